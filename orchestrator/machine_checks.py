"""What a host's own facts mean for runs, cards aside: Python, folders, room, clock, cgroup, container (pure).

``facts`` are as `supervisor.doctor` gathers them; what another form raises `diagnosis.diagnosed` catches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from orchestrator import clocks
from orchestrator.clocks import Offset
from orchestrator.finding import Finding
from orchestrator.inventory import Host
from orchestrator.text import counted

__all__ = ["GIB", "clock", "machine", "python", "shell"]

GIB = 1024**3
LITTLE_ROOM_BYTES, NO_ROOM_BYTES = 10 * GIB, GIB
FEW_INODES = 10_000
SHM, SMALL_SHM_BYTES = "/dev/shm", GIB  # noqa: S108  (its name alone)
MOST_OFF_S = 1.0
MOST_QUOTED = 60


def shell(noise: bytes) -> Finding:
    """Whatever was said before the supervisor's first word was the log-in shell's."""
    if not noise:
        return Finding.ok("shell", "the log-in shell prints nothing of its own")
    first = noise.decode("utf-8", "replace").strip().partition("\n")[0]
    quoted = first if len(first) <= MOST_QUOTED else f"{first[:MOST_QUOTED]}…"
    return Finding.warning(
        "shell",
        f"the log-in shell prints {counted(len(noise), 'byte')} before any program: {quoted!r}",
        "let its start-up file print only in an interactive shell: [ -t 1 ] || return, as its first line",
    )


def clock(offset: Offset) -> Finding:
    """Times of records are by the host's clock."""
    shown = clocks.shown(offset, offset.t, offset.t)
    if abs(offset.offset_s) - offset.error_s <= MOST_OFF_S:
        return Finding.ok("clock", shown)
    return Finding.warning("clock", f"{shown} from this machine's", "set it there: timedatectl set-ntp true")


def python(version: str, facts: Mapping[str, Any]) -> Finding:
    """One that is too old, or cannot run the supervisor, does not come this far."""
    if not (missing := facts["missing_modules"]):
        return Finding.ok("python", version)
    return Finding.warning(
        "python",
        f"{version} has no {', '.join(missing)}",
        "install the whole standard library (Debian, Ubuntu: apt-get install python3), or set 'python:'",
    )


def machine(host: Host, facts: Mapping[str, Any]) -> Iterator[Finding]:
    """Yields what there is to say of folders, disk, memory files, cgroup and container."""
    if facts["venv"]:
        yield _venv(facts["venv"])
    if facts["workdir"]:
        yield _workdir(facts["workdir"])
    yield _root(facts["root"])
    yield _disk(facts["root"])
    yield _shared_memory(host, facts["shm_bytes"])
    yield _cgroup(host, facts["cgroup"])
    yield _container(host, facts["container"], facts["unreaped"])


def _venv(found: Mapping[str, Any]) -> Finding:
    if found["is_venv"]:
        return Finding.ok("venv", str(found["path"]))
    return Finding.warning(
        "venv",
        f"{found['path']} has an interpreter and no pyvenv.cfg: it is no virtual environment",
        "make one: python3 -m venv THERE; or say 'python:' in place of 'venv:'",
    )


def _workdir(found: Mapping[str, Any]) -> Finding:
    if found["error"]:
        return Finding.fault(
            "workdir", f"{found['path']}: {found['error']}", "make the folder there, or set 'workdir:'"
        )
    if not found["is_writable"]:
        return Finding.warning(
            "workdir",
            f"{found['path']} cannot be written to",
            "chmod it, or set 'workdir:' to another folder",
        )
    return Finding.ok("workdir", str(found["path"]))


def _root(found: Mapping[str, Any]) -> Finding:
    if found["refusal"]:
        return Finding.fault(
            "root",
            f"{found['path']} keeps no file: {found['refusal']}",
            "make room (orch gc) or raise the quota there, or set 'root:' to a folder on another disk",
        )
    return Finding.ok("root", f"{found['path']}, mode {found['mode']:o}, ours and writable")


def _disk(found: Mapping[str, Any]) -> Finding:
    free, total = found["free_bytes"], found["total_bytes"]
    says = f"{gib(free)} of {gib(total)} free at {found['path']}"
    make_room = "remove old runs: orch gc; or set 'root:' to a folder on a larger disk"
    if free < NO_ROOM_BYTES:
        return Finding.fault("disk", says, make_room)
    if found["total_inodes"] and found["free_inodes"] < FEW_INODES:  # some file systems count none
        few = f"{counted(found['free_inodes'], 'inode')} of {found['total_inodes']} free at {found['path']}"
        return Finding.fault("disk", few, "remove many small files there, such as old runs: orch gc")
    if free < LITTLE_ROOM_BYTES:
        return Finding.warning("disk", says, make_room)
    return Finding.ok("disk", says)


def _shared_memory(host: Host, size: int | None) -> Finding:
    if host.vmid is not None:
        enlarge = f"lxc.mount.entry: tmpfs dev/shm tmpfs size=16G,create=dir 0 0, in {lxc_config(host)}"
    else:
        enlarge = "mount -o remount,size=16G /dev/shm; a docker container needs --shm-size=16g or --ipc=host"
    if size is None:
        return Finding.warning(
            "shm", f"{SHM} is no file system of its own: workers of data loaders fail", enlarge
        )
    if size < SMALL_SHM_BYTES:
        says = f"{SHM} has {size // 1024**2} MiB: workers of data loaders die of 'bus error'"
        return Finding.warning("shm", says, enlarge)
    return Finding.ok("shm", f"{SHM} has {gib(size)}")


def _cgroup(host: Host, found: Mapping[str, Any]) -> Finding:
    if found["is_own"]:
        return Finding.ok("cgroup", "each run gets its own; memory kills are counted by run")
    if found["can_enter"] and found["scope"] == "cgroup":
        return Finding.ok("cgroup", "each run gets its own; memory kills are counted with all else in ours")
    if found["can_enter"]:
        return Finding.warning(
            "cgroup",
            "each run gets its own, without the memory controller: memory kills are seen host-wide",
            "turn it on above ours: echo +memory > cgroup.subtree_control",
        )
    if found["place"] is None:
        why = "there is no cgroup v2 that we see"
        mount = f"lxc.mount.auto: cgroup:mixed, in {lxc_config(host)}" if host.vmid else "mount cgroup2 there"
    else:
        why = f"we may not make one below {found['place'].rpartition('/')[0]}"
        mount = "have it delegated: Delegate=yes in its systemd unit, or log in as root"
    counted_where = "in our whole cgroup" if found["scope"] == "cgroup" else "host-wide"
    return Finding.warning(
        "cgroup",
        f"{why}: runs are told apart by descent and ORCH_RUN_ID, memory kills are seen {counted_where}",
        mount,
    )


def _container(host: Host, found: Mapping[str, Any], unreaped: list[str]) -> Finding:
    says = f"{found['kind'] or 'none'}, process 1 is {found['init'] or 'hidden'}"
    if not unreaped:
        return Finding.ok("container", says)
    names = ", ".join(dict.fromkeys(unreaped))
    if host.vmid is not None:
        change = f"lxc.init.cmd: /sbin/init, in {lxc_config(host)}"
    else:
        change = "start the container with an init: docker run --init"
    return Finding.warning(
        "container", f"{says} and reaps nothing: {counted(len(unreaped), 'zombie')} ({names[:200]})", change
    )


def lxc_config(host: Host) -> str:
    """Returns where a container's configuration stands on its node."""
    return f"/etc/pve/lxc/{host.vmid}.conf" if host.vmid is not None else "the container's configuration"


def gib(size: int) -> str:
    """Returns a size as a person reads it."""
    return f"{size / GIB:.1f} GiB"
