"""What differs between two runs: in what was asked, the code, what the process got, what came of it (pure).

Knows which facts make a run and when two of them are the same. Where the facts come from is `cli.compare`'s
business, what a person reads `diff_view`'s. A variable of the environment whose name or value looks like a
secret is compared, and stands as `MASK` in every result.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from orchestrator.bundle import Entry
from orchestrator.ledger import MASK, RunRow
from orchestrator.outcome import Outcome
from orchestrator.supervisor.environment import SECRET_NAME
from orchestrator.verdict import Verdict

MOST_TEXT_BYTES = 512 * 1024
MOST_TEXT_LINES = 20_000
CONTEXT_LINES = 3


class Absent(Enum):
    """What a fact is in a run that does not have it; None is a value."""

    ABSENT = "absent"


ABSENT: Final = Absent.ABSENT


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """All that is known of one run.

    ``job`` is the one that its host got; without ``has_values`` the variables in it are masked. ``entries``
    is its bundle, None where the manifest is not here.
    """

    row: RunRow
    job: Mapping[str, Any]
    has_values: bool
    outcome: Outcome
    verdict: Verdict | None
    entries: tuple[Entry, ...] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A fact that is not the same in both runs; ``name`` is a path of names with dots between."""

    name: str
    a: Any
    b: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class FileChange:
    """A shipped file with other bytes or another mode, or that one bundle alone has."""

    path: str
    a: Entry | None
    b: Entry | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Measure:
    """A number of both runs, side by side; None where a run does not have it."""

    name: str
    a: float | None
    b: float | None

    @property
    def difference(self) -> float | None:
        """Returns b - a, None unless both are finite."""
        if self.a is None or self.b is None or not (math.isfinite(self.a) and math.isfinite(self.b)):
            return None
        return self.b - self.a


@dataclass(frozen=True, kw_only=True, slots=True)
class TextDiff:
    """A file's unified diff; ``left_out`` counts lines that are not here, ``reason`` is why none is."""

    path: str
    lines: tuple[str, ...] = ()
    left_out: int = 0
    reason: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Differences:
    """What `compare` found; ``files`` is None where a bundle is unknown, ``measures`` has equal ones too."""

    asked: tuple[Change, ...]
    files: tuple[FileChange, ...] | None
    got: tuple[Change, ...]
    result: tuple[Change, ...]
    measures: tuple[Measure, ...]
    notes: tuple[str, ...]


def compare(a: RunFacts, b: RunFacts) -> Differences:
    """Returns what is not the same in the two runs, and their numbers side by side."""
    files: tuple[FileChange, ...] | None = None
    if a.row.bundle == b.row.bundle:
        files = ()
    elif a.entries is not None and b.entries is not None:
        files = tuple(_file_changes(a.entries, b.entries))
    return Differences(
        asked=(*_changes(_asked(a), _asked(b)), *_variable_changes(a, b)),
        files=files,
        got=tuple(_changes(_got(a.outcome), _got(b.outcome))),
        result=tuple(_changes(_result(a), _result(b))),
        measures=tuple(_side_by_side(_measures(a), _measures(b))),
        notes=tuple(_notes(a, b, is_code_known=files is not None)),
    )


def text_diff(path: str, a: bytes, b: bytes) -> TextDiff:
    """Returns the unified diff of a file that both bundles have, or why there is none to show."""
    if max(len(a), len(b)) > MOST_TEXT_BYTES:
        return TextDiff(path=path, reason=f"more than {MOST_TEXT_BYTES // 1024} KiB")
    try:
        before, after = _lines(a), _lines(b)
    except ValueError:
        return TextDiff(path=path, reason="not text")
    if max(len(before), len(after)) > MOST_TEXT_LINES:
        return TextDiff(path=path, reason=f"more than {MOST_TEXT_LINES} lines")
    lines = difflib.unified_diff(before, after, f"a/{path}", f"b/{path}", lineterm="", n=CONTEXT_LINES)
    return TextDiff(path=path, lines=tuple(lines))


def shortened(diffs: Sequence[TextDiff], most_lines: int) -> tuple[TextDiff, ...]:
    """Returns the diffs with the first ``most_lines`` lines of them all."""
    cut, left = [], most_lines
    for diff in diffs:
        kept = diff.lines[:left]
        left -= len(kept)
        left_out = diff.left_out + len(diff.lines) - len(kept)
        cut.append(TextDiff(path=diff.path, lines=kept, left_out=left_out, reason=diff.reason))
    return tuple(cut)


# What a run was asked to do, what it got, what came of it

_NOT_ASKED = frozenset(
    {"version", "run_id", "group_id", "retry_of", "case", "turn", "bundle", "provenance", "env"}
)
_SECRET_VALUE = re.compile(r"://[^/\s]*@")


def _asked(run: RunFacts) -> dict[str, Any]:
    job = {name: value for name, value in run.job.items() if name not in _NOT_ASKED}
    return {"host": run.row.host, **_flat(job)}


def _got(outcome: Outcome) -> dict[str, Any]:
    facts: dict[str, Any] = {"python": outcome.python, "torch": outcome.torch, "allocator": outcome.allocator}
    facts |= _flat({"allocator_settings": dict(outcome.allocator_settings or {})})
    for card in outcome.devices:
        facts[f"devices.{card.uuid}"] = f"cuda:{card.index} {card.name}"
    return {name: value for name, value in facts.items() if value not in (None, {})}


def _result(run: RunFacts) -> dict[str, Any]:
    return {
        "state": str(run.row.state),
        "exit_code": run.row.exit_code,
        "signal": run.row.signal,
        "verdict": None if run.verdict is None else run.verdict.name,
        "exception": run.outcome.exception_type,
        "reasons": [] if run.verdict is None else list(run.verdict.reasons),
        "notes": list(run.outcome.notes),
    }


def _measures(run: RunFacts) -> dict[str, float]:
    found: dict[str, float | None] = dict(run.outcome.metrics)
    if run.row.started_t is not None and run.row.ended_t is not None:
        found["took_s"] = run.row.ended_t - run.row.started_t
    found["peak_rss_bytes"] = run.outcome.peak_rss_bytes
    for peak in run.outcome.peak_memory:
        found[f"{peak.card}.peak_allocated_bytes"] = peak.allocated_bytes
        found[f"{peak.card}.peak_reserved_bytes"] = peak.reserved_bytes
    return {name: value for name, value in found.items() if value is not None}


def _notes(a: RunFacts, b: RunFacts, *, is_code_known: bool) -> Iterator[str]:
    for run in (a, b):
        if not run.has_values:
            yield f"the values of the variables of {run.row.run_id} are not known here: names alone compared"
        if run.entries is None and not is_code_known:
            yield f"the bundle of {run.row.run_id} is not in the object store: its files are not compared"


# Comparing


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns nested mappings as one, their keys joined by dots; lists and empty mappings are values."""
    flat: dict[str, Any] = {}
    for name, inner in value.items():
        path = f"{prefix}{name}"
        flat |= _flat(inner, f"{path}.") if isinstance(inner, Mapping) and inner else {path: inner}
    return flat


def _changes(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Change]:
    for name in dict.fromkeys((*a, *b)):
        change = Change(name=name, a=a.get(name, ABSENT), b=b.get(name, ABSENT))
        if change.a is ABSENT or change.b is ABSENT or not _is_same(change.a, change.b):
            yield change


def _is_same(a: Any, b: Any) -> bool:
    """As JSON spells them: 1, 1.0 and true are three values for the payload that reads them."""
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


def _variable_changes(a: RunFacts, b: RunFacts) -> Iterator[Change]:
    """Where a side's values are unknown, a variable that both have counts as the same."""
    are_known = a.has_values and b.has_values
    for change in _changes(a.job["env"], b.job["env"]):
        is_in_both = change.a is not ABSENT and change.b is not ABSENT
        if are_known or not is_in_both:
            yield Change(
                name=f"env.{change.name}",
                a=_masked(change.name, change.a),
                b=_masked(change.name, change.b),
            )


def _masked(name: str, value: Any) -> Any:
    is_secret = SECRET_NAME.search(name) or _SECRET_VALUE.search(str(value))
    return MASK if value is not ABSENT and is_secret else value


def _file_changes(a: Sequence[Entry], b: Sequence[Entry]) -> Iterator[FileChange]:
    before, after = ({entry.path: entry for entry in entries} for entries in (a, b))
    for path in sorted(before.keys() | after.keys()):
        if before.get(path) != after.get(path):
            yield FileChange(path=path, a=before.get(path), b=after.get(path))


def _side_by_side(a: Mapping[str, float], b: Mapping[str, float]) -> Iterator[Measure]:
    for name in dict.fromkeys((*a, *b)):
        yield Measure(name=name, a=a.get(name), b=b.get(name))


def _lines(data: bytes) -> list[str]:
    """Raises ValueError for what is no text."""
    if b"\0" in data:
        raise ValueError("a zero byte")
    *lines, last = data.decode("utf-8").split("\n")
    return [*lines, last, "\\ No newline at end of file"] if last else lines
