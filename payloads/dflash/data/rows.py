"""What the data side hands on: a document, and a packed row of several.

Knows neither files nor tokenizers. Shape letters: T tokens of a document, S of a row (the token budget).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Tokens = NDArray[np.int32]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Document:
    """Token ids int32 `[T]`, which of them are learnt, bool `[T]`, and its place ("file.jsonl:7")."""

    tokens: Tokens
    loss_mask: Mask
    source: str


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedRow:
    """A micro-batch: whole documents one after the other, then padding.

    `input_ids_1S` is int64, `loss_mask_1S` bool and false in the padding; `documents` are indices into the
    corpus, in the row's order, and `lengths` their tokens. `number` counts from 0 within the epoch; with the
    seed, epoch and number alone decide what is drawn for the row, never a rank.
    """

    epoch: int
    number: int
    documents: tuple[int, ...]
    input_ids_1S: Tensor
    loss_mask_1S: Tensor
    lengths: tuple[int, ...]


def has_trainable_pair(loss_mask: Mask) -> bool:
    """Return whether a block could start in the document: a learnt token with a learnt one behind it."""
    return bool(np.any(loss_mask[:-1] & loss_mask[1:]))
