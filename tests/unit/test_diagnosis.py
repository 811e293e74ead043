"""Each bad state of a host becomes one line that says what it is and what to do; a good host is all ok."""

from __future__ import annotations

import copy
import json
from contextlib import suppress
from typing import Any

import pytest

from orchestrator import allocator
from orchestrator.allocator import HARMLESS, parse_alloc_conf, render_alloc_conf
from orchestrator.clocks import Offset
from orchestrator.diagnosis import diagnosed, failed
from orchestrator.errors import (
    AuthenticationFailed,
    ContainerStopped,
    HostUnfit,
    OrchError,
    ProtocolError,
    Unreachable,
)
from orchestrator.finding import Finding, Level
from orchestrator.inventory import Host

NODE = Host(name="pve", transport="ssh", address="pve.example", user="root", host_key="ssh-ed25519 AAAA")
PVE_200 = Host(name="pve-200", transport="proxmox", address="pve.example", node=NODE, vmid=200)
RENTED = Host(name="rented", transport="ssh", address="192.0.2.10")
LOCAL = Host(name="local", transport="local", address="local")
EXACT = Offset(offset_s=0.0, error_s=0.0002, t=0.0)
GIB = 1024**3
CARD = "NVIDIA RTX PRO 6000 Blackwell"


def _node(name: str, major: int = 195, refusal: str | None = None) -> dict[str, Any]:
    return {"name": name, "major": major, "refusal": refusal}


def _card(index: int) -> dict[str, Any]:
    seen = {"total_mib": 97251, "used_mib": 2, "is_leased": False}
    return {"index": index, "uuid": f"GPU-{index}", "name": CARD, **seen}


HEALTHY: dict[str, Any] = {
    "missing_modules": [],
    "root": {
        "path": "/root/.orch",
        "error": None,
        "mode": 0o700,
        "is_writable": True,
        "free_bytes": 100 * GIB,
        "total_bytes": 200 * GIB,
        "free_inodes": 1_000_000,
        "total_inodes": 2_000_000,
        "refusal": None,
    },
    "venv": {"path": "/opt/venv", "is_venv": True},
    "workdir": {"path": "/work", "error": None, "mode": 0o755, "is_writable": True},
    "shm_bytes": 32 * GIB,
    "cgroup": {
        "place": "/sys/fs/cgroup/x/orch-doctor-7",
        "can_enter": True,
        "is_own": True,
        "scope": "cgroup",
    },
    "container": {"kind": "lxc", "init": "systemd"},
    "unreaped": [],
    "nvidia": {
        "kernel": "575.57.08",
        "library": "575.57.08",
        "known": 2,
        "pci": 2,
        "uvm_major": 510,
        "nodes": [
            *map(_node, ("nvidia0", "nvidia1", "nvidiactl", "nvidia-modeset")),
            _node("nvidia-uvm", 510),
            _node("nvidia-uvm-tools", 510),
        ],
    },
    "cards": {
        "cards": [_card(0), _card(1)],
        "error": None,
        "is_smi_there": True,
        "lost": [],
        "programs": [],
        "runs": {},
    },
    "torch": {
        "status": 0,
        "said": "",
        "limit_s": 90.0,
        "found": {
            "version": "2.9.1+cu128",
            "cuda": "12.8",
            "driver_api": 12090,
            "why_not": None,
            "arches": ["sm_90", "sm_100", "sm_120", "compute_120"],
            "devices": [{"uuid": f"GPU-{index}", "arch": "sm_120"} for index in (0, 1)],
            "allocator": {
                "backend": None,
                "expandable_segments": None,
                "pinned_free_catch_all": "ValueError: x",
            },
        },
    },
    "alloc_conf": [],
}


def findings(facts: dict[str, Any], host: Host = PVE_200, noise: bytes = b"", offset: Offset = EXACT) -> Any:
    way = ("pve.example port 22", "pct exec 200")
    told = json.loads(json.dumps(facts))  # as it comes over the wire
    return {
        found.name: found for found in diagnosed(host, way, "3.11.2 at /usr/bin/python3", noise, offset, told)
    }


def changed(**changes: Any) -> dict[str, Any]:
    """Returns the healthy facts but for ``a__b=value``, which stands for ``facts["a"]["b"]``."""
    facts = copy.deepcopy(HEALTHY)
    for path, value in changes.items():
        *folders, last = path.split("__")
        place = facts
        for name in folders:
            place = place[name]
        place[last] = value
    return facts


def without_cards(**changes: Any) -> dict[str, Any]:
    nvidia: dict[str, Any] = {
        "kernel": None,
        "library": None,
        "known": 0,
        "pci": 0,
        "uvm_major": None,
        "nodes": [],
    }
    cards = {
        "cards": [],
        "error": "nvidia-smi is not there",
        "is_smi_there": False,
        "lost": [],
        "programs": [],
        "runs": {},
    }
    return changed(nvidia=nvidia, cards=cards, **changes)


def nodes_but(name: str, **changes: Any) -> list[dict[str, Any]]:
    """Returns the nodes with one of them changed, or gone where nothing is said of it."""
    nodes = copy.deepcopy(HEALTHY["nvidia"]["nodes"])
    return [
        {**node, **changes} if node["name"] == name else node
        for node in nodes
        if changes or node["name"] != name
    ]


def test_a_healthy_host_is_ok_in_every_line() -> None:
    found = findings(HEALTHY)
    assert {one.level for one in found.values()} == {Level.OK}
    assert {name: one.says for name, one in found.items()} == {
        "reach": "pve.example port 22, then pct exec 200, 0.4 ms there and back",
        "host key": "ssh-ed25519, pinned in the inventory",
        "shell": "the log-in shell prints nothing of its own",
        "python": "3.11.2 at /usr/bin/python3",
        "venv": "/opt/venv",
        "workdir": "/work",
        "root": "/root/.orch, mode 700, ours and writable",
        "disk": "100.0 GiB of 200.0 GiB free at /root/.orch",
        "shm": "/dev/shm has 32.0 GiB",
        "cgroup": "each run gets its own; memory kills are counted by run",
        "container": "lxc, process 1 is systemd",
        "clock": "+0.0 ms ± 0.2 ms",
        "driver": "575.57.08, kernel module and libraries agree",
        "devices": "nvidiactl and 2 cards can be opened",
        "uvm": "/dev/nvidia-uvm can be opened",
        "cards": f"2 of 2 cards free ({CARD}, 95.0 GiB): 0,1",
        "torch": "2.9.1+cu128, built for CUDA 12.8, which it can use (the driver has CUDA 12.9)",
        "kernels": "this torch has kernels for sm_120",
        "agreement": "torch sees the 2 cards of nvidia-smi, by UUID and in the same order",
        "allocator": "takes 2 of 3 settings; not pinned_free_catch_all",
    }


BAD: list[tuple[str, Level, dict[str, Any], str, str]] = [
    (
        "python",
        Level.WARNING,
        changed(missing_modules=["_ctypes", "ctypes"]),
        "has no _ctypes, ctypes",
        "apt-get",
    ),
    ("venv", Level.WARNING, changed(venv__is_venv=False), "/opt/venv has an interpreter", "python3 -m venv"),
    (
        "workdir",
        Level.FAULT,
        changed(workdir__error="Not a directory"),
        "/work: Not a directory",
        "'workdir:'",
    ),
    ("workdir", Level.WARNING, changed(workdir__is_writable=False), "cannot be written to", "chmod"),
    ("root", Level.FAULT, changed(root__refusal="Disk quota exceeded"), "Disk quota exceeded", "quota"),
    ("disk", Level.WARNING, changed(root__free_bytes=9 * GIB), "9.0 GiB of 200.0 GiB free", "orch gc"),
    ("disk", Level.FAULT, changed(root__free_bytes=GIB // 2), "0.5 GiB of 200.0 GiB free", "orch gc"),
    ("disk", Level.FAULT, changed(root__free_inodes=7), "7 inodes of 2000000 free", "many small files"),
    ("shm", Level.WARNING, changed(shm_bytes=64 * 1024**2), "64 MiB", "dev/shm tmpfs size=16G"),
    ("shm", Level.WARNING, changed(shm_bytes=None), "no file system of its own", "/etc/pve/lxc/200.conf"),
    (
        "cgroup",
        Level.WARNING,
        changed(cgroup={"place": None, "can_enter": False, "is_own": False, "scope": "host"}),
        "memory kills are seen host-wide",
        "lxc.mount.auto: cgroup:mixed",
    ),
    (
        "cgroup",
        Level.WARNING,
        changed(cgroup__can_enter=False, cgroup__is_own=False),
        "we may not make one below /sys/fs/cgroup/x: runs are told apart by descent",
        "Delegate=yes",
    ),
    (
        "cgroup",
        Level.WARNING,
        changed(cgroup__is_own=False, cgroup__scope="host"),
        "memory kills are seen host-wide",
        "+memory",
    ),
    (
        "container",
        Level.WARNING,
        changed(container__init="sleep", unreaped=["python3", "python3"]),
        "process 1 is sleep and reaps nothing: 2 zombies (python3)",
        "lxc.init.cmd: /sbin/init",
    ),
    (
        "driver",
        Level.FAULT,
        changed(nvidia__library="570.86.15"),
        "kernel module 575.57.08, libraries 570.86.15",
        "install exactly 575.57.08 in the container",
    ),
    (
        "driver",
        Level.FAULT,
        changed(
            nvidia__library=None,
            cards__cards=[],
            cards__error="nvidia-smi failed with exit code 18: Failed to initialize NVML: Driver/library "
            "version mismatch\nNVML library version: 570.86",
        ),
        "kernel module 575.57.08, libraries 570.86:",
        "install exactly 575.57.08",
    ),
    (
        "driver",
        Level.FAULT,
        changed(nvidia__library=None, cards__cards=[], cards__error="no", cards__is_smi_there=False),
        "kernel module 575.57.08, no libraries, and no nvidia-smi",
        "install exactly 575.57.08",
    ),
    (
        "driver",
        Level.FAULT,
        changed(cards__cards=[], cards__error="nvidia-smi failed with exit code 9: No devices were found"),
        "No devices were found",
        "dmesg",
    ),
    (
        "driver",
        Level.FAULT,
        without_cards(nvidia__pci=8),
        "8 NVIDIA cards on the PCI bus, and no driver is loaded",
        "on the node",
    ),
    (
        "devices",
        Level.FAULT,
        changed(nvidia__nodes=nodes_but("nvidiactl")),
        "/dev/nvidiactl not there",
        "lxc.mount.entry: /dev/nvidiactl dev/nvidiactl none bind,optional,create=file, in /etc/pve/lxc/",
    ),
    (
        "devices",
        Level.FAULT,
        changed(nvidia__nodes=nodes_but("nvidia1", refusal="EPERM")),
        "/dev/nvidia1 cannot be opened: EPERM: the cgroup's device rights (a systemctl daemon-reload can",
        "lxc.cgroup2.devices.allow: c 195:* rwm, in /etc/pve/lxc/200.conf, and restart the container",
    ),
    (
        "devices",
        Level.FAULT,
        changed(nvidia__nodes=nodes_but("nvidia0", refusal="EACCES")),
        "/dev/nvidia0 cannot be opened: EACCES",
        "chmod 666",
    ),
    (
        "devices",
        Level.FAULT,
        changed(nvidia__nodes=nodes_but("nvidia0", refusal="EIO")),
        "/dev/nvidia0 cannot be opened: EIO",
        "dmesg",
    ),
    (
        "uvm",
        Level.FAULT,
        changed(nvidia__nodes=nodes_but("nvidia-uvm")),
        "/dev/nvidia-uvm is not there",
        "run nvidia-modprobe -u -c 0 on the node, bind it",
    ),
    (
        "uvm",
        Level.FAULT,
        changed(nvidia__nodes=nodes_but("nvidia-uvm", refusal="EPERM")),
        "/dev/nvidia-uvm cannot be opened: EPERM",
        "lxc.cgroup2.devices.allow: c 510:* rwm",
    ),
    (
        "uvm",
        Level.FAULT,
        changed(nvidia__uvm_major=507),
        "has major number 510, the kernel's is 507",
        "restart the container",
    ),
    (
        "cards",
        Level.WARNING,
        changed(
            cards__cards=[_card(0), {**_card(1), "used_mib": 74752}],
            cards__programs=[{"uuid": "GPU-1", "pid": 4242, "name": "python"}],
        ),
        f"1 of 2 cards free ({CARD}, 95.0 GiB): 0; in use by strangers: 1 by python pid 4242 (73.0 GiB)",
        "'devices:'",
    ),
    (
        "lost cards",
        Level.FAULT,
        changed(cards__lost=["2: GPU is lost"]),
        "the driver lists 2: GPU is lost",
        "needs a reboot",
    ),
    (
        "cards",
        Level.WARNING,
        changed(cards__cards=[{**_card(0), "used_mib": 74752}]),
        "0 of 1 card free",
        "on its node",
    ),
    (
        "torch",
        Level.FAULT,
        changed(torch__found={"missing": "torch"}),
        "this Python has none",
        "pip install torch",
    ),
    ("torch", Level.FAULT, changed(torch__found={"missing": "numpy"}), "lacks the module numpy", "reinstall"),
    (
        "torch",
        Level.FAULT,
        changed(torch__found={"broken": "OSError: libcudart.so.12"}),
        "libcudart",
        "reinstall",
    ),
    (
        "torch",
        Level.FAULT,
        changed(torch__found={}, torch__status=-11),
        "ended with signal SIGSEGV",
        "reinstall",
    ),
    ("torch", Level.FAULT, changed(torch__found={}, torch__status=None), "took more than 90 s", "reinstall"),
    (
        "torch",
        Level.FAULT,
        changed(torch__found={"version": "2.9.1+cpu", "cuda": None, "allocator": None}),
        "built without CUDA",
        "pytorch.org",
    ),
    (
        "torch",
        Level.FAULT,
        changed(
            nvidia__kernel="550.54.15",
            nvidia__library="550.54.15",
            torch__found__cuda="13.0",
            torch__found__why_not="The NVIDIA driver on your system is too old",
        ),
        "built for CUDA 13.0, which needs driver 580.65.06: this one is 550.54.15 (the driver has CUDA 12.9)",
        "update the driver",
    ),
    (
        "torch",
        Level.FAULT,
        changed(torch__found__why_not="RuntimeError: CUDA unknown error"),
        "built for CUDA 12.8: RuntimeError: CUDA unknown error",
        "what stands above",
    ),
    (
        "kernels",
        Level.FAULT,
        changed(torch__found__arches=["sm_80", "sm_90", "sm_100a", "compute_130"]),
        "no kernels for sm_120, only sm_80 sm_90 sm_100a compute_130",
        "12.8",
    ),
    (
        "agreement",
        Level.FAULT,
        changed(torch__found__devices=[{"uuid": "GPU-0", "arch": "sm_120"}]),
        "nvidia-smi lists 2 cards, torch sees 1; not seen: 1",
        "fell off the bus",
    ),
    (
        "alloc_conf",
        Level.WARNING,
        changed(alloc_conf=[{"place": "process 1", "name": "PYTORCH_CUDA_ALLOC_CONF"}]),
        "PYTORCH_CUDA_ALLOC_CONF in process 1: no run gets it",
        "alloc_conf:",
    ),
]


@pytest.mark.parametrize(("name", "level", "facts", "says", "next_step"), BAD)
def test_a_bad_state_is_one_line_with_the_next_step(
    name: str, level: Level, facts: dict[str, Any], says: str, next_step: str
) -> None:
    found = findings(facts)[name]
    assert found.level is level
    assert says in found.says
    assert next_step in str(found.next)


def test_a_probe_that_dies_at_the_allocator_keeps_what_it_found_before() -> None:
    facts = changed(torch__status=-6)
    del facts["torch"]["found"]["allocator"]
    found = findings(facts)
    assert (found["torch"].level, found["agreement"].level) == (Level.OK, Level.OK)
    assert (found["allocator"].level, "SIGABRT" in found["allocator"].says) == (Level.WARNING, True)


@pytest.mark.parametrize(
    ("noise", "says"),
    [
        (b"Welcome to box\nHave fun\n", "prints 24 bytes before any program: 'Welcome to box'"),
        (b"\xff\x1b[2J" + b"x" * 100, "prints 105 bytes before any program"),
    ],
)
def test_shell_noise_is_counted_and_its_first_line_quoted(noise: bytes, says: str) -> None:
    found = findings(HEALTHY, noise=noise)["shell"]
    assert (found.level, says in found.says) == (Level.WARNING, True)
    assert "\x1b" not in found.says


def test_a_clock_that_is_off_by_more_than_a_second_and_the_error_is_a_warning() -> None:
    assert (
        findings(HEALTHY, offset=Offset(offset_s=-3.2, error_s=0.01, t=0.0))["clock"].level is Level.WARNING
    )
    assert findings(HEALTHY, offset=Offset(offset_s=3.2, error_s=3.0, t=0.0))["clock"].level is Level.OK


def test_what_makes_no_sense_for_a_host_is_left_out() -> None:
    local = findings(without_cards(venv=None, workdir=None, container__kind=None), host=LOCAL)
    assert not {"host key", "shell", "venv", "workdir", "devices", "uvm", "cards"} & set(local)
    assert (local["driver"].level, local["torch"].level) == (Level.OK, Level.OK)
    assert findings(HEALTHY, host=RENTED)["host key"].says == "by known_hosts"


def test_the_next_step_fits_a_host_that_is_no_container() -> None:
    bare = {"container__kind": None}
    denied = changed(**bare, nvidia__nodes=nodes_but("nvidia0", refusal="EPERM"))
    assert "lxc" not in str(findings(denied, host=RENTED)["devices"].next)
    no_uvm = findings(changed(**bare, nvidia__nodes=nodes_but("nvidia-uvm")), host=RENTED)["uvm"]
    assert no_uvm.next == "run nvidia-modprobe -u -c 0 there as root"
    mismatch = findings(changed(**bare, nvidia__library="1.2.3"), host=RENTED)["driver"]
    assert "reboot" in str(mismatch.next)
    docker = changed(container__kind="docker", nvidia__nodes=nodes_but("nvidiactl"))
    assert "--gpus all" in str(findings(docker, host=RENTED)["devices"].next)
    lxc = findings(changed(nvidia__nodes=nodes_but("nvidia0", refusal="EPERM")), host=RENTED)["devices"]
    assert "c 195:* rwm, in the container's configuration" in str(lxc.next)


def test_cards_that_work_without_nodes_or_a_version_are_no_fault() -> None:
    found = findings(changed(nvidia__nodes=[], nvidia__kernel=None))
    assert not {"devices", "uvm"} & set(found)
    assert found["driver"] == Finding.ok("driver", "575.57.08; nvidia-smi works")


def test_a_run_of_ours_is_no_stranger_and_a_missing_torch_no_fault_without_cards() -> None:
    held = changed(cards__cards=[{**_card(0), "used_mib": 74752}, _card(1)], cards__runs={"GPU-0": ["abc"]})
    found = findings(held)["cards"]
    assert (found.level, "1 of 2 cards free" in found.says, "held: 0 by run abc" in found.says) == (
        Level.OK,
        True,
        True,
    )
    assert findings(without_cards(torch__found={"missing": "torch"}))["torch"].level is Level.WARNING


def test_an_old_torch_that_tells_no_uuid_is_compared_by_number() -> None:
    old = changed(torch__found__devices=[{"uuid": None, "arch": "sm_120"}] * 2)
    assert "by their number" in findings(old)["agreement"].says


@pytest.mark.parametrize("path", ["root", "nvidia", "cards", "torch__found", "cgroup", "missing_modules"])
@pytest.mark.parametrize("value", [None, 7, "x", {}, [1]])
def test_facts_of_another_form_are_refused_or_judged_and_never_a_traceback(path: str, value: Any) -> None:
    found: dict[str, Finding] = {}
    with suppress(ProtocolError):
        found = findings(changed(**{path: value}))
    assert all(isinstance(one, Finding) for one in found.values())


@pytest.mark.parametrize(
    ("error", "name", "says", "next_step"),
    [
        (
            Unreachable("x port 22: timed out. Next: check that it is up", host="rented"),
            "reach",
            "x port 22",
            "up",
        ),
        (
            AuthenticationFailed("x refused the log-in: no key", host="rented"),
            "log-in",
            "refused",
            "'identity:'",
        ),
        (
            ContainerStopped("container 200 is stopped. Next: run on its node: pct start 200", host="rented"),
            "container",
            "is stopped",
            "run on its node: pct start 200",
        ),
        (
            HostUnfit("a; b is 3.6; set 'python:'", host="rented", lacking="python"),
            "python",
            "a; b is",
            "set 'py",
        ),
        (HostUnfit("no pct", host="rented", lacking="pct"), "container", "no pct", "'node:'"),
        (
            ProtocolError("it ended; it said nothing", host="rented"),
            "supervisor",
            "it said nothing",
            "by hand",
        ),
    ],
)
def test_an_error_is_the_last_finding_under_its_own_name(
    error: OrchError, name: str, says: str, next_step: str
) -> None:
    *before, last = failed(RENTED, ("192.0.2.10 port 22",), error)
    assert {one.level for one in before} <= {Level.OK}
    assert (last.name, last.level) == (name, Level.FAULT)
    assert says in last.says
    assert next_step in str(last.next)
    assert not last.says.startswith("rented: ")


def test_harmless_settings_cover_every_key_that_orch_takes() -> None:
    for key, value in HARMLESS.items():
        settings = parse_alloc_conf({key: value})
        assert render_alloc_conf(settings).startswith(f"{key}:")
    assert set(HARMLESS) == set(allocator._PARSERS)


def test_card_that_somebody_out_of_sight_holds_is_not_free() -> None:
    found = findings(changed(cards__cards=[_card(0), {**_card(1), "is_leased": True}]))["cards"]
    assert found.level is Level.OK
    assert "1 of 2 cards free" in found.says
    assert "held: 1 by a run of another user, container or root" in found.says
