"""`dflash.loss_rows` as Triton kernels: logits are read twice for loss and gradient, once for the loss alone.

A first pass keeps a running maximum, sum and argmax for each lane (online softmax, arXiv 1805.02867), so that
the lanes meet only once, at the end; a second writes the gradient over the logits. A program takes one row;
its neighbours mostly share its teacher, whose logits then come from the cache. `dflash.kernel_rows` makes the
room for what they write.

Shape letters: C rows of one chunk, P distinct teacher tokens of one chunk, V vocabulary.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dflash.compiling import FirstCalls

COLUMNS = 2048
WARPS = 8
# Below every logit, and finite: a lane that saw nothing must not make a NaN.
NOTHING = tl.constexpr(-1e38)


def summarize_teacher(logits_PV: Tensor, *arguments: Any) -> None:
    """Write log-sum-exp, negative entropy and argmax of each row."""
    _launch(_summarize_teacher, logits_PV, *arguments)


def score_rows(logits_CV: Tensor, *arguments: Any, **constants: Any) -> None:
    """Write each row's loss and argmax, and its gradient where the constants want one."""
    _launch(_score_rows, logits_CV, *arguments, **constants)


def _launch(kernel: Any, logits: Tensor, *arguments: Any, **constants: Any) -> None:
    rows, columns = logits.shape
    if rows:
        # Triton launches on the current card, whatever card the tensors are on.
        # A kernel is made for types and constants; how many rows there are is none of them.
        types = (part.dtype for part in arguments if isinstance(part, Tensor))
        kind = (kernel.__name__, logits.device, columns, *types, *constants.values())
        with torch.cuda.device_of(logits), _first_calls.guard(*kind):
            kernel[(rows,)](logits, *arguments, VOCABULARY=columns, X=COLUMNS, num_warps=WARPS, **constants)


_first_calls = FirstCalls()


@triton.jit
def _running(values, columns, largest, total, best):  # type: ignore[no-untyped-def]
    """One step of each lane's maximum, sum of exponentials below it, and argmax."""
    raised = tl.maximum(largest, values)
    rescale = tl.exp(largest - raised)
    best = tl.where(values > largest, columns, best)
    return raised, total * rescale + tl.exp(values - raised), best, rescale


@triton.jit
def _together(largest, total, best, VOCABULARY):  # type: ignore[no-untyped-def]
    """The row's log-sum-exp and first argmax, from its lanes'."""
    top = tl.max(largest, 0)
    log_sum = top + tl.log(tl.sum(total * tl.exp(largest - top), 0))
    return log_sum, tl.min(tl.where(largest == top, best, VOCABULARY), 0)


@triton.jit
def _summarize_teacher(  # type: ignore[no-untyped-def]
    logits_PV,
    log_sum_P,
    negative_entropy_P,
    taught_P,
    VOCABULARY: tl.constexpr,
    X: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, X)
    largest = tl.full([X], NOTHING, tl.float32)
    total = tl.zeros([X], tl.float32)
    weighted = tl.zeros([X], tl.float32)
    best = tl.zeros([X], tl.int32)
    for first in range(0, VOCABULARY, X):
        columns = first + lanes
        is_there = columns < VOCABULARY
        values = tl.load(logits_PV + row * VOCABULARY + columns, mask=is_there, other=NOTHING)
        largest, total, best, rescale = _running(values, columns, largest, total, best)
        weighted = weighted * rescale + tl.where(is_there, values * tl.exp(values - largest), 0.0)
    log_sum, argmax = _together(largest, total, best, VOCABULARY)
    mean = tl.sum(weighted * tl.exp(largest - log_sum), 0)
    tl.store(log_sum_P + row, log_sum)
    tl.store(negative_entropy_P + row, mean - log_sum)
    tl.store(taught_P + row, argmax.to(tl.int64))


@triton.jit
def _score_rows(  # type: ignore[no-untyped-def]
    logits_CV,
    labels_C,
    teacher_PV,
    token_of_row_C,
    log_sum_P,
    negative_entropy_P,
    kl_weight,
    losses_C,
    predicted_C,
    gradients_CV,
    VOCABULARY: tl.constexpr,
    X: tl.constexpr,
    GRADIENT_STRIDE: tl.constexpr,
    HAS_TEACHER: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, X)
    largest = tl.full([X], NOTHING, tl.float32)
    total = tl.zeros([X], tl.float32)
    cross = tl.zeros([X], tl.float32)
    best = tl.zeros([X], tl.int32)
    label = tl.load(labels_C + row)
    row_logits = logits_CV + row * VOCABULARY
    if HAS_TEACHER:
        token = tl.load(token_of_row_C + row)
        teacher_log_sum = tl.load(log_sum_P + token)
        row_teacher = teacher_PV + token * VOCABULARY
    for first in range(0, VOCABULARY, X):
        columns = first + lanes
        is_there = columns < VOCABULARY
        values = tl.load(row_logits + columns, mask=is_there, other=NOTHING)
        largest, total, best, _ = _running(values, columns, largest, total, best)
        if HAS_TEACHER:
            taught = tl.load(row_teacher + columns, mask=is_there, other=NOTHING)
            cross += tl.where(is_there, tl.exp(taught - teacher_log_sum) * values, 0.0)
    log_sum, argmax = _together(largest, total, best, VOCABULARY)
    # A label that is no token must not read another row's logit: it makes NaN, which nobody overlooks.
    is_token = (label >= 0) & (label < VOCABULARY)
    own = tl.load(logits_CV + row * VOCABULARY + label, mask=is_token, other=float("nan"))
    loss = log_sum - own
    if HAS_TEACHER:
        divergence = tl.load(negative_entropy_P + token) + log_sum - tl.sum(cross, 0)
        loss += kl_weight * (divergence - loss)
    tl.store(losses_C + row, loss)
    tl.store(predicted_C + row, argmax.to(tl.int64))
    if GRADIENT_STRIDE:
        certain = 1.0
        if HAS_TEACHER:
            certain = 1.0 - kl_weight
        log_sum = tl.where(is_token, log_sum, float("nan"))
        for first in range(0, VOCABULARY, X):
            columns = first + lanes
            is_there = columns < VOCABULARY
            values = tl.load(row_logits + columns, mask=is_there, other=NOTHING)
            gradient = tl.exp(values - log_sum) - tl.where(columns == label, certain, 0.0)
            if HAS_TEACHER:
                taught = tl.load(row_teacher + columns, mask=is_there, other=NOTHING)
                gradient -= kl_weight * tl.exp(taught - teacher_log_sum)
            # What is written here lies over logits that every thread has read by now: a narrow row falls
            # behind the wide one that it replaces.
            tl.debug_barrier()
            place = gradients_CV + row * GRADIENT_STRIDE + columns
            tl.store(place, gradient.to(gradients_CV.dtype.element_ty), mask=is_there)
