"""A row's visibility as the tiles that flex attention computes, skips, or computes without a mask.

The tiles follow from the slots' intervals in closed form: a tile of queries and a tile of keys meet where an
interval reaches into the tile, and need no mask where every query's interval covers it. A run of slots that
belong to one block and one tile has its lowest bounds first and its highest last, so only those are looked
at, and the largest table here is `[runs, key tiles]`: at the reference shape 1,024 × 319 booleans, where the
mask itself would have 32,768 × 40,832.

This module says it in plain torch; `dflash.attention.block_mask_kernels` does the same in two launches.

Shape letters: M masks, X = 4 bounds of W = 2 intervals of a query, Q query rows, K key rows, I query tiles,
J key tiles, P runs of queries, S = 2 states of a tile (partial, full).
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from dflash.attention.interface import TILE_ROWS, KeyLayout
from dflash.packing import HOST
from dflash.platforms import platform_of
from dflash.transfer import to_device
from dflash.visibility import Visibility

EVERYTHING = 0  # the kernels' window of a full layer


def build_block_masks(
    visibilities: Sequence[Visibility], layout: KeyLayout, *, is_compiled: bool
) -> list[BlockMask]:
    """Return the block mask of each kind of layer; exact, on the visibilities' device.

    A padding query sees itself alone, so that no softmax is over nothing; nobody else sees a padding key.
    """
    if is_compiled:
        bounds_MXQ, lists = kernel_tables(visibilities, layout)
    else:
        bounds_MXQ, lists = plain_tables(visibilities, layout)
    return [
        _block_mask(layout, bounds_XQ, [part_SMX[:, mask] for part_SMX in lists])
        for mask, bounds_XQ in enumerate(bounds_MXQ)
    ]


def plain_tables(visibilities: Sequence[Visibility], layout: KeyLayout) -> tuple[Tensor, list[Tensor]]:
    """Return bounds `[M, X, Q]` in key rows; counts and indices by query and by key, `[S, M, …]`; int32."""
    bounds_MXQ = to_device(
        torch.stack([_in_key_rows(part.bounds_XT, layout) for part in visibilities]), visibilities[0].device
    )
    run_rows = math.gcd(visibilities[0].blocks.block_size, TILE_ROWS)
    tiles_SMIJ = _tiles(bounds_MXQ, layout.key_rows, run_rows)
    return bounds_MXQ, [*_ordered(tiles_SMIJ), *_ordered(tiles_SMIJ.mT.contiguous())]


def kernel_tables(visibilities: Sequence[Visibility], layout: KeyLayout) -> tuple[Tensor, list[Tensor]]:
    """Return what `plain_tables` does, filled by two kernels."""
    some, masks = visibilities[0], len(visibilities)
    blocks, device = some.blocks, some.device
    query_tiles, key_tiles = (-(-rows // TILE_ROWS) for rows in (layout.query_rows, layout.key_rows))
    windows = torch.tensor([part.reach or EVERYTHING for part in visibilities], device=HOST)
    given = torch.cat([blocks.anchors_N, blocks.document_starts_N, windows]).int()
    anchors_N, starts_N, windows_M = to_device(given, device).split([blocks.count, blocks.count, masks])

    def room(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    bounds_MXQ = room(masks, 4, query_tiles * TILE_ROWS)
    states_MIJ = room(masks, query_tiles, key_tiles)
    by_query = [room(2, masks, query_tiles), room(2, masks, query_tiles, key_tiles)]
    by_key = [room(2, masks, key_tiles), room(2, masks, key_tiles, query_tiles)]
    lists = [*by_query, *by_key]
    if platform_of(device).simulation is None:
        from dflash.attention.block_mask_kernels import fill  # noqa: PLC0415  needs Triton

        starts = (anchors_N, starts_N, windows_M)
        fill(*starts, bounds_MXQ, states_MIJ, lists, block_size=blocks.block_size, layout=layout)
    return bounds_MXQ, lists


def _block_mask(layout: KeyLayout, bounds_XQ: Tensor, lists: Sequence[Tensor]) -> BlockMask:
    """Return one mask; `lists` are counts and indices by query and by key, each for both states."""
    (kv_num, full_kv_num), (kv, full_kv), (q_num, full_q_num), (q, full_q) = (
        part_SX[:, None, None] for part_SX in lists
    )
    return BlockMask(
        (layout.query_rows, layout.key_rows),
        kv_num,
        kv,
        full_kv_num,
        full_kv,
        q_num,
        q,
        full_q_num,
        full_q,
        (TILE_ROWS, TILE_ROWS),
        _rule(bounds_XQ),
    )


def _rule(bounds_XQ: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    context_from_Q, context_until_Q, slots_from_Q, slots_until_Q = bounds_XQ

    def is_visible(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        in_context: Tensor = (key >= context_from_Q[query]) & (key < context_until_Q[query])
        in_block: Tensor = (key >= slots_from_Q[query]) & (key < slots_until_Q[query])
        return in_context | in_block

    return is_visible


def _in_key_rows(bounds_XT: Tensor, layout: KeyLayout) -> Tensor:
    """Return bounds that count key rows, for the rows of whole query tiles, on the host."""
    slots = bounds_XT.shape[1]
    rows = -(-layout.query_rows // TILE_ROWS) * TILE_ROWS
    bounds_XQ = torch.zeros(4, rows, device=HOST, dtype=torch.int32)
    bounds_XQ[:2, :slots] = bounds_XT[:2]
    torch.add(bounds_XT[2:], layout.slot_start, out=bounds_XQ[2:, :slots])
    own = torch.arange(slots, rows, device=HOST, dtype=torch.int32) + layout.slot_start
    bounds_XQ[2, slots:], bounds_XQ[3, slots:] = own, own + 1
    return bounds_XQ


def _tiles(bounds_MXQ: Tensor, key_rows: int, run_rows: int) -> Tensor:
    """Return `[S, M, I, J]`: the tiles of which some pairs see each other, and those of which all do."""
    starts_J = torch.arange(0, key_rows, TILE_ROWS, device=bounds_MXQ.device, dtype=torch.int32)
    ends_J = starts_J + TILE_ROWS
    lows_MXP1, highs_MXP1 = bounds_MXQ[..., ::run_rows, None], bounds_MXQ[..., run_rows - 1 :: run_rows, None]
    first_MWP1, most_MWP1 = lows_MXP1[:, 0::2], highs_MXP1[:, 1::2]
    last_MWP1, least_MWP1 = highs_MXP1[:, 0::2], lows_MXP1[:, 1::2]
    meets_MWPJ = (first_MWP1 < ends_J) & (most_MWP1 > starts_J) & (first_MWP1 < most_MWP1)
    covers_MWPJ = (last_MWP1 <= starts_J) & (least_MWP1 >= ends_J)
    of_tile = (-1, TILE_ROWS // run_rows)
    meets_MIJ = meets_MWPJ.any(1).unflatten(1, of_tile).any(2)
    full_MIJ = covers_MWPJ.unflatten(2, of_tile).all(3).any(1)
    return torch.stack([meets_MIJ & ~full_MIJ, full_MIJ])


def _ordered(tables_SMXY: Tensor) -> tuple[Tensor, Tensor]:
    """Return counts `[S, M, X]` and indices `[S, M, X, Y]`, int32: the set columns first, in order."""
    columns = tables_SMXY.shape[-1]
    rank_SMXY = tables_SMXY.cumsum(-1)
    # What is not set goes behind the last column, which is cut off.
    place_SMXY = torch.where(tables_SMXY, rank_SMXY - 1, columns)
    numbers_Y = torch.arange(columns, device=tables_SMXY.device, dtype=torch.int32)
    order_SMXZ = numbers_Y.new_zeros(*tables_SMXY.shape[:-1], columns + 1)
    order_SMXZ.scatter_(-1, place_SMXY, numbers_Y.expand_as(tables_SMXY))
    return rank_SMXY[..., -1].int(), order_SMXZ[..., :columns].contiguous()
