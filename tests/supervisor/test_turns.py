"""Runs of one queue: never more at once than said, by their places, until the last process is gone."""

import contextlib
import fcntl
import os
import random
import signal
import tempfile
import threading
import time
import unittest
from typing import Any, Dict, List, Tuple

from orchestrator.supervisor import processes
from orchestrator.supervisor.rundir import RunDir
from orchestrator.supervisor.turns import Turn, check
from tests.supervisor.host import NEEDS_ROOT, WITHOUT_CGROUPS, Following, HostCase, of_kind

WAITS_FOR_A_FILE = """
    import os, sys, time
    os.write(1, b"up\\n")
    while not os.path.exists(%r):
        time.sleep(0.01)
    """


def open_files() -> List[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            found.append(os.readlink("/proc/self/fd/" + name))
    return found


class TurnTest(unittest.TestCase):
    """The queue by itself; each `Turn` has a descriptor of its own, as in a process of its own."""

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = folder.name

    def turn(self, place: int, at_once: int = 1) -> Turn:
        turn = Turn(RunDir(self.root, "run%d" % place), {"queue": "q", "place": place, "at_once": at_once})
        self.addCleanup(lambda: turn.leave() if os.path.exists("/proc/self/fd/%d" % turn.fd) else None)
        return turn

    def test_in_any_order_of_arrival_and_looking_no_more_run_than_may_and_the_first_place_goes(self) -> None:
        for seed in range(60):
            rng = random.Random(seed)
            at_once = rng.randrange(1, 4)
            todo = rng.sample(range(12), 12)
            waiting: Dict[int, Turn] = {}
            taken: Dict[int, Turn] = {}
            began: List[int] = []
            while todo or waiting or taken:
                action = rng.randrange(3)
                if action == 0 and todo:
                    place = todo.pop()
                    waiting[place] = Turn(
                        RunDir(self.root, "run%d" % place), {"queue": "q", "place": place, "at_once": at_once}
                    )
                elif action == 1 and waiting:
                    place = rng.choice(sorted(waiting))
                    may = at_once - len(taken)
                    is_next = place in sorted(waiting)[: max(may, 0)]
                    self.assertEqual(waiting[place].try_take(), is_next, (seed, place))
                    if is_next:
                        taken[place] = waiting.pop(place)
                        began.append(place)
                elif action == 2 and taken:
                    taken.pop(rng.choice(sorted(taken))).leave()
                self.assertLessEqual(len(taken), at_once)
            self.assertEqual(sorted(began), list(range(12)))
        self.assertEqual(os.listdir(os.path.join(self.root, "turns")), [])

    def test_other_files_in_a_queue_s_folder_are_no_tickets(self) -> None:
        first = self.turn(1)
        for name in ("running-notes", "waiting-x-run3", "running-000000000-", "waiting-000000000-.run4"):
            with open(os.path.join(self.root, "turns", "q", name), "w", encoding="utf-8"):
                pass
        self.assertTrue(first.try_take())

    def test_who_waits_is_told_for_whom(self) -> None:
        first, second, third = self.turn(1, 2), self.turn(2, 2), self.turn(3, 2)
        self.assertEqual([first.try_take(), second.try_take(), third.try_take()], [True, True, False])
        self.assertEqual(third.ahead, ["run1", "run2"])

    def test_a_place_in_the_queue_that_was_left_holds_up_nobody(self) -> None:
        first, second, third = self.turn(1), self.turn(2), self.turn(3)
        self.assertEqual([first.try_take(), second.try_take(), third.try_take()], [True, False, False])
        second.leave()
        self.assertFalse(third.try_take())
        first.leave()
        self.assertTrue(third.try_take())

    def test_a_ticket_that_nobody_holds_is_cleared_away(self) -> None:
        first, second = self.turn(1), self.turn(2)
        self.assertTrue(first.try_take())
        self.assertFalse(second.try_take())
        os.close(first.fd)
        self.assertTrue(second.try_take())
        self.assertEqual(len(os.listdir(os.path.join(self.root, "turns", "q"))), 2)  # the lock and its own

    def test_who_waited_for_the_lock_of_a_queue_that_went_meanwhile_finds_the_new_one(self) -> None:
        self.turn(1)
        folder = os.path.join(self.root, "turns", "q")
        lock = os.path.join(folder, "lock")
        made: List[Turn] = []
        with open(lock, encoding="ascii") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            thread = threading.Thread(target=lambda: made.append(self.turn(2)))
            thread.start()
            while len([path for path in open_files() if path == lock]) < 2:
                time.sleep(0.01)
            for name in os.listdir(folder):
                os.unlink(os.path.join(folder, name))
            os.rmdir(folder)
        thread.join()
        self.assertTrue(made[0].try_take())

    def test_a_turn_that_is_none_is_refused(self) -> None:
        check(None)
        check({"queue": "q", "place": 0, "at_once": 1})
        bad: Tuple[Dict[str, Any], ...] = (
            {"queue": "../q"},
            {"queue": "a/b"},
            {"queue": ".."},
            {"queue": ""},
            {"place": -1},
            {"place": 1.0},
            {"at_once": 0},
            {"at_once": True},
        )
        for change in bad:
            with self.assertRaises(ValueError):
                check({"queue": "q", "place": 0, "at_once": 1, **change})


class QueueTest(HostCase):
    def in_queue(self, code: str, place: int, at_once: int = 1, **changes: Any) -> Following:
        turn = {"queue": "q", "place": place, "at_once": at_once}
        return self.start(code, turn=turn, **changes).follow()

    def gate(self, name: str) -> str:
        return os.path.join(self.base, name)

    def open(self, gate: str) -> None:
        with open(gate, "w", encoding="utf-8"):
            pass

    def test_five_runs_never_overlap_more_than_they_may_and_go_in_order(self) -> None:
        for at_once in (1, 2):
            gate = self.gate("first%d" % at_once)
            log = self.gate("log%d" % at_once)
            code = """
                import os, time
                log = os.open(%r, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
                os.write(log, b"+%%d\\n")
                os.write(1, b"up\\n")
                while not os.path.exists(%r):
                    time.sleep(0.01)
                time.sleep(0.2)
                os.write(log, b"-%%d\\n")
                """ % (log, gate)  # fmt: skip
            follows = {}
            for place in (0, 1, 4, 3, 2):  # the first are there before the rest arrives in some other order
                follows[place] = self.in_queue(code % (place, place), place, at_once)
                follows[place].until_printed(b"up") if place < at_once else follows[place].until("queued")
            self.open(gate)
            for follow in follows.values():
                self.assertEqual(of_kind(follow.rest(), "end")[0]["code"], 0)
            with open(log, encoding="utf-8") as file:
                words = file.read().split()
            self.assertEqual(len(words), 10)
            depth = 0
            for index, word in enumerate(words):
                depth += 1 if word[0] == "+" else -1
                self.assertLessEqual(depth, at_once)
                earlier = ["-%d" % place for place in range(int(word[1:])) if word[0] == "+"]
                self.assertLess(len(set(earlier) - set(words[:index])), at_once, words)

    def test_a_run_that_waits_says_so_and_can_be_cancelled_there(self) -> None:
        gate = self.gate("go")
        first = self.in_queue(WAITS_FOR_A_FILE % gate, 0)
        first.until_printed(b"up")
        self.assertFalse(self.standing(self.run_ids[0])["waiting"])
        second = self.in_queue("print('never')", 1, timeout_s=0.2, grace_s=60.0)
        queued = second.until("queued")
        self.assertEqual((queued["queue"], queued["place"], queued["ahead"]), ("q", 1, [self.run_ids[0]]))
        self.assertTrue(self.standing(self.run_ids[1])["waiting"])
        second.until("seal")
        self.assertTrue(self.stop(self.run_ids[1])["asked"])
        records = second.rest()
        self.assertEqual(of_kind(records, "end")[0]["outcome"], "cancelled")
        self.assertEqual(of_kind(records, "spawn") + of_kind(records, "turn"), [])
        self.assertFalse(self.standing(self.run_ids[1])["waiting"])
        third = self.in_queue("print('up')", 2)
        third.until("queued")
        os.kill(self.supervisor(self.run_ids[2]), signal.SIGTERM)
        self.assertEqual(of_kind(third.rest(), "end")[0]["outcome"], "cancelled")
        self.open(gate)
        self.assertEqual(of_kind(first.rest(), "end")[0]["outcome"], "exited")
        self.assertFalse(os.path.exists(os.path.join(self.root, "turns", "q")))

    def test_the_time_limit_counts_from_the_turn(self) -> None:
        gate = self.gate("go")
        first = self.in_queue(WAITS_FOR_A_FILE % gate, 0)
        first.until_printed(b"up")
        second = self.in_queue("print('up')", 1, timeout_s=1.0)
        second.until("queued")
        self.wait_for("more than the limit", lambda: self.standing(self.run_ids[1])["silent_s"] > 1.5)
        self.open(gate)
        records = second.rest()
        self.assertEqual(of_kind(records, "end")[0]["outcome"], "exited")
        self.assertGreater(of_kind(records, "turn")[0]["waited_s"], 1.0)
        first.rest()

    def test_a_killed_supervisors_turn_is_free_only_when_the_last_process_of_its_run_is_gone(self) -> None:
        code = """
            import os, subprocess, sys, time
            nap = "import os, time; os.write(1, b'nap %d\\\\n' % os.getpid()); time.sleep(100)"
            subprocess.Popen([sys.executable, "-c", nap], start_new_session=True)  # inherits no descriptor
            os.write(1, b"up\\n")
            time.sleep(100)
            """
        first = self.in_queue(code, 0)
        first.until_printed(b"nap", b"up")
        second = self.in_queue("print('second')", 1)
        second.until("queued")
        run_id = self.run_ids[0]
        main = first.until("spawn")["pid"]
        (nap,) = [process.pid for process in processes.members(run_id) if process.pid != main]
        os.kill(self.supervisor(run_id), signal.SIGKILL)
        self.wait_for("the supervisor's end", lambda: not self.standing(run_id)["alive"])
        third = self.in_queue("print('third')", 2)
        self.assertEqual(third.until("queued")["ahead"], [run_id, self.run_ids[1]])
        os.kill(main, signal.SIGKILL)
        self.wait_for("the main process's end", lambda: len(self.standing(run_id)["orphans"]) == 1)
        fourth = self.in_queue("print('fourth')", 3)
        self.assertEqual(fourth.until("queued")["ahead"], [run_id, *self.run_ids[1:3]])
        self.assertTrue(self.standing(self.run_ids[1])["waiting"])
        os.kill(nap, signal.SIGKILL)
        for follow in (second, third, fourth):
            self.assertEqual(of_kind(follow.rest(), "end")[0]["code"], 0)

    @NEEDS_ROOT
    def test_a_payload_that_nothing_else_ties_to_its_run_still_holds_the_turn(self) -> None:
        code = "import os; os.execve('/bin/sh', ['sh', '-c', 'echo up; exec sleep 100'], {})"
        first = self.in_queue(code, 0, prefix=WITHOUT_CGROUPS)
        first.until_printed(b"up")
        payload = processes.look(first.until("spawn")["pid"])
        assert payload is not None
        self.addCleanup(processes.send_signal, [payload], signal.SIGKILL)
        run_id = self.run_ids[0]
        os.kill(self.supervisor(run_id), signal.SIGKILL)
        self.wait_for("the supervisor's end", lambda: not self.standing(run_id)["alive"])
        self.assertEqual(self.standing(run_id)["orphans"], [])
        second = self.in_queue("print('second')", 1)
        self.assertEqual(second.until("queued")["ahead"], [run_id])
        processes.send_signal([payload], signal.SIGKILL)
        self.assertEqual(of_kind(second.rest(), "end")[0]["code"], 0)

    def test_a_waiting_run_whose_supervisor_was_killed_holds_up_nobody(self) -> None:
        gate = self.gate("go")
        first = self.in_queue(WAITS_FOR_A_FILE % gate, 0)
        first.until_printed(b"up")
        self.in_queue("print('never')", 1).until("queued")
        third = self.in_queue("print('third')", 2)
        self.assertEqual(third.until("queued")["ahead"], self.run_ids[:2])
        os.kill(self.supervisor(self.run_ids[1]), signal.SIGKILL)
        self.open(gate)
        self.assertEqual(of_kind(third.rest(), "end")[0]["code"], 0)
        first.rest()

    def test_a_turn_that_leaves_the_root_is_refused_before_anything_is_made(self) -> None:
        job, entries, _ = self.job("print('x')", turn={"queue": "../../q", "place": 0, "at_once": 1})
        talk = self.talk({"op": "start", "job": job, "entries": entries, "cursor": None})
        self.assertEqual(talk.header()["error"], "refused")
        self.assertFalse(os.path.exists(self.path(job["run_id"])))


if __name__ == "__main__":
    unittest.main()
