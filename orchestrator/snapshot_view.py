"""A snapshot of torch's CUDA allocator, summed up as lines and as JSON (pure).

Texts of a snapshot come from a host: every line is made safe for a terminal here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from orchestrator.forensics.snapshot import CardSummary, Holding
from orchestrator.supervisor.memory_names import Described
from orchestrator.text import printable, size_text, sized

__all__ = ["snapshot_json", "snapshot_lines"]

MOST_SHOWN = 10
_WIDTH = 11


def snapshot_lines(cards: Sequence[CardSummary]) -> Iterator[str]:
    """Yields what each card held when the snapshot was taken, and at the highest point of its history."""
    if not cards:
        yield "the snapshot holds no memory of any card"
    for card in cards:
        reserved, free = sized(card.reserved_bytes), sized(card.largest_free_bytes)
        yield f"{f'cuda:{card.device}':{_WIDTH}}  {reserved} reserved, {free} free in one piece"
        yield from _holding("when taken", card.now)
        if card.peak != card.now:
            yield from _holding("at the peak", card.peak)


def snapshot_json(cards: Sequence[CardSummary]) -> dict[str, Any]:
    """Returns all of it as JSON values; sizes are bytes."""
    return {"format": 1, "cards": [_card_json(card) for card in cards]}


def _holding(title: str, held: Holding) -> Iterator[str]:
    shares = ", ".join(f"{name} {sized(size)}" for name, size in held.by_category.items())
    yield printable(f"{title:{_WIDTH}}  {sized(held.allocated_bytes)} allocated: {shares or 'nothing'}")
    for block in held.largest[:MOST_SHOWN]:
        yield printable(f"{'':{_WIDTH}}    {size_text(block.bytes):>10}  {_what(block)}")


def _what(block: Described) -> str:
    shape = None if block.shape is None else str(list(block.shape))
    place = f"at {block.where}" if block.where else None
    module = f"in {block.module}" if block.module else None
    phase = f"({block.phase})" if block.phase else None
    return " ".join(filter(None, (block.category, block.name, shape, block.dtype, place, module, phase)))


def _card_json(card: CardSummary) -> dict[str, Any]:
    told = asdict(card)
    for moment, held in (("now", card.now), ("peak", card.peak)):
        told[moment]["largest"] = [block.as_json() for block in held.largest]
    return told
