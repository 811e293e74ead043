"""D-PACE: weights as the paper's formula says, slot by slot in Python, and constants to the gradient."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.payload.cases import Case, architecture_of, build, gradients_of, leaves, relative_error
from tests.payload.reference import Objective, ReferenceDrafter

# The block at 2 is whole, that at 11 has no slot after its document's end, that at 15 has a hole at 17.
CASE = replace(Case(), anchors=(2, 5, 11, 15, 19), holes=(17,), objective=Objective(use_soft_labels=False))
ALPHA = 0.3


def credits_of(losses: Mapping[int, float], *, slots: int, alpha: float = ALPHA) -> dict[int, float]:
    """Return w_k = Σ_{m ≥ k} Π_{i ≤ m} q̃_i of the valid slots; a slot that is not valid is skipped."""
    reached, product = {}, 1.0
    for k in range(1, slots):
        if k in losses:
            product *= (1 - alpha) * math.exp(-losses[k]) + alpha
            reached[k] = product
    return {k: sum(value for m, value in reached.items() if m >= k) for k in reached}


def expected(case: Case) -> tuple[dict[str, Tensor], Tensor, float, float]:
    """Return the reference's weights (with gradients), its loss, and the two sums."""
    bench = build(case)
    weights = leaves(bench.drafter)
    slow = ReferenceDrafter(weights, architecture_of(case), bench.row)
    assert case.anchors is not None
    blocks = [slow.scored_block(anchor, case.objective) for anchor in case.anchors]
    loss_sum = torch.zeros((), dtype=torch.float64)
    for block in blocks:
        losses = {k: slot.loss for k, slot in block.items()}
        shares = credits_of({k: float(loss.detach()) for k, loss in losses.items()}, slots=case.block_size)
        loss_sum = loss_sum + sum(shares[k] * loss for k, loss in losses.items())
    with_loss = sum(bool(block) for block in blocks)
    loss = loss_sum / with_loss
    return weights, loss, float(loss_sum.detach()), with_loss


def run(case: Case, **changed: Any) -> tuple[Any, Tensor, dict[str, Any]]:
    bench = build(case)
    loss, metrics = bench.run(loss_weights="d-pace", alpha=ALPHA, **changed)
    return bench.drafter, loss, metrics


def test_d_pace_weighs_each_slot_by_its_share_in_the_accepted_length() -> None:
    _, loss, loss_sum, blocks_with_loss = expected(CASE)
    _, found, metrics = run(CASE)
    assert float(found.detach()) == pytest.approx(float(loss.detach()), rel=1e-12)
    assert float(metrics["loss_sum"]) == pytest.approx(loss_sum, rel=1e-12)
    assert float(metrics["weight_sum"]) == blocks_with_loss == 5


def test_gradients_take_d_pace_weights_as_constants() -> None:
    weights, loss, *_ = expected(CASE)
    torch.autograd.backward(loss)
    drafter, found, _ = run(CASE)
    torch.autograd.backward(found)
    for name, gradient in gradients_of(drafter).items():
        reference = weights[name].grad
        assert reference is not None
        assert relative_error(gradient, reference) < 1e-10, name


def test_blocks_without_a_valid_slot_are_not_in_the_denominator() -> None:
    # The last token of a document starts a block that has nothing to predict.
    _, _, metrics = run(replace(CASE, anchors=(2, 12), holes=()))
    assert float(metrics["weight_sum"]) == 1
    assert float(metrics["blocks"]) == 2


def test_a_row_without_loss_has_loss_zero_under_d_pace() -> None:
    drafter, loss, metrics = run(replace(CASE, anchors=(12,)))
    torch.autograd.backward(loss)
    assert float(loss.detach()) == float(metrics["weight_sum"]) == 0
    assert all(bool((gradient == 0).all()) for gradient in gradients_of(drafter).values())


def test_d_pace_asks_the_teacher_only_for_metrics() -> None:
    _, with_teacher, metrics = run(CASE, use_soft_labels=True, kl_weight=0.0)
    _, without, _ = run(CASE)
    assert float(with_teacher.detach()) == pytest.approx(float(without.detach()), rel=1e-12)
    assert "teacher_accuracy" in metrics


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"loss_weights": "dpace"}, "did you mean 'd-pace'"),
        ({"loss_weights": "d-pace", "use_soft_labels": True, "kl_weight": 0.15}, "set kl_weight to 0"),
        ({"loss_weights": "d-pace", "alpha": 0.0}, "alpha is 0.0"),
        ({"loss_weights": "d-pace", "alpha": 1.5}, "alpha is 1.5"),
    ],
)
def test_weights_that_cannot_be_are_refused(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build(CASE).run(**changed)
