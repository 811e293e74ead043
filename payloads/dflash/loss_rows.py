"""What becomes of a chunk's logits: each row's loss, argmax, and the gradient of its logits.

The drafter's and the teacher's logits come as float32 (or float64) rows over the vocabulary. This module says
what is computed, in plain torch; `dflash.kernel_rows` computes the same on a GPU in fewer passes.

    CE = lse(z) − z[label]
    KL = Σ q·(log q − log p) = Σ q·log q − Σ q·z + lse(z),  q = softmax(t)
    d/dz = softmax(z) − (1 − w)·onehot(label) − w·q,  w = kl_weight

Shape letters: C rows of one chunk, P distinct teacher tokens of one chunk, V vocabulary.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class TeacherSummary(NamedTuple):
    """Per teacher token: log-sum-exp of its logits, Σ q·log q, and its argmax."""

    log_sum_P: Tensor
    negative_entropy_P: Tensor
    taught_P: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Lesson:
    """What the teacher says to the rows of one chunk."""

    logits_PV: Tensor
    summary: TeacherSummary
    token_of_row_C: Tensor
    kl_weight: float


class Scores(NamedTuple):
    """Per row: loss and argmax, and the gradient of its logits `[C, V]` where it was wanted."""

    losses_C: Tensor
    predicted_C: Tensor
    gradients_CV: Tensor | None


class Rows(Protocol):
    """One way to do it."""

    def summarize_teacher(self, logits_PV: Tensor) -> TeacherSummary:
        """Return what the rows of each teacher token have in common."""

    def score(
        self, logits_CV: Tensor, labels_C: Tensor, lesson: Lesson | None, gradient_dtype: torch.dtype | None
    ) -> Scores:
        """Return losses, argmax and, of the given type if there is one, gradients.

        These take the logits' place: both cannot be had, and neither may be used after the next call.
        """


def choose(dtype: torch.dtype, *, is_compiled: bool) -> Rows:
    """Return kernels of our own for float32 logits, if they may be used, and else plain torch."""
    if is_compiled and dtype == torch.float32:
        from dflash.kernel_rows import KernelRows  # noqa: PLC0415  it imports this module

        return KernelRows()
    return PlainRows()


class PlainRows:
    """Every step its own pass, in whatever type the logits have."""

    def summarize_teacher(self, logits_PV: Tensor) -> TeacherSummary:
        """Return what the rows of each teacher token have in common."""
        log_sum_P = logits_PV.logsumexp(dim=-1)
        log_probabilities_PV = logits_PV - log_sum_P[:, None]
        negative_entropy_P = (log_probabilities_PV.exp() * log_probabilities_PV).sum(dim=-1)
        return TeacherSummary(log_sum_P, negative_entropy_P, logits_PV.argmax(dim=-1))

    def score(
        self, logits_CV: Tensor, labels_C: Tensor, lesson: Lesson | None, gradient_dtype: torch.dtype | None
    ) -> Scores:
        """Return losses, argmax and, of the given type if there is one, gradients in the logits' place."""
        predicted_C = logits_CV.argmax(dim=-1)
        log_sum_C = logits_CV.logsumexp(dim=-1)
        losses_C = log_sum_C - logits_CV.gather(1, labels_C[:, None])[:, 0]
        taught_CV = None
        if lesson is not None:
            taught_PV = (lesson.logits_PV - lesson.summary.log_sum_P[:, None]).exp()
            taught_CV = taught_PV[lesson.token_of_row_C]
            cross_C = log_sum_C - (taught_CV * logits_CV).sum(dim=-1)
            divergence_C = lesson.summary.negative_entropy_P[lesson.token_of_row_C] + cross_C
            losses_C = losses_C.lerp(divergence_C, lesson.kl_weight)
        if gradient_dtype is None:
            return Scores(losses_C, predicted_C, None)
        gradients_CV = logits_CV.sub_(log_sum_C[:, None]).exp_()
        kl_weight = 0.0 if lesson is None else lesson.kl_weight
        if taught_CV is not None:
            gradients_CV.sub_(taught_CV, alpha=kl_weight)
        certain_C1 = gradients_CV.new_full((len(labels_C), 1), kl_weight - 1.0)
        gradients_CV.scatter_add_(1, labels_C[:, None], certain_C1)
        return Scores(losses_C, predicted_C, gradients_CV.to(gradient_dtype))
