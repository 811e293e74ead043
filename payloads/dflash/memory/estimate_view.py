"""An estimate as JSON for programs, and as one screen for people."""

from collections.abc import Iterator, Sequence
from typing import Any

from dflash.cards import Card
from dflash.memory.estimating import GIB, Alternative, Estimate
from dflash.memory.report import Failure, Held, PhasePeaks, Report

FORMAT = 1
LARGEST = 10


def as_json(estimate: Estimate) -> dict[str, Any]:
    """Return the estimate as values of JSON; sizes in bytes, an empty text where nothing was simulated."""
    found, trace = estimate.report, estimate.trace
    values: dict[str, Any] = {
        "format": FORMAT,
        "entry": estimate.entry.module,
        "torch": "" if trace is None else trace.torch,
        "seconds": round(estimate.seconds, 2),
        "card": None if estimate.target.card is None else _card(estimate.target.card),
        "capacity_bytes": estimate.capacity_bytes,
        "outside_bytes": estimate.outside_bytes,
        "error_share": estimate.error_share,
        "peak_allocated_bytes": found.peak_allocated_bytes,
        "peak_reserved_bytes": found.peak_reserved_bytes,
        "verdict": found.verdict,
        "failure": None if found.failure is None else _failure(found.failure),
        "phases": [
            {**_phase(phase), "verdict": found.verdicts.get(phase.name, "no card")} for phase in found.phases
        ],
        "execution": "" if trace is None else trace.execution or "",
        "notes": list(estimate.notes),
    }
    if estimate.alternatives is not None:
        values["alternatives"] = [_alternative(alternative) for alternative in estimate.alternatives]
        values["left_out"] = list(estimate.left_out)
    return values


def _card(card: Card) -> dict[str, Any]:
    return {
        "name": card.name,
        "key": card.key,
        "total_bytes": card.total_bytes,
        "capability": list(card.capability),
    }


def _failure(failure: Failure) -> dict[str, Any]:
    block, error = failure.block, failure.error
    return {
        "phase": failure.phase,
        "name": block.name,
        "bytes": block.bytes,
        "segment_bytes": error.segment_bytes,
        "shape": list(block.shape),
        "dtype": block.dtype,
        "category": block.category,
        "module": block.module,
        "where": block.where,
        "allocated_bytes": error.usage.allocated_bytes,
        "reserved_bytes": error.usage.reserved_bytes,
        "largest_free_bytes": error.usage.largest_free_bytes,
    }


def _phase(phase: PhasePeaks) -> dict[str, Any]:
    return {
        "name": phase.name,
        "peak_allocated_bytes": phase.peak_allocated_bytes,
        "peak_reserved_bytes": phase.peak_reserved_bytes,
        "by_category": phase.by_category(),
        "largest": [_held(held) for held in phase.held[:LARGEST]],
    }


def _held(held: Held) -> dict[str, Any]:
    block = held.block
    return {
        "bytes": block.bytes,
        "shape": list(block.shape),
        "dtype": block.dtype,
        "category": block.category,
        "name": block.name,
        "module": block.module,
        "where": block.where,
        "phase": block.phase,
    }


def _alternative(alternative: Alternative) -> dict[str, Any]:
    return {
        "label": alternative.variation.label,
        "set": alternative.variation.set,
        "alloc_conf": alternative.variation.alloc_conf,
        "peak_allocated_bytes": alternative.report.peak_allocated_bytes,
        "peak_reserved_bytes": alternative.report.peak_reserved_bytes,
        "verdict": alternative.report.verdict,
    }


def as_text(estimate: Estimate) -> str:
    """Return the estimate for people, the verdict first; sizes in GiB."""
    return "\n".join(_lines(estimate))


def _lines(estimate: Estimate) -> Iterator[str]:
    trace = estimate.trace
    if trace is None:
        yield f"nothing to estimate: {estimate.notes[0]}"
        return
    yield _verdict_line(estimate)
    yield (
        f"{estimate.entry.module}: {trace.execution or 'nothing computed'}; simulated by torch {trace.torch} "
        f"in {estimate.seconds:.1f} s, no GPU was used; ± {100 * estimate.error_share:.0f} %"
    )
    yield ""
    yield from _phases(estimate.report)
    if estimate.report.phases:
        yield ""
        yield from _highest(estimate.report)
    if estimate.alternatives is not None:
        yield ""
        yield from _others(estimate.alternatives)
    yield ""
    yield from (f"note: {note}" for note in estimate.notes)


def _verdict_line(estimate: Estimate) -> str:
    found, card = estimate.report, estimate.target.card
    needed = f"at most {_gib(found.peak_reserved_bytes)} GiB reserved"
    if estimate.capacity_bytes is None:
        return f"no card: {needed}; name one with --card for a verdict"
    where = "that the memory limit leaves" if card is None else f"that {card.name} leaves"
    room = f"of {_gib(estimate.capacity_bytes)} GiB {where} to the allocator"
    failure = found.failure
    if failure is None:
        return f"{found.verdict}: {needed}, {room}"
    block = failure.block
    named = f" ({block.name})" if block.name else ""
    tensor = f"{block.category}{named} {list(block.shape)} {block.dtype}"
    return (
        f"{found.verdict}: {failure.phase} asks {_gib(failure.error.segment_bytes)} GiB for {tensor} "
        f"at {block.where or 'an unknown place'}, "
        f"with {_gib(failure.error.usage.reserved_bytes)} GiB reserved, {room}"
    )


def _phases(found: Report) -> Iterator[str]:
    rows = [
        (
            phase.name,
            _gib(phase.peak_allocated_bytes),
            _gib(phase.peak_reserved_bytes),
            found.verdicts.get(phase.name, "-"),
        )
        for phase in found.phases
    ]
    return _table(("phase", "allocated GiB", "reserved GiB", "verdict"), rows)


def _highest(found: Report) -> Iterator[str]:
    """Yield what the highest peak is made of, by category and tensor by tensor."""
    highest = max(found.phases, key=lambda phase: phase.peak_allocated_bytes)
    sums = ", ".join(f"{name} {_gib(size)}" for name, size in highest.by_category().items())
    yield f"at the peak of {highest.name}, GiB: {sums}"
    yield ""
    yield from _table(
        ("largest GiB", "shape", "dtype", "category", "name", "module", "where"),
        [_row(held) for held in highest.held[:LARGEST]],
    )


def _others(alternatives: Sequence[Alternative]) -> Iterator[str]:
    rows = [
        (
            alternative.variation.label,
            _gib(alternative.report.peak_allocated_bytes),
            _gib(alternative.report.peak_reserved_bytes),
            alternative.report.verdict,
        )
        for alternative in alternatives
    ]
    return _table(("with", "allocated GiB", "reserved GiB", "verdict"), rows)


def _row(held: Held) -> tuple[str, ...]:
    block = held.block
    return (
        _gib(block.bytes),
        "×".join(map(str, block.shape)) or "-",
        block.dtype,
        block.category,
        block.name or "-",
        block.module or "-",
        block.where or "-",
    )


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table; columns named in GiB are aligned to the right."""
    lines = [titles, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(titles))]
    for line in lines:
        cells = (
            cell.rjust(width) if "GiB" in title else cell.ljust(width)
            for cell, width, title in zip(line, widths, titles, strict=True)
        )
        yield "  ".join(cells).rstrip()


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"
