"""Environments that are prepared once: by real runs of scripts, under locks that outlive supervisors."""

import contextlib
import glob
import hashlib
import importlib.util
import io
import json
import os
import shlex
import signal
import sys
import tempfile
import unittest
from typing import Any, Dict, List, Optional, Sequence, Tuple
from unittest import mock

from orchestrator.supervisor import cleaning, detach, prepare, processes, setups, store, wire
from orchestrator.supervisor.program import Refused
from orchestrator.supervisor.rundir import RunDir
from tests.supervisor.host import HostCase, Talk, of_kind, stream_bytes

OLD_S = 30 * 86400.0
WAITS = """\
#!/bin/sh
echo up
while [ ! -e %(base)s/go ]; do sleep 0.01; done
echo made >> %(base)s/made
"""


class SetupCase(HostCase):
    def setUp(self) -> None:
        super().setUp()
        plain = tempfile.TemporaryDirectory()
        self.addCleanup(plain.cleanup)
        self.plain = plain.name

    def spec(self, script: str) -> Dict[str, Any]:
        """Returns what a job says of a script that prepares."""
        data = (script % {"base": self.plain}).encode()
        self.objects = {hashlib.sha256(data).hexdigest(): data}
        ((sha256, _),) = self.objects.items()
        self.entries = [["probe/setup.sh", 0o755, len(data), sha256]]
        bundle = store.manifest_id(self.entries)
        return {"kind": "script", "path": "probe/setup.sh", "bundle": bundle, "system_packages": True}

    def prepare(self, script: str, **changes: Any) -> Talk:
        """Starts a run that prepares by ``script``."""
        spec = dict(self.spec(script), **changes)
        job, _, _ = self.job("", prepares=spec, bundle=spec["bundle"])
        del job["module"]
        return self.start_job(job, self.entries, self.objects)

    def need(self, code: str, specs: List[Dict[str, Any]], preparers: Optional[List[str]] = None) -> Talk:
        """Asks for a run that needs what ``specs`` say; its first answer is in ``need``."""
        job, entries, objects = self.job(code, setup=specs)
        request = {"op": "start", "job": job, "entries": entries, "cursor": {"segment": 0, "offset": 0}}
        talk = self.talk(dict(request, preparers=preparers))
        talk.need = talk.header()
        if "need" in talk.need:
            for sha256 in talk.need["need"]:
                talk.send_raw(wire.pack({"object": sha256}, objects[sha256]))
            talk.answer = talk.header()
        return talk

    def closing(self) -> None:
        """Makes a program that closes what it inherited and does what `WAITS` does."""
        path = os.path.join(self.plain, "closing")
        with open(path, "w", encoding="utf-8") as file:  # a #! line takes no path with a space
            file.write("#!/bin/sh\nexec %s -IS %s.py\n" % (shlex.quote(sys.executable), shlex.quote(path)))
        with open(path + ".py", "w", encoding="utf-8") as file:
            file.write("import os, time\nos.closerange(3, 100)\n")
            file.write("while not os.path.exists(%r): time.sleep(0.01)\n" % (self.plain + "/go"))
            file.write("open(%r, 'a').write('made\\n')\n" % (self.plain + "/made"))
        os.chmod(path, 0o700)

    def processes_of(self, run_id: str) -> List[processes.Process]:
        return RunDir(os.path.realpath(self.root), run_id).tree().members()

    def go(self) -> None:
        with open(os.path.join(self.plain, "go"), "w", encoding="utf-8"):
            pass

    def made(self) -> str:
        with open(os.path.join(self.plain, "made"), encoding="utf-8") as file:
            return file.read()

    def environment(self, script: str) -> setups.Environment:
        (found,) = setups.chain(os.path.realpath(self.root), [self.spec(script)])
        return found

    def folders(self) -> List[str]:
        return [path for path in glob.glob(glob.escape(self.root) + "/envs/*") if os.path.isdir(path)]


def ending(records: List[Dict[str, Any]]) -> Tuple[str, Optional[int], str]:
    end = of_kind(records, "end")[0]
    return end["outcome"], end["code"], end["reason"] or ""


class TestPreparing(SetupCase):
    def test_of_two_at_once_one_prepares_and_the_other_waits_and_says_for_whom(self) -> None:
        first = self.prepare(WAITS).follow()
        first.until_printed(b"up")
        second = self.prepare(WAITS).follow()
        waiting = second.until("preparing")
        self.assertEqual((waiting["by"], waiting["file"]), (self.run_ids[0], "probe/setup.sh"))
        self.assertTrue(self.standing(self.run_ids[1])["waiting"])
        self.go()
        self.assertEqual(ending(first.rest()), ("exited", 0, ""))
        records = second.rest()
        self.assertEqual(ending(records), ("exited", 0, ""))
        self.assertIn(b"nothing to do", stream_bytes(records, "stdout"))
        self.assertEqual(self.made(), "made\n")

    def test_a_run_is_not_started_before_what_it_needs_is_there(self) -> None:
        spec = self.spec(WAITS)
        self.assertEqual(self.need("print('ran')", [spec]).need, {"unprepared": [0], "size": 0})
        self.assertFalse(os.path.exists(self.path(self.run_ids[-1])))
        preparing = self.prepare(WAITS).follow()
        preparing.until_printed(b"up")
        by = self.run_ids[-1]
        needing = self.need("print('ran')", [spec], [by]).follow()
        self.assertEqual(needing.until("preparing")["by"], by)
        self.go()
        records = needing.rest()
        self.assertEqual(stream_bytes(records, "stdout"), b"ran\n")
        (used,) = of_kind(records, "prepared")[0]["environments"]
        self.assertEqual((used["by"], used["file"]), (by, "probe/setup.sh"))
        again = self.need("print('ran')", [spec])
        self.assertIn("need", again.need)
        self.assertEqual(stream_bytes(self.records(again), "stdout"), b"ran\n")

    def test_a_failed_preparation_leaves_nothing_and_refuses_who_waits_by_its_name(self) -> None:
        script = "#!/bin/sh\n[ -e %(base)s/go ] || { echo 'no network' >&2; exit 3; }\n"
        spec = self.spec(script)
        failed = self.prepare(script)
        needing = self.need("print('ran')", [spec], [self.run_ids[0]])
        records = self.records(failed)
        self.assertEqual(ending(records)[:2], ("exited", 3))
        self.assertEqual(stream_bytes(records, "stderr"), b"no network\n")
        refused = self.records(needing)
        self.assertEqual(
            ending(refused),
            (
                "refused",
                None,
                "the environment of probe/setup.sh was not prepared: see run " + self.run_ids[0],
            ),
        )
        self.assertEqual(self.folders(), [])
        self.go()
        self.assertEqual(ending(self.records(self.prepare(script))), ("exited", 0, ""))
        self.assertEqual(stream_bytes(self.records(self.need("print('ran')", [spec])), "stdout"), b"ran\n")

    def test_what_a_killed_preparation_left_is_cleared_away_by_the_next(self) -> None:
        talk = self.prepare(WAITS)
        talk.follow().until_printed(b"up")
        self.end_all()
        environment = self.environment(WAITS)
        self.assertIsNone(environment.done)
        with open(os.path.join(environment.path, "half"), "w", encoding="utf-8"):
            pass
        self.assertEqual(self.need("pass", [environment.spec]).need["unprepared"], [0])
        self.go()
        self.assertEqual(ending(self.records(self.prepare(WAITS))), ("exited", 0, ""))
        self.assertEqual(os.listdir(environment.path), ["done"])
        assert environment.done is not None
        self.assertEqual(environment.done["run"], self.run_ids[-1])

    def test_a_preparation_whose_supervisor_was_killed_goes_on_and_is_waited_for(self) -> None:
        first = self.prepare(WAITS)
        first.follow().until_printed(b"up")
        supervisor = processes.look(self.supervisor(self.run_ids[0]))
        assert supervisor is not None
        processes.send_signal([supervisor], signal.SIGKILL)
        processes.wait_for_end([supervisor], 5.0)
        second = self.prepare(WAITS).follow()
        self.assertEqual(second.until("preparing")["by"], self.run_ids[0])
        self.go()
        self.assertEqual(ending(second.rest()), ("exited", 0, ""))
        self.assertEqual(self.made(), "made\n")

    def test_a_script_that_outlives_its_killed_preparation_is_waited_for(self) -> None:
        for rest in ("", "exec %(base)s/closing\n"):  # it keeps the lock; it lets go of it
            self.closing()
            with self.subTest(rest):
                script = WAITS.replace("while", rest + "while")
                self.prepare(script).follow().until_printed(b"up")
                first = self.run_ids[-1]
                supervisor = processes.look(self.supervisor(first))
                assert supervisor is not None
                (made,) = [each for each in self.processes_of(first) if each.parent == supervisor.pid]
                processes.send_signal([supervisor, made], signal.SIGKILL)
                processes.wait_for_end([supervisor, made], 5.0)
                # A process shows no environment, and so no run, in the instant of its exec.
                self.wait_for("what is left", lambda run=first: self.processes_of(run))
                second = self.prepare(script).follow()
                waiting = second.until("preparing")
                self.assertEqual((waiting["by"], waiting["left"]), (first, True))
                self.go()
                self.assertEqual(ending(second.rest()), ("exited", 0, ""))
                self.assertEqual(self.made(), "made\n" * 2, "one after the other")
                for name in ("go", "made"):
                    os.unlink(os.path.join(self.plain, name))

    def test_a_forced_preparation_says_who_uses_it_and_later_runs_wait_behind_it(self) -> None:
        self.go()
        self.records(self.prepare(WAITS))
        code = "import os, time\nos.write(1, b'using')\nwhile not os.path.exists(%r): time.sleep(0.01)" % (
            self.plain + "/end"
        )
        using = self.need(code, [self.spec(WAITS)]).follow()
        using.until_printed(b"using")
        user = self.run_ids[-1]
        forced = self.prepare(WAITS, force=True).follow()
        preparer = self.run_ids[-1]
        self.assertEqual(forced.until("preparing")["users"], [user])
        later = self.need("print('ran')", [self.spec(WAITS)]).follow()
        self.assertEqual(later.until("preparing")["by"], preparer)
        again = self.prepare(WAITS, force=True).follow()
        self.assertEqual(again.until("preparing")["by"], preparer)
        self.assertTrue(self.standing(preparer)["waiting"])
        with open(self.plain + "/end", "w", encoding="utf-8"):
            pass
        self.assertEqual(ending(using.rest())[:2], ("exited", 0))
        self.assertEqual(ending(forced.rest())[:2], ("exited", 0))
        self.assertEqual(ending(again.rest())[:2], ("exited", 0))
        self.assertEqual(stream_bytes(later.rest(), "stdout"), b"ran\n")
        self.assertEqual(self.made(), "made\n" * 3)
        self.assertFalse(os.path.exists(self.environment(WAITS).next))

    def test_a_run_that_waits_for_one_environment_keeps_no_other_from_being_made_anew(self) -> None:
        self.go()
        base = self.spec(WAITS)
        self.records(self.prepare(WAITS))
        root = os.path.realpath(self.root)
        upper = dict(base, path="probe/upper.sh")
        run = RunDir(root, "waits")
        lower, needed = setups.chain(root, [base, upper])
        preparer = needed.hold(exclusive=True)
        needs = setups.Needs(run, {"setup": [base, upper]}, ())
        self.assertFalse(needs.try_take())
        self.assertEqual(needs.awaited["file"], "probe/upper.sh")
        place = lower.queue_up("next")
        assert place is not None
        self.assertEqual(lower.next_preparer, "next")
        self.assertEqual(
            cleaning._remove_environment(root, lower.path, True), "a run is using or preparing it"
        )
        os.close(place)
        made_anew = lower.hold(exclusive=True)
        assert preparer is not None
        assert made_anew is not None
        os.close(made_anew)
        os.close(preparer)

    def test_an_environment_that_lost_its_python_is_told_with_what_to_do(self) -> None:
        root = os.path.realpath(self.root)
        (broken,) = setups.chain(root, [SPEC])
        os.makedirs(broken.path)
        with open(broken.path + "/done", "w", encoding="utf-8") as file:
            file.write("{}")
        with self.assertRaisesRegex(Refused, "no program .*/bin/python: `orch prepare --force`"):
            setups.Needs(RunDir(root, "needs"), {"setup": [SPEC]}, ()).try_take()

    def test_a_cancel_ends_a_preparation_and_a_run_that_waits_for_it(self) -> None:
        first = self.prepare(WAITS).follow()
        first.until_printed(b"up")
        needing = self.need("print('ran')", [self.spec(WAITS)], [self.run_ids[0]]).follow()
        needing.until("preparing")
        self.stop(self.run_ids[1])
        self.assertEqual(ending(needing.rest())[0], "cancelled")
        self.stop(self.run_ids[0])
        self.assertEqual(ending(first.rest())[0], "cancelled")
        self.assertEqual(self.folders(), [])

    def test_what_is_in_use_is_neither_made_anew_nor_removed(self) -> None:
        self.go()
        self.records(self.prepare(WAITS))
        using = self.need(
            "import os, time\nos.write(1, b'using')\n"
            "while not os.path.exists(%r): time.sleep(0.01)" % (self.plain + "/end"),
            [self.spec(WAITS)],
        ).follow()
        using.until_printed(b"using")
        forced = self.prepare(WAITS, force=True).follow()
        self.assertIsNone(forced.until("preparing")["by"])
        root = os.path.realpath(self.root)
        (item,) = list(cleaning._sweep_environments(root, set(self.run_ids), is_real=True))  # its age
        self.assertIn("10 min", item["why"])
        environment = self.environment(WAITS)
        os.utime(environment.lock, (0, 0))
        (item,) = list(cleaning._sweep_environments(root, set(self.run_ids), is_real=True))
        self.assertEqual(item["why"], "a run is using or preparing it")
        with open(self.plain + "/end", "w", encoding="utf-8"):
            pass
        self.assertEqual(ending(using.rest())[:2], ("exited", 0))
        self.assertEqual(ending(forced.rest())[:2], ("exited", 0))
        self.assertEqual(self.made(), "made\nmade\n")

    def test_a_host_tells_what_is_prepared_and_keeps_it_while_a_run_that_used_it_is_there(self) -> None:
        spec = self.spec(WAITS)
        ask = {"op": "prepared", "setup": [spec]}
        (before,) = self.talk(ask).header()["prepared"]
        self.assertEqual((before["done"], before["by"]), (None, None))
        self.assertIn("error", self.talk(dict(ask, setup=[dict(spec, path="../x")])).header())
        self.go()
        self.records(self.prepare(WAITS))
        (after,) = self.talk(ask).header()["prepared"]
        self.assertEqual((after["done"]["run"], after["digest"]), (self.run_ids[0], before["digest"]))
        self.records(self.need("pass", [self.spec(WAITS)]))
        root, environment = os.path.realpath(self.root), self.environment(WAITS)
        os.utime(environment.lock, (0, 0))
        (item,) = list(cleaning._sweep_environments(root, {self.run_ids[0]}, is_real=True))
        self.assertEqual((item["removed"], item["why"]), (False, "1 run here used it"))
        self.assertGreater(item["age_s"], OLD_S)
        (item,) = list(cleaning._sweep_environments(root, set(self.run_ids), is_real=False))
        self.assertTrue(item["removed"])
        self.assertIsNotNone(environment.done)
        os.makedirs(os.path.join(root, "removing"), exist_ok=True)
        (item,) = list(cleaning._sweep_environments(root, set(self.run_ids), is_real=True))
        self.assertTrue(item["removed"])
        self.assertEqual(os.listdir(os.path.join(root, "envs")), [])


SPEC = {"kind": "requirements", "path": "r.txt", "bundle": "0" * 64, "system_packages": True}


class TestDigests(unittest.TestCase):
    def digests(self, root: str = "/root", **changes: Any) -> List[str]:
        return [found.digest for found in setups.chain(root, [dict(SPEC, **changes), SPEC])]

    def test_a_digest_covers_what_makes_an_environment_another_one(self) -> None:
        base = self.digests()
        self.assertEqual(self.digests(), base)
        self.assertEqual(self.digests(force=True), base)
        for changed in (
            self.digests("/other"),
            self.digests(kind="script"),
            self.digests(path="s.txt"),
            self.digests(bundle="1" * 64),
            self.digests(system_packages=False),
        ):
            self.assertFalse(set(changed) & set(base), "what is upon another one is another one too")
        with mock.patch.object(sys, "executable", "/another/python"):
            self.assertFalse(set(self.digests()) & set(base))

    def test_what_stands_upon_an_environment_is_made_by_its_python(self) -> None:
        first, second = setups.chain("/root", [SPEC, SPEC])
        self.assertEqual(second._made_by.path, first.path + "/bin/python")
        first, second = setups.chain("/root", [dict(SPEC, kind="script"), SPEC])
        self.assertEqual(second._made_by.path, sys.executable)


class TestStart(unittest.TestCase):
    def test_a_run_that_needs_or_prepares_something_waits_from_its_start_on(self) -> None:
        for which in ({"setup": [SPEC]}, {"prepares": SPEC}):
            with tempfile.TemporaryDirectory() as root, contextlib.ExitStack() as stack:
                job = dict({"run_id": "r", "bundle": "0" * 64, "devices": []}, **which)
                run = RunDir(root, "r")
                lock_fd, (read_fd, write_fd) = run.claim(job), os.pipe()
                assert lock_fd is not None
                for fd in (lock_fd, read_fd, write_fd):
                    stack.callback(os.close, fd)
                for name in ("cgroups.place", "cgroups.make", "processes.become_subreaper"):
                    stack.enter_context(mock.patch("orchestrator.supervisor." + name, return_value=None))
                stack.enter_context(mock.patch.object(detach, "Job", side_effect=InterruptedError))
                with self.assertRaises(InterruptedError):
                    detach._supervise(run, job, [], {}, [], write_fd)
                self.assertEqual(run.state["state"], "waiting")


class TestPrepareProgram(unittest.TestCase):
    def test_an_interpreter_that_makes_no_environments_is_told_in_one_line(self) -> None:
        find_spec = importlib.util.find_spec
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            stack.callback(signal.signal, signal.SIGTERM, signal.getsignal(signal.SIGTERM))
            made = folder + "/e"
            told = {"kind": "requirements", "file": "/x/r.txt", "folder": made, "system_packages": True}
            stack.enter_context(
                mock.patch.object(
                    importlib.util,
                    "find_spec",
                    lambda name: None if name in ("pip", "ensurepip") else find_spec(name),
                )
            )
            said = stack.enter_context(mock.patch.object(sys, "stderr", io.StringIO()))
            self.assertEqual(prepare.main(json.dumps(dict(told, force=False, note={}))), 1)
            self.assertFalse(os.path.exists(made))
        self.assertIn("has no module ensurepip", said.getvalue())
        self.assertIn("apt-get install python3-venv", said.getvalue())
        self.assertEqual(said.getvalue().count("\n"), 1)

    def test_what_it_starts_keeps_the_locks(self) -> None:
        with tempfile.TemporaryDirectory() as folder, open(os.devnull, encoding="utf-8") as lock:
            script = "#!/bin/sh\n[ ! -e /proc/self/fd/%d ] || exit 9\nexit 8\n" % lock.fileno()
            self.said_of(folder, script.encode(), [lock.fileno()], 9)

    def said_of(self, folder: str, script: bytes, locks: Sequence[int] = (), code: int = 1) -> str:
        """Runs `prepare` with a script; returns what it says."""
        path = folder + "/x.sh"
        with open(path, "wb") as file:
            file.write(script)
        os.chmod(path, 0o755)
        told = {"kind": "script", "file": path, "folder": folder + "/e", "locks": list(locks), "force": False}
        with contextlib.ExitStack() as stack:
            stack.callback(signal.signal, signal.SIGTERM, signal.getsignal(signal.SIGTERM))
            said = stack.enter_context(mock.patch.object(sys, "stderr", io.StringIO()))
            self.assertEqual(prepare.main(json.dumps(dict(told, note={}))), code)
        self.assertEqual(said.getvalue().count("\n"), int(code == 1))
        self.assertFalse(os.path.exists(folder + "/e"))
        return said.getvalue()

    def test_a_script_that_cannot_be_executed_is_told_why(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for script, expected in (
                (b"#!/no/such -x\n", "/no/such, the interpreter of its #! line: No such file"),
                (b"#! /dev/null/sh\n", "/dev/null/sh, the interpreter of its #! line: Not a directory"),
                (b"#!/bin/sh\r\ntrue\r\n", "its lines end in CR LF"),
                (b"\x7fELF", "nothing here can execute it: Exec format error"),
                (b"#!\n", "its #! line names no interpreter"),
            ):
                self.assertIn("orch: cannot start ./x.sh: " + expected, self.said_of(folder, script))

    def test_a_preparation_that_lost_its_folder_says_so_in_one_line(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            script = "#!/bin/sh\nrmdir '%s/e'\n" % folder
            self.assertIn("has gone while it was being prepared", self.said_of(folder, script.encode()))

    def test_the_system_s_packages_are_seen_where_the_interpreter_itself_sees_them(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            config = os.path.join(folder, "pyvenv.cfg")
            for text, expected in (
                ("home = /x\ninclude-system-site-packages = false\n", False),
                ("include-system-site-packages = true\n", True),
                (None, True),
            ):
                if text is not None:
                    with open(config, "w", encoding="utf-8") as file:
                        file.write(text)
                elif os.path.exists(config):
                    os.unlink(config)
                with mock.patch.object(sys, "prefix", folder):
                    self.assertEqual(prepare._sees_system(), expected)


if __name__ == "__main__":
    unittest.main()
