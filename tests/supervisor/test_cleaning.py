"""What `gc` takes from a host and what it leaves: always by real folders, locks and processes."""

import os
import signal
import time
import unittest
from typing import Any, Dict, List, Optional

from orchestrator.supervisor import cleaning, locks, processes
from tests.supervisor.host import HostCase, Talk

OLD_S = 30 * 86400.0
ENDLESS = "import os, time\nos.write(1, b'printed\\n')\ntime.sleep(600)\n"
Item = Dict[str, Any]


class TestCleaning(HostCase):
    def pages(self, request: Dict[str, Any]) -> List[Item]:
        talk = self.talk(request)
        found: List[Item] = []
        while not (header := talk.header()).get("end"):
            self.assertNotIn("error", header)
            found.extend(header["page"])
        return found

    def survey(self) -> Dict[str, Item]:
        return {item["run"]: item for item in self.pages({"op": "gc", "chosen": None})}

    def clean(self, run_ids: Optional[List[str]] = None, is_real: bool = True) -> Dict[str, Item]:
        """Chooses ``run_ids`` as they are surveyed; returns what was said of each thing by its name."""
        surveyed = self.survey()
        chosen = [surveyed[run_id] for run_id in (self.run_ids if run_ids is None else run_ids)]
        found = self.pages({"op": "gc", "chosen": chosen, "is_real": is_real})
        return {"%s %s" % (item["what"], item["name"]): item for item in found}

    def make_old(self, folder: Optional[str] = None) -> None:
        then = time.time() - OLD_S
        for parent, folders, names in os.walk(folder or self.root, topdown=False):
            for name in names + folders:
                os.utime(os.path.join(parent, name), (then, then), follow_symlinks=False)

    def old_run(self, code: str = "pass", **changes: Any) -> str:
        self.run_code(code, **changes)
        self.make_old(self.path(self.run_ids[-1]))
        return self.run_ids[-1]

    def objects(self) -> List[str]:
        return sorted(name for _, _, names in os.walk(os.path.join(self.root, "objects")) for name in names)

    def test_an_old_run_goes_and_so_does_what_it_alone_needed(self) -> None:
        gone, kept = self.old_run("print(1)"), self.old_run("print(2)")
        self.make_old()
        before = self.objects()
        said = self.clean([gone])
        self.assertTrue(said["run " + gone]["removed"])
        self.assertEqual([kept], os.listdir(os.path.join(self.root, "runs")))
        self.assertEqual(len(before) - 1, len(self.objects()))
        self.assertEqual([], os.listdir(os.path.join(self.root, "removing")))
        self.assertEqual("exited", self.run_code("print(2)")[-2]["outcome"])

    def test_a_look_removes_nothing_and_says_the_same(self) -> None:
        self.old_run()
        self.make_old()
        before = sorted(os.walk(self.root))
        looked = self.clean(is_real=False)
        self.assertEqual(before, sorted(os.walk(self.root)))
        real = self.clean()
        self.assertEqual(
            {name: item["removed"] for name, item in looked.items()},
            {name: item["removed"] for name, item in real.items()},
        )

    def test_what_lives_ended_just_now_or_changed_stays(self) -> None:
        living = self.start(ENDLESS)
        next(living.pieces())
        (alive,) = self.run_ids
        self.make_old(self.path(alive))
        self.run_code("pass")
        fresh, changed = self.run_ids[-1], self.old_run("print()")
        surveyed = self.survey()
        with open(self.path(changed, "records", "000000.jsonl"), "ab") as file:
            file.write(b"{}\n")
        self.make_old(self.path(changed))
        chosen = [surveyed[run_id] for run_id in (alive, fresh, changed)]
        said = {item["name"]: item for item in self.pages({"op": "gc", "chosen": chosen, "is_real": True})}
        self.assertIn("alive", said[alive]["why"])
        self.assertIn("10 min", said[fresh]["why"])
        self.assertIn("not those", said[changed]["why"])
        self.assertEqual({alive, fresh, changed}, set(os.listdir(os.path.join(self.root, "runs"))))

    def test_a_run_with_orphans_stays(self) -> None:
        talk = self.start(ENDLESS)
        seen = b""
        for _, _, piece in talk.pieces():
            seen += piece
            if b"printed" in seen:
                break
        (run_id,) = self.run_ids
        identity = self.state(run_id)["identity"]
        supervisor = processes.look(identity["pid"])
        assert supervisor is not None
        assert supervisor.started == identity["started"]
        processes.send_signal([supervisor], signal.SIGKILL)
        processes.wait_for_end([supervisor], 5.0)
        self.make_old(self.path(run_id))
        self.assertIn("still run", self.clean()["run " + run_id]["why"])

    def test_what_is_no_run_of_ours_stops_neither_a_look_nor_the_removal_of_others(self) -> None:
        old = self.old_run()
        for name in ("locked by a folder/lock", "state is a folder/state.json", "two\nlines"):
            os.makedirs(self.path(name))
        os.makedirs(os.fsencode(self.path("")) + b"not utf-8 \xff")
        os.makedirs(self.path("pipes"))
        os.mkfifo(self.path("pipes", "lock"))
        os.mkfifo(self.path("pipes", "state.json"))
        os.makedirs(self.path("odd"))
        with open(self.path("odd", "state.json"), "w", encoding="utf-8") as file:
            file.write('{"identity": "none", "cgroup": 5}')
        queue = os.path.join(self.root, "turns", "q")
        os.makedirs(queue)
        with open(os.path.join(queue, "waiting-000000001-"), "w", encoding="utf-8"):
            pass
        self.make_old()
        said = self.clean(sorted(self.survey()))
        self.assertTrue(said["run " + old]["removed"])
        self.assertIn("lock", said["run locked by a folder"]["why"])

    def test_one_works_here_at_a_time(self) -> None:
        old = self.old_run()
        os.makedirs(os.path.join(self.root, "removing", "by another"))
        fd = os.open(os.path.join(self.root, "removing"), os.O_RDONLY)
        self.addCleanup(os.close, fd)
        self.assertTrue(locks.take(fd, exclusive=True))
        said = self.clean([old])
        self.assertEqual(["folder removing"], list(said))
        self.assertIn("another", said["folder removing"]["why"])
        self.assertEqual(["by another"], os.listdir(os.path.join(self.root, "removing")))
        self.assertTrue(os.path.isdir(self.path(old)))

    def test_objects_stay_while_a_start_is_under_way(self) -> None:
        self.old_run()
        self.make_old()
        job, entries, objects = self.job("print('later')")
        waiting = self.talk({"op": "start", "job": job, "entries": entries, "cursor": None})
        self.assertEqual(1, len(waiting.header()["need"]))  # the empty file is there already
        said = self.clean([self.run_ids[0]])
        self.assertIn("being started", said["objects "]["why"])
        self.finish_start(waiting, objects)

    def finish_start(self, talk: Talk, objects: Dict[str, bytes]) -> None:
        from orchestrator.supervisor import wire  # noqa: PLC0415

        sha256 = next(name for name, data in objects.items() if data)
        talk.send_raw(wire.pack({"object": sha256}, objects[sha256]))
        self.assertTrue(talk.header()["started"])

    def test_a_start_waits_while_objects_are_removed(self) -> None:
        self.old_run()
        fd = os.open(os.path.join(self.root, locks.OBJECTS), os.O_RDWR | os.O_CREAT, 0o600)
        self.assertTrue(locks.take(fd, exclusive=True))
        job, entries, objects = self.job("print('later')")
        talk = self.talk({"op": "start", "job": job, "entries": entries, "cursor": None})
        self.assertIn("hello", talk.hello)
        empty = os.path.join(self.root, "objects", "e3")
        for name in os.listdir(empty):  # what a removal takes is then asked for
            os.unlink(os.path.join(empty, name))
        os.close(fd)
        from orchestrator.supervisor import wire  # noqa: PLC0415

        need = talk.header()["need"]
        self.assertEqual(2, len(need))
        for sha256 in need:
            talk.send_raw(wire.pack({"object": sha256}, objects[sha256]))
        self.assertTrue(talk.header()["started"])

    def test_no_link_is_followed(self) -> None:
        precious = os.path.join(self.base, "precious")
        os.makedirs(precious)
        with open(os.path.join(precious, "file"), "w", encoding="utf-8") as file:
            file.write("kept")
        os.chmod(os.path.join(precious, "file"), 0o400)
        os.chmod(precious, 0o555)
        run_id = self.old_run()
        os.symlink(precious, self.path(run_id, "artifacts", "link"))
        os.symlink(os.path.join(precious, "file"), self.path(run_id, "artifacts", "file"))
        os.symlink(precious, os.path.join(self.root, "objects", "zz"))
        self.make_old()
        self.assertTrue(self.clean()["run " + run_id]["removed"])
        self.assertEqual(["file"], os.listdir(precious))
        self.assertEqual(0o400, os.stat(os.path.join(precious, "file")).st_mode & 0o777)
        self.assertEqual(0o555, os.stat(precious).st_mode & 0o777)

    def test_a_root_whose_folders_are_links_is_left_alone(self) -> None:
        run_id = self.old_run()
        elsewhere = os.path.join(self.base, "elsewhere")
        os.rename(os.path.join(self.root, "objects"), elsewhere)
        os.symlink(elsewhere, os.path.join(self.root, "objects"))
        self.assertEqual(["folder objects"], list(self.clean()))
        self.assertTrue(os.path.isdir(self.path(run_id)))
        self.assertTrue(os.listdir(elsewhere))

    def test_names_that_lead_elsewhere_are_refused(self) -> None:
        self.old_run()
        for name in ("..", "../runs", "", "a/b", ".hidden"):
            talk = self.talk({"op": "gc", "chosen": [{"run": name, "end": None}], "is_real": True})
            self.assertEqual("refused", talk.header().get("error"))

    def test_folders_that_a_payload_closed_are_removed_too(self) -> None:
        run_id = self.old_run("import os\nos.makedirs('shut/inner')\nos.chmod('shut', 0o500)")
        cleaning._open_up(self.path(run_id))  # root could delete it all the same
        self.assertEqual(0o700, os.stat(self.path(run_id, "artifacts", "shut")).st_mode & 0o777)
        self.make_old(self.path(run_id))
        self.assertTrue(self.clean()["run " + run_id]["removed"])
        self.assertEqual([], os.listdir(os.path.join(self.root, "removing")))

    def test_what_an_earlier_attempt_left_is_deleted(self) -> None:
        self.old_run()
        os.makedirs(os.path.join(self.root, "removing", "half.0", "code"))
        self.assertTrue(self.clean([])["leftover half.0"]["removed"])
        self.assertEqual([], os.listdir(os.path.join(self.root, "removing")))

    def test_other_supervisors_go_unless_a_run_that_lives_may_need_them(self) -> None:
        living = self.start(ENDLESS)
        next(living.pieces())
        (run_id,) = self.run_ids
        other = os.path.join(self.root, "supervisor", "0" * 64)
        os.makedirs(other)
        self.make_old(os.path.join(self.root, "supervisor"))
        os.rename(self.path(run_id, "manifest.json"), self.path(run_id, "aside"))  # as an older one's run
        self.assertIn("may need it", self.clean([])["supervisor " + "0" * 64]["why"])
        os.rename(self.path(run_id, "aside"), self.path(run_id, "manifest.json"))
        self.assertTrue(self.clean([])["supervisor " + "0" * 64]["removed"])
        self.assertEqual(1, len(os.listdir(os.path.join(self.root, "supervisor"))))

    def test_a_queue_that_nobody_is_in_goes_and_another_stays(self) -> None:
        talk = self.start(ENDLESS, turn={"queue": "q1", "place": 0, "at_once": 1})
        next(talk.pieces())
        stale = os.path.join(self.root, "turns", "q2")
        os.makedirs(stale)
        with open(os.path.join(stale, "running-000000000-longgone"), "w", encoding="utf-8"):
            pass
        self.assertTrue(self.clean([])["turns q2"]["removed"])
        self.assertEqual(["q1"], os.listdir(os.path.join(self.root, "turns")))

    def test_a_queue_that_goes_meanwhile_is_passed_over(self) -> None:
        self.assertIsNone(cleaning._take_queue(os.path.join(self.root, "turns", "gone")))

    def test_objects_of_a_run_without_a_manifest_are_known_by_its_code(self) -> None:
        run_id = self.old_run("print(1)")
        os.unlink(self.path(run_id, "manifest.json"))
        self.make_old()
        before = self.objects()
        self.clean([])
        self.assertEqual(before, self.objects())


class TestMounts(unittest.TestCase):
    def test_a_folder_in_which_something_is_mounted_is_recognised(self) -> None:
        self.assertTrue(cleaning._holds_a_mount("/"))
        self.assertFalse(cleaning._holds_a_mount(os.path.dirname(os.path.abspath(__file__))))


if __name__ == "__main__":
    unittest.main()
