"""Who uses a card at this moment, seen from inside a process that uses it too.

The driver counts pids in a namespace of its own: only where a process finds its own among them do they name
the processes that it sees. A driver that hangs holds nobody up: it is asked beside, and after a moment there
is no answer.
"""

import os
import threading
from typing import Any, Dict, List, Optional, Tuple

MOST_PROCESSES = 32
PATIENCE_S = 2.0
_MIB = 1024 * 1024
_MOST_CONTEXT_BYTES = 2 * 1024 * _MIB  # what CUDA itself takes for a process, libraries included

Users = List[Tuple[int, Optional[int]]]


def users(uuid: str, own_reserved_bytes: int) -> List[Dict[str, Any]]:
    """Returns pid, name, memory in use and whether it is this process of each that computes on the card.

    Nobody where the driver's library is not there, does not know the card, or does not answer in time.
    """
    found: List[Users] = []
    asking = threading.Thread(target=_ask, args=(uuid, found), name="card-users", daemon=True)
    asking.start()
    asking.join(PATIENCE_S)
    told = found[0][:MOST_PROCESSES] if found else []
    is_our_namespace = os.getpid() in [pid for pid, _ in told]
    own = os.getpid() if is_our_namespace else _fitting(told, own_reserved_bytes)
    return [
        {
            "pid": pid,
            "name": _name(pid) if is_our_namespace else None,
            "used_bytes": used,
            "is_own": pid == own,
        }
        for pid, used in told
    ]


def _ask(uuid: str, found: List[Users]) -> None:
    try:
        from . import nvml  # noqa: PLC0415  (loads the driver's library)

        library = nvml.Nvml()
        for handle in library.handles():
            if isinstance(handle, Exception):
                continue
            for each in (handle, *(library.instances(handle) if library.has_instances(handle) else ())):
                if library.uuid(each) == uuid:
                    told = library.processes(each)
                    found.append([(pid, None if mib is None else mib * _MIB) for pid, mib in told])
                    return
    except Exception:  # noqa: BLE001,S110  (without an answer nobody is told)
        pass


def _fitting(told: Users, reserved_bytes: int) -> Optional[int]:
    """Returns the pid of the only process that has what this one's allocator holds, and a context."""
    most = reserved_bytes + _MOST_CONTEXT_BYTES
    fitting = [pid for pid, used in told if used is not None and reserved_bytes <= used <= most]
    return fitting[0] if len(fitting) == 1 else None


def _name(pid: int) -> Optional[str]:
    """Returns what the kernel calls a process; None for one that has gone."""
    try:
        with open("/proc/%d/comm" % pid, encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return None
