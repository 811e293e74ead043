"""The blocks of one row: where each starts, what it may see, and which of its slots carry loss.

Slot k of a block predicts the token at anchor + k; slot 0 is given. The teacher of slot k is the target's
state one token earlier. A slot is valid when its token lies in the row, in the anchor's document and in the
loss mask. Everything is computed on the host: shapes follow from it, and no later step has to wait for a
device.

Shape letters: S tokens of the row, N blocks, B slots of a block, R valid slots of all blocks.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash.packing import HOST, Packing


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocks:
    """Sorted blocks and their valid slots, the latter ordered by the teacher's token.

    `slots_R` are flat indices into `[N, B]`; label and teacher of each are row indices.
    """

    block_size: int
    anchors_N: Tensor
    document_starts_N: Tensor
    slots_R: Tensor
    labels_R: Tensor
    teachers_R: Tensor

    @property
    def count(self) -> int:
        """The number of blocks, N."""
        return len(self.anchors_N)

    @property
    def has_loss(self) -> bool:
        """Whether any slot is valid."""
        return len(self.slots_R) > 0

    def slot_numbers_R(self) -> Tensor:
        """Return each valid slot's number within its block, 1 … B − 1."""
        return self.slots_R % self.block_size


def lay_out(packing: Packing, loss_mask_S: Tensor, anchors: Tensor, *, block_size: int) -> Blocks:
    """Return the blocks that start at the given anchors, in any order."""
    anchors_N = anchors.sort().values
    tokens_NB = anchors_N[:, None] + torch.arange(block_size, device=HOST)
    valid_NB = _valid_slots(packing, loss_mask_S, tokens_NB)
    slots_R = valid_NB.flatten().nonzero().flatten()
    labels_R, order_R = tokens_NB.flatten()[slots_R].sort(stable=True)
    return Blocks(
        block_size=block_size,
        anchors_N=anchors_N,
        document_starts_N=packing.starts_S[anchors_N],
        slots_R=slots_R[order_R],
        labels_R=labels_R,
        teachers_R=labels_R - 1,
    )


def _valid_slots(packing: Packing, loss_mask_S: Tensor, tokens_NB: Tensor) -> Tensor:
    in_document_NB = tokens_NB < packing.ends_S[tokens_NB[:, :1]]
    counts_NB = loss_mask_S[tokens_NB.clamp(max=packing.row_length - 1)]
    valid_NB = in_document_NB & counts_NB
    valid_NB[:, 0] = False
    return valid_NB
