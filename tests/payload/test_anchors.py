"""Which tokens become anchors, seen from outside: every token of these rows has an id of its own, and the
embedding is watched, so the first token of each block tells where it starts.
"""

from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import pytest
import torch
from dflash import DFlashDrafter
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.payload.cases import FULL, Case, build_drafter
from tests.payload.reference import Row, documents, valid_anchors

ROW_LIMIT = 64
MASK = ROW_LIMIT
TINY = Case(
    layer_types=(FULL,),
    hidden_size=4,
    num_attention_heads=1,
    num_key_value_heads=1,
    head_dim=4,
    intermediate_size=4,
    vocab_size=ROW_LIMIT + 1,
    mask_token_id=MASK,
    target_layer_ids=(0,),
    block_size=3,
    dtype=torch.float32,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """A packed row as far as anchors care."""

    lengths: tuple[int, ...]
    loss_mask: tuple[bool, ...]

    @property
    def row(self) -> Row:
        length = len(self.loss_mask)
        return Row(
            features=torch.zeros(length, 4),
            last_hidden=torch.zeros(length, 4),
            tokens=range(length),
            loss_mask=self.loss_mask,
            lengths=self.lengths,
        )

    @property
    def valid_by_document(self) -> list[list[int]]:
        valid = valid_anchors(self.row)
        return [[index for index in valid if index in span] for span in documents(self.lengths)]


class Watched:
    """A drafter whose drawn anchors can be read off."""

    def __init__(self, max_anchors: int) -> None:
        case = Case(**{**fields_of(TINY), "max_anchors": max_anchors})
        self.drafter: DFlashDrafter = build_drafter(case)
        self.first_tokens: list[int] = []
        self.drafter.embed_tokens.register_forward_pre_hook(self._note)

    def _note(self, _: torch.nn.Module, arguments: tuple[Tensor, ...]) -> None:
        self.first_tokens = arguments[0].view(-1, TINY.block_size)[:, 0].tolist()

    def draw(self, layout: Layout, *, seed: int | None) -> list[int]:
        """Return the anchors of one forward, in the order of the blocks."""
        self.first_tokens = []
        row = layout.row
        with torch.no_grad():
            self.drafter(
                all_hidden_states=row.features[None],
                verifier_last_hidden=row.last_hidden[None],
                input_ids=torch.tensor([list(row.tokens)]),
                loss_mask=torch.tensor([row.loss_mask]),
                lengths=torch.tensor(row.lengths),
                position_ids=None,
                seed=seed,
            )
        return self.first_tokens


def fields_of(case: Case) -> dict[str, Any]:
    return {name: getattr(case, name) for name in case.__dataclass_fields__}


def all_ones(*lengths: int, padding: int = 0) -> Layout:
    return Layout(lengths=lengths, loss_mask=(True,) * (sum(lengths) + padding))


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    lengths = tuple(draw(st.lists(st.integers(1, 14), min_size=1, max_size=4)))
    row_length = sum(lengths) + draw(st.integers(0, 3))
    loss_mask = draw(
        st.lists(st.sampled_from([True, True, True, False]), min_size=row_length, max_size=row_length)
    )
    return Layout(lengths=lengths, loss_mask=tuple(loss_mask))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(layout=layouts(), max_anchors=st.integers(1, 20), seed=st.integers(0, 2**31))
def test_drawn_anchors_are_valid_sorted_distinct_and_shared_out(
    layout: Layout, max_anchors: int, seed: int
) -> None:
    anchors = Watched(max_anchors).draw(layout, seed=seed)
    valid = valid_anchors(layout.row)
    assert len(anchors) == min(max_anchors, len(valid))
    assert anchors == sorted(set(anchors))
    assert set(anchors) <= set(valid)
    counts = [len(set(anchors) & set(document)) for document in layout.valid_by_document]
    check_quotas(counts, [len(document) for document in layout.valid_by_document])


def check_quotas(counts: list[int], available: list[int]) -> None:
    """Assert a largest-remainder apportionment that starves no document while the budget lasts."""
    budget, total = sum(counts), sum(available)
    eligible = [document for document, count in enumerate(available) if count]
    if budget >= len(eligible):
        assert all(counts[document] for document in eligible), "a document starves"
    shares = [Fraction(budget * count, total) if total else Fraction(0) for count in available]
    lifted = any(0 < share < 1 for share in shares)
    for count, share in zip(counts, shares, strict=True):
        assert count < share + 1
        assert lifted or count > share - 1
    if not lifted:
        up = [share % 1 for count, share in zip(counts, shares, strict=True) if count > share]
        down = [share % 1 for count, share in zip(counts, shares, strict=True) if count < share]
        assert not up or not down or min(up) >= max(down), "a smaller remainder was rounded up"


@pytest.mark.parametrize(
    ("lengths", "max_anchors", "quotas"),
    [
        ((11, 21, 31), 6, [1, 2, 3]),  # 10, 20 and 30 valid ones: exact shares
        ((11, 21, 31), 7, [1, 2, 4]),  # 1.17, 2.33, 3.5: the largest remainder gets the odd one
        ((11, 21, 31), 8, [1, 3, 4]),  # 1.33, 2.67, 4
        ((5, 5, 5), 12, [4, 4, 4]),
        ((5, 5, 5), 99, [4, 4, 4]),
        ((41, 3, 3), 10, [8, 1, 1]),  # 9.09, 0.45, 0.45: no document starves
        ((1, 20, 1), 4, [0, 4, 0]),  # a single token has no successor
    ],
)
def test_documents_share_the_budget_by_largest_remainder(
    lengths: tuple[int, ...], max_anchors: int, quotas: list[int]
) -> None:
    anchors = Watched(max_anchors).draw(all_ones(*lengths), seed=0)
    assert [sum(anchor in span for anchor in anchors) for span in documents(lengths)] == quotas


def test_every_valid_position_is_reached_about_equally_often() -> None:
    layout = Layout(lengths=(5, 7), loss_mask=tuple(mark == "1" for mark in "11110" + "1011111" + "11"))
    watched = Watched(2)
    drawn = Counter(anchor for seed in range(300) for anchor in watched.draw(layout, seed=seed))
    assert set(drawn) == {0, 1, 2, 7, 8, 9, 10}
    # Each document gets one of the two: 300 draws over 3 and over 4 positions.
    assert all(60 < drawn[anchor] < 140 for anchor in (0, 1, 2))
    assert all(45 < drawn[anchor] < 105 for anchor in (7, 8, 9, 10))


def test_seed_decides_the_anchors() -> None:
    layout, watched = all_ones(30, 20), Watched(6)
    assert watched.draw(layout, seed=5) == watched.draw(layout, seed=5)
    assert len({tuple(watched.draw(layout, seed=seed)) for seed in range(10)}) > 5


def test_seeded_draw_leaves_the_global_generator_alone() -> None:
    watched = Watched(6)
    before = torch.get_rng_state()
    watched.draw(all_ones(30), seed=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_without_a_seed_the_global_generator_decides() -> None:
    layout, watched = all_ones(30, 20), Watched(6)
    torch.manual_seed(11)
    first, second = watched.draw(layout, seed=None), watched.draw(layout, seed=None)
    torch.manual_seed(11)
    assert watched.draw(layout, seed=None) == first
    assert first != second


def test_given_anchors_are_used_as_they_are() -> None:
    watched = Watched(2)
    row = all_ones(9).row
    watched.drafter(
        all_hidden_states=row.features[None],
        verifier_last_hidden=row.last_hidden[None],
        input_ids=torch.tensor([list(row.tokens)]),
        loss_mask=torch.tensor([row.loss_mask]),
        lengths=torch.tensor(row.lengths),
        position_ids=None,
        anchors=torch.tensor([6, 1, 3]),
    )
    assert sorted(watched.first_tokens) == [1, 3, 6]
