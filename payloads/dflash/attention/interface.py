"""What a layer hands to attention and gets back, and where each key stands.

Queries, keys and values come in buffers laid out by `KeyLayout`: context first, slots after it, and rows of
zeros where a backend wants whole tiles.

Shape letters: S context tokens, T slots, Q query rows, K key rows, A query heads, G key-value heads,
D head_dim.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from dflash.tiling import TILE_ROWS

__all__ = ["TILE_ROWS", "Attend", "KeyLayout", "dense_layout", "padded_layout"]


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyLayout:
    """Rows of the key and query buffers; what lies between and behind the parts is padding of zeros."""

    context_rows: int
    slot_rows: int
    slot_start: int
    key_rows: int
    query_rows: int

    @property
    def slots(self) -> slice:
        """The slots' rows among the keys."""
        return slice(self.slot_start, self.slot_start + self.slot_rows)

    @property
    def padding(self) -> tuple[slice, slice]:
        """The two ranges of key rows that hold nothing; either may be empty."""
        return slice(self.context_rows, self.slot_start), slice(self.slots.stop, self.key_rows)


def dense_layout(context_rows: int, slot_rows: int) -> KeyLayout:
    """Return the layout without padding."""
    return padded_layout(context_rows, slot_rows, tile_rows=1)


def padded_layout(context_rows: int, slot_rows: int, *, tile_rows: int) -> KeyLayout:
    """Return the layout in which context and slots each fill whole tiles."""
    slot_start, query_rows = (-(-rows // tile_rows) * tile_rows for rows in (context_rows, slot_rows))
    return KeyLayout(
        context_rows=context_rows,
        slot_rows=slot_rows,
        slot_start=slot_start,
        key_rows=slot_start + query_rows,
        query_rows=query_rows,
    )


class Attend(Protocol):
    """Attention prepared for one row and one kind of layer."""

    @property
    def layout(self) -> KeyLayout:
        """How this backend wants its buffers."""

    def __call__(self, queries_QAD: Tensor, keys_KGD: Tensor, values_KGD: Tensor) -> Tensor:
        """Return `[T, A·D]`; keys and queries are rotated already."""
