"""Runs `orch`, or a host's Python, and ends it with SIGKILL at one of its steps; standard library only.

    killer.py WHO STEP COUNT_FILE orch ARGUMENT…
    killer.py WHO STEP COUNT_FILE python [-I] [-S] -c CODE

A step is something that another process or a later one could see: a file opened for writing, a rename, a
lock, a connection, a fork, a write to a descriptor, a transaction. ``WHO`` is ``first`` (this process) or
``forked`` (those that come from it); STEP 0 kills nobody. The highest step that was reached is left in
COUNT_FILE, so that a sweep knows its end.
"""

import functools
import os
import signal
import socket
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

SEEN_FROM_OUTSIDE = {
    "os.mkdir",
    "os.rename",
    "os.remove",
    "os.fork",
    "os.truncate",
    "fcntl.flock",
    "shutil.rmtree",
    "socket.connect",
    "sqlite3.connect",
    "subprocess.Popen",
}
WRITING = os.O_WRONLY | os.O_RDWR


class Killer:
    """Counts steps, and ends the process at the one it was told."""

    def __init__(self, who: str, step: int, count_file: str) -> None:
        self._first = os.getpid()
        self._who = who
        self._step = step
        self._count_file = count_file
        self._count = 0
        self._is_counting = False

    def watch(self) -> None:
        """Starts counting: from here on every step is one."""
        sys.addaudithook(self._on_event)
        for module, name in ((os, "write"), (os, "pwrite"), (os, "fsync"), (socket.socket, "send")):
            setattr(module, name, self._counted(getattr(module, name)))
        execute = self._counted(sqlite3.Connection.execute)
        ours = type("Connection", (sqlite3.Connection,), {"execute": execute})
        sqlite3.connect = functools.partial(sqlite3.connect, factory=ours)  # type: ignore[assignment]

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:
            self._take_step()
            return call(*arguments)

        return counted

    def _on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in SEEN_FROM_OUTSIDE or (event == "open" and (arguments[2] or 0) & WRITING):
            self._take_step()

    def _take_step(self) -> None:
        is_first = os.getpid() == self._first
        if self._is_counting or is_first != (self._who == "first"):
            return
        self._is_counting = True  # what is done here is no step
        self._count += 1
        try:
            Path(self._count_file).write_text(str(self._count), encoding="ascii")
        finally:
            self._is_counting = False
        if self._count == self._step:
            os.kill(os.getpid(), signal.SIGKILL)


def main(who: str, step: str, count_file: str, program: str, *arguments: str) -> None:
    """Runs the program in this process."""
    killer = Killer(who, int(step), count_file)
    sys.argv = [program, *arguments]
    if program == "orch":
        from orchestrator.cli.main import main as orch  # noqa: PLC0415  (a host's Python has no such module)

        killer.watch()
        orch()
        return
    code = arguments[arguments.index("-c") + 1]
    sys.argv = ["-c"]
    killer.watch()
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})  # noqa: S102  (as `python -c` does)


if __name__ == "__main__":
    main(*sys.argv[1:])
