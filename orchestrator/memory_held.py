"""Who held a card's memory at a process's peak, as the process told when it ended (pure).

An event of kind ``memory`` comes from a payload's process and is believed only as far as its types go.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.told_values import mappings, size, text

__all__ = ["Held", "read_held"]

MOST_OWNERS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """What ``proc`` held on its card ``index`` at the peak, by category.

    Where the peak lies before what the process remembers, ``is_whole`` is false and ``reason`` says so.
    """

    proc: str
    index: int
    peak_allocated_bytes: int
    by_category: Mapping[str, int]
    is_whole: bool
    reason: str | None = None


def read_held(proc: str, event: Mapping[str, Any]) -> Held | None:
    """Returns what an event says; None where it says nothing that could be believed."""
    peak_bytes, owners = size(event.get("peak_allocated_bytes")), event.get("owners")
    if peak_bytes is None or not isinstance(owners, list):
        return None
    by_category: dict[str, int] = {}
    for owner in mappings(owners, MOST_OWNERS):
        if (category := text(owner.get("category"))) is not None:
            by_category[category] = by_category.get(category, 0) + (size(owner.get("bytes")) or 0)
    return Held(
        proc=proc,
        index=size(event.get("device")) or 0,
        peak_allocated_bytes=peak_bytes,
        by_category=by_category,
        is_whole=event.get("is_whole") is True,
        reason=text(event.get("reason")),
    )
