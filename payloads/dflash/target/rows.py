"""A packed row as a target runs it: documents apart from one another, nothing else than documents.

transformers takes a position that does not follow its predecessor for the beginning of another document, and
masks attention accordingly. Layers with a memory that flows along the row want a gap before each document
(`dflash.target.recurrence`). Padding is left out: it would cost a large model as much as text does.

Shape letters: S tokens of the row as packed, D tokens of its documents, T tokens as the target runs them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash.packing import HOST, pack

ROUNDING = 64  # few different lengths let the allocator use the same memory again


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetRow:
    """Tokens and positions `[1, T]`, and indices into T, all on the host.

    `kept_D` are the documents' tokens in order, `firsts_N` the first of each document, `is_text_T` tells the
    documents' tokens from gaps and what rounds the length up.
    """

    input_ids_1T: Tensor
    position_ids_1T: Tensor
    kept_D: Tensor
    firsts_N: Tensor
    is_text_T: Tensor

    @property
    def is_contiguous(self) -> bool:
        """Whether the documents stand at the beginning without gaps."""
        return len(self.kept_D) == 0 or int(self.kept_D[-1]) == len(self.kept_D) - 1


def lay_out_row(input_ids_1S: Tensor, lengths: Sequence[int], *, gap: int) -> TargetRow:
    """Return the row with `gap` filling tokens before each document but the first.

    Raises:
        ValueError: the row is no `[1, S]`, holds no document, or the documents do not fit into it.
    """
    if input_ids_1S.ndim != 2 or len(input_ids_1S) != 1:
        raise ValueError(f"input_ids has shape {tuple(input_ids_1S.shape)}, expected (1, row length)")
    packing = pack(lengths, input_ids_1S.shape[1])
    if not packing.lengths:
        raise ValueError("the row holds no document; leave such rows out")
    sizes = torch.tensor(packing.lengths, device=HOST)
    documents = len(sizes)
    text = int(sizes.sum())
    numbers_D = torch.arange(documents, device=HOST).repeat_interleave(sizes)
    kept_D = torch.arange(text, device=HOST) + gap * numbers_D
    length = -(-(text + gap * (documents - 1)) // ROUNDING) * ROUNDING
    ids_T = torch.zeros(length, dtype=torch.long, device=HOST)
    positions_T = torch.zeros(length, dtype=torch.long, device=HOST)
    is_text_T = torch.zeros(length, dtype=torch.bool, device=HOST)
    ids_T[kept_D] = input_ids_1S[0, :text].to(HOST, torch.long)
    positions_T[kept_D] = packing.positions_S[:text]
    is_text_T[kept_D] = True
    return TargetRow(
        input_ids_1T=ids_T[None],
        position_ids_1T=positions_T[None],
        kept_D=kept_D,
        firsts_N=kept_D[sizes.cumsum(0) - sizes],
        is_text_T=is_text_T,
    )
