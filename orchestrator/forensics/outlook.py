"""What a payload's estimate says of a configuration, and what would make it fit (pure).

Nothing is invented here: a remedy was predicted by the payload's estimate, or stands in its list of tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from orchestrator.forensics.numbers import Balance
from orchestrator.payload_answers import FITS, NO_CARD, UNFIT, UNSURE
from orchestrator.text import gib

__all__ = ["Outlook", "Remedy", "foreseen", "remedies_of"]

_FAR_ABOVE = 1.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """A change that may make it fit, and what it would come to; None where nobody predicted it.

    ``changes`` are parameters, ``alloc_conf`` a setting of the allocator.
    """

    label: str
    changes: Mapping[str, Any]
    alloc_conf: str | None
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    verdict: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Outlook:
    """What the payload's estimate says of this configuration, and the remedies that it knows to need less.

    ``remedies`` stand in the order of what they cost, the cheapest first, ``left_out`` are those that nobody
    waited for. ``missing`` says why there is none.
    """

    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    capacity_bytes: int | None = None
    error_share: float = 0.0
    verdict: str | None = None
    torch: str | None = None
    remedies: tuple[Remedy, ...] = ()
    left_out: tuple[str, ...] = ()
    missing: str | None = None


def remedies_of(
    outlook: Outlook | None, declared: Mapping[str, Any] | None, balance: Balance
) -> Iterator[Remedy]:
    """Yields what was predicted, what fits first; then what the payload ``declared`` to avoid the tensor,
    where nobody predicted that.
    """
    predicted = () if outlook is None else outlook.remedies
    judged = [_judged(remedy, outlook, balance) for remedy in predicted]
    yield from (remedy for remedy in judged if remedy.verdict == FITS)
    yield from (remedy for remedy in judged if remedy.verdict != FITS)
    if declared and not any(remedy.changes == dict(declared) for remedy in judged):
        yield Remedy(
            label=", ".join(f"{name}={value}" for name, value in declared.items()),
            changes=dict(declared),
            alloc_conf=None,
            peak_allocated_bytes=None,
            peak_reserved_bytes=None,
            verdict=None,
        )


def foreseen(outlook: Outlook | None, balance: Balance) -> Iterator[str]:
    """Yields what was predicted of this configuration as it is; more than that is another's, or nobody's
    that the payload knows.
    """
    if outlook is None:
        return
    if outlook.missing is not None:
        yield f"nothing is predicted: {outlook.missing}"
    peak = outlook.peak_allocated_bytes
    if peak is None or outlook.peak_reserved_bytes is None:
        return
    judged = _judged(_unchanged(outlook), outlook, balance).verdict
    verdict = "" if judged in (None, NO_CARD) else f": {judged}"
    yield f"as it is: {gib(peak)} allocated, {gib(outlook.peak_reserved_bytes)} reserved at most{verdict}"
    wanted = (balance.allocated_bytes or 0) + (balance.asked_bytes or 0)
    if balance.allocated_bytes is not None and wanted > peak * (1 + outlook.error_share) * _FAR_ABOVE:
        yield (
            f"but {gib(wanted)} were allocated and asked for: another configuration printed this, or "
            "something holds memory that the payload does not know of"
        )


def _unchanged(outlook: Outlook) -> Remedy:
    """Returns the configuration as it is, as a remedy that changes nothing."""
    return Remedy(
        label="as it is",
        changes={},
        alloc_conf=None,
        peak_allocated_bytes=outlook.peak_allocated_bytes,
        peak_reserved_bytes=outlook.peak_reserved_bytes,
        verdict=outlook.verdict,
    )


def _judged(remedy: Remedy, outlook: Outlook | None, balance: Balance) -> Remedy:
    """Judges by the room that the message tells of, where the estimate knew no card."""
    room = _whole_room(balance)
    peak = remedy.peak_reserved_bytes
    if remedy.verdict != NO_CARD or room is None or peak is None or outlook is None:
        return remedy
    least, most = (peak * (1 + side * outlook.error_share) for side in (-1, 1))
    verdict = FITS if most <= room else UNFIT if least > room else UNSURE
    return replace(remedy, verdict=verdict)


def _whole_room(balance: Balance) -> int | None:
    """Returns what torch can have of this card as it is: what it holds, and what it could still get."""
    if balance.reserved_bytes is None or balance.room_bytes is None:
        return None
    return balance.reserved_bytes + balance.room_bytes
