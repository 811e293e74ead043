"""SIGTERM and SIGINT ask a training to end: the step is finished and saved first; a second one ends at once.

    with stop_on_signals() as stop:
        for step in steps:
            ...
            if stop.is_asked:
                save()
                return stop.exit_code

Launchers pass a signal on that the whole process group has got already, so what comes within a second of the
first is the same request. Loads without torch.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

ASKED_BY = (signal.SIGTERM, signal.SIGINT)
SAME_REQUEST_S = 1.0
EXIT_OFFSET = 128  # a shell's exit code for a process that a signal ended


@dataclass(slots=True)
class Stop:
    """Whether somebody asked for the end, and by which signal."""

    signal_number: int | None = None
    _asked_s: float = field(default=0.0, repr=False)

    @property
    def is_asked(self) -> bool:
        """Whether to save and leave once the step is done."""
        return self.signal_number is not None

    @property
    def exit_code(self) -> int:
        """The code to leave with: 143 after SIGTERM, 130 after SIGINT, 0 where nobody asked."""
        return 0 if self.signal_number is None else EXIT_OFFSET + self.signal_number

    def hear(self, number: int) -> None:
        """Note the signal of a request; leave the process at the second request."""
        name = signal.Signals(number).name
        if self.signal_number is None:
            self.signal_number, self._asked_s = number, time.monotonic()
            _say(f"{name}: the step is finished and saved, then this ends; a second signal ends it now")
        elif time.monotonic() - self._asked_s >= SAME_REQUEST_S:
            _say(f"{name} again: leaving without saving")
            os._exit(EXIT_OFFSET + number)


@contextlib.contextmanager
def stop_on_signals() -> Iterator[Stop]:
    """Hear SIGTERM and SIGINT until the end of the block; for the main thread.

    A thread of its own reads what the C handler writes, since the main one may wait within a kernel or a
    collective that runs no Python.
    """
    stop = Stop()
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = {number: signal.signal(number, _leave_it_to_the_thread) for number in ASKED_BY}
    wakeup = signal.set_wakeup_fd(writer)
    _replaced.update(before)
    thread = threading.Thread(target=_listen, args=(reader, stop), name="signals", daemon=True)
    thread.start()
    try:
        yield stop
    finally:
        signal.set_wakeup_fd(wakeup)
        _restore()
        os.close(writer)
        thread.join()
        os.close(reader)


def _leave_it_to_the_thread(_number: int, _frame: object) -> None:
    """Exist: without a handler Python would not write to the pipe."""


def _listen(reader: int, stop: Stop) -> None:
    while heard := os.read(reader, 64):
        for number in heard:
            if number in ASKED_BY:
                stop.hear(number)


def _restore() -> None:
    for number, handler in _replaced.items():
        signal.signal(number, handler)
    _replaced.clear()


def _hold_while_forking() -> None:
    if _replaced:
        signal.pthread_sigmask(signal.SIG_BLOCK, ASKED_BY)


def _go_on_after_forking() -> None:
    if _replaced:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKED_BY)


def _end_as_usual_in_child() -> None:
    """Let a forked child end as any process does: the pipe is its parent's, who is not meant."""
    if _replaced:
        signal.set_wakeup_fd(-1)
        _restore()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKED_BY)


def _say(message: str) -> None:
    with contextlib.suppress(OSError):  # nobody may be reading any more
        os.write(sys.stderr.fileno(), f"{message}\n".encode())


_replaced: dict[signal.Signals, Any] = {}
os.register_at_fork(
    before=_hold_while_forking,
    after_in_parent=_go_on_after_forking,
    after_in_child=_end_as_usual_in_child,
)
