"""The one visibility rule that every attention backend applies.

A slot of a block sees
- the context: tokens of the anchor's document before the anchor; in a sliding layer of window W only those at
  row index ≥ anchor + slot − (W − 1), the bound that serving engines apply to that query;
- its own block: every slot in a full layer, itself and earlier slots in a sliding one, whose window is never
  smaller than a block. Never another block.

So each slot sees at least itself, and no softmax is over nothing.

Shape letters: C context tokens of a slice, N blocks, n blocks of a slice, B slots of a block, T = n·B slots,
K = C + T keys.
"""

import torch
from torch import Tensor

from dflash.blocks import Blocks


class Visibility:
    """The rule for one row and one kind of layer; `window` is None in full layers."""

    def __init__(
        self, blocks: Blocks, *, context_length: int, window: int | None, device: torch.device
    ) -> None:
        self.blocks = blocks
        self.context_length = context_length
        self.window = window
        self.device = device
        self._anchors_N = blocks.anchors_N.to(device)
        self._document_starts_N = blocks.document_starts_N.to(device)

    def context_bounds(self, blocks: slice) -> slice:
        """Return the smallest slice of the context that holds every token a slot of these blocks sees."""
        anchors_n = self.blocks.anchors_N[blocks]
        first_n = self.blocks.document_starts_N[blocks]
        if self.window is not None:
            first_n = torch.maximum(first_n, anchors_n - (self.window - 1))
        return slice(int(first_n.min()), int(anchors_n.max()))

    def mask_TK(self, blocks: slice, context: slice) -> Tensor:
        """Return what the blocks' slots see of that context slice, followed by these blocks' own slots."""
        return torch.cat([self._context_mask_TC(blocks, context), self._block_mask_TT(blocks)], dim=1)

    def _context_mask_TC(self, blocks: slice, context: slice) -> Tensor:
        anchors_n11 = self._anchors_N[blocks, None, None]
        first_nB1 = self._document_starts_N[blocks, None, None]
        if self.window is not None:
            slots_B1 = torch.arange(self.blocks.block_size, device=self.device)[:, None]
            first_nB1 = torch.maximum(first_nB1, anchors_n11 + slots_B1 - (self.window - 1))
        keys_C = torch.arange(context.start, context.stop, device=self.device)
        mask_nBC = (keys_C >= first_nB1) & (keys_C < anchors_n11)
        return mask_nBC.expand(-1, self.blocks.block_size, -1).flatten(0, 1)

    def _block_mask_TT(self, blocks: slice) -> Tensor:
        slots_T = torch.arange((blocks.stop - blocks.start) * self.blocks.block_size, device=self.device)
        block_T = slots_T // self.blocks.block_size
        mask_TT = block_T[:, None] == block_T
        return mask_TT if self.window is None else mask_TT & (slots_T <= slots_T[:, None])
