"""Shows log lines: to a person, safe on any terminal, and to a program as JSON values.

Where lines come from is `log_lines`' business, writing them to a terminal is left to others.
"""

from __future__ import annotations

from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

from orchestrator.log_lines import LogLine
from orchestrator.text import printable

_RUN_ID_SHOWN = 8
_RESET, _DIM = "\x1b[0m", "\x1b[2m"
_COLOURS = {"stdout": "\x1b[36m", "stderr": "\x1b[33m"}


def render(line: LogLine, *, colour: bool, is_long: bool = False) -> str:
    """Returns ``host run8/proc.stream:number | text``, with escapes for all that could act on a terminal.

    ``is_long`` adds the process's pid and the time of the line's last byte by the host's clock.
    """
    source = f"{_source(line.host, line.run_id, line.proc, line.stream)}:{line.number}"
    if is_long:
        source = f"{source} pid {line.pid} {utc(line.t)}"
    text = line.text
    if not text.isprintable():
        text = "\t".join(map(printable, text.split("\t")))
    if line.is_finished and not line.is_headless and not line.left_out_bytes and not colour:
        return f"{source} | {text}"
    before = "[begins earlier …] " if line.is_headless else ""
    after = "" if line.is_finished else " [no line end]"
    if line.left_out_bytes:
        place = f"runs/{line.run_id}/records, up to seq {line.seq}"
        after = f" [… {line.left_out_bytes} more bytes in {place}]{after}"
    if not colour:
        return f"{source} | {before}{text}{after}"
    begin = _COLOURS.get(line.stream, _DIM)
    marks = [f"{_DIM}{mark}{_RESET}" if mark else "" for mark in (before, after)]
    return f"{begin}{source} |{_RESET} {marks[0]}{text}{marks[1]}"


def line_json(line: LogLine) -> dict[str, Any]:
    """Returns a line as JSON values, its text unescaped: JSON does that."""
    return {"name": line.name, **line._asdict()}


def utc(t: float) -> str:
    """Returns a time in UTC to the millisecond; one that no clock shows stays a number."""
    try:
        return datetime.fromtimestamp(t, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    except (ValueError, OverflowError, OSError):
        return f"t={t}"


@lru_cache(maxsize=64)
def _source(host: str, run_id: str, proc: str, stream: str) -> str:
    return printable(f"{host} {run_id[:_RUN_ID_SHOWN]}/{proc}.{stream}")
