"""Runs a program here apart from everything: a bare environment, no input, bounded time and output.

What it starts ends with it, whatever it did with its pipes, and with orch, however that ends (`keeper`).
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from threading import Event

from orchestrator import keeper
from orchestrator.errors import ProgramFailed
from orchestrator.text import printable, size_text

__all__ = ["Stopped", "bare_environment", "execute"]

READ_BYTES = 64 * 1024
MOST_TOLD_BYTES = 64 * 1024
POLL_S = 0.1
KEEPER_S = keeper.MOST_S + 1


class Stopped(Exception):
    """Whoever asked does not wait for the answer any more."""


def bare_environment(scratch: Path | None = None) -> dict[str, str]:
    """Returns a bare environment, in which no card is seen and nothing is written outside ``scratch``."""
    kept = {name: os.environ[name] for name in ("HOME", "PATH", "LANG") if name in os.environ}
    temporary = {} if scratch is None else {"TMPDIR": str(scratch)}
    return {"LANG": "C.UTF-8", **kept, **temporary, "CUDA_VISIBLE_DEVICES": ""}


def execute(
    argv: Sequence[str],
    *,
    name: str,
    cwd: Path,
    env: Mapping[str, str],
    limit_s: float,
    most_bytes: int,
    stopping: Event | None = None,
) -> tuple[int, bytes, bytes]:
    """Returns exit code, standard output and the end of standard error; what is late is killed. Errors say
    ``name``.

    Raises:
        ProgramFailed: it cannot be started, takes longer, or prints too much.
        Stopped: ``stopping`` was set.
    """
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(keeper.PATH), str(theirs.fileno()), *argv],
                cwd=cwd,
                env=env,
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        with process:
            try:
                out, told = _attend(process, printable(name), limit_s, most_bytes, stopping)
            finally:
                _end(process, ours)
        refused = ours.recv(READ_BYTES)
    if refused:
        raise ProgramFailed(f"{printable(argv[0])}: cannot be started: {os.strerror(int(refused))}")
    return process.returncode, out, told


def _end(process: subprocess.Popen[bytes], ours: socket.socket) -> None:
    """Lets the keeper end what is left, and ends what that leaves, as one that was killed itself."""
    ours.shutdown(socket.SHUT_WR)
    give_up_at = time.monotonic() + KEEPER_S
    while not _has_ended(process.pid) and time.monotonic() < give_up_at:
        time.sleep(keeper.POLL_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # it is not reaped yet: nobody else has its number


def _attend(
    process: subprocess.Popen[bytes], named: str, limit_s: float, most_bytes: int, stopping: Event | None
) -> tuple[bytes, bytes]:
    """Reads both streams until the process has ended; what it leaves behind holds nobody up."""
    out, told, began_at = bytearray(), bytearray(), time.monotonic()
    with DefaultSelector() as selector:
        for stream, into in ((process.stdout, out), (process.stderr, told)):
            assert stream is not None
            selector.register(stream, EVENT_READ, into)
        while selector.get_map() or not _has_ended(process.pid):
            if stopping is not None and stopping.is_set():
                raise Stopped
            if time.monotonic() > began_at + limit_s:
                raise ProgramFailed(f"{named}: no answer within {limit_s:g} s")
            ready = selector.select(POLL_S)
            for key, _ in ready:
                data = os.read(key.fd, READ_BYTES)
                key.data.extend(data)
                if not data:
                    selector.unregister(key.fileobj)
            if len(out) > most_bytes:
                raise ProgramFailed(f"{named}: printed more than {size_text(most_bytes)}")
            del told[:-MOST_TOLD_BYTES]
            if not ready and _has_ended(process.pid):
                break
    return bytes(out), bytes(told)


def _has_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
