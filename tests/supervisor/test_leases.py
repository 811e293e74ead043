"""Cards that runs take, wait for, share and give back."""

import fcntl
import json
import os
import shutil
import signal
import stat
import tempfile
import unittest
from typing import Any, List, Optional

from orchestrator.supervisor import gpus
from orchestrator.supervisor.gpus import Asked, Card, DeviceError
from orchestrator.supervisor.leases import Leases
from orchestrator.supervisor.rundir import RunDir
from tests.supervisor.cards import ScriptedCards, uuid
from tests.supervisor.host import HostCase, of_kind, stream_bytes

MIB_OF_H200 = 143771
PRINT_CARDS = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"
HOLD = "import os, time; os.write(1, b'has it'); time.sleep(100)"  # in one piece: the pipe's other end may go


def card(number: int, used_mib: int = 0, **more: Any) -> Card:
    return Card(number, uuid(number), "NVIDIA H200", MIB_OF_H200, used_mib, **more)


class LeasesCase(unittest.TestCase):
    """Leases of runs that are nothing but folders with a held lock."""

    def setUp(self) -> None:
        self.root = tempfile.mkdtemp(prefix="orch leases ")
        self.addCleanup(shutil.rmtree, self.root)

    def run_named(self, name: str) -> RunDir:
        run = RunDir(self.root, name)
        for folder in (run.path, run.records):
            os.makedirs(folder)
        fd = os.open(run.lock, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        self.addCleanup(os.close, fd)
        return run

    def leases(self, name: str, devices: Any, is_shared: bool = False) -> Leases:
        return Leases(self.run_named(name), devices, is_shared)

    def says(self, leases: Leases) -> str:
        return "; ".join(obstacle.says for obstacle in leases.obstacles)


class TakingTest(LeasesCase):
    def test_a_card_is_one_runs_until_it_leaves(self) -> None:
        first, second = self.leases("first", ["0"]), self.leases("second", ["0"])
        present = [card(0)]
        self.assertEqual(first.try_take(present), present)
        self.assertEqual(second.try_take(present), [])
        self.assertEqual(self.says(second), "card 0 (NVIDIA H200) is held by run first")
        first.leave()
        self.assertEqual(second.try_take(present), present)

    def test_all_cards_or_none_are_taken(self) -> None:
        held, both, other = self.leases("held", ["1"]), self.leases("both", ["0", "1"]), None
        present = [card(0), card(1)]
        held.try_take(present)
        self.assertEqual(both.try_take(present), [])
        self.assertEqual(both.fds, [])
        other = self.leases("other", ["0"], is_shared=True)
        self.assertEqual([found.number for found in other.try_take(present)], [0])

    def test_a_lease_is_a_lock_on_the_cards_node_whichever_root_asks(self) -> None:
        present = [card(0, node="/dev/null")]
        mine = self.leases("mine", ["0"])
        mine.try_take(present)
        elsewhere = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, elsewhere)
        run = RunDir(elsewhere, "theirs")
        os.makedirs(run.path)
        theirs = Leases(run, ["0"], False)
        self.assertEqual(theirs.try_take(present), [])
        self.assertIn("another user or container of this machine", self.says(theirs))
        mine.leave()
        self.assertEqual(theirs.try_take(present), present)
        theirs.leave()

    def test_the_devices_order_is_the_one_asked_for(self) -> None:
        present = [card(0), card(1)]
        self.assertEqual(self.leases("r", ["1", uuid(0)]).try_take(present), [present[1], present[0]])

    def test_a_number_of_cards_takes_those_with_the_most_free_memory(self) -> None:
        present = [
            card(0, used_mib=143_000),
            card(1, used_mib=2000),
            card(2),
            card(3, used_mib=5000),
        ]
        wish = {"count": 2, "free_bytes": 90 * 2**30}
        self.assertEqual([found.number for found in self.leases("r", wish).try_take(present)], [1, 2])

    def test_a_number_of_cards_waits_for_memory_and_says_what_is_free(self) -> None:
        leases = self.leases("r", {"count": 1, "free_bytes": 90 * 2**30})
        self.assertEqual(leases.try_take([card(0, used_mib=100_000)]), [])
        self.assertIn("has 42.7 GiB free of 140.4 GiB", self.says(leases))

    def test_a_number_of_cards_without_memory_takes_none_that_somebody_uses(self) -> None:
        present = [card(0, processes=((1, 500),)), card(1, used_mib=9000), card(2, used_mib=600)]
        self.assertEqual(
            [found.number for found in self.leases("r", {"count": 1, "free_bytes": None}).try_take(present)],
            [2],
        )

    def test_what_can_never_be_had_is_refused(self) -> None:
        present = [card(0), card(1, has_instances=True), Card(2, "", "", 0, 0, fault="GPU is lost")]
        wishes: List[Any] = [
            (["7"], "card 7 is not there; this host has: 0 NVIDIA H200"),
            (["0", uuid(0)], "asked for twice"),
            (["1"], "card 1 is in MIG mode: ask for one of its instances"),
            (["2"], "card 2 does not answer: GPU is lost; see the kernel's log there"),
            ({"count": 2, "free_bytes": None}, "2 cards asked for; this host has: 0 NVIDIA H200"),
            ({"count": 1, "free_bytes": 2**40}, "1 card of 1024.0 GiB asked for; this host has"),
        ]
        for number, (devices, text) in enumerate(wishes):
            with self.assertRaisesRegex(DeviceError, text.replace("(", r"\(")):
                self.leases("r%d" % number, devices).try_take(present)

    def test_a_stranger_is_named_with_what_it_uses(self) -> None:
        leases = self.leases("r", ["0"])
        self.assertEqual(leases.try_take([card(0, 20_480, processes=((os.getpid(), 20_480),))]), [])
        self.assertRegex(
            self.says(leases), r"has 20.0 GiB in use: pid %d \(.*python.*\), 20.0 GiB" % os.getpid()
        )

    def test_sharing_takes_what_others_have_and_is_seen_by_those_who_do_not_share(self) -> None:
        present = [card(0, 20_480, processes=((1, 20_480),))]
        sharer, other = self.leases("sharer", ["0"], is_shared=True), self.leases("other", ["0"])
        self.assertEqual(sharer.try_take(present), present)
        self.assertEqual(other.try_take([card(0)]), [])
        self.assertIn("is held by run sharer", self.says(other))
        sharer.leave()
        self.assertEqual(other.try_take([card(0)]), [card(0)])
        again = self.leases("again", ["0"], is_shared=True)
        self.assertEqual(again.try_take(present), present)
        again.leave()
        third = self.leases("third", ["0"])
        third.try_take([card(0)])
        self.assertIn("held by run other", self.says(third))

    def test_mig_instances_are_cards_of_their_own(self) -> None:
        instance = Card(0, "MIG-aa", "MIG 3g.20gb", 0, 0, is_instance=True)
        present = [card(0, has_instances=True), instance]
        self.assertEqual(self.leases("r", ["MIG-aa"]).try_take(present), [instance])
        with self.assertRaisesRegex(DeviceError, "instances: MIG-aa"):
            self.leases("other", ["0"]).try_take(present)


class SharingTest(LeasesCase):
    def test_who_does_not_share_waits_for_those_who_do_also_when_the_first_holder_has_gone(self) -> None:
        present = [card(0)]
        first, sharer, other = (
            self.leases("first", ["0"]),
            self.leases("sharer", ["0"], is_shared=True),
            self.leases("other", ["0"]),
        )
        first.try_take(present)
        self.assertEqual(sharer.try_take(present), present)
        first.leave()
        self.assertEqual(other.try_take(present), [])
        self.assertIn("is held by run sharer", self.says(other))
        sharer.hold_shared()
        with open(os.path.join(self.root, "leases", uuid(0) + ".lock"), "rb") as lock:
            self.assertRaises(BlockingIOError, fcntl.flock, lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def test_two_who_share_are_both_named(self) -> None:
        present = [card(0)]
        one, two = (self.leases(name, ["0"], is_shared=True) for name in ("one", "two"))
        one.try_take(present)
        two.try_take(present)
        waits = self.leases("waits", ["0"])
        waits.try_take(present)
        self.assertIn("is held by run one and run two", self.says(waits))
        one.leave()
        waits.try_take(present)
        self.assertIn("is held by run two", self.says(waits))


class QueueTest(LeasesCase):
    def test_who_waits_for_a_stranger_keeps_nobody_from_another_use_of_the_card(self) -> None:
        present = [card(0, used_mib=600), card(1, used_mib=600)]
        large = self.leases("large", {"count": 1, "free_bytes": 140 * 2**30})
        self.assertEqual(large.try_take(present), [])
        small = self.leases("small", ["1"])
        self.assertEqual(small.try_take(present), [present[1]])
        # What a run of ours has in use goes with it: who waits for that keeps its place.
        self.assertEqual(self.leases("late", ["1"]).try_take(present), [])

    def test_a_queue_whose_lock_stays_held_is_an_obstacle_and_no_hang(self) -> None:
        waits = self.leases("waits", ["0"])
        with open(os.path.join(self.root, "leases", "queue", "lock"), "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.assertEqual(waits.try_take([card(0)]), [])
        self.assertIn("queue/lock has been held for", self.says(waits))
        self.assertEqual(waits.try_take([card(0)]), [card(0)])

    def test_what_is_no_ticket_in_a_queue_is_in_nobodys_way(self) -> None:
        waits = self.leases("waits", ["0"])
        os.mkdir(os.path.join(self.root, "leases", "queue", "waiting-000000000-folder"))
        self.assertEqual(waits.try_take([card(0)]), [card(0)])

    def test_a_card_whose_node_cannot_be_opened_is_passed_over_unless_it_is_named(self) -> None:
        # Nothing on this machine answers to this device number.
        node = os.path.join(self.root, "node")
        try:
            os.mknod(node, 0o600 | stat.S_IFCHR, os.makedev(508, 77))
        except PermissionError:
            node = "/dev/mem"
        present = [card(0, node=node), card(1)]
        self.assertEqual(self.leases("any", {"count": 1, "free_bytes": None}).try_take(present), [present[1]])
        with self.assertRaisesRegex(DeviceError, "cannot open"):
            self.leases("named", ["0"]).try_take(present)

    def test_who_came_first_goes_first_and_others_pass_where_nobody_waits(self) -> None:
        present = [card(number) for number in range(3)]
        holder, first, second, passing = (
            self.leases("holder", ["0"]),
            self.leases("first", ["0", "1"]),
            self.leases("second", ["1"]),
            self.leases("passing", ["2"]),
        )
        holder.try_take(present)
        self.assertEqual(first.try_take(present), [])
        self.assertEqual(second.try_take(present), [])
        self.assertIn("is for run first, which came first", self.says(second))
        self.assertEqual(passing.try_take(present), [present[2]])
        holder.leave()
        self.assertEqual(second.try_take(present), [])
        self.assertEqual(first.try_take(present), present[:2])
        first.leave()
        self.assertEqual(second.try_take(present), [present[1]])

    def test_a_number_of_cards_ahead_keeps_all_that_could_serve_it(self) -> None:
        present = [card(0), card(1)]
        self.leases("first", {"count": 1, "free_bytes": None})
        second = self.leases("second", ["1"])
        self.assertEqual(second.try_take(present), [])
        self.assertIn("is for run first", self.says(second))

    def test_who_will_be_refused_is_in_nobodys_way(self) -> None:
        self.leases("first", ["7"])
        self.assertEqual(self.leases("second", ["0"]).try_take([card(0)]), [card(0)])

    def test_who_is_gone_is_in_nobodys_way(self) -> None:
        first = self.leases("first", ["0"])
        os.close(first._ticket_fd)  # as the kernel does when a supervisor is killed
        self.assertEqual(self.leases("second", ["0"]).try_take([card(0)]), [card(0)])

    def test_nothing_of_a_queue_or_a_lease_stays_but_the_lock_files(self) -> None:
        leases = self.leases("r", ["0"])
        leases.try_take([card(0)])
        leases.leave()
        self.assertEqual(os.listdir(os.path.join(self.root, "leases")), [uuid(0) + ".lock"])


class AskingTest(unittest.TestCase):
    def test_no_devices_are_no_wish(self) -> None:
        self.assertIsNone(Asked.of([]))

    def test_bytes_are_rounded_up_to_mib(self) -> None:
        wish: Optional[Asked] = Asked.of({"count": 1, "free_bytes": 2**20 + 1})
        assert wish is not None
        self.assertEqual(wish.free_mib, 2)


class ScriptedTest(HostCase):
    """Whole runs on a host whose nvidia-smi is a script."""

    def scripted(self, count: int) -> ScriptedCards:
        return ScriptedCards(os.path.join(self.base, "tools"), count)

    def test_cards_are_read_with_their_processes_and_instances(self) -> None:
        cards = self.scripted(2)
        cards.mig = [1]
        cards.run_on(0, 4242, 73_000)
        cards.list(
            "GPU 0: NVIDIA H200 (UUID: %s)\nGPU 1: NVIDIA H200 (UUID: %s)\n"
            "  MIG 3g.71gb     Device  0: (UUID: MIG-aa)\n" % (uuid(0), uuid(1))
        )
        path = os.environ["PATH"]
        self.addCleanup(os.environ.update, PATH=path)
        os.environ["PATH"] = cards.folder + ":" + path
        found = gpus.cards()
        self.assertEqual([entry.uuid for entry in found], [uuid(0), uuid(1), "MIG-aa"])
        self.assertEqual((found[0].used_mib, found[0].processes), (73_000, ((4242, 73_000),)))
        self.assertEqual((found[1].has_instances, found[2].is_instance, found[2].number), (True, True, 1))

    def test_a_run_waits_for_the_card_of_another_and_says_for_whom(self) -> None:
        cards = self.scripted(1)
        holder = self.start(HOLD, devices=["0"], host_env=cards.env)
        holder.follow().until_printed(b"has it")
        waiting = self.start(PRINT_CARDS, devices=["0"], host_env=cards.env).follow()
        said = waiting.until("cards_awaited")["obstacles"]
        self.assertEqual(said, ["card 0 (NVIDIA H200) is held by run %s" % self.run_ids[0]])
        standing = [self.standing(run_id) for run_id in self.run_ids]
        self.assertEqual((standing[1]["waiting"], standing[1]["obstacles"]), (True, said))
        self.assertEqual((standing[0]["waiting"], standing[0]["cards"]), (False, ["0 (NVIDIA H200)"]))
        self.stop(self.run_ids[0], 0.0)
        records = waiting.rest()
        self.assertEqual(stream_bytes(records, "stdout"), uuid(0).encode() + b"\n")
        self.assertEqual(of_kind(records, "cards")[0]["cards"][0]["uuid"], uuid(0))

    def test_a_run_that_does_not_wait_is_refused_and_leaves_the_queue(self) -> None:
        cards = self.scripted(1)
        cards.run_on(0, 999_999, 20_480)
        records = self.records(
            self.start(PRINT_CARDS, devices=["0"], host_env=cards.env, waits_for_cards=False)
        )
        end = of_kind(records, "end")[0]
        self.assertEqual((end["outcome"], of_kind(records, "spawn")), ("refused", []))
        self.assertIn("has 20.0 GiB in use: pid 999999, 20.0 GiB; without --no-wait it waits", end["reason"])
        self.assertFalse(os.path.exists(os.path.join(self.root, "leases", "queue")))
        shared = self.records(self.start(PRINT_CARDS, devices=["0"], host_env=cards.env, shares_cards=True))
        self.assertEqual(of_kind(shared, "end")[0]["outcome"], "exited")

    def test_a_waiting_run_is_cancelled_at_once(self) -> None:
        cards = self.scripted(1)
        cards.run_on(0, 999_999, 20_480)
        waiting = self.start(PRINT_CARDS, devices=["0"], host_env=cards.env).follow()
        waiting.until("cards_awaited")
        self.stop(self.run_ids[0])
        records = waiting.rest()
        self.assertEqual(
            (of_kind(records, "end")[0]["outcome"], of_kind(records, "spawn")), ("cancelled", [])
        )

    def test_a_card_is_free_when_the_last_process_that_has_it_is_gone(self) -> None:
        cards = self.scripted(1)
        holder = self.start(HOLD, devices=["0"], host_env=cards.env)
        holder.follow().until_printed(b"has it")
        os.kill(self.supervisor(self.run_ids[0]), signal.SIGKILL)
        waiting = self.start(PRINT_CARDS, devices=["0"], host_env=cards.env).follow()
        said = waiting.until("cards_awaited")["obstacles"][0]
        self.assertIn("is held by what is left of run %s" % self.run_ids[0], said)
        self.stop(self.run_ids[0], 0.0)
        self.assertEqual(of_kind(waiting.rest(), "end")[0]["code"], 0)

    def test_rows_that_are_none_and_cards_without_a_uuid_disable_no_other_card(self) -> None:
        cards = self.scripted(2)
        rows = [
            "Warning: infoROM is corrupted at gpu 0000:01:00.0",
            "0, [Unknown Error], [Unknown Error], [Unknown Error], [Unknown Error], [Unknown Error]",
            "1, %s, NVIDIA H200, 143771, 0, Disabled" % uuid(1),
        ]
        cards.show(text="\n".join(rows))
        records = self.records(
            self.start(PRINT_CARDS, devices={"count": 1, "free_bytes": None}, host_env=cards.env)
        )
        self.assertEqual(stream_bytes(records, "stdout"), uuid(1).encode() + b"\n")
        records = self.records(self.start(PRINT_CARDS, devices=["0"], host_env=cards.env))
        self.assertIn("card 0 does not answer: it shows no UUID", of_kind(records, "end")[0]["reason"])
        records = self.records(self.start(PRINT_CARDS, devices=["7"], host_env=cards.env))
        self.assertIn("nvidia-smi says: Warning: infoROM", of_kind(records, "end")[0]["reason"])

    def test_of_eight_cards_a_number_takes_those_that_nobody_has(self) -> None:
        cards = self.scripted(8)
        holder = self.start(HOLD, devices=["7", "2"], host_env=cards.env)
        holder.follow().until_printed(b"has it")
        six = {"count": 6, "free_bytes": None}
        records = self.records(self.start(PRINT_CARDS, devices=six, host_env=cards.env))
        free = ",".join(uuid(number) for number in (0, 1, 3, 4, 5, 6))
        self.assertEqual(stream_bytes(records, "stdout").decode(), free + "\n")
        seven = {"count": 7, "free_bytes": None}
        refused = self.records(
            self.start(PRINT_CARDS, devices=seven, host_env=cards.env, waits_for_cards=False)
        )
        reason = of_kind(refused, "end")[0]["reason"]
        self.assertIn("card 2 (NVIDIA H200) is held by run %s; card 7" % self.run_ids[0], reason)
        nine = {"count": 9, "free_bytes": None}
        refused = self.records(self.start(PRINT_CARDS, devices=nine, host_env=cards.env))
        self.assertIn("9 cards asked for; this host has: 0 NVIDIA H200", of_kind(refused, "end")[0]["reason"])

    def test_what_nvidia_smi_says_is_cut(self) -> None:
        cards = self.scripted(1)
        cards.show(code=3, text="x" * 100_000)
        records = self.records(self.start(PRINT_CARDS, devices=["0"], host_env=cards.env))
        self.assertLess(len(of_kind(records, "end")[0]["reason"]), 600)

    def test_a_failure_of_the_driver_while_a_run_waits_is_one_more_obstacle(self) -> None:
        cards = self.scripted(1)
        cards.run_on(0, 999_999, 20_480)
        waiting = self.start(PRINT_CARDS, devices=["0"], host_env=cards.env).follow()
        waiting.until("cards_awaited")
        cards.show(code=15, text="Unknown Error")
        self.wait_for(
            "the obstacle", lambda: "exit code 15" in str(self.standing(self.run_ids[0])["obstacles"])
        )
        cards.run_on(0, 999_999, 0)
        cards.forget_programs()
        self.assertEqual(of_kind(waiting.rest(), "end")[0]["code"], 0)

    def test_a_driver_that_fails_says_so_in_its_own_words(self) -> None:
        cards = self.scripted(1)
        cards.show(code=15, text="Unable to determine the device handle for GPU0000:06:00.0: GPU is lost.\n")
        records = self.records(self.start(PRINT_CARDS, devices=["0"], host_env=cards.env))
        self.assertIn("exit code 15: Unable to determine", of_kind(records, "end")[0]["reason"])

    def test_a_driver_that_hangs_holds_up_neither_signs_of_life_nor_a_cancel(self) -> None:
        cards = self.scripted(1)
        cards.hang()
        waiting = self.start(PRINT_CARDS, devices=["0"], host_env=cards.env).follow()
        waiting.until("start")
        self.wait_for("the look", lambda: os.path.exists(os.path.join(cards.folder, "hangs")))
        self.stop(self.run_ids[0], 0.2)
        end = of_kind(waiting.rest(), "end")[0]
        self.assertEqual((end["outcome"], end["survivors"]), ("cancelled", []))

    def test_what_a_run_asks_for_stands_in_its_ticket_and_nowhere_else(self) -> None:
        cards = self.scripted(1)
        cards.run_on(0, 999_999, 20_480)
        waiting = self.start(PRINT_CARDS, devices=["0"], host_env=cards.env).follow()
        waiting.until("cards_awaited")
        folder = os.path.join(self.root, "leases", "queue")
        (ticket,) = [name for name in os.listdir(folder) if name != "lock"]
        with open(os.path.join(folder, ticket), encoding="utf-8") as file:
            self.assertEqual(json.load(file), {"devices": ["0"], "is_shared": False})
        self.assertEqual(os.stat(os.path.join(folder, ticket)).st_mode & 0o077, 0)
        self.stop(self.run_ids[0])
        waiting.rest()


if __name__ == "__main__":
    unittest.main()
