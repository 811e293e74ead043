"""`orch doctor`: every bad state of a host, made for real, becomes one line that says what to do."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_log_merge import PYTHON_AHEAD
from tests.integration.test_orch_errors import bare_python, old_python
from tests.integration.test_proxmox import entry, in_container
from tests.lxc import NO_VMID, Container
from tests.project import ORCH, Done, Project
from tests.sshd import Sshd

LINE = re.compile(
    r"(?:(?P<host>\S+) +)?(?P<level>ok|warning|fault) +(?P<name>[a-z_-]+(?: key)?)  +(?P<says>\S.*)"
)
SMI = """#!/bin/sh
case "$1" in
*compute-apps*) echo "GPU-b, 1, 74752" ;;
*) echo "0, GPU-a, NVIDIA H200, 143771, 2, N/A"; echo "1, GPU-b, NVIDIA H200, 143771, 74752, N/A" ;;
esac
"""


def lines_of(done: Done) -> dict[tuple[str, str], tuple[str, str]]:
    """Returns level and text of each line, by host (none where there is one host) and name."""
    found = {}
    for line in done.out.splitlines():
        match = LINE.fullmatch(line)
        assert match is not None, line
        found[match["host"] or "", match["name"]] = (match["level"], match["says"])
    assert found, done.err
    return found


def test_a_good_host_is_ok_in_every_line_and_nothing_is_kept_here(project: Project, tmp_path: Path) -> None:
    project.write_inventory(
        {"here": {"transport": "local", "venv": str(Path(sys.prefix)), "workdir": "/tmp"}}
    )
    done = project.orch("doctor", "--json")
    assert done.code == 0, done.out
    (host,) = done.json
    assert host["host"] == "here"
    checks = {check["name"]: check for check in host["checks"]}
    assert {"reach", "python", "venv", "workdir", "root", "disk", "clock", "driver", "torch"} <= set(checks)
    assert checks["torch"]["says"].startswith(version("torch"))
    assert {check["level"] for check in checks.values()} <= {"ok", "warning"}
    assert all((check["next"] is None) == (check["level"] == "ok") for check in checks.values())
    assert not (project.folder / ".orch").exists()


def test_hosts_that_cannot_be_used_are_one_fault_each_and_hold_up_nobody(
    project: Project, sshd: Sshd, start_sshd: Callable[..., Sshd], tmp_path: Path
) -> None:
    (sshd.home / ".bashrc").write_text("echo noise; echo more noise; echo loud >&2\n")
    silent = start_sshd(options={"ForceCommand": "echo this account is not available"})
    slim = bare_python(tmp_path / "slim", "ctypes", "tarfile.py")
    local = {"transport": "local", "python": slim}
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    hosts: Mapping[str, Any] = {
        "noisy": sshd.inventory_entry(python=slim, workdir="/nowhere/work"),
        "gone": sshd.inventory_entry(port=1),
        "unknown": sshd.inventory_entry(host_key=None),
        "changed": sshd.inventory_entry(host_key=silent.host_key()),
        "refused": sshd.inventory_entry(identity=str(silent.client_key)),
        "no-shell": silent.inventory_entry(),
        "no-python": sshd.inventory_entry(python="/nowhere/python3"),
        "python36": {**local, "python": old_python("3.6")},
        "python27": {**local, "python": old_python("2.7")},
        "stripped": {**local, "python": bare_python(tmp_path / "stripped", "json")},
        "no-venv": {"transport": "local", "venv": "/nowhere/venv"},
        "open": {**local, "root": str(tmp_path / "open")},
    }
    project.write_inventory(hosts)
    done = project.orch("doctor")
    assert (done.code, done.err) == (1, "")
    found = lines_of(done)
    assert [host for host, name in found if name == "reach"] == sorted(hosts)
    faults = {key: says for key, (level, says) in found.items() if level == "fault"}
    for (host, name), parts in {
        ("noisy", "workdir"): ("/nowhere/work: No such file or directory; next: make the folder there",),
        ("gone", "reach"): ("127.0.0.1 port 1: Connection refused; next: check that it is up",),
        ("unknown", "host key"): (sshd.fingerprint(), "next: ", "orch hosts repin unknown"),
        ("changed", "host key"): (
            sshd.fingerprint(),
            silent.fingerprint(),
            "CHANGED",
            "orch hosts repin changed",
        ),
        ("refused", "log-in"): (sshd.user, "next: "),
        ("no-shell", "supervisor"): ("this account is not available; next: log in by hand",),
        ("no-python", "python"): ("there is no /nowhere/python3", "next: set 'python:'"),
        ("python36", "python"): ("is Python 3.6", "need 3.8; next: set 'python:'"),
        ("python27", "python"): ("is older than Python 3.4, need 3.8; next: set 'python:'",),
        ("stripped", "python"): (
            "has no module json",
            "next: install the whole one",
            "apt-get install python3",
        ),
        ("no-venv", "python"): ("/nowhere/venv/bin/python", "next: set"),
        ("open", "root"): ("is writable by others", "next: set 'root:'"),
    }.items():
        for part in parts:
            assert part in faults.pop((host, name), "") or part in found[host, name][1], (host, name, part)
    assert faults == {}
    noise = (
        "warning",
        "the log-in shell prints 17 bytes before any program: 'noise'; next: let its start-up",
    )
    assert (found["noisy", "shell"][0], found["noisy", "shell"][1][: len(noise[1])]) == noise
    assert found["noisy", "python"][0] == "warning"
    assert "has no ctypes, tarfile; next: install" in found["noisy", "python"][1]
    assert found["noisy", "host key"] == ("ok", "ssh-ed25519, pinned in the inventory")
    assert found["noisy", "torch"][0] == "warning"


@pytest.mark.skipif(os.geteuid() != 0, reason="a mount namespace needs root")
def test_a_read_only_home_is_a_fault_of_the_root(project: Project, home: Path) -> None:
    project.write_inventory({"here": {"transport": "local", "root": "~/.orch"}})
    read_only = 'mount --bind "$HOME" "$HOME" && mount -o remount,bind,ro "$HOME" && exec "$@"'
    done = project.orch("doctor", "here", program=["unshare", "-m", "sh", "-c", read_only, "sh", ORCH])
    assert done.code == 1, done.err
    level, says = lines_of(done)["", "root"]
    assert (level, "Read-only file system" in says) == ("fault", True)
    assert says.endswith("next: set 'root:' in inventory.yaml to a folder of yours")


def test_cards_of_strangers_missing_nodes_and_a_clock_that_is_off(
    project: Project, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    program, python, ahead = (tmp_path / "bin" / name for name in ("nvidia-smi", "python", "ahead.py"))
    program.write_text(SMI)
    ahead.write_text(PYTHON_AHEAD)
    words = [bare_python(tmp_path / "bare"), "-I", "-S", str(ahead)]
    python.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    for path in (program, python):
        path.chmod(0o755)
    (home / ".profile").write_text("export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\n")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    project.write_inventory({"here": {"transport": "local", "python": str(python)}})
    done = project.orch("doctor")
    assert done.code == 1, done.err
    found = lines_of(done)
    level, says = found["", "cards"]
    strangers = (
        r"1 of 2 cards free \(NVIDIA H200, 140\.4 GiB\): 0; in use by strangers: 1 by \S+ pid 1 \(73\.0 GiB\)"
    )
    assert level == "warning"
    assert re.match(strangers, says), says
    assert found["", "clock"][0] == "warning"
    assert found["", "clock"][1].startswith("+3600.00")
    assert [found["", name][0] for name in ("devices", "uvm", "torch")] == ["fault", "fault", "fault"]
    assert "PYTORCH_CUDA_ALLOC_CONF in ~/.profile: no run gets it" in found["", "alloc_conf"][1]


def test_a_container_tells_what_it_lacks_and_a_stopped_or_unknown_one_how_to_get_it(
    container: Container, tmp_path: Path
) -> None:
    node = {"transport": "local"}
    hosts = {"pve-200": entry(node, python="/usr/bin/python3"), "wrong": entry(node, vmid=NO_VMID)}
    project = in_container(container, tmp_path / "my project", hosts)
    container.run("sh", "-c", "(sleep 0 & exec true) & wait")
    found = lines_of(project.orch("doctor"))
    assert found["pve-200", "reach"][1].startswith("pct exec 200, ")
    assert found["pve-200", "cgroup"][0] == "ok"
    level, says = found["pve-200", "container"]
    assert (level, says.startswith("lxc, process 1 is sleep and reaps nothing: ")) == ("warning", True), says
    assert says.endswith("next: lxc.init.cmd: /sbin/init, in /etc/pve/lxc/200.conf")
    assert found["pve-200", "shm"][0] == "warning"
    assert found["wrong", "container"][0] == "fault"
    assert (
        "its node has no container 999; next: set 'vmid:' in inventory.yaml" in found["wrong", "container"][1]
    )
    container.stop()
    done = project.orch("doctor", "pve-200")
    stopped = ("fault", "container 200 is stopped; next: run on its node: pct start 200")
    assert (done.code, lines_of(done)["", "container"]) == (1, stopped)


def test_a_name_that_is_no_host_is_refused_before_anything_is_asked(project: Project) -> None:
    done = project.orch("doctor", "here", "hree")
    assert (done.code, done.out, "did you mean 'here'" in done.err) == (2, "", True)
