"""The block mask in closed form: the tiles and the rule that flex attention gets are the visibility's own."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from dflash import drafter
from dflash.attention.block_masks import build_block_masks, kernel_tables, plain_tables
from dflash.attention.flex import FlexAttention
from dflash.attention.interface import TILE_ROWS, KeyLayout, dense_layout, padded_layout
from dflash.blocks import Blocks
from dflash.visibility import Visibility
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.utils._python_dispatch import TorchDispatchMode

from tests.payload.cases import Case, blocks_of, build, relative_error
from tests.payload.test_backends import ROWS

CPU = torch.device("cpu")
# More key tiles than a kernel looks at together, and numbers of tiles that are no power of two.
LONG = {
    "long row": Case(
        lengths=(5000, 3300),
        padding=77,
        block_size=16,
        sliding_window=600,
        anchors=tuple(range(0, 8290, 179)),
    ),
    "many tiles of queries": Case(
        lengths=(300,), padding=0, block_size=24, sliding_window=64, anchors=tuple(range(0, 290, 2))
    ),
}
BOTH = pytest.mark.parametrize("is_padded", [True, False], ids=["whole tiles", "as they are"])


def masks_of(
    case: Case, blocks: Blocks, *, is_padded: bool
) -> tuple[list[Visibility], KeyLayout, list[BlockMask]]:
    """Return both kinds of layer: what is visible, how keys are laid out, and the block masks."""
    seen = [
        Visibility(blocks=blocks, context_length=case.row_length, window=window, device=CPU)
        for window in (case.sliding_window, None)
    ]
    rows = (case.row_length, blocks.count * blocks.block_size)
    layout = padded_layout(*rows, tile_rows=TILE_ROWS) if is_padded else dense_layout(*rows)
    return seen, layout, build_block_masks(seen, layout, is_compiled=False)


def dense_rule(mask: BlockMask, layout: KeyLayout) -> Tensor:
    """Return the mask's rule for every pair of whole tiles, `[Q, K]`."""
    queries, keys = (
        torch.arange(-(-rows // TILE_ROWS) * TILE_ROWS) for rows in (layout.query_rows, layout.key_rows)
    )
    return mask.mask_mod(torch.tensor(0), torch.tensor(0), queries[:, None], keys)


def listed(counts: Tensor | None, indices: Tensor | None, columns: int) -> Tensor:
    """Return a table `[X, columns]` of what a block mask's list names; each list is in order."""
    assert counts is not None
    assert indices is not None
    table = torch.zeros(counts.shape[-1], columns, dtype=torch.bool)
    for row, (count, order) in enumerate(zip(counts[0, 0].tolist(), indices[0, 0].tolist(), strict=True)):
        assert order[:count] == sorted(set(order[:count]))
        table[row, order[:count]] = True
    return table


@BOTH
@pytest.mark.parametrize("case", ROWS.values(), ids=ROWS.keys())
def test_rule_is_the_visibility_and_nothing_sees_padding(case: Case, is_padded: bool) -> None:
    for seen, layout, mask in _each(case, is_padded=is_padded):
        expected = seen.mask_LK(slice(0, seen.blocks.count), slice(0, layout.context_rows))
        rule = dense_rule(mask, layout)
        slots = rule[: layout.slot_rows]
        assert torch.equal(slots[:, : layout.context_rows], expected[:, : layout.context_rows])
        assert torch.equal(slots[:, layout.slots], expected[:, layout.context_rows :])
        for rows in layout.padding:
            assert not slots[:, rows].any()
        assert rule[layout.slot_rows : layout.query_rows].sum(1).eq(1).all()


@BOTH
@pytest.mark.parametrize("case", ROWS.values(), ids=ROWS.keys())
def test_tiles_are_exactly_those_that_the_rule_reaches_and_fills(case: Case, is_padded: bool) -> None:
    for _, layout, mask in _each(case, is_padded=is_padded):
        rule = dense_rule(mask, layout)
        tiles = rule.unflatten(1, (-1, TILE_ROWS)).unflatten(0, (-1, TILE_ROWS)).transpose(1, 2)
        some, every = tiles.flatten(2).any(2), tiles.flatten(2).all(2)
        rows, columns = some.shape
        assert torch.equal(listed(mask.kv_num_blocks, mask.kv_indices, columns), some & ~every)
        assert torch.equal(listed(mask.full_kv_num_blocks, mask.full_kv_indices, columns), every)
        assert torch.equal(listed(mask.q_num_blocks, mask.q_indices, rows), (some & ~every).T)
        assert torch.equal(listed(mask.full_q_num_blocks, mask.full_q_indices, rows), every.T)
        assert torch.equal(mask.to_dense()[0, 0].bool(), some)


def _each(case: Case, *, is_padded: bool) -> list[tuple[Visibility, KeyLayout, BlockMask]]:
    seen, layout, masks = masks_of(case, blocks_of(case), is_padded=is_padded)
    return [(part, layout, mask) for part, mask in zip(seen, masks, strict=True)]


def test_some_tiles_need_no_mask() -> None:
    # Otherwise the comparison above would hold for a builder that never finds one.
    case = replace(
        ROWS["one document"], lengths=(700,), anchors=tuple(range(500, 690, 2)), sliding_window=400
    )
    _, _, masks = masks_of(case, blocks_of(case), is_padded=True)
    for mask in masks:
        assert mask.full_kv_num_blocks is not None
        assert int(mask.full_kv_num_blocks.sum()) > 0


class LargestResult(TorchDispatchMode):
    """Notes the largest number of elements that any operator returned."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for part in result if isinstance(result, tuple | list) else (result,):
            if isinstance(part, Tensor):
                self.elements = max(self.elements, part.numel())
        return result


def test_mask_is_built_without_anything_like_its_own_size() -> None:
    case = Case(
        lengths=(8000,), padding=0, block_size=32, sliding_window=2048, anchors=tuple(range(0, 7900, 50))
    )
    blocks = blocks_of(case)
    with LargestResult() as largest:
        seen, layout, masks = masks_of(case, blocks, is_padded=True)
    assert len(seen) == len(masks) == 2
    # Runs × key tiles for two intervals of two masks, against slots × keys.
    assert largest.elements <= 4 * (layout.query_rows // 32) * (layout.key_rows // TILE_ROWS)
    assert largest.elements < layout.query_rows * layout.key_rows / 200


@pytest.mark.usefixtures("interpreted")
@BOTH
@pytest.mark.parametrize("case", [*ROWS.values(), *LONG.values()], ids=[*ROWS, *LONG])
def test_kernels_make_the_same_tables(case: Case, is_padded: bool) -> None:
    seen, layout, _ = masks_of(case, blocks_of(case), is_padded=is_padded)
    (bounds, found), (plain_bounds, plain) = kernel_tables(seen, layout), plain_tables(seen, layout)
    assert torch.equal(bounds, plain_bounds)
    assert len(found) == len(plain) == 4
    for part, expected in zip(found, plain, strict=True):
        assert part.dtype == torch.int32
        assert torch.equal(part, expected)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.filterwarnings("ignore:attention. flex attention runs uncompiled")
@pytest.mark.parametrize("case", ROWS.values(), ids=ROWS.keys())
def test_layout_and_tables_of_a_card_give_the_same_loss(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    # All that a card's default path does but compile: whole tiles, the kernels' tables, zeros in the padding.
    def prepare(_execution: object, visibilities: Mapping[str, Visibility]) -> dict[str, FlexAttention]:
        some = next(iter(visibilities.values()))
        rows = (some.context_length, some.blocks.count * some.blocks.block_size)
        layout = padded_layout(*rows, tile_rows=TILE_ROWS)
        masks = build_block_masks(list(visibilities.values()), layout, is_compiled=True)
        return {
            kind: Checked(layout, mask, {}, is_compiled=False)
            for kind, mask in zip(visibilities, masks, strict=True)
        }

    with torch.no_grad():
        expected = build(replace(case, attention="eager")).run()[0]
        monkeypatch.setattr(drafter, "prepare_attention", prepare)
        found = build(replace(case, attention="flex")).run()[0]
    assert relative_error(found, expected) < 1e-12


class Checked(FlexAttention):
    """Flex attention that looks at what it is given."""

    def __call__(self, queries_QAD: Tensor, keys_KGD: Tensor, values_KGD: Tensor) -> Tensor:
        assert not queries_QAD[self.layout.slot_rows :].any()
        for rows in self.layout.padding:
            assert not keys_KGD[rows].any()
            assert not values_KGD[rows].any()
        return super().__call__(queries_QAD, keys_KGD, values_KGD)
