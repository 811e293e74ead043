"""The textbook formula over a dense mask, in float32 or wider.

Shape letters: Q = T slots, K = S + T keys, A query heads, G key-value heads, D head_dim.
"""

import torch
from torch import Tensor

from dflash.attention.interface import dense_layout
from dflash.visibility import Visibility


class EagerAttention:
    """Scores of every slot with every key."""

    def __init__(self, visibility: Visibility) -> None:
        blocks, context = slice(0, visibility.blocks.count), slice(0, visibility.context_length)
        self.layout = dense_layout(context.stop, blocks.stop * visibility.blocks.block_size)
        self._mask_QK = visibility.mask_LK(blocks, context)

    def __call__(self, queries_QAD: Tensor, keys_KGD: Tensor, values_KGD: Tensor) -> Tensor:
        """Return `[T, A·D]`."""
        dtype, exact = queries_QAD.dtype, torch.promote_types(torch.float32, queries_QAD.dtype)
        heads_per_group = queries_QAD.shape[1] // keys_KGD.shape[1]
        keys_KAD, values_KAD = (
            part.to(exact).repeat_interleave(heads_per_group, dim=1) for part in (keys_KGD, values_KGD)
        )
        scores_AQK = (
            torch.einsum("qad,kad->aqk", queries_QAD.to(exact), keys_KAD) / queries_QAD.shape[2] ** 0.5
        )
        shares_AQK = scores_AQK.masked_fill(~self._mask_QK, -torch.inf).softmax(dim=-1)
        return torch.einsum("aqk,kad->qad", shares_AQK, values_KAD).flatten(1).to(dtype)
