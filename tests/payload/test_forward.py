"""The drafter's forward and gradients equal the slow reference's, rule by rule."""

from typing import Any

import pytest
import torch
from dflash import drafter
from dflash.rope import RopeTable, rope_table
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.payload.cases import (
    FULL,
    SLIDING,
    Case,
    build,
    expected_metrics,
    gradients_of,
    leaves,
    numbers,
    relative_error,
)
from tests.payload.reference import Objective

CASES = {
    "packed, sliding and full": Case(),
    "reference layer types": Case(layer_types=(SLIDING, SLIDING, SLIDING, SLIDING, FULL)),
    "full only": Case(layer_types=(FULL, FULL)),
    "sliding only": Case(layer_types=(SLIDING, SLIDING)),
    "full before sliding": Case(layer_types=(FULL, SLIDING)),
    "one layer": Case(layer_types=(FULL,)),
    "one document, no padding": Case(lengths=(21,), padding=0, anchors=(0, 7, 19)),
    "many short documents": Case(lengths=(2, 5, 1, 3, 7, 2), padding=3, anchors=(0, 3, 8, 11, 13, 18)),
    "three heads share a key": Case(num_attention_heads=6, num_key_value_heads=2),
    "every head its own key": Case(num_attention_heads=3, num_key_value_heads=3),
    "one key for all heads": Case(num_attention_heads=4, num_key_value_heads=1),
    "positions counted from one": Case(first_position=1),
    "positions far out": Case(first_position=300),
    "window of the block's size": Case(sliding_window=5, lengths=(18, 6), anchors=(8, 14, 19)),
    "window wider than documents": Case(sliding_window=64),
    "blocks that overlap": Case(anchors=(4, 5, 6, 7, 8)),
    "anchor without context": Case(anchors=(0, 13)),
    "blocks past the document's end": Case(anchors=(10, 11, 20), padding=0),
    "holes in the loss mask": Case(holes=(4, 7, 8, 17), anchors=(2, 5, 9, 15)),
    "anchors out of order": Case(anchors=(15, 2, 19, 9)),
    "block of two": Case(block_size=2),
    "block longer than documents": Case(
        block_size=11, sliding_window=12, lengths=(6, 4, 9), anchors=(2, 7, 12)
    ),
    "hard labels": Case(objective=Objective(use_soft_labels=False)),
    "teacher only": Case(objective=Objective(kl_weight=1.0)),
    "label only": Case(objective=Objective(kl_weight=0.0)),
    "steep weights": Case(objective=Objective(gamma=0.7)),
    "guesses that often hit": Case(vocab_size=4, mask_token_id=3, anchors=tuple(range(0, 20, 2))),
    "five target layers": Case(target_layer_ids=(0, 1, 2, 3, 4)),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_loss_metrics_and_gradients_equal_the_reference(case: Case) -> None:
    bench = build(case)
    weights = leaves(bench.drafter)
    slow = bench.reference(weights)
    torch.autograd.backward(slow.loss)

    loss, metrics = bench.run()
    torch.autograd.backward(loss)

    assert float(loss.detach()) == pytest.approx(float(slow.loss.detach()), rel=1e-9)
    assert numbers(metrics) == pytest.approx(expected_metrics(slow, case.objective), rel=1e-6)
    for name, gradient in gradients_of(bench.drafter).items():
        expected = weights[name].grad
        assert expected is not None
        assert relative_error(gradient, expected) < 1e-9, name


@st.composite
def layouts(draw: st.DrawFn) -> Case:
    """Any packing, anchors, block, window and loss mask, for one small layer of either type."""
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    row_length = sum(lengths)
    padding = draw(st.integers(0, 3))
    anywhere = st.integers(0, row_length + padding - 1)
    anchors = draw(st.lists(anywhere, min_size=1, max_size=4, unique=True))
    block_size = draw(st.integers(2, 6))
    return Case(
        layer_types=(draw(st.sampled_from([SLIDING, FULL])),),
        sliding_window=draw(st.integers(block_size, 12)),
        block_size=block_size,
        lengths=tuple(lengths),
        padding=padding,
        holes=tuple(draw(st.sets(anywhere, max_size=5))),
        first_position=draw(st.sampled_from([None, 0, 1, 7])),
        anchors=tuple(anchors),
        attention=draw(st.sampled_from(["eager", "sdpa_chunked"])),
        vocab_size=5,
        mask_token_id=4,
        seed=draw(st.integers(0, 99)),
    )


@settings(max_examples=60, deadline=None, derandomize=True)
@given(case=layouts())
def test_any_layout_equals_the_reference(case: Case) -> None:
    bench = build(case)
    with torch.no_grad():
        loss, metrics = bench.run()
        slow = bench.reference()
    assert float(loss) == pytest.approx(float(slow.loss), rel=1e-9)
    assert numbers(metrics) == pytest.approx(expected_metrics(slow, case.objective), rel=1e-6)


@pytest.mark.parametrize("first", [None, 1, 300])
def test_positions_restart_in_each_document_and_run_on_through_the_block(
    monkeypatch: pytest.MonkeyPatch, first: int | None
) -> None:
    # Attention depends on differences alone, so no loss shows where counting began; the angles do.
    asked: list[list[int]] = []

    def noted(positions: Tensor, **settings: Any) -> RopeTable:
        asked.append(positions.tolist())
        return rope_table(positions, **settings)

    monkeypatch.setattr(drafter, "rope_table", noted)
    build(Case(lengths=(4, 6), padding=0, anchors=(1, 5), block_size=3, first_position=first)).run()
    start = first or 0
    row = [*range(start, start + 4), *range(start, start + 6)]
    assert asked == [[*row, *(start + offset for offset in (1, 2, 3, 1, 2, 3))]]


def test_frozen_embedding_and_head_get_no_gradient() -> None:
    bench = build(Case())
    bench.gradients()
    assert bench.drafter.embed_tokens.weight.grad is None
    assert bench.drafter.lm_head.weight.grad is None


def test_target_gets_no_gradient_through_the_teacher() -> None:
    bench = build(Case())
    states = bench.arguments["verifier_last_hidden"].requires_grad_()
    bench.gradients()
    assert states.grad is None


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_without_gradients_gives_the_same_numbers(mode: type[torch.no_grad]) -> None:
    bench = build(Case(recompute="layer", attention="sdpa_chunked"))
    loss, metrics = bench.run()
    with mode():
        evaluated, evaluated_metrics = bench.run()
    assert not evaluated.requires_grad
    assert torch.equal(evaluated, loss)
    assert numbers(evaluated_metrics) == numbers(metrics)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_integers_of_either_width_are_taken(dtype: torch.dtype) -> None:
    bench = build(Case(first_position=1))
    names = ("input_ids", "position_ids", "lengths", "anchors", "loss_mask")
    narrow = {name: bench.arguments[name].to(dtype) for name in names}
    assert torch.equal(bench.run(**narrow)[0], bench.run()[0])


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float32])
def test_loss_mask_is_any_type_that_is_zero_or_not(dtype: torch.dtype) -> None:
    bench = build(Case(holes=(4, 7, 17)))
    mask = bench.arguments["loss_mask"].to(dtype)
    assert torch.equal(bench.run(loss_mask=mask)[0], bench.run()[0])


def test_lengths_may_be_a_list_and_none_is_one_document() -> None:
    packed = build(Case())
    assert torch.equal(packed.run(lengths=[13, 9])[0], packed.run()[0])
    single = build(Case(lengths=(26,), padding=0))
    assert torch.equal(single.run(lengths=None)[0], single.run()[0])


@pytest.mark.parametrize("attention", ["eager", "sdpa_chunked"])
def test_another_default_device_changes_nothing(attention: str) -> None:
    # Tensors that a forward makes for itself must follow its inputs; on "meta" they would hold no values.
    bench = build(Case(attention=attention, anchors=None))
    expected = bench.run(seed=3)[0]
    with torch.device("meta"):
        assert torch.equal(bench.run(seed=3)[0], expected)
