"""Whatever a payload does to get away, its run ends whole: by descent, by its id, by its cgroup."""

import json
import os
import signal
import subprocess
import tempfile
import unittest
from typing import Any, Dict, List

from orchestrator.supervisor import cgroups, processes
from tests.supervisor.host import NEEDS_ROOT, WITHOUT_CGROUPS, HostCase, of_kind, stream_bytes

HAS_CGROUPS = any(
    os.path.exists(os.path.join(mount, "cgroup.controllers")) and os.access(mount, os.W_OK)
    for mount in ("/sys/fs/cgroup", "/sys/fs/cgroup/unified")
)
HAS_CGROUP_KILL = tuple(map(int, os.uname().release.split("-")[0].split(".")[:2])) >= (5, 14)
NEEDS_CGROUPS = unittest.skipUnless(HAS_CGROUPS, "needs root and a writable cgroup v2 hierarchy")

# Starts ranks that only a cgroup ties to the run once its supervisor is gone: env cleared, a session of
# their own, their parent gone. Each is deaf to SIGTERM and prints its pid.
RANKS = r"""
    import os, subprocess, sys, time
    rank = "import os, signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    rank += "os.write(1, ('%s %d\\n' % (sys.argv[1], os.getpid())).encode()); time.sleep(100)"
    middle = "import subprocess, sys; args = [sys.executable, '-c', %r, sys.argv[1]]; " % rank
    middle += "subprocess.Popen(args, start_new_session=sys.argv[1] == 'rank1')"
    for name in ("rank1", "rank2"):
        subprocess.run([sys.executable, "-c", middle, name], env={"PATH": os.environ["PATH"]})
    subprocess.Popen(["bash", "-c", "bash -c 'sleep 100; true' & echo shell $$ $!; wait"])
    os.write(1, b"main %d\n" % os.getpid())
    time.sleep(100)
    """
RANK_WORDS = (b"rank1", b"rank2", b"shell", b"main")


def pids_printed(records: List[Dict[str, Any]]) -> List[int]:
    return [int(word) for word in stream_bytes(records, "stdout").split() if word.isdigit()]


def running(pids: List[int]) -> List[int]:
    found = [processes.look(pid) for pid in pids]
    return [process.pid for process in found if process is not None and process.is_running]


class EndingCase(HostCase):
    def cgroup(self, run_id: str) -> str:
        path = self.state(run_id)["cgroup"]
        assert cgroups.checked(path, run_id) == path
        return str(path)

    def kill_supervisor(self, run_id: str) -> None:
        os.kill(self.supervisor(run_id), signal.SIGKILL)
        self.wait_for("the supervisor's end", lambda: not self.standing(run_id)["alive"])


class CgroupTest(EndingCase):
    @NEEDS_CGROUPS
    def test_cancel_ends_ranks_that_cleared_their_environment_before_it_is_reported(self) -> None:
        follow = self.start(RANKS, grace_s=0.3).follow()
        follow.until_printed(*RANK_WORDS)
        run_id = self.run_ids[0]
        cgroup = self.cgroup(run_id)
        self.assertEqual(follow.until("spawn")["cgroup"], cgroup)
        self.assertTrue(self.stop(run_id)["asked"])
        end = follow.until("end")
        records = follow.rest()
        self.assertEqual(len(pids_printed(records)), 5)
        self.assertEqual(running(pids_printed(records)), [])
        self.assertEqual((end["outcome"], end["survivors"]), ("cancelled", []))
        self.wait_for("the cgroup's removal", lambda: not os.path.exists(cgroup))

    @NEEDS_CGROUPS
    def test_orphans_without_the_runs_id_are_named_and_ended_by_stop(self) -> None:
        bystander = subprocess.Popen(["sleep", "100"])
        self.addCleanup(bystander.wait)
        self.addCleanup(bystander.kill)
        follow = self.start(RANKS).follow()
        follow.until_printed(*RANK_WORDS)
        run_id = self.run_ids[0]
        cgroup = self.cgroup(run_id)
        self.kill_supervisor(run_id)
        pids = pids_printed(follow.rest())
        self.assertEqual(running(pids), pids)
        self.assertLessEqual(set(pids), {orphan["pid"] for orphan in self.standing(run_id)["orphans"]})
        answer = self.stop(run_id, 0.2)
        self.assertEqual((answer["asked"], answer["survivors"]), (False, []))
        self.assertLessEqual(set(pids), {process["pid"] for process in answer["ended"]})
        self.assertEqual(running(pids), [])
        self.assertIsNone(bystander.poll())
        self.assertFalse(os.path.exists(cgroup))

    @NEEDS_CGROUPS
    @unittest.skipUnless(HAS_CGROUP_KILL, "needs Linux 5.14")
    def test_the_kernel_kills_a_whole_cgroup_at_once(self) -> None:
        cgroup = cgroups.make(cgroups.place(os.path.basename(self.base)[-8:]))
        assert cgroup is not None
        self.addCleanup(cgroups.remove, cgroup)
        child = subprocess.Popen(["sleep", "100"], start_new_session=True)
        self.addCleanup(child.kill)
        with open(os.path.join(cgroup, "cgroup.procs"), "w", encoding="ascii") as file:
            file.write(str(child.pid))
        self.assertEqual(cgroups.pids(cgroup), [child.pid])
        self.assertIsNone(
            cgroups.make(cgroups.place(os.path.basename(self.base)[-8:]))
        )  # in use: it cannot be a new run's
        cgroups.kill(cgroup)
        self.assertEqual(child.wait(30), -signal.SIGKILL)

    @NEEDS_CGROUPS
    def test_what_a_payload_makes_below_its_cgroup_is_part_of_it(self) -> None:
        code = """
            import os, time
            own = [line for line in open("/proc/self/cgroup") if line.startswith("0::")][0].strip()[3:]
            mount = "/sys/fs/cgroup" if os.path.exists("/sys/fs/cgroup" + own) else "/sys/fs/cgroup/unified"
            os.makedirs(mount + own + "/mine/deep")
            if os.fork() == 0:
                os.setsid()
                open(mount + own + "/mine/deep/cgroup.procs", "w").write("0")
                os.execve("/bin/sh", ["sh", "-c", "echo below $$; sleep 100"], {})
            os.write(1, b"main %d\\n" % os.getpid())
            time.sleep(100)
            """
        follow = self.start(code).follow()
        follow.until_printed(b"below", b"main")
        run_id = self.run_ids[0]
        cgroup = self.cgroup(run_id)
        self.kill_supervisor(run_id)
        pids = pids_printed(follow.rest())
        self.assertLessEqual(set(pids), set(cgroups.pids(cgroup)))
        self.assertEqual(self.stop(run_id, 0.2)["survivors"], [])
        self.assertEqual(running(pids), [])
        self.assertFalse(os.path.exists(cgroup))

    @NEEDS_CGROUPS
    def test_the_cgroup_of_a_run_whose_orphans_ended_by_themselves_is_removed_by_who_looks(self) -> None:
        follow = self.start("import os, time; os.write(1, b'up\\n'); time.sleep(100)").follow()
        follow.until_printed(b"up")
        run_id = self.run_ids[0]
        cgroup = self.cgroup(run_id)
        pid = follow.until("spawn")["pid"]
        self.kill_supervisor(run_id)
        self.assertTrue(os.path.exists(cgroup))
        os.kill(pid, signal.SIGKILL)
        self.wait_for("the payload's end", lambda: not running([pid]))
        self.assertEqual(self.standing(run_id)["orphans"], [])
        self.assertFalse(os.path.exists(cgroup))

    @NEEDS_ROOT
    def test_without_a_cgroup_descent_and_the_runs_id_do(self) -> None:
        follow = self.start(RANKS, grace_s=0.3, prefix=WITHOUT_CGROUPS).follow()
        follow.until_printed(*RANK_WORDS)
        self.assertIsNone(follow.until("spawn")["cgroup"])
        self.assertTrue(self.stop(self.run_ids[0])["asked"])
        self.assertEqual(follow.until("end")["survivors"], [])
        self.assertEqual(running(pids_printed(follow.rest())), [])

    def test_only_the_cgroup_named_for_a_run_is_taken_for_its(self) -> None:
        mounts = [mount for mount in cgroups.MOUNTS if os.path.exists(mount + "/cgroup.controllers")]
        for mount in mounts:
            self.assertEqual(
                cgroups.checked(mount + "/a.slice/orch-run1", "run1"), mount + "/a.slice/orch-run1"
            )
        for path in (
            None,
            "",
            7,
            "/",
            "/var/lib/orch-run1",
            *mounts,
            *(mount + "/orch-run2" for mount in mounts),
            *(mount + "/x/../orch-run1" for mount in mounts),
            *(mount + "//orch-run1" for mount in mounts),
            *(mount + "/../orch-run1" for mount in mounts),
        ):
            self.assertIsNone(cgroups.checked(path, "run1"), path)


class StopTest(EndingCase):
    def test_a_grandchild_whose_parents_were_killed_is_ended_with_the_run(self) -> None:
        follow = self.start(
            """
            import subprocess, sys, time
            for name, text in (
                ("leaf.py", "import os, time; os.write(1, b'leaf %d\\\\n' % os.getpid()); time.sleep(100)"),
                ("inner.sh", "echo inner $$; '%s' leaf.py & wait" % sys.executable),
                ("outer.sh", "echo outer $$; bash inner.sh & wait"),
            ):
                with open(name, "w") as file:
                    file.write(text)
            subprocess.run(["bash", "outer.sh"])
            time.sleep(100)
            """
        ).follow()
        follow.until_printed(b"leaf", b"inner", b"outer")
        run_id = self.run_ids[0]
        pids = {}
        for line in stream_bytes(self.records_so_far(run_id), "stdout").splitlines():
            name, pid = line.split()
            pids[name] = int(pid)
        for name in (b"outer", b"inner"):
            os.kill(pids[name], signal.SIGKILL)
        self.wait_for("their end", lambda: running([pids[b"outer"], pids[b"inner"]]) == [])
        self.assertEqual(running([pids[b"leaf"]]), [pids[b"leaf"]])
        self.stop(run_id, 0.3)
        self.assertEqual(follow.until("end")["survivors"], [])
        self.assertEqual(running(list(pids.values())), [])

    def test_a_grace_of_zero_kills_at_once_and_a_second_request_only_shortens_a_longer_one(self) -> None:
        deaf = (
            "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
            "print('up', flush=True); time.sleep(100)"
        )
        follow = self.start(deaf, grace_s=0).follow()
        follow.until_printed(b"up")
        self.stop(self.run_ids[0])
        self.assertEqual(
            (follow.until("end")["outcome"], follow.until("stopping")["grace_s"]), ("cancelled", 0)
        )
        follow.rest()

        follow = self.start(deaf, grace_s=1.0).follow()
        follow.until_printed(b"up")
        self.stop(self.run_ids[1])
        self.stop(self.run_ids[1], 604800.0)
        self.assertEqual((follow.until("end")["outcome"], follow.until("end")["signal"]), ("cancelled", 9))
        follow.rest()

        follow = self.start(deaf, grace_s=600000.0).follow()
        follow.until_printed(b"up")
        self.stop(self.run_ids[2])
        self.assertEqual(follow.until("stopping")["grace_s"], 600000.0)
        self.assertTrue(self.standing(self.run_ids[2])["alive"])
        self.stop(self.run_ids[2], 0.1)
        self.assertEqual((follow.until("end")["outcome"], follow.until("end")["signal"]), ("cancelled", 9))
        self.assertEqual(len(of_kind(follow.rest(), "stopping")), 1)

    def test_sigterm_to_the_supervisor_gives_the_payload_its_grace(self) -> None:
        follow = self.start(
            """
            import signal, sys, time
            def save(*_):
                time.sleep(0.5)
                print("saved", flush=True)
                sys.exit(0)
            signal.signal(signal.SIGTERM, save)
            print("up", flush=True)
            time.sleep(100)
            """,
            grace_s=20.0,
        ).follow()
        follow.until_printed(b"up")
        os.kill(self.supervisor(self.run_ids[0]), signal.SIGTERM)
        follow.until_printed(b"saved")
        end = follow.until("end")
        self.assertEqual((end["outcome"], end["code"]), ("cancelled", 0))
        follow.rest()

    def records_so_far(self, run_id: str) -> List[Dict[str, Any]]:
        with open(self.path(run_id, "records", "000000.jsonl"), "rb") as file:
            return [json.loads(line) for line in file.read().rpartition(b"\n")[0].splitlines()]


class OomTest(unittest.TestCase):
    def test_the_runs_own_cgroup_is_asked_where_it_counts(self) -> None:
        with tempfile.TemporaryDirectory() as cgroup:
            without = processes.OomCounter(cgroup)
            self.assertEqual(without.scope, processes.OomCounter(None).scope)
            events = os.path.join(cgroup, "memory.events")
            with open(events, "w", encoding="ascii") as file:
                file.write("low 0\noom 7\noom_kill 3\n")
            counter = processes.OomCounter(cgroup)
            with open(events, "w", encoding="ascii") as file:
                file.write("low 0\noom 9\noom_kill 5\n")
            self.assertEqual((counter.scope, counter.since_start()), ("cgroup", 2))


@unittest.skipUnless(os.geteuid() == 0, "mounting a small file system needs root")
class FullDiskTest(HostCase):
    def setUp(self) -> None:
        super().setUp()
        os.mkdir(self.root, 0o700)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m,mode=700", "none", self.root], check=True)
        self.addCleanup(subprocess.run, ["umount", self.root], check=True)
        self.addCleanup(self.end_all)

    def flooded(self, count: int) -> List[Dict[str, Any]]:
        flood = "import time\nfor _ in range(40): print('x' * 999999, flush=True)\ntime.sleep(100)"
        return self.run_code(flood, on_disk_full="stop", processes=count)

    def test_a_run_that_is_not_to_wait_ends_at_once_and_says_so(self) -> None:
        records = self.flooded(1)
        end = of_kind(records, "end")[0]
        self.assertEqual((end["outcome"], end["survivors"]), ("abandoned", []))
        self.assertRegex(end["reason"], "disk is full.*on_disk_full: stop")
        self.assertEqual([record["kind"] for record in records[-3:]], ["exit", "end", "seal"])
        self.assertIn(records[-3]["signal"], (signal.SIGTERM, signal.SIGKILL))

    def test_so_do_all_of_its_ranks(self) -> None:
        records = self.flooded(2)
        self.assertEqual([record["kind"] for record in records[-4:]], ["exit", "exit", "end", "seal"])
        self.assertEqual(sorted(record["proc"] for record in records[-4:-2]), ["rank0", "rank1"])
        self.assertEqual((records[-2]["outcome"], records[-2]["survivors"]), ("abandoned", []))


if __name__ == "__main__":
    unittest.main()
