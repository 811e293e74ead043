"""From logits to losses and gradients in two ways: plain torch, and kernels, run by Triton's interpreter."""

from typing import Any

import pytest
import torch
from dflash.loss import Teacher, _plan_chunks
from dflash.loss_rows import Lesson, PlainRows, Rows, Scores, TeacherSummary
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.payload.cases import Case, build, relative_error
from tests.payload.reference import Objective, slot_loss

ROWS, TOKEN_OF_ROW = 5, torch.tensor([0, 0, 1, 2, 2])
# Around the kernels' 2,048 columns: less, a little more, twice, and far from a multiple.
VOCABULARIES = (307, 2048, 2049, 5000)
KL_WEIGHTS = (None, 0.0, 0.15, 1.0)


@pytest.fixture
def kernels(interpreted: None) -> Rows:
    from dflash.kernel_rows import KernelRows  # noqa: PLC0415  it launches what needs Triton

    return KernelRows()


def logits_of(vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return draft and teacher logits, float32, and labels."""
    generator = torch.Generator().manual_seed(vocabulary)
    draft, teacher = (torch.randn(rows, vocabulary, generator=generator) * 4 for rows in (ROWS, 3))
    return draft, teacher, torch.randint(vocabulary, (ROWS,), generator=generator)


def scored(
    rows: Rows, vocabulary: int, kl_weight: float | None, gradient_dtype: torch.dtype | None
) -> tuple[Scores, TeacherSummary | None]:
    draft, teacher, labels = logits_of(vocabulary)
    if kl_weight is None:
        return rows.score(draft, labels, None, gradient_dtype), None
    summary = rows.summarize_teacher(teacher)
    lesson = Lesson(logits_PV=teacher, summary=summary, token_of_row_C=TOKEN_OF_ROW, kl_weight=kl_weight)
    return rows.score(draft, labels, lesson, gradient_dtype), summary


def exact(vocabulary: int, kl_weight: float | None) -> tuple[Tensor, Tensor]:
    """Return losses and gradients of the logits in float64, by autograd through the reference's formula."""
    draft, teacher, labels = logits_of(vocabulary)
    leaf = draft.double().requires_grad_()
    objective = Objective(use_soft_labels=kl_weight is not None, kl_weight=kl_weight or 0.0)
    losses = torch.stack(
        [
            slot_loss(row, teacher[token].double(), int(label), objective)
            for row, token, label in zip(leaf, TOKEN_OF_ROW, labels, strict=True)
        ]
    )
    torch.autograd.backward(losses.sum())
    assert leaf.grad is not None
    return losses.detach(), leaf.grad


@pytest.mark.parametrize("kl_weight", KL_WEIGHTS)
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_kernels_give_the_float64_losses_and_gradients(
    kernels: Rows, vocabulary: int, kl_weight: float | None
) -> None:
    scores, _ = scored(kernels, vocabulary, kl_weight, torch.float32)
    losses, gradients = exact(vocabulary, kl_weight)
    assert scores.gradients_CV is not None
    assert relative_error(scores.losses_C, losses) < 1e-5
    assert relative_error(scores.gradients_CV, gradients) < 1e-5


@pytest.mark.parametrize("kl_weight", KL_WEIGHTS)
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_plain_rows_give_the_float64_losses_and_gradients(vocabulary: int, kl_weight: float | None) -> None:
    scores, _ = scored(PlainRows(), vocabulary, kl_weight, torch.float32)
    losses, gradients = exact(vocabulary, kl_weight)
    assert scores.gradients_CV is not None
    assert relative_error(scores.losses_C, losses) < 1e-5
    assert relative_error(scores.gradients_CV, gradients) < 1e-5


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_kernels_name_the_same_tokens_and_summaries(kernels: Rows, vocabulary: int) -> None:
    (found, summary), (plain, expected) = (
        scored(rows, vocabulary, 0.15, None) for rows in (kernels, PlainRows())
    )
    assert found.gradients_CV is None
    assert torch.equal(found.predicted_C, plain.predicted_C)
    assert summary is not None
    assert expected is not None
    assert torch.equal(summary.taught_P, expected.taught_P)
    assert relative_error(summary.log_sum_P, expected.log_sum_P) < 1e-5
    assert relative_error(summary.negative_entropy_P, expected.negative_entropy_P) < 1e-4


def test_narrow_gradients_lie_in_the_logits_memory_and_are_all_written(kernels: Rows) -> None:
    draft, _, labels = logits_of(5000)
    scores = kernels.score(draft, labels, None, torch.bfloat16)
    assert scores.gradients_CV is not None
    assert scores.gradients_CV.dtype == torch.bfloat16
    assert scores.gradients_CV.untyped_storage().data_ptr() == draft.untyped_storage().data_ptr()
    _, gradients = exact(5000, None)
    # The interpreter cuts bfloat16 off where a card rounds it.
    assert relative_error(scores.gradients_CV, gradients) < 8e-3


def test_first_of_equal_logits_is_the_argmax(kernels: Rows) -> None:
    logits = torch.zeros(2, 5000)
    logits[1, [17, 4000]] = 3.0
    assert kernels.score(logits, torch.tensor([0, 0]), None, None).predicted_C.tolist() == [0, 17]


@pytest.mark.parametrize("label", [-100, -1, 5000, 5001])
def test_label_that_is_no_token_makes_nan_and_reads_no_other_row(kernels: Rows, label: int) -> None:
    draft, _, labels = logits_of(5000)
    others = labels.clone()
    labels[2] = label
    scores = kernels.score(draft.clone(), labels, None, torch.float32)
    expected = kernels.score(draft.clone(), others, None, torch.float32)
    assert scores.gradients_CV is not None
    assert expected.gradients_CV is not None
    assert bool(scores.losses_C[2].isnan())
    assert bool(scores.gradients_CV[2].isnan().all())
    kept = [0, 1, 3, 4]
    assert torch.equal(scores.losses_C[kept], expected.losses_C[kept])
    assert torch.equal(scores.gradients_CV[kept], expected.gradients_CV[kept])


@pytest.mark.parametrize("use_soft_labels", [True, False])
def test_no_more_rows_than_a_chunk_meet_the_vocabulary_at_once(use_soft_labels: bool) -> None:
    case = Case(
        vocab_size=997,
        mask_token_id=996,
        lengths=(60, 70),
        anchors=tuple(range(0, 125, 3)),
        loss_chunk_rows=16,
        objective=Objective(use_soft_labels=use_soft_labels),
    )
    bench = build(case)
    with RowsOf(997) as rows:
        loss, metrics = bench.run()
        torch.autograd.backward(loss)
    assert int(metrics["valid_slots"]) > 100
    assert rows.most == 16


class RowsOf(TorchDispatchMode):  # torch has no types here
    """Notes the largest number of rows of that width, but for whole weights."""

    def __init__(self, width: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = 0
        self._width = width
        self._hidden = Case().hidden_size  # the head, transposed

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for part in result if isinstance(result, tuple | list) else (result,):
            if isinstance(part, Tensor) and part.ndim == 2 and part.shape[1] == self._width:
                self.most = max(self.most, 0 if part.shape[0] == self._hidden else part.shape[0])
        return result


@pytest.mark.parametrize("chunk_rows", [1, 2, 3, 7, 64, 1000])
def test_every_teacher_token_is_asked_once(chunk_rows: int) -> None:
    tokens = torch.tensor([2, 2, 2, 5, 6, 6, 9, 9, 9, 9, 9, 9, 12, 13, 13])
    teacher = Teacher(states_SH=torch.zeros(20, 1), tokens_R=tokens, kl_weight=0.5)
    chunks = _plan_chunks(len(tokens), chunk_rows, teacher, torch.device("cpu"))
    asked = torch.cat([chunk.tokens_P for chunk in chunks if chunk.tokens_P is not None])
    assert asked.tolist() == tokens.unique().tolist()
    covered = [row for chunk in chunks for row in range(chunk.rows.start, chunk.rows.stop)]
    assert covered == list(range(len(tokens)))
    for chunk in chunks:
        assert chunk.tokens_P is not None
        assert torch.equal(chunk.tokens_P[chunk.token_of_row_C], tokens[chunk.rows])
        # One token's rows stay together, however many they are.
        assert chunk.size <= max(chunk_rows, int(tokens[chunk.rows].bincount().max()))
