"""Block-sparse attention by PyTorch's flex_attention, over whole tiles of queries and keys.

Compiled it skips what nobody sees and holds no scores. Uncompiled it computes and holds all of them, in
float32: that is reported whenever it happens, whatever the cause.

Shape letters: T slots, Q query rows, K key rows, A query heads, G key-value heads, D head_dim.
"""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from dflash.attention.block_masks import build_block_masks
from dflash.attention.interface import TILE_ROWS, KeyLayout, dense_layout, padded_layout
from dflash.compiling import Compiled
from dflash.notices import warn_once
from dflash.platforms import platform_of
from dflash.visibility import Visibility

HOPPER = (9, 0)


def prepare_flex(visibilities: Mapping[str, Visibility], *, is_compiled: bool) -> "dict[str, FlexAttention]":
    """Return flex attention for each kind of layer of one row."""
    some = next(iter(visibilities.values()))
    rows = (some.context_length, some.blocks.count * some.blocks.block_size)
    layout = padded_layout(*rows, tile_rows=TILE_ROWS) if is_compiled else dense_layout(*rows)
    block_masks = build_block_masks(list(visibilities.values()), layout, is_compiled=is_compiled)
    return {
        kind: FlexAttention(
            layout, block_mask, _kernel_options(visibility) if is_compiled else {}, is_compiled=is_compiled
        )
        for (kind, visibility), block_mask in zip(visibilities.items(), block_masks, strict=True)
    }


class FlexAttention:
    """Flex attention with grouped heads, under a block mask in closed form."""

    def __init__(
        self, layout: KeyLayout, block_mask: BlockMask, options: Mapping[str, Any], *, is_compiled: bool
    ) -> None:
        self.layout = layout
        self._block_mask = block_mask
        self._options = options
        self._attend = _attend.when(is_compiled)

    def __call__(self, queries_QAD: Tensor, keys_KGD: Tensor, values_KGD: Tensor) -> Tensor:
        """Return `[T, A·D]`."""
        heads_first = (part.transpose(0, 1)[None] for part in (queries_QAD, keys_KGD, values_KGD))
        mixed_1AQD: Tensor = self._attend(*heads_first, self._block_mask, self._options)
        mixed_QX = mixed_1AQD[0].transpose(0, 1).flatten(1)
        # Even a slice of everything would be copied in backward.
        is_whole = self.layout.slot_rows == self.layout.query_rows
        return mixed_QX if is_whole else mixed_QX[: self.layout.slot_rows]


@Compiled
def _attend(
    queries_1AQD: Tensor, keys_1GKD: Tensor, values_1GKD: Tensor, mask: BlockMask, options: Mapping[str, Any]
) -> Tensor:
    # True while this function is traced, so only what runs uncompiled gets beyond.
    if torch.compiler.is_compiling():
        return _flex(queries_1AQD, keys_1GKD, values_1GKD, mask, options)
    simulated = platform_of(queries_1AQD.device).simulation
    if simulated is not None and simulated.is_compiling:
        return simulated.attend_flex(queries_1AQD, keys_1GKD, values_1GKD, mask)
    heads, rows = queries_1AQD.shape[1:3]
    warn_once(
        "attention",
        f"flex attention runs uncompiled and holds scores [{heads}, {rows}, {keys_1GKD.shape[2]}] in "
        "float32; leave compile on, and see that torch.compile is not disabled",
        cause="flex runs uncompiled",
    )
    if simulated is not None:
        return simulated.attend_flex(queries_1AQD, keys_1GKD, values_1GKD, mask)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "flex_attention called without")  # said better just now
        return _flex(queries_1AQD, keys_1GKD, values_1GKD, mask, {})


def _flex(
    queries_1AQD: Tensor, keys_1GKD: Tensor, values_1GKD: Tensor, mask: BlockMask, options: Mapping[str, Any]
) -> Tensor:
    call: Any = flex_attention  # its options are typed for its own internals
    mixed_1AQD: Tensor = call(
        queries_1AQD, keys_1GKD, values_1GKD, block_mask=mask, enable_gqa=True, kernel_options=dict(options)
    )
    return mixed_1AQD


def _kernel_options(visibility: Visibility) -> dict[str, Any]:
    platform = platform_of(visibility.device)
    if not platform.is_cuda:
        return {}
    # Rows are whole tiles; with lengths that vary the compiler cannot know it and would check every access.
    options: dict[str, Any] = {"IS_DIVISIBLE": True}
    if visibility.window is not None and platform.capability == HOPPER:
        # Few key tiles for each query tile: a shallower pipeline is a sixth faster there, and slower for
        # full layers (docs/performance.md).
        options["bwd_num_stages"] = 2
    return options
