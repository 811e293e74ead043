"""What a supervisor does with real payloads: records, endings, starts."""

import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import unittest
from typing import Any, Dict, List

from orchestrator.supervisor import processes, store, wire
from orchestrator.supervisor.seals import SealChecker
from tests.supervisor.cards import ScriptedCards
from tests.supervisor.host import HostCase, of_kind, printed, stream_bytes


class OutputTest(HostCase):
    def test_each_stream_reassembles_exactly_when_they_interleave_without_line_ends(self) -> None:
        records = self.run_code(
            """
            import os
            for i in range(50):
                os.write(1, b"step %d lo" % i)
                os.write(2, b"warning %d\\r" % i)
                os.write(1, b"ss=0.5\\n")
            """
        )
        self.assertEqual(
            stream_bytes(records, "stdout"), b"".join(b"step %d loss=0.5\n" % i for i in range(50))
        )
        self.assertEqual(stream_bytes(records, "stderr"), b"".join(b"warning %d\r" % i for i in range(50)))

    def test_any_bytes_come_back_as_they_were(self) -> None:
        records = self.run_code(
            """
            import os, random
            random.seed(7)
            raw = bytes(range(256)) * 40 + "grüße 漢字 🎉".encode() * 99 + b"caf\\xe9\\n"
            raw += bytes(random.randrange(256) for _ in range(20000))
            view = memoryview(raw)
            while view:
                view = view[os.write(1, view[:777]):]
            """
        )
        random.seed(7)
        raw = bytes(range(256)) * 40 + "grüße 漢字 🎉".encode() * 99 + b"caf\xe9\n"
        raw += bytes(random.randrange(256) for _ in range(20000))
        self.assertEqual(stream_bytes(records, "stdout"), raw)

    def test_a_character_cut_between_two_writes_is_one_text_chunk(self) -> None:
        records = self.run_code(
            """
            import os, time
            whole = "é🎉".encode()
            for i in range(len(whole)):
                os.write(1, whole[i:i+1])
                time.sleep(0.05)
            """
        )
        chunks = of_kind(records, "out")
        self.assertEqual("".join(chunk["text"] for chunk in chunks), "é🎉")

    def test_megabytes_on_both_streams_at_once_do_not_deadlock(self) -> None:
        records = self.run_code(
            """
            import os, threading
            def flood(fd):
                for i in range(800):
                    view = memoryview(b"%05d" % i + b"x" * 9994 + b"\\n")
                    while view:
                        view = view[os.write(fd, view):]
            threads = [threading.Thread(target=flood, args=(fd,)) for fd in (1, 2)]
            [thread.start() for thread in threads]
            [thread.join() for thread in threads]
            """
        )
        expected = b"".join(b"%05d" % i + b"x" * 9994 + b"\n" for i in range(800))
        self.assertEqual(stream_bytes(records, "stdout"), expected)
        self.assertEqual(stream_bytes(records, "stderr"), expected)

    def test_records_are_numbered_without_a_gap_and_end_with_a_seal(self) -> None:
        records = self.run_code("print('x' * 9999999)")
        self.assertEqual([record["seq"] for record in records], list(range(len(records))))
        self.assertEqual([record["kind"] for record in records[:3]], ["segment", "start", "spawn"])
        self.assertEqual([record["kind"] for record in records[-2:]], ["end", "seal"])
        self.assertGreaterEqual(len(of_kind(records, "seal")), 3)  # one at least every 4 MiB

    def test_what_is_streamed_is_the_file_and_every_seal_is_right(self) -> None:
        talk = self.start("for i in range(200000): print('line', i)")
        data = b"".join(piece for _, _, piece in talk.pieces())
        with open(self.path(self.run_ids[0], "records", "000000.jsonl"), "rb") as file:
            self.assertEqual(data, file.read())
        checker = SealChecker(self.run_ids[0])
        seals = [
            seal for start in range(0, len(data), 1000) for seal in checker.feed(data[start : start + 1000])
        ]
        self.assertEqual(seals[-1].end, len(data))
        self.assertEqual(checker.pending_bytes, seals[-1].line_bytes)

    def test_a_payload_cannot_forge_a_record(self) -> None:
        forged = '{"seq":5,"t":1.0,"kind":"seal","bytes":1,"sha256":"00"}'
        records = self.run_code("print(%r)" % ("\n" + forged + "\n"))
        self.assertEqual(stream_bytes(records, "stdout").decode().strip(), forged)
        self.assertNotIn("00", [seal["sha256"] for seal in of_kind(records, "seal")])


class EndingTest(HostCase):
    def end(self, records: List[Dict[str, Any]]) -> Dict[str, Any]:
        found = of_kind(records, "end")
        self.assertEqual(len(found), 1)
        return found[0]

    def test_exit_code_and_signal_are_recorded(self) -> None:
        end = self.end(self.run_code("raise SystemExit(7)"))
        self.assertEqual((end["outcome"], end["code"], end["signal"]), ("exited", 7, None))
        end = self.end(self.run_code("import os, signal; os.kill(os.getpid(), signal.SIGKILL)"))
        self.assertEqual((end["outcome"], end["code"], end["signal"]), ("signalled", None, signal.SIGKILL))

    def test_a_timeout_ends_the_whole_tree_and_says_why(self) -> None:
        records = self.run_code(
            """
            import subprocess, sys, time
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"], start_new_session=True)
            print("up", flush=True)
            time.sleep(100)
            """,
            timeout_s=1.0,
            grace_s=1.0,
        )
        end = self.end(records)
        self.assertEqual((end["outcome"], end["survivors"]), ("timeout", []))
        self.assertIn("1 s", end["reason"])
        self.assertEqual(processes.members(self.run_ids[0]), [])

    def test_cancel_ends_reparented_and_setsid_descendants_before_it_is_reported(self) -> None:
        talk = self.start(
            """
            import os, subprocess, sys, time
            deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
            nap = [sys.executable, "-c", deaf + "print('nap', flush=True); time.sleep(100)"]
            middle = "import subprocess, sys; subprocess.Popen(%r, start_new_session=True)" % (nap,)
            subprocess.run([sys.executable, "-c", middle])
            subprocess.Popen(["bash", "-c", "bash -c 'exec sleep 100' & wait"])
            print("up", flush=True)
            time.sleep(100)
            """,
            grace_s=0.5,
        )
        pieces = talk.pieces()
        seen = b""
        while not (printed(seen, b"nap") and printed(seen, b"up")):
            seen += next(pieces)[2]
        self.wait_for("its processes", lambda: len(processes.members(self.run_ids[0])) >= 4)
        stop = self.talk({"op": "stop", "run": self.run_ids[0], "grace_s": None})
        self.assertEqual(stop.header()["asked"], True)
        seen += b"".join(piece for _, _, piece in pieces)
        end = self.end([json.loads(line) for line in seen.splitlines()])
        self.assertEqual((end["outcome"], end["survivors"]), ("cancelled", []))
        self.assertEqual(processes.members(self.run_ids[0]), [])

    def test_a_payload_that_saves_on_sigterm_gets_its_grace(self) -> None:
        talk = self.start(
            """
            import signal, sys, time
            def save(*_):
                time.sleep(1.0)
                open("checkpoint", "w").write("whole")
                print("saved", flush=True)
                sys.exit(0)
            signal.signal(signal.SIGTERM, save)
            print("up", flush=True)
            time.sleep(100)
            """,
            grace_s=20.0,
        )
        pieces = talk.pieces()
        seen = b""
        while not printed(seen, b"up"):
            seen += next(pieces)[2]
        self.talk({"op": "stop", "run": self.run_ids[0], "grace_s": None}).header()
        seen += b"".join(piece for _, _, piece in pieces)
        records = [json.loads(line) for line in seen.splitlines()]
        self.assertEqual(stream_bytes(records, "stdout"), b"up\nsaved\n")
        self.assertEqual((self.end(records)["outcome"], self.end(records)["code"]), ("cancelled", 0))
        self.assertTrue(os.path.exists(self.path(self.run_ids[0], "artifacts", "checkpoint")))

    def test_a_child_that_keeps_the_pipe_open_is_named_and_ended(self) -> None:
        records = self.run_code(
            """
            import subprocess
            subprocess.Popen(["sleep", "77"])
            print("main done")
            """,
            grace_s=1.0,
        )
        self.assertEqual(of_kind(records, "pipe_held")[0]["holders"][0]["argv"], ["sleep", "77"])
        self.assertEqual(of_kind(records, "leftover")[0]["processes"][0]["argv"], ["sleep", "77"])
        end = self.end(records)
        self.assertEqual((end["outcome"], end["code"], end["survivors"]), ("exited", 0, []))

    def test_a_run_that_ended_by_itself_keeps_its_outcome_while_leftovers_are_ended(self) -> None:
        records = self.run_code(
            """
            import subprocess, sys
            deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(100)"
            subprocess.Popen([sys.executable, "-c", deaf])
            """,
            timeout_s=2.5,  # comes while its leftovers are being ended
            grace_s=1.0,
        )
        end = self.end(records)
        self.assertEqual((end["outcome"], end["code"], end["survivors"]), ("exited", 0, []))

    def test_a_grace_that_is_no_number_of_seconds_is_refused(self) -> None:
        talk = self.start("import time; print('up', flush=True); time.sleep(1.5)")
        graces: List[Any] = ["soon", [], -1, float("nan"), float("inf")]
        for grace in graces:
            answer = self.talk({"op": "stop", "run": self.run_ids[0], "grace_s": grace}).header()
            self.assertEqual(answer["error"], "refused", grace)
        self.assertEqual(self.end(self.records(talk))["outcome"], "exited")

    def test_devices_that_are_not_there_refuse_the_run_before_any_work(self) -> None:
        env = dict(os.environ, PATH=os.path.dirname(sys.executable) + ":/usr/bin:/bin")
        records = self.records(self.start("print('worked')", devices=["5"], host_env=env))
        end = self.end(records)
        self.assertEqual(end["outcome"], "refused")
        self.assertRegex(end["reason"], "nvidia-smi|card 5")
        self.assertEqual(of_kind(records, "spawn"), [])

    def test_cards_are_pinned_by_uuid_as_nvidia_smi_lists_them(self) -> None:
        cards = ScriptedCards(os.path.join(self.base, "tools"), 2)
        cards.show(
            text="0, GPU-aa, NVIDIA H200, 143771, 0, N/A\n1, GPU-bb, NVIDIA, Odd Name, 143771, 300, N/A\n"
        )
        code = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"
        records = self.records(self.start(code, devices=["1", "GPU-aa"], host_env=cards.env))
        self.assertEqual(stream_bytes(records, "stdout"), b"GPU-bb,GPU-aa\n")
        devices = of_kind(records, "spawn")[0]["devices"]
        self.assertEqual(
            [(device["name"], device["used_mib"]) for device in devices],
            [("NVIDIA, Odd Name", 300), ("NVIDIA H200", 0)],
        )
        records = self.records(self.start(code, devices=["2"], host_env=cards.env))
        self.assertRegex(self.end(records)["reason"], "card 2 is not there.*0 NVIDIA H200")

    def test_a_run_survives_the_end_of_its_channel(self) -> None:
        talk = self.start("import time; print('a', flush=True); time.sleep(0.5); print('b')")
        next(talk.pieces())
        os.kill(talk.process.pid, signal.SIGKILL)
        talk.close()
        self.wait_for("the run's end", lambda: self.state(self.run_ids[0])["state"] == "ended")
        again = self.talk(
            {"op": "read", "run": self.run_ids[0], "cursor": {"segment": 0, "offset": 0}, "follow": True}
        )
        self.assertEqual(stream_bytes(self.records(again), "stdout"), b"a\nb\n")

    def test_a_reader_ends_when_its_controller_has_gone(self) -> None:
        talk = self.start("import time; time.sleep(60)")
        assert talk.process.stdin is not None
        talk.process.stdin.close()
        self.assertEqual(talk.process.wait(10), 0)
        self.talk({"op": "stop", "run": self.run_ids[0], "grace_s": 0.1}).header()
        self.wait_for("the run's end", lambda: self.state(self.run_ids[0])["state"] == "ended")


class KilledSupervisorTest(HostCase):
    CODE = """
        import os, subprocess, time
        subprocess.Popen(["sleep", "100"], start_new_session=True)
        os.write(1, b"up\\n")  # in one piece: its other end is about to go
        time.sleep(100)
        """

    def kill_supervisor(self) -> str:
        talk = self.start(self.CODE)
        seen = b""
        for _, _, piece in talk.pieces():
            seen += piece
            if printed(seen, b"up"):
                os.kill(self.state(self.run_ids[0])["identity"]["pid"], signal.SIGKILL)
        return self.run_ids[0]

    def test_its_run_counts_as_dead_and_what_still_runs_is_told(self) -> None:
        run_id = self.kill_supervisor()
        standing = self.talk({"op": "status", "runs": [run_id]}).header()["runs"][run_id]
        self.assertEqual((standing["exists"], standing["started"], standing["alive"]), (True, True, False))
        self.assertIn(["sleep", "100"], [orphan["argv"] for orphan in standing["orphans"]])

    def test_a_stop_ends_what_carries_the_runs_id_and_nothing_else(self) -> None:
        bystander = subprocess.Popen(["sleep", "100"])
        self.addCleanup(bystander.wait)
        self.addCleanup(bystander.kill)
        run_id = self.kill_supervisor()
        answer = self.talk({"op": "stop", "run": run_id, "grace_s": 1.0}).header()
        self.assertEqual((answer["asked"], answer["survivors"]), (False, []))
        self.assertIn(["sleep", "100"], [process["argv"] for process in answer["ended"]])
        self.assertEqual(processes.members(run_id), [])
        self.assertIsNone(bystander.poll())

    def test_the_members_of_a_run_that_is_gone_are_nobody(self) -> None:
        self.assertEqual(processes.members("no-such-run"), [])
        with self.assertRaises(AssertionError):
            processes.members("no-such-run", 0)


class StartTest(HostCase):
    def test_a_repeated_start_finds_the_run_and_ships_nothing(self) -> None:
        job, entries, objects = self.job("import time; print('once', flush=True); time.sleep(1)")
        first = self.start_job(job, entries, objects)
        again = self.start_job(job, entries, objects)
        self.assertEqual((first.answer["started"], again.answer["started"]), (True, False))
        self.assertEqual(again.need["need"], [])
        one, other = self.records(first), self.records(again)
        self.assertEqual(one, other)
        self.assertEqual(stream_bytes(one, "stdout"), b"once\n")

    def test_twenty_starts_at_once_start_one_run(self) -> None:
        job, entries, objects = self.job("print('once')")
        self.records(self.start("print('warm')"))
        talks = [
            self.talk({"op": "start", "job": job, "entries": entries, "cursor": {"segment": 0, "offset": 0}})
            for _ in range(20)
        ]
        started = 0
        for talk in talks:
            for sha256 in talk.header()["need"]:
                talk.send_raw(wire.pack({"object": sha256}, objects[sha256]))
        for talk in talks:
            started += talk.header()["started"]
            self.assertEqual(stream_bytes(self.records(talk), "stdout"), b"once\n")
        self.assertEqual(started, 1)

    def test_the_same_id_for_another_job_is_refused(self) -> None:
        job, entries, objects = self.job("print('mine')")
        self.records(self.start_job(job, entries, objects))
        other = dict(job, params={"answer": 43})
        talk = self.start_job(other, entries, objects)
        self.assertEqual(talk.answer["error"], "conflict")

    def test_a_damaged_object_is_asked_for_again_before_anything_runs(self) -> None:
        job, entries, objects = self.job("print('true')")
        self.records(self.start_job(job, entries, objects))
        (sha256,) = [entry[3] for entry in entries if entry[0] == "probe/go.py"]
        with open(os.path.join(self.root, "objects", sha256[:2], sha256), "w", encoding="utf-8") as file:
            file.write("print('false')")
        self.run_ids.append(job["run_id"] + "b")
        talk = self.start_job(dict(job, run_id=job["run_id"] + "b"), entries, objects)
        self.assertEqual(talk.need["need"], [sha256])
        self.assertEqual(stream_bytes(self.records(talk), "stdout"), b"true\n")

    def test_a_run_that_changes_its_own_code_is_told_and_reaches_no_other_run(self) -> None:
        code = """
            import os, time
            here = os.path.dirname(__file__)
            print(sorted(os.listdir(here)), flush=True)
            with open(os.path.join(here, "late.py"), "w") as file:
                file.write("x = 666")
            with open(__file__, "a") as file:
                file.write("# changed")
            """
        job, entries, objects = self.job(code)
        self.run_ids.append(job["run_id"] + "b")
        for run_id in (job["run_id"], job["run_id"] + "b"):
            records = self.records(self.start_job(dict(job, run_id=run_id), entries, objects))
            self.assertEqual(stream_bytes(records, "stdout"), b"['__init__.py', 'go.py']\n")
            changed = of_kind(records, "code_changed")
            self.assertEqual([record["files"] for record in changed], [["probe/go.py", "probe/late.py"]])

    def test_a_manifest_that_is_not_its_id_or_leaves_the_tree_is_refused(self) -> None:
        job, entries, _ = self.job("print('x')")
        talk = self.talk(
            {"op": "start", "job": dict(job, bundle="0" * 64), "entries": entries, "cursor": None}
        )
        self.assertEqual(talk.header()["error"], "damaged")
        for path in ("../evil.py", "/evil.py", "a//b", "a/./b", "a/../../b"):
            bad = [[path, 0o644, 0, hashlib.sha256(b"").hexdigest()]]
            talk = self.talk(
                {
                    "op": "start",
                    "job": dict(job, bundle=store.manifest_id(bad)),
                    "entries": bad,
                    "cursor": None,
                }
            )
            self.assertEqual(talk.header()["error"], "damaged", path)

    def test_an_object_that_arrives_damaged_is_not_kept(self) -> None:
        job, entries, _ = self.job("print('x')")
        talk = self.talk({"op": "start", "job": job, "entries": entries, "cursor": None})
        need = talk.header()["need"]
        talk.send_raw(wire.pack({"object": need[0]}, b"something else"))
        self.assertEqual(talk.header()["error"], "damaged")
        self.assertFalse(os.path.exists(os.path.join(self.root, "objects", need[0][:2], need[0])))
        self.assertFalse(os.path.exists(self.path(job["run_id"])))

    def test_a_root_that_others_may_write_is_refused(self) -> None:
        os.mkdir(self.root)
        os.chmod(self.root, 0o777)
        talk = self.talk({"op": "status", "runs": []})
        self.assertEqual(talk.hello["error"], "unfit-root")
        self.assertIn("writable by others", talk.hello["message"])

    def test_a_tampered_supervisor_is_replaced(self) -> None:
        self.talk({"op": "status", "runs": []}).header()
        (digest,) = [name for name in os.listdir(os.path.join(self.root, "supervisor")) if len(name) == 64]
        with open(
            os.path.join(self.root, "supervisor", digest, "supervisor", "wire.py"), "a", encoding="utf-8"
        ) as file:
            file.write("\nraise SystemExit('tampered')\n")
        talk = self.talk({"op": "status", "runs": ["nothing"]})
        self.assertEqual(talk.hello["supervisor"], False)
        self.assertEqual(talk.header()["runs"]["nothing"]["exists"], False)
        talk = self.talk({"op": "status", "runs": []})
        self.assertEqual(talk.hello["supervisor"], True)

    def test_the_host_says_what_time_it_is_once_for_each_frame(self) -> None:
        before = time.time()
        talk = self.talk({"op": "clock", "trips": 3})
        self.assertTrue(before <= talk.hello["hello"]["t"] <= time.time())
        for _ in range(3):
            asked_t = time.time()
            talk.send_raw(wire.pack({"clock": True}))
            self.assertTrue(asked_t <= talk.header()["t"] <= time.time())
        self.assertEqual(talk.close(), 0)

    def test_an_unknown_run_and_a_run_id_that_is_a_path_are_refused(self) -> None:
        talk = self.talk(
            {"op": "read", "run": "nothing", "cursor": {"segment": 0, "offset": 0}, "follow": True}
        )
        self.assertEqual(talk.header()["error"], "unknown-run")
        for run_id in ("../x", ".", "", "a/b"):
            talk = self.talk({"op": "stop", "run": run_id, "grace_s": 1})
            self.assertEqual(talk.header()["error"], "refused", run_id)


class RestTest(HostCase):
    def test_a_resting_supervisor_is_small_and_quiet(self) -> None:
        talk = self.start("import time; print('up', flush=True); time.sleep(30)")
        next(talk.pieces())
        pid = self.state(self.run_ids[0])["identity"]["pid"]
        time.sleep(0.5)
        with open("/proc/%d/status" % pid, encoding="ascii") as file:
            resident_kib = int(re.findall(r"VmRSS:\s+(\d+) kB", file.read())[0])
        self.assertLess(resident_kib, 20 * 1024)
        before = self.switches(pid)
        time.sleep(2.0)
        self.assertLess(self.switches(pid) - before, 10)

    def switches(self, pid: int) -> int:
        with open("/proc/%d/status" % pid, encoding="ascii") as file:
            return int(re.findall(r"\nvoluntary_ctxt_switches:\s+(\d+)", file.read())[0])


if __name__ == "__main__":
    unittest.main()
