"""What a host tells of itself is what is there: folders, driver files, cards, torch in its own process."""

import json
import os
import subprocess
import sys
import unittest
from typing import Any, Dict, List
from unittest import mock

from orchestrator.supervisor import device_nodes, doctor, processes, torch_probe, wire
from tests.supervisor.host import NEEDS_ROOT, HostCase

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
ASKED = {
    "env": {},
    "venv": None,
    "workdir": None,
    "import_container_env": False,
    "allocator": {"backend": "native"},
}
SMI = """#!/bin/sh
case "$1" in
*compute-apps*) echo "GPU-b, 1, 74752" ;;
*) echo "0, GPU-a, NVIDIA H200, 143771, 2, N/A"; echo "1, GPU-b, NVIDIA H200, 143771, 74752, N/A" ;;
esac
"""

# A torch with two cards; a test says which parts of it are broken.
TORCH = """
import os, sys, types, warnings
print("torch greets", file=sys.stdout)
mode = os.environ["TORCH_MODE"]
if mode == "broken":
    raise OSError("libcudart.so.12: cannot open shared object file\\nsecond line")
if mode == "lacks":
    import no_such_module
if mode == "slow":
    import time
    time.sleep(100)
__version__ = "2.9.1+cu128"
version = types.SimpleNamespace(cuda="12.8")
def put(setting):
    if setting.split(":")[0] not in ("backend", "expandable_segments"):
        raise ValueError("Unrecognized key\\nmore")
    if mode == "dies":
        os.abort()
_C = types.SimpleNamespace(_accelerator_setAllocatorSettings=put)
class cuda:
    is_up = False
    def is_available():
        if mode == "old driver":
            warnings.warn("The NVIDIA driver on your system is too old (found version 11040)")
            return False
        return True
    def init():
        cuda.is_up = True
    def is_initialized():
        return cuda.is_up
    def device_count():
        return 0 if mode == "old driver" else 2
    def get_arch_list():
        return ["sm_90"]
    def get_device_properties(index):
        return types.SimpleNamespace(name="H200", uuid="0-%d" % index, total_memory=7, major=9, minor=0)
"""


def behind_mounts(mounts: str, code: str, folder: str) -> Any:
    """Returns what ``code`` leaves in ``told`` behind mounts of its own; ``folder`` is its argument."""
    program = "import json, sys; from orchestrator.supervisor import device_nodes, doctor; %s" % code
    program += "; print(json.dumps(told))"
    script = '%s && exec "$2" -c "$3" "$1"' % mounts
    argv = ["unshare", "-m", "sh", "-c", script, "sh", folder, sys.executable, program]
    return json.loads(subprocess.run(argv, stdout=subprocess.PIPE, cwd=ROOT, check=True).stdout)


class GatheringTest(HostCase):
    def test_this_host_tells_the_time_and_then_all_and_leaves_nothing_behind(self) -> None:
        broken = {"PYTHONHOME": "/nowhere"}  # ends the probe at once
        asked = dict(ASKED, workdir=self.base, venv=self.base, env=broken)
        talk = self.talk({"op": "doctor", "trips": 1, "asked": asked})
        talk.send_raw(wire.pack({"clock": True}))
        self.assertIn("t", talk.header())
        facts = talk.header()["facts"]
        self.assertEqual(facts["missing_modules"], [])
        self.assertEqual((facts["root"]["path"], facts["root"]["mode"]), (self.root, 0o700))
        self.assertIsNone(facts["root"]["refusal"])
        self.assertGreater(facts["root"]["total_bytes"], facts["root"]["free_bytes"])
        self.assertEqual(facts["workdir"]["path"], self.base)
        self.assertEqual((facts["workdir"]["error"], facts["workdir"]["is_writable"]), (None, True))
        self.assertEqual(facts["venv"], {"path": self.base, "is_venv": False})
        self.assertEqual((facts["torch"]["found"], facts["torch"]["status"]), ({}, 1))
        self.assertEqual(os.listdir(self.root), ["supervisor"])
        place = facts["cgroup"]["place"]
        self.assertFalse(place is not None and os.path.exists(place), place)

    def test_folders_that_are_missing_or_no_folders_are_told(self) -> None:
        path = os.path.join(self.base, "file")
        open(path, "w").close()
        self.assertEqual(doctor._folder(path)["error"], "not a folder")
        self.assertEqual(doctor._folder(path + "x")["error"], "No such file or directory")

    @NEEDS_ROOT
    def test_a_full_disk_is_told_though_the_folder_is_writable(self) -> None:
        code = "open(sys.argv[1] + '/x', 'wb', 0).write(bytes(1 << 20)); told = doctor._room(sys.argv[1])"
        told = behind_mounts('mount -t tmpfs -o size=64k none "$1"', code, self.base)
        self.assertEqual(told["refusal"], "No space left on device")

    @NEEDS_ROOT
    def test_a_host_without_cgroups_says_so(self) -> None:
        told = behind_mounts("mount -t tmpfs none /sys/fs/cgroup", "told = doctor._cgroup()", self.base)
        nothing = {"place": None, "can_enter": False, "is_own": False, "scope": "host"}
        self.assertEqual(told, nothing)

    def test_only_what_process_1_never_reaps_is_told(self) -> None:
        zombies = {(7, 1): "python3", (8, 1): "sh"}
        with mock.patch.object(doctor, "_unreaped", side_effect=[zombies, {(8, 2): "other"}]):
            self.assertEqual(doctor._never_reaped(zombies), [])
        left = mock.patch.object(doctor, "_unreaped", return_value={(7, 1): "python3"})
        with left, mock.patch.object(doctor, "REAPING_S", 0.0):
            self.assertEqual(doctor._never_reaped(zombies), ["python3"])


class CardsTest(HostCase):
    def setUp(self) -> None:
        super().setUp()
        path = os.path.join(self.base, "nvidia-smi")
        with open(path, "w") as file:
            file.write(SMI)
        os.chmod(path, 0o755)
        patched = mock.patch.dict(os.environ, {"PATH": self.base + os.pathsep + os.environ["PATH"]})
        patched.start()
        self.addCleanup(patched.stop)

    def test_programs_on_cards_and_the_runs_that_were_given_them_are_told(self) -> None:
        env = {"ORCH_RUN_ID": "run7", "CUDA_VISIBLE_DEVICES": "GPU-a,GPU-c", "PATH": os.environ["PATH"]}
        with subprocess.Popen(["cat"], env=env, stdin=subprocess.PIPE) as run:
            found = doctor._cards(self.root)
            assert run.stdin is not None
            run.stdin.close()
        self.assertEqual([card["uuid"] for card in found["cards"]], ["GPU-a", "GPU-b"])
        self.assertEqual([card["is_leased"] for card in found["cards"]], [False, False])
        self.assertFalse(os.path.exists(os.path.join(self.root, "leases")))
        (program,) = found["programs"]
        self.assertEqual((program["uuid"], program["pid"]), ("GPU-b", 1))
        self.assertEqual(program["name"], processes.command_line(1)[0])
        self.assertEqual(found["runs"], {"GPU-a": ["run7"], "GPU-c": ["run7"]})
        self.assertEqual((found["error"], found["is_smi_there"]), (None, True))

    def test_a_driver_that_hangs_costs_its_own_check_alone(self) -> None:
        with open(os.path.join(self.base, "nvidia-smi"), "w") as file:
            file.write("#!/bin/sh\nexec sleep 30\n")
        with mock.patch.object(doctor, "CARDS_LIMIT_S", 0.3):
            found = doctor._cards(self.root)
        self.assertEqual(found["error"], "the NVIDIA driver does not answer within 0 s")
        self.assertTrue(found["is_smi_there"])

    def test_an_nvidia_smi_that_fails_is_told_from_one_that_is_missing(self) -> None:
        with open(os.path.join(self.base, "nvidia-smi"), "w") as file:
            file.write("#!/bin/sh\necho 'Driver/library version mismatch'; exit 18\n")
        found = doctor._cards(self.root)
        self.assertIn("exit code 18: Driver/library version mismatch", found["error"])
        self.assertTrue(found["is_smi_there"])
        os.remove(os.path.join(self.base, "nvidia-smi"))
        with mock.patch.dict(os.environ, {"PATH": "/nowhere"}):
            found = doctor._cards(self.root)
        self.assertEqual((found["cards"], found["is_smi_there"]), ([], False))

    def test_a_probe_sees_every_card_and_nothing_of_a_run(self) -> None:
        env = doctor._payload_env(
            dict(ASKED, env={"HF_HOME": "/models"}, venv="/opt/venv"), doctor._cards(self.root)["cards"]
        )
        self.assertEqual((env["CUDA_VISIBLE_DEVICES"], env["HF_HOME"]), ("GPU-a,GPU-b", "/models"))
        self.assertTrue(env["PATH"].startswith("/opt/venv/bin:"))
        self.assertFalse({"PYTHONPATH", "ORCH_RUN_ID", "ORCH_EVENTS_FD"} & set(env))


class TorchTest(HostCase):
    def probed(self, mode: str, limit_s: float = 60.0) -> Dict[str, Any]:
        with open(os.path.join(self.base, "torch.py"), "w") as file:
            file.write(TORCH)
        env = {"PYTHONPATH": self.base, "TORCH_MODE": mode}
        settings = {"backend": "native", "pinned_free_catch_all": "False"}
        return doctor.probe_torch(env, self.base, settings, limit_s)

    def test_build_cards_and_allocator_are_found(self) -> None:
        probe = self.probed("good")
        self.assertEqual((probe["status"], probe["said"]), (0, ""))
        found = probe["found"]
        self.assertEqual((found["version"], found["cuda"]), ("2.9.1+cu128", "12.8"))
        self.assertIsNone(found["why_not"])
        self.assertEqual([device["uuid"] for device in found["devices"]], ["GPU-0-0", "GPU-0-1"])
        self.assertEqual((found["arches"], found["devices"][0]["arch"]), (["sm_90"], "sm_90"))
        refused = {"backend": None, "pinned_free_catch_all": "ValueError: Unrecognized key"}
        self.assertEqual(found["allocator"], refused)

    def test_torchs_own_warning_says_why_cuda_cannot_be_used(self) -> None:
        self.assertIn("driver on your system is too old", self.probed("old driver")["found"]["why_not"])

    def test_an_import_that_fails_is_told_in_one_line(self) -> None:
        broken = self.probed("broken")["found"]
        self.assertEqual(broken, {"broken": "OSError: libcudart.so.12: cannot open shared object file"})
        self.assertEqual(self.probed("lacks")["found"], {"missing": "no_such_module"})

    def test_a_crash_leaves_what_was_found_before(self) -> None:
        probe = self.probed("dies")
        self.assertEqual(probe["status"], -6)
        self.assertEqual(probe["found"]["version"], "2.9.1+cu128")
        self.assertNotIn("allocator", probe["found"])

    def test_an_import_without_end_is_ended(self) -> None:
        probe = self.probed("slow", limit_s=0.3)
        self.assertEqual((probe["status"], probe["found"]), (None, {}))

    def test_no_torch_at_all(self) -> None:
        argv = [sys.executable, "-I", "-S", torch_probe.__file__, json.dumps({})]
        out = subprocess.run(argv, stdout=subprocess.PIPE, check=True).stdout.decode()
        self.assertEqual(torch_probe.found_in(out), {"missing": "torch"})


class DriverTest(HostCase):
    def setUp(self) -> None:
        super().setUp()
        for name in ("dev", "proc", "pci", "lib"):
            os.mkdir(os.path.join(self.base, name))

    def write(self, path: str, text: str = "") -> str:
        path = os.path.join(self.base, path)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w") as file:
            file.write(text)
        return path

    def look(self) -> Dict[str, Any]:
        dev, proc, pci, lib = (os.path.join(self.base, name) for name in ("dev", "proc", "pci", "lib"))
        return device_nodes.look(dev, proc, pci, [os.path.join(self.base, "no"), lib])

    def refusals(self) -> Dict[str, Any]:
        return {node["name"]: node["refusal"] for node in self.look()["nodes"]}

    def test_nothing_is_there(self) -> None:
        nothing: Dict[str, Any] = {
            "kernel": None,
            "library": None,
            "known": 0,
            "pci": 0,
            "uvm_major": None,
            "nodes": [],
        }
        self.assertEqual(self.look(), nothing)

    def test_versions_of_kernel_module_and_libraries(self) -> None:
        for text, version in (
            (
                "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5\nGCC version: 12\n",
                "550.54.15",
            ),
            (
                "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  575.57.08  Release Build\n",
                "575.57.08",
            ),
        ):
            self.write("proc/driver/nvidia/version", text)
            self.assertEqual(self.look()["kernel"], version)
        self.write("lib/libnvidia-ml.so.570.86.15")
        os.symlink("libnvidia-ml.so.570.86.15", os.path.join(self.base, "lib", "libnvidia-ml.so.1"))
        self.assertEqual(self.look()["library"], "570.86.15")

    def test_cards_on_the_bus_and_the_number_of_uvm(self) -> None:
        for name, vendor, kind in (
            ("a", "0x10de", "0x030200"),
            ("b", "0x10de", "0x040300"),
            ("c", "0x8086", "0x030000"),
        ):
            self.write("pci/%s/vendor" % name, vendor + "\n")
            self.write("pci/%s/class" % name, kind + "\n")
        self.write(
            "proc/devices",
            "Character devices:\n  1 mem\n195 nvidia\n510 nvidia-uvm\n\nBlock devices:\n7 loop\n",
        )
        found = self.look()
        self.assertEqual((found["pci"], found["uvm_major"]), (1, 510))

    def test_nodes_that_cannot_be_opened_say_why(self) -> None:
        self.write("dev/nvidia0")
        os.mkdir(os.path.join(self.base, "dev", "nvidia1"))
        os.symlink("nowhere", os.path.join(self.base, "dev", "nvidiactl"))
        self.write("dev/nvidia-caps")
        self.assertEqual(self.refusals(), {"nvidia0": None, "nvidia1": "EISDIR", "nvidiactl": "ENOENT"})

    def test_the_number_of_a_node_is_told_and_a_file_has_none(self) -> None:
        self.write("dev/nvidia0")
        os.symlink("/dev/null", os.path.join(self.base, "dev", "nvidia-uvm"))
        self.assertEqual(
            [(node["name"], node["major"]) for node in self.look()["nodes"]],
            [("nvidia-uvm", 1), ("nvidia0", None)],
        )

    @NEEDS_ROOT
    def test_a_mount_that_forbids_devices_refuses_even_root(self) -> None:
        os.symlink(os.path.join(self.base, "pci", "null"), os.path.join(self.base, "dev", "nvidiactl"))
        mounts = 'mount --bind /dev "$1/pci" && mount -o remount,bind,nodev "$1/pci"'
        code = "told = device_nodes.look(dev=sys.argv[1] + '/dev')['nodes']"
        (node,) = behind_mounts(mounts, code, self.base)
        self.assertEqual((node["name"], node["refusal"]), ("nvidiactl", "EACCES"))


class AllocatorVariablesTest(HostCase):
    def test_places_that_set_what_no_run_gets_are_named(self) -> None:
        with open(os.path.join(self.base, ".bashrc"), "w") as file:
            file.write("# PYTORCH_ALLOC_CONF=no\nexport PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\n")
        with mock.patch.dict(os.environ, {"HOME": self.base, "PYTORCH_ALLOC_CONF": "x"}):
            found = doctor._alloc_conf()
        wanted: List[Dict[str, str]] = [
            {"place": "the log-in", "name": "PYTORCH_ALLOC_CONF"},
            {"place": "~/.bashrc", "name": "PYTORCH_CUDA_ALLOC_CONF"},
        ]
        self.assertEqual([entry for entry in found if entry["place"] != "process 1"], wanted)


if __name__ == "__main__":
    unittest.main()
