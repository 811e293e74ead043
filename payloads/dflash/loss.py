"""Cross-entropy and KL(teacher ‖ draft) of many rows over a large frozen head, a chunk of rows at a time.

The head is frozen, so a row's gradient needs nothing that only backward knows except one factor: forward
computes it while the chunk's logits exist, and backward scales it. Losses come back per row, so weights and
denominators, even those that depend on the losses or on other ranks, are the caller's and may be known late.

Shape letters: R rows, C rows of one chunk, P distinct teacher tokens of one chunk, S tokens of the row,
H hidden, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True, kw_only=True, slots=True)
class Teacher:
    """The target's normed last states and whose state teaches each row: `tokens_R`, sorted, on the host."""

    states_SH: Tensor
    tokens_R: Tensor
    kl_weight: float


class RowScores(NamedTuple):
    """Per row: the loss (differentiable), the drafter's argmax, and the teacher's where there is one."""

    losses_R: Tensor
    predicted_R: Tensor
    taught_R: Tensor | None


def score_rows(
    states_RH: Tensor, head_VH: Tensor, labels_R: Tensor, *, teacher: Teacher | None, chunk_rows: int
) -> RowScores:
    """Return each row's (1 − kl_weight)·CE(label) + kl_weight·KL(teacher ‖ draft); CE alone untaught.

    Losses and logits are float32 (float64 for float64 states). Only `states_RH` gets a gradient.
    """
    scorer = _Scorer(head_VH, states_RH, teacher)
    chunks = _plan_chunks(len(states_RH), chunk_rows, teacher, states_RH.device)
    apply: Any = _ScoredRows.apply
    return RowScores(*apply(states_RH, labels_R, scorer, chunks))


class _ScoredRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, states_RH: Tensor, labels_R: Tensor, scorer: "_Scorer", chunks: list["_Chunk"]
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        scored = [scorer.score(states_RH[chunk.rows], labels_R[chunk.rows], chunk) for chunk in chunks]
        losses_R = torch.cat([part.losses_C for part in scored])
        predicted_R = torch.cat([part.predicted_C for part in scored])
        taught_R = _cat_present([part.taught_C for part in scored])
        ctx.save_for_backward(_cat_present([part.gradients_CH for part in scored]))
        ctx.mark_non_differentiable(*[part for part in (predicted_R, taught_R) if part is not None])
        return losses_R, predicted_R, taught_R

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor | None, ...]:
        (gradients_RH,) = ctx.saved_tensors
        # The factor is float32, so the product is too; it is rounded once.
        scaled_RH = gradients_RH * incoming[0][:, None]
        return scaled_RH.to(gradients_RH.dtype), None, None, None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Chunk:
    """Some rows and, with a teacher, its distinct tokens among them and each row's index into those."""

    rows: slice
    tokens_P: Tensor | None = None
    token_of_row_C: Tensor | None = None


def _plan_chunks(rows: int, chunk_rows: int, teacher: Teacher | None, device: torch.device) -> list[_Chunk]:
    slices = [slice(start, min(start + chunk_rows, rows)) for start in range(0, rows, chunk_rows)]
    if teacher is None:
        return [_Chunk(rows=part) for part in slices]
    # Sorted tokens: a token's rows are neighbours, so its logits are computed once, or twice at a border.
    distinct = [torch.unique_consecutive(teacher.tokens_R[part], return_inverse=True) for part in slices]
    tokens = torch.cat([tokens_P for tokens_P, _ in distinct]).to(device)
    indices = torch.cat([index_C for _, index_C in distinct]).to(device)
    tokens_by_chunk = torch.split(tokens, [len(tokens_P) for tokens_P, _ in distinct])
    return [
        _Chunk(rows=part, tokens_P=tokens_P, token_of_row_C=indices[part])
        for part, tokens_P in zip(slices, tokens_by_chunk, strict=True)
    ]


class _ChunkScores(NamedTuple):
    losses_C: Tensor
    predicted_C: Tensor
    taught_C: Tensor | None
    gradients_CH: Tensor | None


class _Lesson(NamedTuple):
    """What the teacher says to the rows of one chunk."""

    probabilities_CV: Tensor
    negative_entropy_C: Tensor
    taught_C: Tensor
    kl_weight: float


class _Scorer:
    """Everything that is the same for all chunks: the head, the teacher, and whether gradients are wanted."""

    def __init__(self, head_VH: Tensor, states_RH: Tensor, teacher: Teacher | None) -> None:
        self._head = _Head(head_VH, states_RH.dtype)
        self._teacher = teacher
        self._wants_gradient = torch.is_grad_enabled() and states_RH.requires_grad

    def score(self, states_CH: Tensor, labels_C: Tensor, chunk: _Chunk) -> _ChunkScores:
        lesson = None if self._teacher is None else self._lesson(self._teacher, chunk)
        logits_CV = self._head.logits(states_CH)
        predicted_C = logits_CV.argmax(dim=-1)
        log_draft_CV = logits_CV.log_softmax(dim=-1)
        del logits_CV  # as large as everything else here
        losses_C = -log_draft_CV.gather(1, labels_C[:, None])[:, 0]
        if lesson is not None:
            cross_entropy_C = -(lesson.probabilities_CV * log_draft_CV).sum(dim=-1)
            losses_C = losses_C.lerp(lesson.negative_entropy_C + cross_entropy_C, lesson.kl_weight)
        gradients_CH = None
        if self._wants_gradient:
            gradients_CV = _logit_gradients_(log_draft_CV, labels_C, lesson)
            gradients_CH = self._head.row_gradients(gradients_CV).to(states_CH.dtype)
        return _ChunkScores(losses_C, predicted_C, None if lesson is None else lesson.taught_C, gradients_CH)

    def _lesson(self, teacher: Teacher, chunk: _Chunk) -> _Lesson:
        assert chunk.tokens_P is not None
        assert chunk.token_of_row_C is not None
        log_teacher_PV = self._head.logits(teacher.states_SH[chunk.tokens_P]).log_softmax(dim=-1)
        probabilities_PV = log_teacher_PV.exp()
        negative_entropy_P = log_teacher_PV.mul_(probabilities_PV).sum(dim=-1)
        return _Lesson(
            probabilities_CV=probabilities_PV[chunk.token_of_row_C],
            negative_entropy_C=negative_entropy_P[chunk.token_of_row_C],
            taught_C=probabilities_PV.argmax(dim=-1)[chunk.token_of_row_C],
            kl_weight=teacher.kl_weight,
        )


def _logit_gradients_(log_draft_CV: Tensor, labels_C: Tensor, lesson: _Lesson | None) -> Tensor:
    """Turn log-probabilities into p − (1 − w)·onehot(label) − w·q, in place."""
    gradients_CV = log_draft_CV.exp_()
    kl_weight = 0.0
    if lesson is not None:
        kl_weight = lesson.kl_weight
        gradients_CV.sub_(lesson.probabilities_CV, alpha=kl_weight)
    certain_C1 = gradients_CV.new_full((len(labels_C), 1), kl_weight - 1.0)
    return gradients_CV.scatter_add_(1, labels_C[:, None], certain_C1)


class _Head:
    """The two products with the frozen head, both into float32 or wider: bfloat16 logits spoil the KL.

    On CUDA a bfloat16 or float16 head multiplies in its own type, to which states and logit gradients are
    rounded, and only the sums are float32. Everywhere else, and for float64 states, the head is widened.
    """

    def __init__(self, head_VH: Tensor, states_dtype: torch.dtype) -> None:
        exact = torch.promote_types(torch.float32, states_dtype)
        is_narrow = head_VH.dtype in (torch.bfloat16, torch.float16)
        self._is_mixed = is_narrow and head_VH.is_cuda and exact == torch.float32
        self._head_VH = head_VH.detach() if self._is_mixed else head_VH.detach().to(exact)

    def logits(self, states_LH: Tensor) -> Tensor:
        return self._product(states_LH, self._head_VH.t())

    def row_gradients(self, logit_gradients_CV: Tensor) -> Tensor:
        return self._product(logit_gradients_CV, self._head_VH)

    def _product(self, rows: Tensor, matrix: Tensor) -> Tensor:
        rows = rows.to(matrix.dtype)
        # Only CUDA multiplies a narrow type into float32.
        return torch.mm(rows, matrix, out_dtype=torch.float32) if self._is_mixed else torch.mm(rows, matrix)


def _cat_present(parts: list[Tensor | None]) -> Tensor | None:
    present = [part for part in parts if part is not None]
    return torch.cat(present) if present else None
