"""Numbers and phases for whoever watches this process: one JSON object per line into an inherited pipe.

`ORCH_EVENTS_FD` names the pipe as `<descriptor>:<inode>`, both decimal. Only a FIFO with that inode is
written to: a child process that did not inherit the pipe may have a checkpoint open under the same number.
Without the pipe, and after its reader has gone, every call does nothing: a watcher can never stop the work.
Lines of many threads stay whole, those of several processes up to the 4 KiB that a pipe takes at once.

Knows nothing of torch; a value is anything that `float()` takes.

    {"kind": "metric", "name": "timed.mean_ms", "value": 12.3, "step": 3}
    {"kind": "phase", "name": "warmup"}
    {"kind": "warning", "about": "attention", "message": "flex cannot run here: …"}
"""

import contextlib
import json
import math
import os
import stat
import threading
from typing import Any, SupportsFloat

ENVIRONMENT_NAME = "ORCH_EVENTS_FD"
MAX_NAME_CHARACTERS = 5000  # of at most 12 bytes each as JSON, so that a line stays below 64 KiB


def emit_metric(name: str, value: SupportsFloat, *, step: int | None = None) -> None:
    """Send one number under a dotted name such as "timed.mean_ms"; "nan", "inf" and "-inf" go as strings."""
    event: dict[str, object] = {"kind": "metric", "name": _shortened(name), "value": _json_number(value)}
    if step is not None:
        event["step"] = step
    _send(event)


def emit_phase(name: str) -> None:
    """Say that a phase begins; it lasts until the next one."""
    _send({"kind": "phase", "name": _shortened(name)})


def emit_warning(about: str, message: str) -> None:
    """Say that something works otherwise than was asked for."""
    _send({"kind": "warning", "about": _shortened(about, 100), "message": _shortened(message)})


def _shortened(name: str, most: int = MAX_NAME_CHARACTERS) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"


def _json_number(value: Any) -> float | int | str:
    if type(value) is int and -(2**63) <= value < 2**63:
        return value
    try:
        number = float(value)
    except OverflowError:
        number = math.inf if value > 0 else -math.inf
    return number if math.isfinite(number) else str(number)


def _send(event: dict[str, object]) -> None:
    # ASCII throughout: a lone surrogate has no UTF-8 but an escape.
    line = json.dumps(event, allow_nan=False, ensure_ascii=True).encode("ascii") + b"\n"
    with _lock, contextlib.suppress(OSError):
        descriptor = _watchers_pipe()
        while line and descriptor is not None:
            line = line[os.write(descriptor, line) :]


def _watchers_pipe() -> int | None:
    number, _, inode = os.environ.get(ENVIRONMENT_NAME, "").partition(":")
    try:
        descriptor = int(number)
        found = os.fstat(descriptor)
    except (ValueError, OverflowError, OSError):
        return None
    return descriptor if stat.S_ISFIFO(found.st_mode) and str(found.st_ino) == inode else None


_lock = threading.Lock()


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


# A thread that was sending during a fork does not exist in the child to let go of the lock.
os.register_at_fork(after_in_child=_renew_lock)
