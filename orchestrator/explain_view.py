"""An explanation of memory that was out, as lines and as JSON (pure).

Texts of an explanation may come from a host: every line is made safe for a terminal here.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from orchestrator.forensics.explain import Explanation
from orchestrator.forensics.naming import Candidate, Naming
from orchestrator.forensics.outlook import Outlook, Remedy
from orchestrator.text import gib, printable

__all__ = ["explanation_json", "explanation_lines", "remedy_lines", "short_lines"]

MOST_SHORT_LINES = 12
_MOST_SHORT_CHARACTERS = 400
_WIDTH = 9


def explanation_lines(
    found: Explanation, *, run_id: str | None = None, where: str | None = None
) -> Iterator[str]:
    """Yields the answer, and then what it stands on, section by section, but for what to do next.

    ``where`` is the stream of the run that its message was printed to.
    """
    yield printable(found.answer)
    has_text = found.message is not None and bool(found.message.text)
    sections: Mapping[str, Iterable[str]] = {
        "params": found.of_params,
        "asked": found.asked,
        "held": found.held,
        "tensor": found.tensor,
        "cause": _cause(found),
        "message": [_message_text(found, where)] if has_text else [],
        "also": (*_further(found, run_id, where), *found.notes),
    }
    for title, lines in sections.items():
        yield from _section(title, lines)


def remedy_lines(found: Explanation) -> Iterator[str]:
    """Yields what was predicted of it as it is, or why nothing was, and what can be tried next, with what
    each way comes to.
    """
    yield from _section("predicted", found.foreseen)
    yield from _section("next", _remedies(found))


def short_lines(found: Explanation, run_id: str, most_lines: int = MOST_SHORT_LINES) -> list[str]:
    """Returns the answer with what matters most, in at most so many lines, the last of which says where to
    read on.
    """
    tensor, free = _short_tensor(found), filter(None, [found.balance.free_text])
    held = [line.strip() for line in found.held[:3]]
    advice = list(_remedies(found))[:1]
    lines = [found.answer, *tensor, *free, *held, *found.cause.evidence[:1], *advice]
    kept = [printable(line)[:_MOST_SHORT_CHARACTERS] for line in dict.fromkeys(lines)][: most_lines - 1]
    return [kept[0], *(f"  {line}" for line in kept[1:]), f"  more: orch explain {run_id}"]


def _short_tensor(found: Explanation) -> list[str]:
    """Returns why it is this tensor; of one that another run makes why it is not this run's."""
    if found.naming is None or not found.naming.candidates:
        return list(found.tensor[:1])
    best = found.naming.candidates[0]
    if found.naming.not_this_run:
        return [*filter(None, [best.whose]), *found.naming.ruled_out[:2]]
    return list(best.evidence[:3])


def explanation_json(found: Explanation | None, *, run_id: str | None, where: str | None) -> dict[str, Any]:
    """Returns all of it as JSON values; sizes are bytes."""
    if found is None:
        return {"format": 1, "run_id": run_id, "answer": None}
    return {
        "format": 1,
        "run_id": run_id,
        "answer": found.answer,
        "cause": asdict(found.cause),
        "balance": asdict(found.balance),
        "message": None if found.message is None else asdict(found.message),
        "where": where,
        "capture": None if found.capture is None else asdict(found.capture),
        "tensor": None if found.naming is None else _naming_json(found.naming),
        "why_unnamed": list(found.tensor) if found.naming is None else [],
        "would_fit": [_remedy_json(remedy) for remedy in found.remedies],
        "foreseen": list(found.foreseen),
        "estimate": None if found.outlook is None else _outlook_json(found.outlook),
        "of_params": list(found.of_params),
        "notes": list(found.notes),
    }


def _section(title: str, lines: Iterable[str]) -> Iterator[str]:
    for number, line in enumerate(lines):
        yield f"{'' if number else title:{_WIDTH}}  {printable(line)}"


def _message_text(found: Explanation, where: str | None) -> str:
    message = found.message
    assert message is not None
    place = "" if message.line is None or where is None else f"{where}:{message.line} | "
    return f"{place}{message.text}"


def _further(found: Explanation, run_id: str | None, where: str | None) -> Iterator[str]:
    """Yields where to look on: the whole snapshot, and who printed what seems to be another's."""
    if run_id and found.capture is not None and found.capture.snapshot:
        file = shlex.quote(found.capture.snapshot)
        yield f"all that torch's allocator held, for its viewer: orch fetch {run_id} {file}"
    is_foreign = found.naming is not None and found.naming.not_this_run
    if is_foreign and run_id and where and found.message is not None and found.message.line is not None:
        yield f"which process printed it: orch logs --where {run_id}/{where}:{found.message.line}"


def _cause(found: Explanation) -> Iterator[str]:
    yield found.cause.sentence
    yield from (f"  {line}" for line in found.cause.evidence)


def _remedies(found: Explanation) -> Iterator[str]:
    """Yields what was predicted with its peaks, then what the cause asks for."""
    if found.cause.advice is not None:
        yield found.cause.advice
    for remedy in found.remedies:
        label = ", ".join(filter(None, (remedy.label, remedy.alloc_conf)))
        if remedy.peak_reserved_bytes is None:
            yield f"{label}: avoids this tensor; not predicted"
            continue
        allocated = gib(remedy.peak_allocated_bytes or 0)
        yield f"{label}: {allocated} allocated, {gib(remedy.peak_reserved_bytes)} reserved: {remedy.verdict}"
    if found.outlook is not None and found.outlook.left_out:
        yield f"not estimated, which would take longer: {'; '.join(found.outlook.left_out)}"


def _naming_json(naming: Naming) -> dict[str, Any]:
    return {
        "summary": naming.summary,
        "not_this_run": naming.not_this_run,
        "unknown": naming.unknown,
        "candidates": [_candidate_json(candidate) for candidate in naming.candidates],
        "ruled_out": list(naming.ruled_out),
    }


def _candidate_json(candidate: Candidate) -> dict[str, Any]:
    tensor, fit = candidate.tensor, candidate.fit
    return {
        "name": tensor.name,
        "category": tensor.category,
        "of": candidate.label,
        "also_of": list(candidate.also),
        "is_this_run": candidate.is_this_run,
        "confidence": candidate.confidence,
        "shape": list(fit.shape),
        "shape_text": fit.shape_text,
        "dtype": fit.dtype,
        "pieces": fit.pieces,
        "bytes": fit.size_bytes,
        "expression": [dimension.expression for dimension in tensor.dimensions],
        "born": tensor.born,
        "evidence": list(candidate.evidence),
    }


def _remedy_json(remedy: Remedy) -> dict[str, Any]:
    return {**asdict(remedy), "changes": dict(remedy.changes)}


def _outlook_json(outlook: Outlook) -> dict[str, Any]:
    return {name: value for name, value in asdict(outlook).items() if name != "remedies"}
