"""The loss: which slot weighs what, what each is taught, and gradients that follow whatever comes in."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from dflash.loss import Teacher, score_rows
from torch import Tensor
from torch.nn import functional

from tests.payload.cases import Bench, Case, build, gradients_of, relative_error
from tests.payload.reference import Objective, slot_loss

ROW = Case(lengths=(14, 11), padding=2, anchors=(3, 15), block_size=4)


def loss_of(case: Case) -> float:
    with torch.no_grad():
        return float(build(case).run()[0])


def test_slots_weigh_less_by_a_factor_of_e_every_gamma() -> None:
    # The loss mask decides which slots count and is no input, so each slot's loss can be had alone.
    case = replace(ROW, anchors=(3,), objective=Objective(gamma=1.5))
    alone = [
        loss_of(replace(case, holes=tuple(hole for hole in (4, 5, 6) if hole != kept))) for kept in (4, 5, 6)
    ]
    weights = [math.exp(-k / 1.5) for k in range(3)]
    mean = sum(weight * loss for weight, loss in zip(weights, alone, strict=True)) / sum(weights)
    assert loss_of(case) == pytest.approx(mean, rel=1e-12)


def test_one_denominator_serves_all_blocks() -> None:
    # The second block has one valid slot: it weighs as one slot, not as half of everything.
    case = replace(ROW, holes=(17, 18), objective=Objective(gamma=1.5))
    first, second = loss_of(replace(case, anchors=(3,))), loss_of(replace(case, anchors=(15,)))
    first_weight = sum(math.exp(-k / 1.5) for k in range(3))
    expected = (first_weight * first + 1.0 * second) / (first_weight + 1.0)
    assert loss_of(case) == pytest.approx(expected, rel=1e-12)


def test_kl_weight_mixes_label_and_teacher() -> None:
    at = {weight: loss_of(replace(ROW, objective=Objective(kl_weight=weight))) for weight in (0.0, 0.3, 1.0)}
    assert at[0.3] == pytest.approx(0.7 * at[0.0] + 0.3 * at[1.0], rel=1e-12)
    assert at[1.0] > 0.0


def test_without_soft_labels_the_loss_is_the_cross_entropy() -> None:
    hard = loss_of(replace(ROW, objective=Objective(use_soft_labels=False, kl_weight=0.6)))
    assert hard == pytest.approx(loss_of(replace(ROW, objective=Objective(kl_weight=0.0))), rel=1e-12)


def test_loss_is_its_sum_over_its_weight() -> None:
    loss, metrics = build(ROW).run()
    assert float(loss.detach()) == pytest.approx(
        float(metrics["loss_sum"] / metrics["weight_sum"]), rel=1e-12
    )


@pytest.mark.parametrize("chunk_rows", [1, 2, 4, 5, 1000])
def test_number_of_rows_a_chunk_changes_nothing(chunk_rows: int) -> None:
    case = replace(ROW, anchors=(0, 3, 4, 5, 15, 17, 22), block_size=5)
    whole, chunked = build(case), build(replace(case, loss_chunk_rows=chunk_rows))
    torch.testing.assert_close(chunked.run()[0], whole.run()[0], rtol=1e-12, atol=0.0)
    expected = whole.gradients()
    for name, gradient in chunked.gradients().items():
        assert relative_error(gradient, expected[name]) < 1e-11, name


@pytest.mark.parametrize("factor", [1.0, -2.5, 1e-3, 0.0])
def test_gradients_scale_with_the_incoming_gradient(factor: float) -> None:
    bench = build(ROW)
    expected = bench.gradients()
    bench.drafter.zero_grad()
    torch.autograd.backward(bench.run()[0], torch.tensor(factor, dtype=torch.float64))
    for name, gradient in gradients_of(bench.drafter).items():
        torch.testing.assert_close(gradient, factor * expected[name], rtol=1e-12, atol=1e-15)


def test_splitting_a_row_by_documents_changes_no_gradient() -> None:
    # Unnormalised sums add up over rows; one division by the total weight at the end.
    packed = build(ROW)
    expected = packed.gradients()
    parts = build(ROW)
    total = 0.0
    for start, length, anchor in ((0, 14, 3), (14, 11, 15)):
        loss, metrics = parts.run(**document(parts, start, length), anchors=torch.tensor([anchor - start]))
        torch.autograd.backward(loss * metrics["weight_sum"])
        total += float(metrics["weight_sum"])
    for name, gradient in gradients_of(parts.drafter).items():
        assert relative_error(gradient / total, expected[name]) < 1e-11, name


def document(bench: Bench, start: int, length: int) -> dict[str, Tensor]:
    """Return the arguments of one document as a row of its own."""
    names = ("all_hidden_states", "verifier_last_hidden", "input_ids", "loss_mask")
    cut = {name: bench.arguments[name][:, start : start + length] for name in names}
    return cut | {"lengths": torch.tensor([length])}


NO_SLOT: dict[str, Case] = {
    "empty loss mask": replace(ROW, anchors=None, holes=tuple(range(27))),
    "no two labels in a row": replace(ROW, anchors=None, holes=tuple(range(0, 27, 2))),
    "documents of one token": replace(ROW, anchors=None, lengths=(1,) * 5, padding=3),
    "nothing but padding": replace(ROW, anchors=None, lengths=(), padding=9),
    "no anchor given": replace(ROW, anchors=()),
    "given anchors without a label": replace(ROW, anchors=(13, 24)),
    "anchor in the padding": replace(ROW, anchors=(25,)),
    "hard labels": replace(ROW, anchors=(), objective=Objective(use_soft_labels=False)),
    "recomputed": replace(ROW, anchors=(13,), recompute="layer", attention="sdpa_chunked"),
}


@pytest.mark.parametrize("case", NO_SLOT.values(), ids=NO_SLOT.keys())
def test_row_without_a_valid_slot_has_zero_loss_and_zero_gradients(case: Case) -> None:
    bench = build(case)
    loss, metrics = bench.run()
    torch.autograd.backward(loss)
    assert float(loss.detach()) == 0.0
    assert int(metrics["rows_without_loss"]) == 1
    assert float(metrics["loss_sum"]) == float(metrics["weight_sum"]) == float(metrics["accuracy"]) == 0.0
    assert float(metrics["avg_streak"]) == 0.0
    for name, gradient in gradients_of(bench.drafter).items():
        assert torch.equal(gradient, torch.zeros_like(gradient)), name


def test_row_with_loss_is_not_counted_as_one_without() -> None:
    assert int(build(ROW).run()[1]["rows_without_loss"]) == 0


# Below: the per-row losses themselves. R rows of width 24 meet a vocabulary of 40.
ROWS, WIDTH, VOCABULARY = 7, 24, 40
TEACHER_TOKENS = [0, 0, 2, 3, 3, 3, 8]


def rows(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return draft states, head, labels and the target's states."""
    generator = torch.Generator().manual_seed(3)
    states = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    head = torch.randn(VOCABULARY, WIDTH, generator=generator, dtype=torch.float64) / 3
    labels = torch.randint(VOCABULARY, (ROWS,), generator=generator)
    target = torch.randn(9, WIDTH, generator=generator, dtype=torch.float64)
    return states.to(dtype), head.to(dtype), labels, target.to(dtype)


def slow_losses(states: Tensor, head: Tensor, labels: Tensor, target: Tensor, kl_weight: float) -> Tensor:
    taught = target[torch.tensor(TEACHER_TOKENS)]
    losses = [
        slot_loss(head @ state, head @ teacher, int(label), Objective(kl_weight=kl_weight))
        for state, teacher, label in zip(states, taught, labels, strict=True)
    ]
    return torch.stack(losses)


def fast_losses(states: Tensor, head: Tensor, labels: Tensor, target: Tensor, kl_weight: float) -> Tensor:
    teacher = Teacher(states_SH=target, tokens_R=torch.tensor(TEACHER_TOKENS), kl_weight=kl_weight)
    return score_rows(states, head, labels, teacher=teacher, chunk_rows=3).losses_R


INCOMING: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda losses: losses.sum(),
    "weights per row": lambda losses: (losses * torch.linspace(-1.0, 2.0, ROWS, dtype=losses.dtype)).sum(),
    "one row": lambda losses: losses[4],
    "weights that depend on the losses": lambda losses: (losses * torch.softmax(-losses, dim=0)).sum(),
}


@pytest.mark.parametrize("reduce", INCOMING.values(), ids=INCOMING.keys())
@pytest.mark.parametrize("kl_weight", [0.0, 0.4, 1.0])
def test_row_losses_and_gradients_follow_any_reduction(
    reduce: Callable[[Tensor], Tensor], kl_weight: float
) -> None:
    states, head, labels, target = rows()
    slow_states, fast_states = states.clone().requires_grad_(), states.clone().requires_grad_()
    slow = slow_losses(slow_states, head, labels, target, kl_weight)
    fast = fast_losses(fast_states, head, labels, target, kl_weight)
    torch.testing.assert_close(fast, slow, rtol=1e-12, atol=1e-12)
    torch.autograd.backward(reduce(slow))
    torch.autograd.backward(reduce(fast))
    torch.testing.assert_close(fast_states.grad, slow_states.grad, rtol=1e-11, atol=1e-13)


def test_drafter_that_equals_its_teacher_has_no_kl_and_no_gradient() -> None:
    _, head, labels, target = rows()
    states = target[torch.tensor(TEACHER_TOKENS)].clone().requires_grad_()
    losses = fast_losses(states, head, labels, target, kl_weight=1.0)
    torch.autograd.backward(losses.sum())
    torch.testing.assert_close(losses.detach(), torch.zeros(ROWS, dtype=torch.float64), rtol=0.0, atol=1e-13)
    assert states.grad is not None
    assert float(states.grad.abs().max()) < 1e-13


@pytest.mark.parametrize(
    # bfloat16 gradients are rounded once, at the end; bfloat16 logits would cost several percent.
    ("dtype", "tolerance"),
    [(torch.float32, 2e-4), (torch.bfloat16, 5e-3)],
    ids=["float32", "bfloat16"],
)
def test_kl_gradient_is_right_where_the_teacher_is_almost_sure(dtype: torch.dtype, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(9)
    directions = torch.randn(512, 64, generator=generator, dtype=torch.float64)
    head = (8.0 * functional.normalize(directions, dim=-1)).to(dtype)
    # Along one row of the head the logit of its token grows; this length gives it about 0.98.
    target = (0.174 * head[:ROWS].double()).to(dtype)
    sure = torch.softmax(target.double() @ head.double().T, dim=-1).max(dim=-1).values
    assert 0.97 < float(sure.min()) < float(sure.max()) < 0.99
    noise = torch.randn(ROWS, 64, generator=generator, dtype=torch.float64)
    draft = (target.double() + 0.05 * noise).to(dtype)
    exact = draft.double().requires_grad_()
    losses = [
        slot_loss(head.double() @ state, head.double() @ teacher, 0, Objective(kl_weight=1.0))
        for state, teacher in zip(exact, target.double(), strict=True)
    ]
    torch.autograd.backward(torch.stack(losses).sum())
    states = draft.clone().requires_grad_()
    teacher = Teacher(states_SH=target, tokens_R=torch.arange(ROWS), kl_weight=1.0)
    scored = score_rows(states, head, torch.zeros(ROWS, dtype=torch.long), teacher=teacher, chunk_rows=4)
    assert scored.losses_R.dtype == torch.float32
    torch.autograd.backward(scored.losses_R.sum())
    assert states.grad is not None
    assert exact.grad is not None
    assert relative_error(states.grad, exact.grad) < tolerance
