"""The driver's library: read through a compiled stand-in that has cards which one cannot have here."""

import json
import os
import subprocess
import sys
import threading
import unittest
from typing import Any, Dict, List
from unittest import mock

from orchestrator.supervisor import card_users, processes
from orchestrator.supervisor.sampling import Strangers
from tests.supervisor.host import HostCase, of_kind

STAND_IN = """
typedef unsigned int uint; typedef unsigned long long u64;
typedef struct { uint version; u64 total, reserved, free, used; } memory_v2;
typedef struct { uint pid; u64 used; uint gi, ci; } process;
typedef struct { uint gpu, memory; } rates;
static char cards[4];
static int text(char *to, const char *from) { while ((*to++ = *from++)); return 0; }
#define IS(n) (handle == &cards[n])
int nvmlInit_v2(void) { return 0; }
const char *nvmlErrorString(int code) { return code == 15 ? "GPU is lost" : "Not Supported"; }
int nvmlDeviceGetCount_v2(uint *count) { *count = 3; return 0; }
int nvmlDeviceGetHandleByIndex_v2(uint index, void **handle) {
    *handle = &cards[index]; return index == 2 ? 15 : 0; }
int nvmlDeviceGetUUID(void *handle, char *to, uint size) {
    return text(to, IS(0) ? "GPU-00000000-0000-0000-0000-000000000000" : IS(1) ? "GPU-1" : "MIG-1"); }
int nvmlDeviceGetName(void *handle, char *to, uint size) {
    return text(to, IS(3) ? "MIG 3g.71gb" : "NVIDIA H200"); }
int nvmlDeviceGetMinorNumber(void *handle, uint *minor) { *minor = IS(0) ? 4 : 5; return IS(3) ? 3 : 0; }
int nvmlDeviceGetMemoryInfo_v2(void *handle, memory_v2 *memory) {
    if (memory->version != (sizeof *memory | 2 << 24)) return 25;
    memory->total = 143771ull << 20; memory->used = IS(0) ? 300ull << 20 : 0; return 0; }
int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, uint *count, process *table) {
    if (IS(0)) { *count = 0; return 0; }
    *count = 2; table[0] = (process){77, 1ull << 30, 0, 0}; table[1] = (process){78, ~0ull, 0, 0}; return 0; }
int nvmlDeviceGetMigMode(void *handle, uint *now, uint *then) { *now = IS(1); return IS(0) ? 3 : 0; }
int nvmlDeviceGetMaxMigDeviceCount(void *handle, uint *count) { *count = 2; return 0; }
int nvmlDeviceGetMigDeviceHandleByIndex(void *card, uint index, void **handle) {
    *handle = &cards[3]; return index == 1 ? 0 : 6; }
int nvmlDeviceGetGpuInstanceId(void *handle, uint *id) { *id = 2; return 0; }
int nvmlDeviceGetComputeInstanceId(void *handle, uint *id) { *id = 0; return 0; }
int nvmlDeviceGetUtilizationRates(void *handle, rates *now) { now->gpu = 87; now->memory = 40; return 0; }
int nvmlDeviceGetTemperature(void *handle, int sensor, uint *degrees) { *degrees = 61; return 0; }
"""


class LibraryTest(HostCase):
    def setUp(self) -> None:
        super().setUp()
        source = os.path.join(self.base, "nvml.c")
        with open(source, "w", encoding="utf-8") as file:
            file.write(STAND_IN)
        # Without libc a compiler alone is enough.
        library = os.path.join(self.base, "libnvidia-ml.so.1")
        subprocess.run(["cc", "-shared", "-fPIC", "-nostdlib", "-w", "-o", library, source], check=True)
        self.env = dict(os.environ, LD_LIBRARY_PATH=self.base)

    def test_cards_instances_and_lost_ones_are_read(self) -> None:
        code = "from orchestrator.supervisor import gpus; print(*map(repr, gpus.cards()), sep='\\n')"
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=self.env,
            check=True,
            stdout=subprocess.PIPE,
            universal_newlines=True,
        )
        rows = done.stdout.splitlines()
        self.assertEqual(len(rows), 4)
        for row, parts in zip(
            rows,
            (
                ("number=0", "total_mib=143771, used_mib=300, node='/dev/nvidia4', processes=()"),
                ("uuid='GPU-1'", "processes=((77, 1024), (78, None))", "has_instances=True"),
                ("number=1", "uuid='MIG-1', name='MIG 3g.71gb'", "node=None", "is_instance=True"),
                ("number=2, uuid=''", "fault='GPU is lost'"),
            ),
        ):
            for part in parts:
                self.assertIn(part, row)

    def test_users_of_a_card_are_told_in_its_process_and_own_pid_by_its_size(self) -> None:
        code = (
            "import json; from orchestrator.supervisor import card_users as c; "
            "print(json.dumps([c.users(uuid, 2**29) for uuid in ('GPU-1', 'MIG-1', 'GPU-none')]))"
        )
        argv = [sys.executable, "-c", code]
        done = subprocess.run(argv, env=self.env, check=True, stdout=subprocess.PIPE)
        users = [
            {"pid": 77, "name": None, "used_bytes": 2**30, "is_own": True},
            {"pid": 78, "name": None, "used_bytes": None, "is_own": False},
        ]
        self.assertEqual(json.loads(done.stdout), [users, users, []])

    def test_a_run_is_sampled_and_a_lost_card_refused(self) -> None:
        records = self.records(self.start("import time; time.sleep(0.3)", devices=["0"], host_env=self.env))
        samples: List[Dict[str, Any]] = of_kind(records, "gpus")
        self.assertEqual(
            samples[0]["cards"],
            [
                {
                    "uuid": "GPU-00000000-0000-0000-0000-000000000000",
                    "used_mib": 300,
                    "utilisation_percent": 87,
                    "temperature_c": 61,
                    "processes": [],
                }
            ],
        )
        refused = self.records(self.start("", devices=["2"], host_env=self.env))
        self.assertIn("card 2 does not answer: GPU is lost", of_kind(refused, "end")[0]["reason"])


class UsersTest(unittest.TestCase):
    def users(self, *told: "tuple[int, int]") -> List[Dict[str, Any]]:
        def ask(uuid: str, found: List[Any]) -> None:
            found.append(list(told))

        with mock.patch.object(card_users, "_ask", ask):
            return card_users.users("GPU-1", 2**30)

    def test_names_are_told_where_the_driver_counts_as_we_do(self) -> None:
        mine, other = self.users((os.getpid(), 5), (os.getppid(), 2**30))
        with open("/proc/%d/comm" % os.getppid(), encoding="utf-8") as file:
            self.assertEqual((other["name"], other["is_own"]), (file.read().strip(), False))
        self.assertTrue(mine["is_own"])

    def test_of_two_whose_size_fits_neither_is_ours(self) -> None:
        self.assertEqual([user["is_own"] for user in self.users((1, 2**30), (2, 2**31))], [False, False])

    def test_a_driver_that_hangs_holds_nobody_up(self) -> None:
        answer = threading.Event()
        self.addCleanup(answer.set)

        def ask(*_: Any) -> None:
            answer.wait()

        with mock.patch.object(card_users, "PATIENCE_S", 0.01), mock.patch.object(card_users, "_ask", ask):
            self.assertEqual(card_users.users("GPU-1", 0), [])


class StrangersTest(unittest.TestCase):
    def new_in(self, strangers: Strangers, *pids: int) -> List[int]:
        cards = [{"uuid": "GPU-1", "processes": [[pid, 100] for pid in pids]}]
        return [found["pid"] for found in strangers.new_in(cards)]

    def test_each_is_told_once_and_none_that_is_ours_or_nobody(self) -> None:
        mine, other, nobody = os.getpid(), os.getppid(), 2**22 + 1
        me = processes.look(mine)
        assert me is not None
        strangers = Strangers(lambda: [me])
        self.assertEqual(self.new_in(strangers, mine), [])
        self.assertEqual(self.new_in(strangers, mine, other, nobody), [other])
        self.assertEqual(self.new_in(strangers, mine, other), [])

    def test_pids_of_another_namespace_are_not_believed(self) -> None:
        strangers = Strangers(list)
        self.assertEqual(self.new_in(strangers, os.getppid()), [])


if __name__ == "__main__":
    unittest.main()
