"""A cgroup of its own for a run's payload, where this host lets us make one.

Membership is inherited and cannot be dropped by `setsid`, by a new parent or by a cleared environment, so the
cgroup finds processes that nothing else does. Only the unified hierarchy (v2) is used, and only a child of
the supervisor's own cgroup, named for the run; without one everything works by descent and `ORCH_RUN_ID`
alone.
"""

import os
from typing import Any, List, Optional

MOUNTS = ("/sys/fs/cgroup", "/sys/fs/cgroup/unified")
_PREFIX = "orch-"


def place(run_id: str) -> Optional[str]:
    """Returns where the run's cgroup would be; None where there is no v2 hierarchy."""
    own = _own()
    return None if own is None else os.path.join(own, _PREFIX + run_id)


def make(path: Optional[str]) -> Optional[str]:
    """Makes the cgroup at ``path`` and returns it; None where there is no place for it or we may not."""
    if path is None:
        return None
    try:
        os.mkdir(path)
    except FileExistsError:  # an earlier attempt to start this run came this far
        return None if pids(path) else path
    except OSError:
        return None
    return path


def checked(path: Any, run_id: str) -> Optional[str]:
    """Returns ``path``, as state.json has it, if it can only be the cgroup of this run; else None."""
    if not isinstance(path, str) or os.path.basename(path) != _PREFIX + run_id:
        return None
    is_below = any(path.startswith(mount + "/") for mount in MOUNTS if _is_unified(mount))
    return path if is_below and os.path.normpath(path) == path and not os.path.islink(path) else None


def opened(path: str) -> Optional[int]:
    """Returns a descriptor on which a process that writes ``0`` moves itself in; None when we may not."""
    try:
        return os.open(os.path.join(path, "cgroup.procs"), os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return None


def holds(path: str, pid: int) -> bool:
    """Tells whether ``pid``, a zombie too, is in the cgroup at ``path``."""
    return any(mount + line == path for mount in MOUNTS for line in _unified_paths(pid))


def pids(path: Optional[str]) -> List[int]:
    """Returns the processes in ``path`` and in what was made below it; those we cannot see are left out."""
    if path is None:
        return []
    words = [word for folder, _, _ in os.walk(path) for word in _procs(folder)]
    return [int(word) for word in words if int(word) > 1]  # 0 is a process of another PID namespace


def kill(path: Optional[str]) -> None:
    """Has the kernel kill everything in ``path`` at once, where it can (Linux 5.14)."""
    if path is None:
        return
    try:
        fd = os.open(os.path.join(path, "cgroup.kill"), os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        os.write(fd, b"1")
    except OSError:
        pass  # the signals that are sent one by one have to do
    finally:
        os.close(fd)


def remove(path: Optional[str]) -> None:
    """Removes ``path`` and what was made below it, as far as nothing runs there."""
    for folder, _, _ in os.walk(path, topdown=False) if path is not None else ():
        try:
            os.rmdir(folder)
        except OSError:
            pass  # still in use: whoever ends the last process comes back


def _procs(folder: str) -> List[str]:
    return _read(os.path.join(folder, "cgroup.procs")).split()


def _own() -> Optional[str]:
    for line in _unified_paths(os.getpid()):
        for mount in MOUNTS:
            path = (mount + line).rstrip("/")
            is_plain = os.path.normpath(path) == path  # one outside our namespace begins with /..
            if is_plain and _is_unified(mount) and os.path.isdir(path):
                return path
    return None


def _unified_paths(pid: int) -> List[str]:
    lines = _read("/proc/%d/cgroup" % pid).splitlines()
    return [line[3:] for line in lines if line.startswith("0::/")]


def _is_unified(mount: str) -> bool:
    return os.path.exists(os.path.join(mount, "cgroup.controllers"))


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except OSError:
        return ""
