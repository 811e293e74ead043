"""Shows log lines: to a person, safe on any terminal, and to a program as JSON values.

Where lines come from is `log_lines`' business, writing them to a terminal is left to others.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

from orchestrator.log_lines import LogLine
from orchestrator.text import printable

_RUN_ID_SHOWN = 8
_RESET, _DIM = "\x1b[0m", "\x1b[2m"
_COLOURS = {"stdout": "\x1b[36m", "stderr": "\x1b[33m"}
_RUN_COLOURS = tuple(f"\x1b[{code}m" for code in (36, 33, 35, 32, 34, 31, 96, 93, 95, 92, 94, 91))
_TAB_CELLS = 8
_WORTH_TELLING_S = 1.0  # what is free or there is had at once
_CONTINUED = "    "
_LEAST_COLUMNS = 20


def render(
    line: LogLine,
    *,
    colour: bool,
    is_long: bool = False,
    columns: int | None = None,
    run: int | None = None,
    t: float | None = None,
) -> str:
    """Returns ``host run8/proc.stream:number | text``, with escapes for all that could act on a terminal.

    ``is_long`` adds the process's pid and the time of the line's last byte: by the host's clock, or ``t``.
    On a terminal with so many ``columns`` a longer line goes on in rows that begin with spaces, as no source
    does. ``run``: among several runs this one has a colour of its own, else each stream has.
    """
    row = _row(line, colour=colour, is_long=is_long, run=run, t=line.t if t is None else t)
    if columns is None or columns < _LEAST_COLUMNS:
        return row
    most_cells = (1 if row.isascii() else 2) * len(row) + _TAB_CELLS * row.count("\t")
    return row if most_cells <= columns else _folded(row, columns)


def _row(line: LogLine, *, colour: bool, is_long: bool, run: int | None, t: float) -> str:
    if line.cut is not None:
        text = f"{printable(f'{line.host} {line.run_id[:_RUN_ID_SHOWN]}')} | {line.text}"
        return f"{_DIM}{text}{_RESET}" if colour else text
    source = f"{_source(line.host, line.run_id, line.proc, line.stream)}:{line.number}"
    if is_long:
        source = f"{source} pid {line.pid} {utc(t)}"
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
    begin = _COLOURS.get(line.stream, _DIM) if run is None else _RUN_COLOURS[run % len(_RUN_COLOURS)]
    marks = [f"{_DIM}{mark}{_RESET}" if mark else "" for mark in (before, after)]
    return f"{begin}{source} |{_RESET} {marks[0]}{text}{marks[1]}"


def line_json(line: LogLine) -> dict[str, Any]:
    """Returns a line as JSON values, its text unescaped: JSON does that.

    In the place of missing records ``cut`` names them and nothing else has a value but where and when.
    """
    values = line._asdict()
    cut = values.pop("cut")
    if cut is None:
        return {"name": line.name, **values}
    return {"cut": cut._asdict(), **{key: values[key] for key in ("host", "run_id", "seq", "t", "text")}}


def utc(t: float) -> str:
    """Returns a time in UTC to the millisecond; one that no clock shows stays a number."""
    try:
        return datetime.fromtimestamp(t, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    except (ValueError, OverflowError, OSError):
        return f"t={t}"


def waiting_note(record: Mapping[str, Any], run_id: str) -> str | None:
    """Says that a run waits for its turn, for what is being prepared or for its cards, and for whom, or that
    it has them; None for another record, and for what was there at once.
    """
    if record.get("kind") == "queued":
        ahead = record.get("ahead")
        names = ", ".join(map(str, ahead)) if isinstance(ahead, list) and ahead else "others"
        return f"run {run_id} waits for its turn in {record.get('queue')}, behind {names}"
    if record.get("kind") == "preparing":
        return f"run {run_id} waits {_awaited(record)}"
    if record.get("kind") == "turn":
        waited_s = record.get("waited_s")
        after = f" after {waited_s:.0f} s" if isinstance(waited_s, float) else ""
        return f"the turn of run {run_id} came{after}"
    if record.get("kind") == "cards_awaited":
        obstacles = record.get("obstacles")
        why = (
            "; ".join(map(str, obstacles)) if isinstance(obstacles, list) and obstacles else "they are taken"
        )
        return f"run {run_id} waits for its cards: {why}"
    what = {"cards": "its cards", "prepared": "what it needs"}.get(str(record.get("kind")))
    waited_s = record.get("waited_s")
    if what is not None and isinstance(waited_s, float) and waited_s >= _WORTH_TELLING_S:
        return f"run {run_id} has {what} after {waited_s:.0f} s"
    return None


def _folded(row: str, columns: int) -> str:
    """Breaks a row into rows of at most ``columns`` cells; colours are no cells."""
    parts, cells = [], 0
    for piece, width in _cells(row):
        if cells + width > columns:
            parts.append("\n" + _CONTINUED)
            cells = len(_CONTINUED)
        parts.append(piece)
        cells += width
    return "".join(parts)


def _cells(row: str) -> Iterator[tuple[str, int]]:
    """Yields characters with their cells, no fewer than a terminal gives them, and colours with none."""
    at = 0
    while at < len(row):
        if row[at] == "\x1b":  # ours: those of a payload are escaped
            end = row.index("m", at) + 1
            yield row[at:end], 0
            at = end
            continue
        character = row[at]
        is_wide = unicodedata.east_asian_width(character) in ("W", "F")
        yield character, _TAB_CELLS if character == "\t" else 1 + is_wide
        at += 1


@lru_cache(maxsize=64)
def _source(host: str, run_id: str, proc: str, stream: str) -> str:
    return printable(f"{host} {run_id[:_RUN_ID_SHOWN]}/{proc}.{stream}")


def _awaited(preparing: Mapping[str, Any]) -> str:
    file, by, users = preparing.get("file"), preparing.get("by"), preparing.get("users")
    if isinstance(users, list):
        return f"for runs that use {file}" + (": " + ", ".join(map(str, users)) if users else "")
    if not by:
        return f"until others have prepared {file}"
    if preparing.get("left"):
        return f"for what is left of run {by}, which was to prepare {file}; `orch cancel {by}` ends that"
    return f"until run {by} has prepared {file}"
