"""Two runs beside each other, as lines for a person and as JSON values (pure).

Knows how differences are spelt. ``+`` stands before what only the second run has, ``-`` before what only the
first has, ``~`` before what is in both and not the same. Everything that came from a file or a host is
escaped in the lines; JSON escapes it itself.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from orchestrator.bundle import Entry
from orchestrator.comparing import ABSENT, Change, Differences, FileChange, Measure, RunFacts, TextDiff
from orchestrator.ledger import RunRow
from orchestrator.provenance import Commit
from orchestrator.text import printable

_MIB = 1024**2
_GIB = 1024**3


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Two runs and what differs; ``commits`` is None where git does not know both of theirs."""

    a: RunFacts
    b: RunFacts
    found: Differences
    diffs: tuple[TextDiff, ...]
    commits: tuple[Commit, ...] | None


def diff_lines(shown: Comparison) -> list[str]:
    """Returns the whole comparison, section by section."""
    found = shown.found
    lines = [f"{letter} {_run_line(run.row)}" for letter, run in (("a", shown.a), ("b", shown.b))]
    lines += _section("asked", "what was asked", map(_change_line, found.asked))
    lines += _section("code", "the code", _code(shown))
    lines += _section("got", "what the process got", map(_change_line, found.got))
    lines += _section("result", "what came of it", map(_change_line, found.result))
    if found.measures:
        lines += ["measures", *_measure_table(found.measures)]
    lines += [f"note: {note}" for note in found.notes]
    return [printable(line) for line in lines]


def diff_json(shown: Comparison) -> dict[str, Any]:
    """Returns what `diff_lines` shows; a run that has not a fact has not its key."""
    found, commits = shown.found, shown.commits
    files = None if found.files is None else [_file_json(change) for change in found.files]
    return {
        "a": _run_json(shown.a.row),
        "b": _run_json(shown.b.row),
        "asked": [_change_json(change) for change in found.asked],
        "code": {
            "files": files,
            "diffs": [asdict(diff) for diff in shown.diffs],
            "commits": None if commits is None else [asdict(commit) for commit in commits],
        },
        "got": [_change_json(change) for change in found.got],
        "result": [_change_json(change) for change in found.result],
        "measures": [_measure_json(measure) for measure in found.measures],
        "notes": list(found.notes),
    }


def _section(title: str, subject: str, lines: Iterable[str]) -> list[str]:
    found = [f"  {line}" for line in lines]
    return [title, *found] if found else [f"no difference in {subject}"]


def _run_line(row: RunRow) -> str:
    profile = "" if row.profile is None else f":{row.profile}"
    retry = "" if row.retry_of is None else f", retry of {row.retry_of}"
    return f"{row.run_id} {row.experiment}{profile} on {row.host}{retry}"


def _change_line(change: Change) -> str:
    a, b = _spelt(change.a), _spelt(change.b)
    if change.a is ABSENT:
        return f"+ {change.name} {b}"
    if change.b is ABSENT:
        return f"- {change.name} {a}"
    return f"~ {change.name} {a} → {b}"


def _spelt(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _code(shown: Comparison) -> Iterator[str]:
    a, b, found = shown.a.row, shown.b.row, shown.found
    if a.bundle != b.bundle:
        yield f"~ bundle {a.bundle[:12]} → {b.bundle[:12]}"
    if (a.commit_id, a.dirty) != (b.commit_id, b.dirty):
        yield f"~ commit {_commit(a)} → {_commit(b)}"
    for commit in shown.commits or ():
        yield f"{'-' if commit.is_only_in_first else '+'} {commit.id} {commit.subject}"
    yield from map(_file_line, found.files or ())
    for diff in shown.diffs:
        yield from diff.lines
        if diff.reason is not None:
            yield f"{diff.path}: no lines shown: {diff.reason}"
    left_out = sum(diff.left_out for diff in shown.diffs)
    if left_out:
        yield f"… {left_out} more lines of the diff; --code shows them"


def _commit(row: RunRow) -> str:
    return (row.commit_id or "none")[:12] + ("*" if row.dirty else "")


def _file_line(change: FileChange) -> str:
    a, b = change.a, change.b
    if a is None or b is None:
        only = a or b
        assert only is not None
        return f"{'+' if a is None else '-'} {change.path} {only.size_bytes} bytes"
    mode = "" if a.mode == b.mode else f", mode {a.mode:o} → {b.mode:o}"
    return f"~ {change.path} {a.size_bytes} → {b.size_bytes} bytes{mode}"


def _measure_table(measures: Sequence[Measure]) -> Iterator[str]:
    rows = [("", "a", "b", "b - a")]
    for measure in measures:
        a, b = (_amount(measure.name, value) for value in (measure.a, measure.b))
        rows.append((measure.name, a, b, _difference(measure)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *values in rows:
        cells = (f"{value:>{width}}" for value, width in zip(values, widths[1:], strict=True))
        yield f"  {name:<{widths[0]}}  {'  '.join(cells)}".rstrip()


def _amount(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    if not name.endswith("_bytes"):
        return f"{value:.6g}"
    return f"{value / _GIB:.2f} GiB" if value >= _GIB else f"{value / _MIB:.2f} MiB"


def _difference(measure: Measure) -> str:
    difference = measure.difference
    if difference is None:
        return "-"
    if difference == 0:
        return "0"
    share = f" ({difference / abs(measure.a):+.1%})" if measure.a else ""
    sign = "+" if difference > 0 else "-"
    return f"{sign}{_amount(measure.name, abs(difference))}{share}"


def _run_json(row: RunRow) -> dict[str, Any]:
    kept = ("run_id", "retry_of", "experiment", "profile", "host", "bundle", "commit_id", "dirty")
    return {name: getattr(row, name) for name in kept}


def _change_json(change: Change) -> dict[str, Any]:
    sides = {"a": change.a, "b": change.b}
    return {"name": change.name, **{side: value for side, value in sides.items() if value is not ABSENT}}


def _file_json(change: FileChange) -> dict[str, Any]:
    return {"path": change.path, "a": _entry_json(change.a), "b": _entry_json(change.b)}


def _entry_json(entry: Entry | None) -> dict[str, Any] | None:
    if entry is None:
        return None
    return {"size_bytes": entry.size_bytes, "mode": f"{entry.mode:o}", "sha256": entry.sha256}


def _measure_json(measure: Measure) -> dict[str, Any]:
    a, b = (value if value is not None and math.isfinite(value) else None for value in (measure.a, measure.b))
    return {"name": measure.name, "a": a, "b": b, "difference": measure.difference}
