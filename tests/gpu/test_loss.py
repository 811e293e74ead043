"""The loss on a card: products in the head's type, logits in float32, and kernels of our own."""

from typing import NamedTuple

import pytest
import torch
from dflash.loss import RowScores, Teacher, score_rows
from torch import Tensor

from tests.payload.cases import relative_error
from tests.payload.reference import Objective, slot_loss

pytestmark = pytest.mark.gpu

ROWS, WIDTH, VOCABULARY, KL_WEIGHT = 13, 96, 307, 0.4
OBJECTIVE = Objective(kl_weight=KL_WEIGHT)
LABELS = torch.arange(ROWS) * 19 % VOCABULARY
TAUGHT_BY = torch.arange(ROWS) // 2


def tensors(head_dtype: torch.dtype, states_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return draft states, head and the target's states; logits of a spread of about ten."""
    generator = torch.Generator().manual_seed(5)
    states = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64).to(states_dtype)
    head = torch.randn(VOCABULARY, WIDTH, generator=generator, dtype=torch.float64).to(head_dtype)
    target = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64).to(head_dtype)
    return states, head, target


def scored_on(device: torch.device, states: Tensor, head: Tensor, target: Tensor) -> tuple[RowScores, Tensor]:
    """Return the scores and the states' gradient."""
    leaf = states.to(device, copy=True).requires_grad_()
    teacher = Teacher(states_SH=target.to(device), tokens_R=TAUGHT_BY, kl_weight=KL_WEIGHT)
    scores = score_rows(leaf, head.to(device), LABELS.to(device), teacher=teacher, chunk_rows=5)
    torch.autograd.backward(scores.losses_R.sum())
    assert leaf.grad is not None
    return scores, leaf.grad


def exact(states: Tensor, head: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return losses and the states' gradient in float64."""
    leaf = states.to(torch.float64, copy=True).requires_grad_()
    losses = torch.stack(
        [
            slot_loss(head.double() @ state, head.double() @ target[taught].double(), int(label), OBJECTIVE)
            for state, taught, label in zip(leaf, TAUGHT_BY, LABELS, strict=True)
        ]
    )
    torch.autograd.backward(losses.sum())
    assert leaf.grad is not None
    return losses.detach(), leaf.grad


@pytest.mark.parametrize("states_dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("head_dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_narrow_head_multiplies_in_its_own_type_into_float32(
    card: torch.device, head_dtype: torch.dtype, states_dtype: torch.dtype
) -> None:
    states, head, target = tensors(head_dtype, states_dtype)
    scores, gradient = scored_on(card, states, head, target)
    rounded = states.to(head_dtype)
    expected_losses, expected_gradient = exact(rounded, head, target)
    assert scores.losses_R.dtype == torch.float32
    assert gradient.dtype == states_dtype
    # Logits near 30 would be off by 0.06 in bfloat16 and by 0.008 in float16, and the losses with them.
    assert float((scores.losses_R.detach().cpu() - expected_losses).abs().max()) < 2e-4
    assert relative_error(gradient.cpu(), expected_gradient) < 6e-3
    assert scores.predicted_R.tolist() == (rounded.double() @ head.double().T).argmax(-1).tolist()


def test_states_that_are_not_rounded_make_other_losses() -> None:
    # Otherwise the test above would not tell in which type the product runs.
    states, head, target = tensors(torch.bfloat16, torch.float32)
    kept, _ = exact(states, head, target)
    rounded, _ = exact(states.bfloat16(), head, target)
    assert float((kept - rounded).abs().max()) > 2e-3


@pytest.mark.parametrize("states_dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_wide_states_and_a_wide_head_lose_nothing(card: torch.device, states_dtype: torch.dtype) -> None:
    states, head, target = tensors(torch.float32, states_dtype)
    scores, gradient = scored_on(card, states, head, target)
    expected_losses, expected_gradient = exact(states, head, target)
    tolerance = 1e-5 if states_dtype == torch.float32 else 1e-12
    assert scores.losses_R.dtype == states_dtype
    assert relative_error(scores.losses_R.detach().cpu(), expected_losses) < tolerance
    assert relative_error(gradient.cpu(), expected_gradient) < tolerance


def test_float64_states_widen_a_bfloat16_head(card: torch.device) -> None:
    states, head, target = tensors(torch.bfloat16, torch.float64)
    scores, gradient = scored_on(card, states, head, target)
    expected_losses, expected_gradient = exact(states, head, target)
    assert relative_error(scores.losses_R.detach().cpu(), expected_losses) < 1e-12
    assert relative_error(gradient.cpu(), expected_gradient) < 1e-12


@pytest.mark.parametrize("is_compiled", [True, False], ids=["kernels", "plain"])
@pytest.mark.parametrize("kl_weight", [1.0, 0.15, None])
@pytest.mark.parametrize("vocabulary", [307, 2048, 5000, 49152])
def test_chunks_of_rows_give_the_float64_losses_and_gradients(
    card: torch.device, vocabulary: int, kl_weight: float | None, is_compiled: bool
) -> None:
    draft = sharp(vocabulary, top=0.5)
    found, gradient = scored_sharp(card, draft, kl_weight, is_compiled=is_compiled)
    losses, expected = exact_sharp(draft, kl_weight)
    assert relative_error(found.losses_R.detach().cpu(), losses) < 1e-4
    assert relative_error(gradient.cpu(), expected) < 6e-3
    assert found.predicted_R.tolist() == (draft.states.double() @ draft.head.double().T).argmax(-1).tolist()


@pytest.mark.parametrize("is_compiled", [True, False], ids=["kernels", "plain"])
def test_kl_gradient_of_a_confident_teacher_is_right_to_one_percent(
    card: torch.device, is_compiled: bool
) -> None:
    # Over a batch, from the same bfloat16 states; with bfloat16 logits it would be several percent off.
    draft = sharp(49152, top=0.98)
    probabilities = (draft.target.double() @ draft.head.double().T).softmax(-1).amax(-1)
    assert 0.95 < float(probabilities.mean()) < 0.995
    _, gradient = scored_sharp(card, draft, 1.0, is_compiled=is_compiled)
    _, expected = exact_sharp(draft, 1.0)
    assert relative_error(gradient.cpu(), expected) < 1e-2


class Sharp(NamedTuple):
    """Draft and target states of rows, a head, and labels: bfloat16, one teacher token for two rows."""

    states: Tensor
    target: Tensor
    head: Tensor
    labels: Tensor
    tokens: Tensor


def sharp(vocabulary: int, *, top: float) -> Sharp:
    """Return rows whose teacher gives one token a probability near `top`, and whose drafter nearly agrees."""
    generator = torch.Generator().manual_seed(11)
    rows, width = 96, 256
    head = torch.randn(vocabulary, width, generator=generator) / width**0.5
    chosen = torch.randint(vocabulary, (rows,), generator=generator)
    noise = torch.randn(rows, width, generator=generator)
    # The chosen token's logit must exceed the log of the others' summed exponentials by log(top / (1 − top)).
    others = (noise @ head.T).logsumexp(-1)
    wanted = others + torch.tensor(top / (1 - top)).log()
    direction = head[chosen] / head[chosen].norm(dim=-1, keepdim=True) ** 2
    own = (noise * head[chosen]).sum(-1)
    target = noise + (wanted - own)[:, None] * direction
    states = target + 0.1 * torch.randn(rows, width, generator=generator)
    tokens = torch.arange(rows) // 2
    return Sharp(states.bfloat16(), target.bfloat16(), head.bfloat16(), chosen, tokens)


def scored_sharp(
    device: torch.device, draft: Sharp, kl_weight: float | None, *, is_compiled: bool
) -> tuple[RowScores, Tensor]:
    leaf = draft.states.to(device, copy=True).requires_grad_()
    teacher = None
    if kl_weight is not None:
        teacher = Teacher(states_SH=draft.target.to(device), tokens_R=draft.tokens, kl_weight=kl_weight)
    scores = score_rows(
        leaf,
        draft.head.to(device),
        draft.labels.to(device),
        teacher=teacher,
        chunk_rows=41,
        is_compiled=is_compiled,
    )
    torch.autograd.backward(scores.losses_R.sum())
    assert leaf.grad is not None
    return scores, leaf.grad


def exact_sharp(draft: Sharp, kl_weight: float | None) -> tuple[Tensor, Tensor]:
    """Return losses and the states' gradient in float64 from the same bfloat16 states and head."""
    leaf = draft.states.double().requires_grad_()
    objective = Objective(use_soft_labels=kl_weight is not None, kl_weight=kl_weight or 0.0)
    head, target = draft.head.double(), draft.target.double()
    losses = torch.stack(
        [
            slot_loss(head @ state, head @ target[token], int(label), objective)
            for state, token, label in zip(leaf, draft.tokens, draft.labels, strict=True)
        ]
    )
    torch.autograd.backward(losses.sum())
    assert leaf.grad is not None
    return losses.detach(), leaf.grad
