"""Estimates of memory as lines, tables and JSON values, alone and beside what was measured (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from orchestrator.payload_answers import NO_CARD, UNSURE, Alternative, Estimate, Failure, Tensor, as_json
from orchestrator.predicted import Comparison
from orchestrator.predicting import Forecast, Prediction
from orchestrator.text import gib, size_text
from orchestrator.views import plain

if TYPE_CHECKING:
    from rich.table import Table

__all__ = [
    "alternatives_table",
    "cases_table",
    "categories_table",
    "comparison_table",
    "estimate_line",
    "failure_text",
    "forecast_json",
    "largest_table",
    "phases_table",
    "provenance_text",
]

MOST_TENSORS = 10
MOST_PHASES = 50
MOST_NOTES = 20
MOST_EXECUTIONS = 4


def estimate_line(estimate: Estimate, card_name: str | None = None) -> str:
    """Returns an estimate in one line; ``card_name`` is what the card itself is called."""
    if not estimate.phases:
        return "nothing to estimate"
    error = f"within {estimate.error_share * 100:g} %"
    sizes = f"{gib(estimate.peak_allocated_bytes)} allocated, {gib(estimate.peak_reserved_bytes)} reserved"
    if estimate.verdict == NO_CARD or estimate.capacity_bytes is None:
        return f"{sizes}, {error}; no verdict, since no card is known"
    verdict = "it may fit or not" if estimate.verdict == UNSURE else estimate.verdict
    return f"{sizes} of {_room(estimate, card_name)}, {error}: {verdict}"


def failure_text(failure: Failure) -> str:
    """Returns which allocation the card would refuse."""
    named = _named(failure.category, failure.name) or "a tensor"
    tensor = " ".join(filter(None, (named, _shape(failure.shape), failure.dtype)))
    place = "".join(
        f" {word} {name}" for word, name in (("at", failure.where), ("in", failure.module)) if name
    )
    held = f"with {gib(failure.allocated_bytes)} allocated of {gib(failure.reserved_bytes)} reserved"
    free = failure.largest_free_bytes
    piece = "" if free is None else f", the largest free piece {gib(free)}"
    return f"{tensor} of {gib(failure.bytes)}{place}, in phase {failure.phase}, {held}{piece}"


def provenance_text(estimates: Iterable[Estimate]) -> str:
    """Returns what estimates speak for, and how long they took; nothing where there was nothing to do."""
    made = [estimate for estimate in estimates if estimate.phases]
    torches, executions = (
        list(dict.fromkeys(getattr(estimate, name) for estimate in made)) for name in ("torch", "execution")
    )
    took = f"estimated in {sum(estimate.seconds for estimate in made):.1f} s"
    return f"torch {', '.join(torches)}; {'; '.join(executions[:MOST_EXECUTIONS])}; {took}" if made else ""


def phases_table(estimate: Estimate) -> Table:
    """Returns the peaks of each phase, and whether it fits."""
    table = _table("PHASE", ">ALLOCATED", ">RESERVED", "VERDICT")
    for phase in estimate.phases[:MOST_PHASES]:
        peaks = (gib(phase.peak_allocated_bytes), gib(phase.peak_reserved_bytes))
        table.add_row(*map(plain, (phase.name, *peaks, phase.verdict or "-")))
    return table


def categories_table(estimate: Estimate) -> Table:
    """Returns who holds the memory at the highest peak, the largest first."""
    phase = estimate.highest
    table = _table("CATEGORY" if phase is None else f"CATEGORY (in {phase.name})", ">SIZE", ">SHARE")
    for category, size in sorted(_held(estimate), key=lambda held: -held[1]):
        share = size / max(1, estimate.peak_allocated_bytes)
        table.add_row(plain(category), plain(gib(size)), plain(f"{share:.1%}"))
    return table


def largest_table(estimate: Estimate) -> Table:
    """Returns the largest tensors that live at the highest peak."""
    table = _table("LARGEST", ">SIZE", "CATEGORY", "SHAPE", "DTYPE", "MODULE", "MADE AT")
    for tensor in _largest(estimate):
        words = (tensor.category, _shape(tensor.shape) or "-", tensor.dtype or "-", tensor.module or "-")
        made = " ".join(filter(None, (tensor.where, tensor.phase and f"({tensor.phase})")))
        table.add_row(*map(plain, (tensor.name or "-", gib(tensor.bytes), *words, made or "-")))
    return table


def alternatives_table(estimate: Estimate, alternatives: Sequence[Alternative]) -> Table:
    """Returns what changes would come to, beside the estimate without them."""
    table = _table("CHANGE", ">ALLOCATED", ">RESERVED", ">DIFFERENCE", "VERDICT")
    for each in alternatives:
        sizes = (gib(each.peak_allocated_bytes), gib(each.peak_reserved_bytes))
        difference = each.peak_allocated_bytes - estimate.peak_allocated_bytes
        table.add_row(*map(plain, (each.label, *sizes, _signed(difference), each.verdict)))
    return table


def cases_table(cases: Iterable[tuple[str, Forecast]]) -> Table:
    """Returns one line for each case; where an estimate could not be made, why."""
    table = _table("CASE", ">ALLOCATED", ">RESERVED", "VERDICT", "LARGEST")
    for label, forecast in cases:
        if (estimate := forecast.estimate) is None:
            table.add_row(*map(plain, (label, "-", "-", "-", forecast.error or "-")))
            continue
        if not estimate.phases:
            table.add_row(*map(plain, (label, "-", "-", "-", estimate_line(estimate))))
            continue
        peaks = (gib(estimate.peak_allocated_bytes), gib(estimate.peak_reserved_bytes))
        largest = next(map(_tensor, _largest(estimate)), "-")
        table.add_row(*map(plain, (label, *peaks, estimate.verdict, largest)))
    return table


def comparison_line(prediction: Prediction, found: Comparison | None) -> str:
    """Returns what was predicted of a run beside what was measured, in one line."""
    estimate = prediction.estimate
    if found is None:
        name = None if prediction.card is None else prediction.card.name
        return f"{estimate_line(estimate, name)}; no peak was measured"
    measured = f"{gib(found.measured_allocated_bytes)} allocated on {found.card}"
    if found.is_cut_short:
        return f"{gib(found.predicted_allocated_bytes)} allocated predicted; the run ended at {measured}"
    rest = f"{_signed(found.unexplained_bytes)} unexplained ({found.unexplained_share:+.1%})"
    return f"{gib(found.predicted_allocated_bytes)} allocated predicted, {measured}: {rest}"


def comparison_table(found: Comparison) -> Table:
    """Returns predicted and measured memory per category, and what is left between the two peaks."""
    table = _table("MEMORY AT THE PEAK", ">PREDICTED", ">MEASURED", ">DIFFERENCE")
    for share in found.shares:
        measured, difference = share.measured_bytes, share.difference_bytes
        told = ("-", "-") if measured is None else (gib(measured), _signed(difference or 0))
        table.add_row(*map(plain, (share.category, gib(share.predicted_bytes), *told)))
    for label, predicted, measured in (
        ("allocated", found.predicted_allocated_bytes, found.measured_allocated_bytes),
        ("reserved", found.predicted_reserved_bytes, found.measured_reserved_bytes),
    ):
        sizes = (gib(predicted), gib(measured), _signed(measured - predicted))
        table.add_row(*map(plain, (label, *sizes)))
    rest = "-" if found.is_cut_short else _signed(found.unexplained_bytes)
    table.add_row(*map(plain, ("unexplained", "", "", rest)))
    return table


def forecast_json(label: str | None, forecast: Forecast) -> dict[str, Any]:
    """Returns a case with all that an estimate says, or why there is none."""
    question, estimate = forecast.question, forecast.estimate
    return {
        "case": label,
        "params": question.params,
        "alloc_conf": question.alloc_conf,
        "memory_limit_bytes": question.memory_limit_bytes,
        "estimate": None if estimate is None else as_json(estimate),
        "error": None if forecast.error is None else str(forecast.error),
    }


def prediction_json(prediction: Prediction, found: Comparison | None) -> dict[str, Any]:
    """Returns what was predicted of a run, and what it comes to beside what was measured."""
    return {
        "estimate": as_json(prediction.estimate),
        "card": None if prediction.card is None else prediction.card.as_json(),
        "comparison": None if found is None else found.as_json(),
    }


def _room(estimate: Estimate, card_name: str | None) -> str:
    """Returns what the allocator and all beside it may take, and of which card that is.

    A limit, orch's or the program's own, shows in that: it leaves less than the card has.
    """
    card, room = estimate.card, (estimate.capacity_bytes or 0) + estimate.outside_bytes
    is_limited = card is None or room < card.total_bytes
    total = room if card is None else min(room, card.total_bytes)
    names = [card_name or (card.name if card else None), "a memory limit" if is_limited else None]
    return f"{gib(total)} ({', '.join(filter(None, names))})"


def _held(estimate: Estimate) -> list[tuple[str, int]]:
    return [] if estimate.highest is None else [*estimate.highest.by_category.items()]


def _largest(estimate: Estimate) -> list[Tensor]:
    return [] if estimate.highest is None else estimate.highest.largest[:MOST_TENSORS]


def _tensor(tensor: Tensor) -> str:
    named = _named(tensor.category, tensor.name)
    return " ".join(filter(None, (named, gib(tensor.bytes), _shape(tensor.shape), tensor.dtype)))


def _named(category: str | None, name: str | None) -> str | None:
    """Returns what a tensor is and what it is called: ``scores (bmm)``."""
    return f"{category} ({name})" if category and name else category or name


def _shape(shape: Sequence[int] | None) -> str:
    return "" if shape is None else f"[{', '.join(map(str, shape))}]"


def _signed(size_bytes: int) -> str:
    """Returns a difference; one that GiB would show as nothing in a smaller unit."""
    if abs(size_bytes) >= 2**30 // 100:
        return f"{size_bytes / 2**30:+.2f} GiB"
    return "0" if size_bytes == 0 else f"{'-' if size_bytes < 0 else '+'}{size_text(abs(size_bytes))}"


def _table(*titles: str) -> Table:
    """Returns a table without lines; a title that begins with ``>`` stands over numbers."""
    from rich.table import Table  # noqa: PLC0415

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in titles:
        table.add_column(plain(title.removeprefix(">")), justify="right" if title.startswith(">") else "left")
    return table
