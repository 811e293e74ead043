"""Leaving a view without touching the run: Ctrl-C, SIGTERM and a closed pipe detach; a second Ctrl-C cancels.

Signals become exceptions in the main thread, so that every ``with`` on the way out closes what it opened.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from orchestrator.cli.main import leave_stdout
from orchestrator.text import printable

SECOND_CHANCE_S = 2.0


class Left(BaseException):
    """The user leaves the view; ``exit_code`` follows the shell's habit of 128 + signal."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


@contextmanager
def leaving() -> Iterator[None]:
    """Turns SIGINT, SIGTERM and SIGHUP into `Left`, and a pipe that nobody reads too."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, _leave) for number in numbers}
    try:
        yield
    except BrokenPipeError:
        leave_stdout()
        raise Left(128 + signal.SIGPIPE) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def say_goodbye(
    left: Left,
    run_id: str,
    cancel: Callable[[], object] | None = None,
    *,
    done: str = "nothing was done to",
    what: str = "run",
    come_back: str = "orch logs -f",
) -> int:
    """Tells how to come back, and what was ``done`` to the run; ``cancel`` is for a second Ctrl-C.

    ``what``: the id is that of a run or of a group. Returns the exit code.
    """
    text = f"left the view; {done} {what} {run_id}. Come back with: {come_back} {run_id}"
    if cancel is None or left.exit_code != 128 + signal.SIGINT or not sys.stderr.isatty():
        _write(text)
        return left.exit_code
    try:
        with leaving():  # before it is offered
            _write(text)
            _write(f"press Ctrl-C again within {SECOND_CHANCE_S:g} s to cancel it")
            time.sleep(SECOND_CHANCE_S)
    except Left:
        _write(f"cancelling {what} {run_id}")
        cancel()
    return left.exit_code


def _leave(number: int, _frame: FrameType | None) -> None:
    raise Left(128 + number)


def _write(text: str) -> None:
    sys.stderr.write(f"orch: {printable(text)}\n")
    sys.stderr.flush()
