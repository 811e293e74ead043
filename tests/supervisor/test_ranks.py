"""A run of several processes: who they are told to be, whose lines are whose, and how all end with one."""

import json
import os
import signal
import unittest
from typing import Any, Dict, List

from orchestrator.supervisor import processes, program, ranks
from tests.supervisor.host import HostCase, of_kind

SLEEP = "import time\ntime.sleep(100)\n"
UP = "import os\nos.write(1, b'up ' + os.environ['RANK'].encode())\n" + SLEEP
ENDS_AFTER_ITS_PEER = """
    import os, signal, time
    rank = int(os.environ["RANK"])
    def is_there(name):
        return os.path.exists(name)
    def has_ended(pid):
        try:
            with open("/proc/%d/stat" % pid) as file:
                return file.read().rpartition(")")[2].split()[0] in "ZX"
        except OSError:
            return True
    if rank == 1:
        with open("pid", "w") as file:
            file.write(str(os.getpid()))
        os.rename("pid", "pid of rank 1")
    print("up %d" % rank, flush=True)
    while not is_there("go") or not is_there("pid of rank 1"):
        time.sleep(0.01)
    if rank == 0:
        while not has_ended(int(open("pid of rank 1").read())):
            time.sleep(0.01)
    os._exit(4 - rank)
    """


def by_proc(records: List[Dict[str, Any]], kind: str) -> Dict[str, Dict[str, Any]]:
    """Returns each process's one record of a kind, in their order."""
    found = {}
    for record in of_kind(records, kind):
        assert record["proc"] not in found, record
        found[record["proc"]] = record
    return found


def is_running(pid: int) -> bool:
    process = processes.look(pid)
    return process is not None and process.is_running


def printed_by(records: List[Dict[str, Any]], proc: str) -> str:
    return "".join(record["text"] for record in of_kind(records, "out") if record["proc"] == proc)


class StartTest(HostCase):
    maxDiff = None

    def test_each_rank_is_told_who_it_is_as_torchrun_does_and_has_a_log_and_events_of_its_own(self) -> None:
        records = self.run_code(
            """
            import json, os
            names = %r
            print(json.dumps({name: os.environ.get(name) for name in names}))
            fd = int(os.environ["ORCH_EVENTS_FD"].split(":")[0])
            os.write(fd, b'{"kind":"metric","name":"rank","value":%%s}\\n' %% os.environ["RANK"].encode())
            """
            % (("OMP_NUM_THREADS", "MODE", *ranks.VARIABLES),),
            processes=2,
            env={"MODE": "the run's"},
        )
        spawns = by_proc(records, "spawn")
        self.assertEqual(list(spawns), ["rank0", "rank1"])
        self.assertNotEqual(
            spawns["rank0"]["env"]["ORCH_EVENTS_FD"], spawns["rank1"]["env"]["ORCH_EVENTS_FD"]
        )
        port = spawns["rank0"]["env"]["MASTER_PORT"]
        self.assertTrue(port.isdigit())
        for rank, proc in enumerate(spawns):
            of_rank = dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank))
            of_all = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), "2")
            stated = dict(of_rank, **of_all, GROUP_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
            stated.update(TORCHELASTIC_RUN_ID=self.run_ids[0], OMP_NUM_THREADS="1", MODE="the run's")
            self.assertEqual(json.loads(printed_by(records, proc)), stated)
            self.assertEqual(by_proc(records, "event")[proc]["event"]["value"], rank)
            self.assertEqual(by_proc(records, "event")[proc]["pid"], spawns[proc]["pid"])
            self.assertEqual(by_proc(records, "exit")[proc]["code"], 0)
        end = of_kind(records, "end")[0]
        self.assertEqual((end["outcome"], end["code"], end["reason"]), ("exited", 0, None))

    def test_ranks_meet_at_the_port_that_they_were_told(self) -> None:
        records = self.run_code(
            """
            import os, socket, time
            place = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
            if os.environ["RANK"] == "0":
                with socket.create_server(place) as server:
                    print(server.accept()[0].recv(99).decode())
            else:
                while True:
                    try:
                        with socket.create_connection(place) as peer:
                            peer.sendall(b"hello")
                        break
                    except ConnectionRefusedError:
                        time.sleep(0.01)
            """,
            processes=2,
        )
        self.assertEqual(printed_by(records, "rank0"), "hello\n")

    def test_a_rank_that_cannot_be_started_takes_those_before_it_along(self) -> None:
        limit = ("sh", "-c", 'ulimit -n 40; exec "$@"', "sh")
        records = self.records(self.start(SLEEP, processes=64, prefix=limit))
        end = of_kind(records, "end")[0]
        self.assertIn("Too many open files", end["reason"])
        self.assertIn(end["outcome"], ("refused", "abandoned"))
        self.assertEqual(end["survivors"], [])
        pids = [record["pid"] for record in of_kind(records, "spawn")]
        self.assertGreater(len(pids), 1)
        for pid in pids:
            process = processes.look(pid)
            self.assertFalse(process is not None and process.is_running)

    def test_a_job_that_no_ranks_can_be_made_of_is_refused(self) -> None:
        for job in (
            {"module": "m", "processes": 0},
            {"module": "m", "processes": ranks.MOST_RANKS + 1},
            {"module": "m", "processes": True},
            {"module": "m", "processes": "2"},
            {"module": "m", "processes": None},
            {"command": ["true"], "processes": 2},
            {"command": ["true"], "memory_limit_bytes": 1},
        ):
            with self.assertRaises(ValueError, msg=repr(job)):
                program.check(job)
        program.check({"command": ["true"], "processes": 1, "memory_limit_bytes": None})


class EndTest(HostCase):
    def test_the_first_rank_to_fail_is_named_and_ends_the_others_after_their_grace(self) -> None:
        records = self.run_code(
            """
            import os, signal, sys, time
            rank = os.environ["RANK"]
            def save(*_):
                print("saved", flush=True)
                sys.exit(0)
            signal.signal(signal.SIGTERM, save if rank == "0" else signal.SIG_IGN)
            open("ready " + rank, "w").close()
            while not all(os.path.exists("ready %d" % peer) for peer in range(3)):
                time.sleep(0.01)
            if rank == "2":
                sys.exit(3)
            time.sleep(100)
            """,
            processes=3,
            grace_s=0.5,
        )
        end = of_kind(records, "end")[0]
        self.assertEqual((end["outcome"], end["code"], end["signal"]), ("exited", 3, None))
        self.assertEqual(end["reason"], "rank 2 exited with code 3 first; the other ranks were ended")
        self.assertEqual((end["proc"], end["survivors"]), ("rank2", []))
        exits = by_proc(records, "exit")
        self.assertEqual(list(exits), ["rank2", "rank0", "rank1"])
        self.assertEqual((exits["rank0"]["code"], exits["rank1"]["signal"]), (0, signal.SIGKILL))
        self.assertEqual(printed_by(records, "rank0"), "saved\n")

    def test_a_rank_that_was_killed_is_named_with_its_signal(self) -> None:
        records = self.run_code(
            """
            import os, signal, time
            if os.environ["RANK"] == "1":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(100)
            """,
            processes=2,
        )
        end = of_kind(records, "end")[0]
        self.assertEqual((end["outcome"], end["code"], end["signal"]), ("signalled", None, 9))
        self.assertEqual(end["reason"], "rank 1 was ended by signal 9 first; the other ranks were ended")

    def test_a_rank_that_ends_well_ends_no_other(self) -> None:
        records = self.run_code(
            """
            import os, time
            if os.environ["RANK"] == "0":
                with open("new", "w") as file:
                    file.write(str(os.getpid()))
                os.rename("new", "pid")
            else:
                while not os.path.exists("pid"):
                    time.sleep(0.01)
                while os.path.exists("/proc/" + open("pid").read()):  # until it was reaped
                    time.sleep(0.01)
                print("alone")
            """,
            processes=2,
        )
        self.assertEqual(list(by_proc(records, "exit")), ["rank0", "rank1"])
        self.assertEqual(printed_by(records, "rank1"), "alone\n")
        end = of_kind(records, "end")[0]
        self.assertEqual((end["outcome"], end["code"], end["reason"]), ("exited", 0, None))

    def test_the_first_is_the_first_although_the_supervisor_looked_after_all_had_ended(self) -> None:
        follow = self.start(ENDS_AFTER_ITS_PEER, processes=2).follow()
        follow.until_printed(b"up 0", b"up 1")
        run_id = self.run_ids[0]
        pids = [record["pid"] for record in follow.so_far("spawn")]
        self.assertEqual(len(pids), 2)
        os.kill(self.supervisor(run_id), signal.SIGSTOP)
        with open(self.path(run_id, "artifacts", "go"), "w", encoding="ascii"):
            pass
        # By state: for an instant before its end a process shows neither argv nor environment.
        self.wait_for("their end", lambda: not any(is_running(pid) for pid in pids))
        os.kill(self.supervisor(run_id), signal.SIGCONT)
        records = follow.rest()
        end = of_kind(records, "end")[0]
        self.assertEqual(
            (end["proc"], end["code"], end["reason"]), ("rank1", 3, "rank 1 exited with code 3 first")
        )
        self.assertEqual(list(by_proc(records, "exit")), ["rank1", "rank0"])
        self.assertEqual(of_kind(records, "stopping"), [])

    def test_a_cancel_and_the_time_limit_end_all_ranks(self) -> None:
        follow = self.start(UP, processes=2).follow()
        follow.until_printed(b"up 0", b"up 1")
        self.stop(self.run_ids[0])
        records = follow.rest()
        end = of_kind(records, "end")[0]
        self.assertEqual((end["outcome"], end["reason"]), ("cancelled", "cancelled on request"))
        self.assertEqual(sorted(by_proc(records, "exit")), ["rank0", "rank1"])
        records = self.run_code(SLEEP, processes=2, timeout_s=0.5)
        end = of_kind(records, "end")[0]
        self.assertEqual((end["outcome"], end["signal"], end["survivors"]), ("timeout", signal.SIGTERM, []))
        self.assertEqual(sorted(by_proc(records, "exit")), ["rank0", "rank1"])

    def test_what_keeps_a_ranks_output_open_is_told_of_that_rank(self) -> None:
        code = """
            import os, subprocess
            if os.environ["RANK"] == "1":
                subprocess.Popen(["sleep", "77"])
            """
        held = by_proc(self.run_code(code, processes=2, grace_s=0.5), "pipe_held")
        self.assertEqual(list(held), ["rank1"])
        self.assertEqual([holder["argv"] for holder in held["rank1"]["holders"]], [["sleep", "77"]])

    def test_ranks_without_their_supervisor_are_found_and_ended(self) -> None:
        follow = self.start(UP, processes=2).follow()
        follow.until_printed(b"up 0", b"up 1")
        run_id = self.run_ids[0]
        os.kill(self.supervisor(run_id), signal.SIGKILL)
        self.wait_for("the supervisor's end", lambda: not self.standing(run_id)["alive"])
        answer = self.stop(run_id, 0.5)
        spawned = [record["pid"] for record in of_kind(follow.rest(), "spawn")]
        self.assertEqual(sorted(process["pid"] for process in answer["ended"]), sorted(spawned))
        self.assertEqual((len(spawned), answer["survivors"]), (2, []))


if __name__ == "__main__":
    unittest.main()
