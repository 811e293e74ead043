"""Cross-entropy and KL(teacher ‖ draft) of many rows over a large frozen head, a chunk of rows at a time.

The head is frozen, so a row's gradient needs nothing that only backward knows except one factor: forward
computes it while the chunk's logits exist, and backward scales it. Losses come back per row, so weights and
denominators, even those that depend on the losses or on other ranks, are the caller's and may be known late.

Rows are sorted by the token that teaches them and chunks end between tokens, so each token's teacher logits
are computed once. One set of buffers serves all chunks.

Shape letters: R rows, C rows of one chunk, P distinct teacher tokens of one chunk, S tokens of the row,
H hidden, V vocabulary.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dflash import loss_rows, pointwise
from dflash.derivatives import first_order
from dflash.platforms import platform_of
from dflash.transfer import to_device


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
    states_RH: Tensor,
    head_VH: Tensor,
    labels_R: Tensor,
    *,
    teacher: Teacher | None,
    chunk_rows: int,
    is_compiled: bool = True,
) -> RowScores:
    """Return each row's (1 − kl_weight)·CE(label) + kl_weight·KL(teacher ‖ draft); CE alone untaught.

    Losses and logits are float32 (float64 for float64 states). Only `states_RH` gets a gradient. A chunk has
    at most `chunk_rows` rows, or as many as one token teaches; `is_compiled` allows kernels of our own, which
    there are for float32 logits on a GPU.
    """
    chunks = _plan_chunks(len(states_RH), chunk_rows, teacher, states_RH.device)
    scorer = _Scorer(states_RH, head_VH, teacher, chunks, is_compiled=is_compiled)
    apply: Any = _ScoredRows.apply
    return RowScores(*apply(states_RH, labels_R, scorer, chunks))


class _ScoredRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, states_RH: Tensor, labels_R: Tensor, scorer: "_Scorer", chunks: Sequence["_Chunk"]
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        gradients_RH = torch.empty_like(states_RH) if scorer.wants_gradients else None
        scored = []
        for chunk in chunks:
            gradients_CH = None if gradients_RH is None else gradients_RH[chunk.rows]
            scored.append(scorer.score(states_RH[chunk.rows], labels_R[chunk.rows], chunk, gradients_CH))
        losses_R = torch.cat([part.losses_C for part in scored])
        predicted_R = torch.cat([part.predicted_C for part in scored])
        taught = [part.taught_C for part in scored if part.taught_C is not None]
        taught_R = torch.cat(taught) if taught else None
        ctx.is_compiled = scorer.is_compiled
        ctx.save_for_backward(gradients_RH)
        ctx.mark_non_differentiable(*[part for part in (predicted_R, taught_R) if part is not None])
        return losses_R, predicted_R, taught_R

    @staticmethod
    @first_order
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor | None, ...]:
        (gradients_RH,) = ctx.saved_tensors
        scaled_RH = pointwise.scale_rows.when(ctx.is_compiled)(gradients_RH, incoming[0])
        return scaled_RH, None, None, None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Chunk:
    """Some rows and, with a teacher, its distinct tokens among them and each row's index into those."""

    rows: slice
    tokens_P: Tensor | None = None
    token_of_row_C: Tensor | None = None

    @property
    def size(self) -> int:
        return _length(self.rows)


def _plan_chunks(
    rows: int, chunk_rows: int, teacher: Teacher | None, device: torch.device
) -> Sequence[_Chunk]:
    if teacher is None:
        return [
            _Chunk(rows=slice(first, min(first + chunk_rows, rows))) for first in range(0, rows, chunk_rows)
        ]
    tokens, index_R, counts = torch.unique_consecutive(
        teacher.tokens_R, return_inverse=True, return_counts=True
    )
    on_device, index_on_device_R = to_device(tokens, device), to_device(index_R, device)
    return [
        _Chunk(
            rows=part,
            tokens_P=on_device[tokens],
            token_of_row_C=index_on_device_R[part] - tokens.start,
        )
        for part, tokens in _chunks_between_tokens(counts, chunk_rows)
    ]


def largest_chunk(teachers_R: Tensor, chunk_rows: int) -> tuple[int, int]:
    """Return the buffers' rows: most rows of any chunk, most distinct tokens of any."""
    _, counts = torch.unique_consecutive(teachers_R, return_counts=True)
    chunks = list(_chunks_between_tokens(counts, chunk_rows))
    return max((_length(rows) for rows, _ in chunks), default=0), max(
        (_length(tokens) for _, tokens in chunks), default=0
    )


def _chunks_between_tokens(counts: Tensor, chunk_rows: int) -> Iterator[tuple[slice, slice]]:
    """Yield each chunk's rows and tokens: as many tokens as fit, and at least one."""
    ends = counts.cumsum(0).tolist()
    first_row, first_token = 0, 0
    while first_token < len(ends):
        end_token = max(first_token + 1, bisect_right(ends, first_row + chunk_rows))
        end_row = ends[end_token - 1]
        yield slice(first_row, end_row), slice(first_token, end_token)
        first_row, first_token = end_row, end_token


def _length(part: slice) -> int:
    length: int = part.stop - part.start
    return length


class _ChunkScores(NamedTuple):
    losses_C: Tensor
    predicted_C: Tensor
    taught_C: Tensor | None


class _Scorer:
    """What is the same for all chunks: head, teacher, buffers, and whether gradients are wanted."""

    def __init__(
        self,
        states_RH: Tensor,
        head_VH: Tensor,
        teacher: Teacher | None,
        chunks: Sequence[_Chunk],
        *,
        is_compiled: bool,
    ) -> None:
        self.is_compiled = is_compiled and platform_of(states_RH.device).is_cuda
        self.wants_gradients = torch.is_grad_enabled() and states_RH.requires_grad
        self._head = _Head(head_VH, states_RH.dtype)
        self._teacher = teacher
        self._rows = loss_rows.choose(self._head.exact, is_compiled=self.is_compiled)
        most_rows = max((chunk.size for chunk in chunks), default=0)
        self._logits_CV = self._head.buffer(most_rows)
        tokens = (0 if chunk.tokens_P is None else len(chunk.tokens_P) for chunk in chunks)
        self._teacher_PV = self._head.buffer(max(tokens, default=0))

    def score(
        self, states_CH: Tensor, labels_C: Tensor, chunk: _Chunk, gradients_CH: Tensor | None
    ) -> _ChunkScores:
        """Return the chunk's scores, and write its rows' gradients where there is room for them."""
        lesson = None if self._teacher is None else self._lesson(self._teacher, chunk)
        logits_CV = self._logits_CV[: chunk.size]
        self._head.logits(states_CH, out=logits_CV)
        # Gradients are rounded to the head's type, in which their product with it is taken.
        wanted = None if gradients_CH is None else self._head.dtype
        losses_C, predicted_C, gradients_CV = self._rows.score(logits_CV, labels_C, lesson, wanted)
        if gradients_CH is not None:
            assert gradients_CV is not None
            self._head.row_gradients(gradients_CV, out=gradients_CH)
        taught_C = None if lesson is None else lesson.summary.taught_P[lesson.token_of_row_C]
        return _ChunkScores(losses_C, predicted_C, taught_C)

    def _lesson(self, teacher: Teacher, chunk: _Chunk) -> loss_rows.Lesson:
        assert chunk.tokens_P is not None
        assert chunk.token_of_row_C is not None
        logits_PV = self._teacher_PV[: len(chunk.tokens_P)]
        self._head.logits(teacher.states_SH[chunk.tokens_P], out=logits_PV)
        return loss_rows.Lesson(
            logits_PV=logits_PV,
            summary=self._rows.summarize_teacher(logits_PV),
            token_of_row_C=chunk.token_of_row_C,
            kl_weight=teacher.kl_weight,
        )


class _Head:
    """The two products with the frozen head. Logits are float32 or wider: bfloat16 ones spoil the KL.

    On CUDA a bfloat16 or float16 head multiplies in its own type, to which states and logit gradients are
    rounded, and only the sums are float32. Everywhere else, and for float64 states, the head is widened.
    """

    def __init__(self, head_VH: Tensor, states_dtype: torch.dtype) -> None:
        self.exact = torch.promote_types(torch.float32, states_dtype)
        is_narrow = head_VH.dtype in (torch.bfloat16, torch.float16)
        is_cuda = platform_of(head_VH.device).is_cuda
        self._is_mixed = is_narrow and is_cuda and self.exact == torch.float32
        self._head_VH = head_VH.detach() if self._is_mixed else head_VH.detach().to(self.exact)
        self.dtype = self._head_VH.dtype

    def buffer(self, rows: int) -> Tensor:
        """Return room for that many rows of logits."""
        return self._head_VH.new_empty(rows, len(self._head_VH), dtype=self.exact)

    def logits(self, states_LH: Tensor, *, out: Tensor) -> None:
        self._multiply(states_LH.to(self.dtype), self._head_VH.t(), out)

    def row_gradients(self, logit_gradients_CV: Tensor, *, out: Tensor) -> None:
        self._multiply(logit_gradients_CV, self._head_VH, out)

    def _multiply(self, rows: Tensor, matrix: Tensor, out: Tensor) -> None:
        if out.dtype == matrix.dtype:
            torch.mm(rows, matrix, out=out)
        elif not self._is_mixed:
            out.copy_(rows @ matrix)
        elif out.dtype == self.exact:
            # Only CUDA multiplies a narrow type into float32.
            torch.mm(rows, matrix, out_dtype=self.exact, out=out)
        else:
            out.copy_(torch.mm(rows, matrix, out_dtype=self.exact))
