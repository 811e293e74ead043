"""A packed row: documents one after the other, then padding.

Knows where each token's document begins and ends. Everything is computed on the host, where `lengths` is
small, so that later decisions about shapes wait for no device.

Shape letters: S tokens of the row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

HOST = torch.device("cpu")  # said everywhere, since a caller may have set another default device


@dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """Each token's document as [start, end) row indices; a padding token is an empty document of its own."""

    lengths: tuple[int, ...]
    starts_S: Tensor
    ends_S: Tensor

    @property
    def row_length(self) -> int:
        """The number of tokens, padding included."""
        return len(self.starts_S)

    @property
    def positions_S(self) -> Tensor:
        """Positions counted from 0 within each document; 0 in the padding."""
        return torch.arange(self.row_length, device=HOST) - self.starts_S


def pack(lengths: Sequence[int] | Tensor | None, row_length: int) -> Packing:
    """Return the packing of a row of `row_length` tokens; None means one document that fills it.

    Raises:
        ValueError: a length is not positive, or the documents do not fit into the row.
    """
    sizes = _as_tuple(lengths, row_length)
    if any(size <= 0 for size in sizes):
        raise ValueError(f"lengths holds {min(sizes)}; every document has at least 1 token")
    if sum(sizes) > row_length:
        raise ValueError(f"lengths sum to {sum(sizes)}, but the row has {row_length} tokens")
    padding = row_length - sum(sizes)
    repeats = torch.tensor([*sizes, *[1] * padding], device=HOST)
    ends = repeats.cumsum(0)
    starts = ends - repeats
    ends[len(sizes) :] -= 1
    return Packing(
        lengths=sizes, starts_S=starts.repeat_interleave(repeats), ends_S=ends.repeat_interleave(repeats)
    )


def _as_tuple(lengths: Sequence[int] | Tensor | None, row_length: int) -> tuple[int, ...]:
    if lengths is None:
        return (row_length,)
    if isinstance(lengths, Tensor):
        lengths = lengths.flatten().tolist()
    return tuple(int(length) for length in lengths)
