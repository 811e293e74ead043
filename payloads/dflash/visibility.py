"""The visibility rule, as two intervals of keys for each slot; every attention backend applies it.

`dflash.attention.block_mask_kernels` says it once more, for a GPU; a test compares the two.

A slot of a block sees
- the context: tokens of the anchor's document before the anchor; in a sliding layer of window W only those at
  row index ≥ anchor + slot − (W − 1), the bound that serving engines apply to that query;
- its own block: every slot in a full layer, itself and earlier slots in a sliding one, whose window is never
  smaller than a block. Never another block.

So each slot sees at least itself, and no softmax is over nothing. Anchors are sorted, so neighbouring blocks
see neighbouring tokens, and no bound falls from slot to slot of a block.

Shape letters: N blocks, B slots of a block, T = N·B slots, L slots of some blocks, C context tokens of a
slice, K = C + L keys, X = 4 bounds.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash.blocks import Blocks
from dflash.config import FULL, SLIDING, DrafterConfig
from dflash.packing import HOST
from dflash.transfer import to_device


def visibilities(
    config: DrafterConfig, blocks: Blocks, *, context_length: int, device: torch.device
) -> "dict[str, Visibility]":
    """Return the rule of one row for each kind of layer that the drafter has."""
    windows = {SLIDING: config.sliding_window, FULL: None}
    return {
        kind: Visibility(blocks=blocks, context_length=context_length, window=windows[kind], device=device)
        for kind in dict.fromkeys(config.layer_types)
    }


@dataclass(frozen=True, kw_only=True)
class Visibility:
    """The rule for one row and one kind of layer; `window` is None in full layers."""

    blocks: Blocks
    context_length: int
    window: int | None
    device: torch.device

    @property
    def reach(self) -> int | None:
        """The window, no longer than what there is to see, so that it fits into 32 bits."""
        return None if self.window is None else min(self.window, self.context_length + self.blocks.block_size)

    @functools.cached_property
    def bounds_XT(self) -> Tensor:
        """The keys each slot sees: context tokens [from, until), slots [from, until); int32, on the host."""
        anchors_N1 = self.blocks.anchors_N.int()[:, None]
        starts_N1 = self.blocks.document_starts_N.int()[:, None]
        slots_B = torch.arange(self.blocks.block_size, device=HOST, dtype=torch.int32)
        first_N1 = torch.arange(self.blocks.count, device=HOST, dtype=torch.int32)[:, None] * len(slots_B)
        bounds_XNB = torch.empty(4, self.blocks.count, len(slots_B), device=HOST, dtype=torch.int32)
        bounds_XNB[1], bounds_XNB[2] = anchors_N1, first_N1
        if self.reach is None:
            bounds_XNB[0], bounds_XNB[3] = starts_N1, first_N1 + len(slots_B)
        else:
            bounds_XNB[0] = torch.maximum(starts_N1, anchors_N1 + (slots_B - (self.reach - 1)))
            bounds_XNB[3] = first_N1 + (slots_B + 1)
        return bounds_XNB.flatten(1)

    def context_bounds(self, blocks: slice) -> slice:
        """Return the smallest slice of the context that holds every token a slot of these blocks sees."""
        anchors_n = self.blocks.anchors_N[blocks]
        first_n = self.blocks.document_starts_N[blocks]
        if self.reach is not None:
            first_n = torch.maximum(first_n, anchors_n - (self.reach - 1))
        return slice(int(first_n.min()), int(anchors_n.max()))

    def mask_LK(self, blocks: slice, context: slice) -> Tensor:
        """Return what the blocks' slots see of that context slice, followed by these blocks' own slots."""
        block_size = self.blocks.block_size
        slots = slice(blocks.start * block_size, blocks.stop * block_size)
        context_from_L, context_until_L, slots_from_L, slots_until_L = self._on_device_XT[:, slots]
        return torch.cat(
            [
                _between(context, context_from_L, context_until_L),
                _between(slots, slots_from_L, slots_until_L),
            ],
            dim=1,
        )

    def masks_nBK(self, blocks: slice, context: slice) -> Tensor:
        """Return for each of the blocks what `mask_LK` says of it alone, `[n, B, context + B]`."""
        size = self.blocks.block_size
        slots = slice(blocks.start * size, blocks.stop * size)
        context_from_L, context_until_L, slots_from_L, slots_until_L = self._on_device_XT[:, slots]
        own_n1B = torch.arange(slots.start, slots.stop, device=self.device).view(-1, 1, size)
        own_nBB = (own_n1B >= slots_from_L.view(-1, size, 1)) & (own_n1B < slots_until_L.view(-1, size, 1))
        context_nBK = _between(context, context_from_L, context_until_L).view(len(own_nBB), size, -1)
        return torch.cat([context_nBK, own_nBB], dim=2)

    @functools.cached_property
    def _on_device_XT(self) -> Tensor:
        return to_device(self.bounds_XT, self.device)


def _between(keys: slice, from_L: Tensor, until_L: Tensor) -> Tensor:
    keys_X = torch.arange(keys.start, keys.stop, device=from_L.device)
    return (keys_X >= from_L[:, None]) & (keys_X < until_L[:, None])
