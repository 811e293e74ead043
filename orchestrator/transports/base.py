"""The seam: what a transport and its channels promise, and the one part that they share.

A transport knows how to reach one host and start a program there by its argument vector. A channel is
that program's three streams and its exit status. Neither knows what is said over them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol, Self

from orchestrator.inventory import Host

__all__ = ["STDERR_TAIL_BYTES", "Channel", "StderrTail", "Transport"]

STDERR_TAIL_BYTES = 64 * 1024


class Channel(Protocol):
    """One running program; one thread may send while another receives.

    Every method raises `Unreachable` when the connection is broken, except `stderr` and `close`.
    """

    def send(self, data: bytes) -> None:
        """Passes all of ``data`` to the program's stdin.

        Blocks while the program does not read. A program that answers while it still reads is to be
        received from in another thread. Raises `Unreachable` when the program takes no more input.
        """

    def recv(self, max_bytes: int, timeout_s: float) -> bytes:
        """Returns what came from stdout, at least one byte; ``b""`` is its end.

        Raises `TimeoutError` when nothing came in ``timeout_s``: nothing is lost, call again.
        """

    def finish_input(self) -> None:
        """Ends the program's stdin; it may go on writing."""

    def stderr(self) -> bytes:
        """Returns the last `STDERR_TAIL_BYTES` of stderr so far: all of them once `recv` saw the end."""

    def wait(self, timeout_s: float) -> int:
        """Returns the exit status; ``-n`` for signal ``n``.

        Receive to the end first: a program that cannot write does not end. Raises `TimeoutError`.
        """

    def close(self) -> None:
        """Gives the channel up; it may be called in any state and more than once, and never hangs."""


class Transport(Protocol):
    """A way to one host."""

    @property
    def host(self) -> Host:
        """The inventory entry that it leads to."""

    def open(self, argv: Sequence[str]) -> Channel:
        """Starts ``argv`` on the host, in the user's home, exactly as given: no word is expanded.

        Quoted and joined it is shorter than 128 KiB, Linux's limit for what a shell gets as ``-c``.
        """

    def attach(self, argv: Sequence[str] | None) -> int:
        """Runs ``argv`` there as `open` does, or the user's log-in shell, on this process's own streams.

        It has a terminal there when stdin and stdout are one here. Returns its exit status, ``-n`` for signal
        ``n``. To be called in the main thread.
        """

    def close(self) -> None:
        """Closes every channel and the way itself; may be called more than once, and never hangs."""

    def __enter__(self) -> Self:
        """Returns itself."""

    def __exit__(self, *_: object) -> None:
        """Closes."""


class StderrTail:
    """Keeps a program's stderr from filling up, and remembers its end.

    ``read`` blocks for the next bytes; ``b""`` is the end, and whoever made it sees to it that the end
    comes when the channel is closed.
    """

    def __init__(self, read: Callable[[], bytes]) -> None:
        self._read = read
        self._tail = bytearray()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._drain, name="orch-stderr", daemon=True)
        self._thread.start()

    def bytes_so_far(self) -> bytes:
        """Returns the last `STDERR_TAIL_BYTES` at most."""
        with self._lock:
            return bytes(self._tail)

    def join(self, timeout_s: float) -> None:
        """Waits for the end of the stream, but not for ever."""
        self._thread.join(timeout_s)

    def _drain(self) -> None:
        while chunk := self._read():
            with self._lock:
                self._tail += chunk
                del self._tail[:-STDERR_TAIL_BYTES]
