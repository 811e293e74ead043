"""This process's own streams on a program behind ssh, and the terminal here on the one that it has there.

The terminal here passes every key on as it is until the program has ended, and is then as it was. What comes
is written as it comes: a shell's escape sequences are meant for the terminal.
"""

from __future__ import annotations

import os
import select
import signal
import termios
import threading
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

import paramiko

from orchestrator.transports.ssh_errors import FOREIGN_ERRORS

__all__ = ["Terminal", "attach", "here", "is_terminal"]

READ_BYTES = 32 * 1024
JOIN_TIMEOUT_S = 2.0
_STDIN, _STDOUT, _STDERR = 0, 1, 2
_END = b"."


class Terminal(NamedTuple):
    """What a program must know of a terminal."""

    kind: str
    columns: int
    rows: int


def is_terminal() -> bool:
    """Somebody types here and reads what comes."""
    return os.isatty(_STDIN) and os.isatty(_STDOUT)


def here() -> Terminal:
    """Returns the terminal that stdout is, as it is now."""
    size = os.get_terminal_size(_STDOUT)
    return Terminal(os.environ.get("TERM", "dumb"), size.columns, size.lines)


def attach(raw: paramiko.Channel, *, has_terminal: bool) -> int:
    """Connects the streams until the program has ended; returns its exit status as ``raw`` holds it."""
    wake_r, wake_w = os.pipe()
    typing = threading.Thread(target=_send_input, args=(raw, wake_r), name="orch-stdin", daemon=True)
    saying = threading.Thread(target=_send_errors, args=(raw,), name="orch-stderr", daemon=True)
    try:
        with _raw_terminal(wake_w) if has_terminal else _as_it_is():
            typing.start()
            saying.start()
            _copy(lambda: raw.recv(READ_BYTES), _STDOUT)
            saying.join(JOIN_TIMEOUT_S)
            raw.status_event.wait()  # also set when the connection is gone
            return raw.exit_status
    finally:
        os.write(wake_w, _END)
        raw.close()
        typing.join(JOIN_TIMEOUT_S)
        os.close(wake_w)
        if not typing.is_alive():
            os.close(wake_r)


def _send_input(raw: paramiko.Channel, wake_r: int) -> None:
    """Passes on what is typed, and sizes of the window, until it is woken with `_END`."""
    sources = [_STDIN, wake_r]
    while True:
        try:
            ready, _, _ = select.select(sources, [], [])
            if wake_r in ready:
                if _END in os.read(wake_r, READ_BYTES):
                    return
                _, columns, rows = here()
                raw.resize_pty(columns, rows)
            if _STDIN in ready:
                data = os.read(_STDIN, READ_BYTES)
                if data:
                    raw.sendall(data)
                else:
                    raw.shutdown_write()
                    sources = [wake_r]
        except FOREIGN_ERRORS:  # the program takes no more; whoever receives is told why
            sources = [wake_r]


def _send_errors(raw: paramiko.Channel) -> None:
    with suppress(OSError):  # nobody reads them
        _copy(lambda: raw.recv_stderr(READ_BYTES), _STDERR)


def _copy(read: Callable[[], bytes], to: int) -> None:
    while data := read():
        view = memoryview(data)
        while view:
            view = view[os.write(to, view) :]


@contextmanager
def _raw_terminal(wake_w: int) -> Iterator[None]:
    saved = termios.tcgetattr(_STDIN)
    before = signal.signal(signal.SIGWINCH, lambda *_: os.write(wake_w, b"w"))
    try:
        tty.setraw(_STDIN, termios.TCSADRAIN)  # what was typed meanwhile stays typed
        yield
    finally:
        termios.tcsetattr(_STDIN, termios.TCSADRAIN, saved)
        signal.signal(signal.SIGWINCH, before)


@contextmanager
def _as_it_is() -> Iterator[None]:
    yield
