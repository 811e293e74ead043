"""Linux processes: who they are, which belong to a run, how a whole tree is ended, why one was killed.

A pid alone names nobody: `identity` adds what makes it unique (boot id, PID namespace, start time). A run's
processes are the supervisor's descendants (it is their subreaper), whatever carries the run's `ORCH_RUN_ID`,
and whatever is in its cgroup.
"""

import os
import time
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Set

RUN_ID_VARIABLE = "ORCH_RUN_ID"
_PR_SET_CHILD_SUBREAPER = 36
_PIDFD_OPEN = 434  # the system call's number, the same on every architecture
_DELETED_STATES = "ZX"


class Process(NamedTuple):
    """One process as /proc shows it; ``started`` is in clock ticks since boot."""

    pid: int
    parent: int
    state: str
    started: int

    @property
    def is_running(self) -> bool:
        """A zombie answers signals but runs nothing."""
        return self.state not in _DELETED_STATES


def look(pid: int) -> Optional[Process]:
    """Returns what /proc says about ``pid``, or None when there is no such process."""
    try:
        with open("/proc/%d/stat" % pid, "rb") as file:
            text = file.read()
    except OSError:
        return None
    fields = text[text.rindex(b")") + 2 :].split()
    return Process(pid, int(fields[1]), fields[0].decode("ascii"), int(fields[19]))


def identity(pid: int) -> Dict[str, Any]:
    """Returns what tells this process from every other that ever had its pid."""
    own, first = look(pid), look(1)
    return {
        "pid": pid,
        "started": own.started if own else None,
        "boot_id": boot_id(),
        "pid_namespace": os.readlink("/proc/self/ns/pid"),
        "init_started": first.started if first else None,
    }


def boot_id() -> str:
    """Returns what names the time since this host's kernel was started."""
    return read_text("/proc/sys/kernel/random/boot_id").strip()


def command_line(pid: int) -> List[str]:
    """Returns a process's argv as /proc shows it, bytes that are not UTF-8 escaped; empty when it is gone."""
    return [
        part.decode("utf-8", "backslashreplace")
        for part in _read_bytes("/proc/%d/cmdline" % pid).split(b"\0")
    ][:-1]


def environment(pid: int) -> Dict[str, str]:
    """Returns the environment a process was started with, as /proc shows it; empty when we may not look."""
    pairs = [
        item.partition(b"=") for item in _read_bytes("/proc/%d/environ" % pid).split(b"\0") if b"=" in item
    ]
    return {
        name.decode("utf-8", "backslashreplace"): value.decode("utf-8", "backslashreplace")
        for name, _, value in pairs
    }


def become_subreaper() -> bool:
    """Makes orphans below this process its children; tells whether the kernel did so."""
    try:
        import ctypes  # noqa: PLC0415  (a stripped Python may lack it)

        return int(ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)) == 0
    except (ImportError, OSError, AttributeError):
        return False


def open_pidfd(pid: int) -> int:
    """Returns a descriptor that becomes readable when ``pid`` ends.

    Raises:
        OSError: the kernel has none, or there is no such process.
    """
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid)
    try:
        import ctypes  # noqa: PLC0415  (Python 3.8 alone needs it here)
    except ImportError as error:
        raise OSError("this Python has no ctypes") from error
    fd = int(ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_OPEN, pid, 0))
    if fd < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return fd


def everything() -> List[Process]:
    """Returns every process in this PID namespace."""
    seen = [look(int(name)) for name in os.listdir("/proc") if name.isdigit()]
    return [process for process in seen if process is not None]


def members(run_id: str, supervisor: Optional[int] = None, in_cgroup: Iterable[int] = ()) -> List[Process]:
    """Returns the running processes of a run: those that carry its id or are in its cgroup, and the
    supervisor's descendants.

    ``supervisor`` is None when it is gone. It and this process are never among them.
    """
    table = {process.pid: process for process in everything()}
    mark = os.fsencode("%s=%s" % (RUN_ID_VARIABLE, run_id))
    ours = set(in_cgroup) & set(table)
    assert not ours & {0, 1}, "process 1 belongs to no run"
    ours |= {pid for pid in table if mark in _read_bytes("/proc/%d/environ" % pid).split(b"\0")}
    if supervisor is not None:
        assert supervisor > 1, "everything descends from process %d" % supervisor
        ours |= _descendants(table.values(), supervisor)
    ours -= {supervisor, os.getpid()}
    return [table[pid] for pid in sorted(ours) if table[pid].is_running]


def send_signal(processes: Iterable[Process], number: int) -> None:
    """Signals each process that is still the one that was seen."""
    for process in processes:
        now = look(process.pid)
        if now is None or now.started != process.started:
            continue
        try:
            os.kill(process.pid, number)
        except (ProcessLookupError, PermissionError):
            continue  # gone meanwhile, or not ours to end: who stays is named as a survivor


def describe(processes: Iterable[Process]) -> List[Dict[str, Any]]:
    """Returns pid and argv of each, for a record."""
    return [{"pid": process.pid, "argv": command_line(process.pid)} for process in processes]


def holders_of(pipe_inodes: Set[int], processes: Iterable[Process]) -> List[Process]:
    """Returns those that have one of the pipes open, this process aside."""
    names = {"pipe:[%d]" % inode for inode in pipe_inodes}
    found = []
    for process in processes:
        folder = "/proc/%d/fd" % process.pid
        try:
            if process.pid != os.getpid() and any(
                _link(os.path.join(folder, fd)) in names for fd in os.listdir(folder)
            ):
                found.append(process)
        except OSError:
            continue
    return found


class OomCounter:
    """Counts the kernel's out-of-memory kills: of the run's cgroup or ours where they can be read, else of
    the whole host.
    """

    def __init__(self, cgroup: Optional[str]) -> None:
        self._path, self.scope = self._choose(cgroup)
        self._before = self._count()

    def since_start(self) -> Optional[int]:
        """Returns the kills since this object was made, or None when the kernel does not tell."""
        now = self._count()
        return None if now is None or self._before is None else now - self._before

    def _choose(self, cgroup: Optional[str]) -> "tuple[str, str]":
        if cgroup is not None and os.path.exists(os.path.join(cgroup, "memory.events")):
            return os.path.join(cgroup, "memory.events"), "cgroup"
        for line in read_text("/proc/self/cgroup").splitlines():
            _, controllers, path = line.split(":", 2)
            for folder in ("/sys/fs/cgroup", "/sys/fs/cgroup/unified") if not controllers else ():
                events = folder + path.rstrip("/") + "/memory.events"
                if os.path.exists(events):
                    return events, "cgroup"
            if "memory" in controllers.split(","):
                control = "/sys/fs/cgroup/memory" + path.rstrip("/") + "/memory.oom_control"
                if os.path.exists(control):
                    return control, "cgroup"
        return "/proc/vmstat", "host"

    def _count(self) -> Optional[int]:
        for line in read_text(self._path).splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
        return None


def wait_for_end(processes: Iterable[Process], timeout_s: float) -> List[Process]:
    """Waits until none of ``processes`` runs; returns those that still do after ``timeout_s``."""
    end = time.monotonic() + timeout_s
    left = list(processes)
    while left:
        seen = [(process, look(process.pid)) for process in left]
        left = [old for old, now in seen if now and now.started == old.started and now.is_running]
        if not left or time.monotonic() >= end:
            break
        time.sleep(0.02)
    return left


def _descendants(processes: Iterable[Process], root: int) -> Set[int]:
    children: Dict[int, List[int]] = {}
    for process in processes:
        children.setdefault(process.parent, []).append(process.pid)
    found: Set[int] = set()
    todo = [root]
    while todo:
        for child in children.get(todo.pop(), []):
            if child not in found:
                found.add(child)
                todo.append(child)
    return found


def _read_bytes(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


def read_text(path: str) -> str:
    """Returns what a file says, nothing of one that cannot be read."""
    return _read_bytes(path).decode("utf-8", "replace")


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
