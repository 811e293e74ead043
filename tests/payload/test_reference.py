"""The slow reference itself, against pictures and sums made by hand."""

import math

import pytest
import torch

from tests.payload.reference import (
    Architecture,
    Objective,
    Row,
    context_is_visible,
    positions_of,
    rotate,
    slot_is_valid,
    slot_is_visible,
    slot_loss,
    streak,
    valid_anchors,
)

ARCHITECTURE = Architecture(
    layer_types=("sliding_attention", "full_attention"),
    sliding_window=4,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=4,
    rope_theta=10.0,
    rms_norm_eps=1e-6,
    block_size=3,
    mask_token_id=0,
)
SLIDING, FULL = 0, 1


def row(*, loss_mask: str = "11111111111", positions: list[int] | None = None) -> Row:
    nothing = torch.zeros(11, 1, dtype=torch.float64)
    marks = [mark == "1" for mark in loss_mask]
    return Row(
        features=nothing,
        last_hidden=nothing,
        tokens=[0] * 11,
        loss_mask=marks,
        lengths=(3, 6),
        positions=positions,
    )


def picture(layer: int, anchor: int) -> list[str]:
    """Draw one line per slot: the row's tokens, then the block's own slots; `x` is seen."""
    lines = []
    for slot in range(ARCHITECTURE.block_size):
        context = [
            context_is_visible(ARCHITECTURE, row(), layer=layer, anchor=anchor, slot=slot, key=key)
            for key in range(11)
        ]
        block = [
            slot_is_visible(ARCHITECTURE, layer, slot, other) for other in range(ARCHITECTURE.block_size)
        ]
        lines.append("".join(".x"[seen] for seen in context) + " " + "".join(".x"[seen] for seen in block))
    return lines


def test_full_layer_sees_its_document_before_the_anchor_and_the_whole_block() -> None:
    assert picture(FULL, anchor=7) == ["...xxxx.... xxx"] * 3


def test_sliding_layer_sees_a_window_that_moves_with_the_slot_and_no_later_slot() -> None:
    assert picture(SLIDING, anchor=7) == ["....xxx.... x..", ".....xx.... xx.", "......x.... xxx"]


def test_first_token_of_a_document_has_no_context() -> None:
    assert picture(FULL, anchor=3) == ["........... xxx"] * 3


def test_positions_restart_at_each_document_unless_given() -> None:
    assert positions_of(row())[:9] == [0, 1, 2, 0, 1, 2, 3, 4, 5]
    given = [*range(1, 4), *range(1, 7), 0, 0]
    assert positions_of(row(positions=given)) == given


def test_anchor_needs_itself_and_its_successor_in_mask_and_document() -> None:
    assert valid_anchors(row()) == [0, 1, 3, 4, 5, 6, 7]
    assert valid_anchors(row(loss_mask="01101110111")) == [1, 4, 5]


def test_slot_zero_foreign_masked_and_padding_slots_are_not_valid() -> None:
    holes = row(loss_mask="11110111111")
    assert [slot_is_valid(holes, 3, slot) for slot in range(3)] == [False, False, True]
    assert [slot_is_valid(row(), 1, slot) for slot in range(3)] == [False, True, False]
    assert [slot_is_valid(row(), 7, slot) for slot in range(3)] == [False, True, False]


def test_streak_is_the_prefix_from_slot_one() -> None:
    assert streak({1: True, 2: True, 3: False, 4: True}) == 2
    assert streak({2: True, 3: True}) == 0
    assert streak({1: True, 3: True}) == 1


def test_rotation_turns_each_pair_by_position_over_theta() -> None:
    turned = rotate(torch.tensor([[1.0, 1.0, 0.0, 0.0]], dtype=torch.float64), 2, theta=100.0)
    expected = [math.cos(2.0), math.cos(0.2), math.sin(2.0), math.sin(0.2)]
    torch.testing.assert_close(turned[0], torch.tensor(expected, dtype=torch.float64))


def test_slot_loss_of_two_tokens_by_hand() -> None:
    draft = torch.tensor([0.0, math.log(3.0)], dtype=torch.float64)
    teacher = torch.tensor([0.0, 0.0], dtype=torch.float64)
    ce = math.log(4.0 / 3.0)
    kl = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    mixed = slot_loss(draft, teacher, 1, Objective(kl_weight=0.25))
    assert float(mixed) == pytest.approx(0.75 * ce + 0.25 * kl, rel=1e-14)
    hard = slot_loss(draft, teacher, 1, Objective(kl_weight=0.25, use_soft_labels=False))
    assert float(hard) == pytest.approx(ce, rel=1e-14)
