"""Runs a program so that nothing of it stays: not when it ends, and not when whoever asked is killed.

    python -I -S keeper.py FD PROGRAM ARGUMENT…

A process of its own between `apart` and the program, executed by its path. FD is one end of a pair of
sockets: when the other is closed, all is ended; where the program cannot be started, the errno is written
to it. Ends as the program did.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from orchestrator.supervisor.processes import become_subreaper, everything

__all__ = ["PATH"]

PATH = Path(__file__)
POLL_S = 0.02
MOST_S = 4.0


def keep(asking: socket.socket, argv: Sequence[str]) -> int:
    """Runs the program to its end, or until nobody asks; returns its exit code, negative for a signal."""
    become_subreaper()
    restored = (signal.SIGPIPE, signal.SIGXFSZ)  # which Python ignores
    try:
        pid = os.posix_spawnp(argv[0], [*argv], os.environ, setsigdef=restored)
    except OSError as error:
        asking.send(str(error.errno).encode())
        return 1
    while not _has_ended(pid) and not select.select([asking], [], [], POLL_S)[0]:
        pass
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) if _has_ended(pid) else 1
    _end_children()
    return code


def _has_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _end_children() -> None:
    """Ends all below: the children of one that has ended become this process's."""
    give_up_at = time.monotonic() + MOST_S
    while time.monotonic() < give_up_at:
        for process in everything():
            if process.parent == os.getpid():
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(process.pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(POLL_S / 10)


def _end_as(code: int) -> int:
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError, ValueError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    fd, *words = sys.argv[1:]
    os.set_inheritable(int(fd), False)
    with socket.socket(fileno=int(fd)) as other_end:
        ended = keep(other_end, words)
    sys.exit(_end_as(ended))
