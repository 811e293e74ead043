"""The rows of `dflash.loss_rows` by kernels of our own: the room that they need, and what each is given.

`dflash.loss_kernels` has the kernels. It is loaded when one is launched, so that a simulated card, on which
nothing is, needs no Triton.

Shape letters: C rows of one chunk, P distinct teacher tokens of one chunk, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor

from dflash.loss_rows import Lesson, Scores, TeacherSummary
from dflash.platforms import platform_of


class KernelRows:
    """One row a program, one pass over them for the losses and one for the gradients."""

    def summarize_teacher(self, logits_PV: Tensor) -> TeacherSummary:
        """Return what the rows of each teacher token have in common."""
        log_sum_P, negative_entropy_P = (logits_PV.new_empty(len(logits_PV)) for _ in range(2))
        taught_P = torch.empty(len(logits_PV), dtype=torch.int64, device=logits_PV.device)
        _launch("summarize_teacher", logits_PV, log_sum_P, negative_entropy_P, taught_P)
        return TeacherSummary(log_sum_P, negative_entropy_P, taught_P)

    def score(
        self, logits_CV: Tensor, labels_C: Tensor, lesson: Lesson | None, gradient_dtype: torch.dtype | None
    ) -> Scores:
        """Return losses, argmax and, of the given type if there is one, gradients in the logits' place."""
        losses_C = logits_CV.new_empty(len(logits_CV))
        predicted_C = torch.empty_like(labels_C)
        gradients_CV = None if gradient_dtype is None else _in_place(logits_CV, gradient_dtype)
        teacher: tuple[Any, ...] = (logits_CV, labels_C, losses_C, losses_C, 0.0)  # not read
        if lesson is not None:
            teacher = (lesson.logits_PV, lesson.token_of_row_C, *lesson.summary[:2], lesson.kl_weight)
        _launch(
            "score_rows",
            logits_CV,
            labels_C,
            *teacher,
            losses_C,
            predicted_C,
            logits_CV if gradients_CV is None else gradients_CV,
            GRADIENT_STRIDE=0 if gradients_CV is None else gradients_CV.stride(0),
            HAS_TEACHER=lesson is not None,
        )
        return Scores(losses_C, predicted_C, gradients_CV)


def _in_place(logits_CV: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `[C, V]` of that type, each row at the start of the logits' row."""
    return logits_CV.view(dtype)[:, : logits_CV.shape[1]]


def _launch(kernel: str, logits: Tensor, *arguments: Any, **constants: Any) -> None:
    assert logits.is_contiguous()
    if platform_of(logits.device).simulation is None:
        from dflash import loss_kernels  # noqa: PLC0415  Triton is there on a GPU only

        getattr(loss_kernels, kernel)(logits, *arguments, **constants)
