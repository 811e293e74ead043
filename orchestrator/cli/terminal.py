"""What the commands write with: log lines to one stream, one status line that never mixes with them, rich
tables.

The status line is drawn on standard error and only on a terminal; it is wiped before anything else is
written.
"""

from __future__ import annotations

import os
import sys
from typing import IO, TYPE_CHECKING

from orchestrator.text import printable

if TYPE_CHECKING:
    from rich.console import RenderableType  # a log's first line does not wait for tables to be imported

WIDE = 10_000
_WIPE = "\r\x1b[K"


class Screen:
    """Writes lines and keeps one status line below them.

    ``lines_to_stderr``: standard output belongs to a program that reads JSON from it.
    """

    def __init__(self, *, lines_to_stderr: bool = False) -> None:
        self._lines: IO[str] = sys.stderr if lines_to_stderr else sys.stdout
        self._is_terminal = self._lines.isatty()
        self._has_status = sys.stderr.isatty() and self._is_terminal
        self._status = ""
        self.colour = self._is_terminal and "NO_COLOR" not in os.environ

    @property
    def columns(self) -> int | None:
        """The width of the terminal that lines go to, as it is now; None where they go elsewhere."""
        return os.get_terminal_size(self._lines.fileno()).columns if self._is_terminal else None

    def line(self, text: str) -> None:
        """Writes one line of a log; ``text`` has been made safe by its view.

        On a terminal it takes the place of whatever status line stands there, also another command's.
        """
        self._status = ""
        self._lines.write(f"{_WIPE}{text}\n" if self._has_status else f"{text}\n")

    def note(self, text: str) -> None:
        """Writes one line about the command's own doings, to standard error."""
        self.flush()
        self._wipe()
        sys.stderr.write(f"orch: {printable(text)}\n")
        sys.stderr.flush()

    def status(self, text: str) -> None:
        """Shows ``text`` as the status line."""
        if self._has_status and text != self._status:
            columns = os.get_terminal_size(sys.stderr.fileno()).columns or 80
            sys.stderr.write(f"{_WIPE}{printable(text)[: columns - 1]}")
            sys.stderr.flush()
            self._status = text

    def flush(self) -> None:
        """Hands all lines to the terminal or the pipe; raises BrokenPipeError when nobody reads."""
        self._lines.flush()

    def close(self) -> None:
        """Wipes the status line."""
        self._wipe()
        sys.stderr.flush()

    def _wipe(self) -> None:
        if self._status:
            sys.stderr.write(_WIPE)
            sys.stderr.flush()
            self._status = ""


def show(renderable: RenderableType) -> None:
    """Writes a table to standard output: cut to a terminal's width, or whole and without trailing spaces."""
    from rich.console import Console  # noqa: PLC0415

    console = Console(markup=False, highlight=False, emoji=False)
    if console.is_terminal:
        console.print(renderable)
        return
    console.width = WIDE
    with console.capture() as captured:
        console.print(renderable)
    sys.stdout.write("".join(line.rstrip() + "\n" for line in captured.get().splitlines()))
