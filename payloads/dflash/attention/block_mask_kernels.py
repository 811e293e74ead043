"""`dflash.attention.block_masks` as two Triton kernels: on a GPU each launch costs more than its work.

The first takes a tile of queries: their bounds, the state of each key tile, and the row's lists. The second
takes a tile of keys and gathers its column's lists from the states.

Shape letters: M masks, N blocks, X = 4 bounds, Q query rows, K key rows, I query tiles, J key tiles,
S = 2 states of a tile (partial, full).
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from dflash.attention.interface import TILE_ROWS, KeyLayout
from dflash.compiling import FirstCalls

KEY_TILES = 64  # of those that a program looks at together

_first_calls = FirstCalls()


def fill(
    anchors_N: Tensor,
    starts_N: Tensor,
    windows_M: Tensor,
    bounds_MXQ: Tensor,
    states_MIJ: Tensor,
    lists: Sequence[Tensor],
    *,
    block_size: int,
    layout: KeyLayout,
) -> None:
    """Fill bounds, states, and counts and indices by query and by key; all int32 and zero before."""
    masks, query_tiles, key_tiles = states_MIJ.shape
    steps = triton.next_power_of_2(triton.cdiv(key_tiles, KEY_TILES))
    columns = triton.next_power_of_2(query_tiles)
    # Triton launches on the current card, whatever card the tensors are on.
    with torch.cuda.device_of(bounds_MXQ), _first_calls.guard(bounds_MXQ.device, steps, columns):
        _take_query_tile[(masks, query_tiles)](
            anchors_N,
            starts_N,
            windows_M,
            bounds_MXQ,
            states_MIJ,
            *lists[:2],
            block_size,
            layout.slot_rows,
            layout.slot_start,
            masks,
            query_tiles,
            key_tiles,
            ROWS=TILE_ROWS,
            TILES=KEY_TILES,
            STEPS=steps,
        )
        _take_key_tile[(masks, key_tiles)](
            states_MIJ, *lists[2:], masks, query_tiles, key_tiles, TILES=columns
        )


@triton.jit
def _take_query_tile(  # type: ignore[no-untyped-def]
    anchors_N,
    starts_N,
    windows_M,
    bounds_MXQ,
    states_MIJ,
    counts_SMI,
    order_SMIJ,
    block_size,
    slots,
    slot_start,
    masks,
    query_tiles,
    key_tiles,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    STEPS: tl.constexpr,
):
    mask, tile = tl.program_id(0), tl.program_id(1)
    query = tile * ROWS + tl.arange(0, ROWS)
    is_slot = query < slots
    block = query // block_size
    anchor = tl.load(anchors_N + block, mask=is_slot, other=0)
    start = tl.load(starts_N + block, mask=is_slot, other=0)
    window = tl.load(windows_M + mask)
    first = block * block_size
    reach = tl.where(window > 0, anchor + (query - first) - (window - 1), 0)
    context_from = tl.where(is_slot, tl.maximum(start, reach), 0)
    slots_from = slot_start + tl.where(is_slot, first, query)
    slots_until = slot_start + tl.where(is_slot & (window == 0), first + block_size, query + 1)
    rows = query_tiles * ROWS
    place = bounds_MXQ + mask * 4 * rows + query
    tl.store(place, context_from)
    tl.store(place + rows, anchor)
    tl.store(place + 2 * rows, slots_from)
    tl.store(place + 3 * rows, slots_until)

    line = mask * query_tiles + tile
    full_line = line + masks * query_tiles
    partial_count = 0
    full_count = 0
    # A power of two of steps, so that lengths that vary need few kernels; the last may find nothing.
    for step in range(STEPS):
        keys = step * TILES + tl.arange(0, TILES)
        low = keys[None] * ROWS
        high = low + ROWS
        in_context = (context_from[:, None] < high) & (anchor[:, None] > low)
        in_context = in_context & (context_from < anchor)[:, None]
        in_block = (slots_from[:, None] < high) & (slots_until[:, None] > low)
        meets = tl.max((in_context | in_block).to(tl.int32), 0)
        fills_context = (context_from[:, None] <= low) & (anchor[:, None] >= high)
        fills_block = (slots_from[:, None] <= low) & (slots_until[:, None] >= high)
        context_full = tl.min(fills_context.to(tl.int32), 0)
        block_full = tl.min(fills_block.to(tl.int32), 0)
        is_there = keys < key_tiles
        full = tl.where(is_there, tl.maximum(context_full, block_full), 0)
        partial = tl.where(is_there, meets - full, 0)
        tl.store(states_MIJ + line * key_tiles + keys, partial + 2 * full, mask=is_there)
        partial_place = line * key_tiles + partial_count + tl.cumsum(partial, 0) - 1
        full_place = full_line * key_tiles + full_count + tl.cumsum(full, 0) - 1
        tl.store(order_SMIJ + partial_place, keys, mask=partial > 0)
        tl.store(order_SMIJ + full_place, keys, mask=full > 0)
        partial_count += tl.sum(partial, 0)
        full_count += tl.sum(full, 0)
    tl.store(counts_SMI + line, partial_count)
    tl.store(counts_SMI + full_line, full_count)


@triton.jit
def _take_key_tile(  # type: ignore[no-untyped-def]
    states_MIJ, counts_SMJ, order_SMJI, masks, query_tiles, key_tiles, TILES: tl.constexpr
):
    mask, tile = tl.program_id(0), tl.program_id(1)
    queries = tl.arange(0, TILES)
    is_there = queries < query_tiles
    place = states_MIJ + (mask * query_tiles + queries) * key_tiles + tile
    state = tl.load(place, mask=is_there, other=0)
    for wanted in tl.static_range(2):
        line = wanted * masks * key_tiles + mask * key_tiles + tile
        is_listed = (state == wanted + 1).to(tl.int32)
        tl.store(order_SMJI + line * query_tiles + tl.cumsum(is_listed, 0) - 1, queries, mask=is_listed > 0)
        tl.store(counts_SMJ + line, tl.sum(is_listed, 0))
