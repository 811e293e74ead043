"""Who held a card's memory at a process's peak, as the process told when it ended (pure).

An event of kind ``memory`` comes from a payload's process and is believed only as far as its types go.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Held", "read_held"]

MOST_OWNERS = 64
_MOST_BYTES = 2**63


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
    peak_bytes, owners = _size(event.get("peak_allocated_bytes")), event.get("owners")
    if peak_bytes is None or not isinstance(owners, list):
        return None
    by_category: dict[str, int] = {}
    for owner in owners[:MOST_OWNERS]:
        if isinstance(owner, Mapping) and isinstance(category := owner.get("category"), str):
            by_category[category] = by_category.get(category, 0) + (_size(owner.get("bytes")) or 0)
    reason = event.get("reason")
    return Held(
        proc=proc,
        index=_size(event.get("device")) or 0,
        peak_allocated_bytes=peak_bytes,
        by_category=by_category,
        is_whole=event.get("is_whole") is True,
        reason=reason if isinstance(reason, str) else None,
    )


def _size(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < _MOST_BYTES else None
