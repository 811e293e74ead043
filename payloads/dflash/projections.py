"""From states to queries, keys and values: input norm, three products, head norms and rotation, as one step.

Autograd keeps the states and the raw products, which its own graph would keep beside the normed input and
further copies; the normed input is made again in backward. Keys and values of context and slots are written
into one buffer each, so nothing is joined afterwards.

Shape letters: S context tokens, T slots, Q query rows, K key rows, H hidden, A query heads, G key-value
heads, D head_dim, F = D/2.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dflash import pointwise
from dflash.attention.interface import KeyLayout
from dflash.derivatives import first_order
from dflash.rope import RopeTable


class ProjectionWeights(NamedTuple):
    """A layer's weights up to attention; matrices are `[out, H]`."""

    input_norm_H: Tensor
    query_XH: Tensor
    key_YH: Tensor
    value_YH: Tensor
    query_norm_D: Tensor
    key_norm_D: Tensor


class Projected(NamedTuple):
    """Attention's input, laid out as the backend wants it, and the slots' states as they came in.

    The states are handed on so that their later gradient comes back here and is added in the same pass.
    """

    queries_QAD: Tensor
    keys_KGD: Tensor
    values_KGD: Tensor
    slots_TH: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What is the same for all layers: buffers, positions of every key row, the norms' epsilon."""

    layout: KeyLayout
    rope_K: RopeTable
    eps: float
    is_compiled: bool


def project(slots_TH: Tensor, context_SH: Tensor, weights: ProjectionWeights, plan: Plan) -> Projected:
    """Return queries of the slots, and keys and values of context and slots; padding rows are zero."""
    apply: Any = _Projection.apply
    return Projected(*apply(slots_TH, context_SH, *weights, plan))


class _Projection(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, slots_TH: Tensor, context_SH: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        *tensors, plan = rest
        weights, layout = ProjectionWeights(*tensors), plan.layout
        normalize = pointwise.normalize.when(plan.is_compiled)
        normed_TH = normalize(slots_TH, weights.input_norm_H, plan.eps)
        query_width, key_width = len(weights.query_XH), len(weights.key_YH)
        raw_queries_QX = slots_TH.new_empty(layout.query_rows, query_width)
        raw_queries_QX[layout.slot_rows :] = 0
        torch.mm(normed_TH, weights.query_XH.t(), out=raw_queries_QX[: layout.slot_rows])
        raw_keys_KY, values_KY = (slots_TH.new_empty(layout.key_rows, key_width) for _ in range(2))
        for buffer_KY, matrix_YH in ((raw_keys_KY, weights.key_YH), (values_KY, weights.value_YH)):
            torch.mm(context_SH, matrix_YH.t(), out=buffer_KY[: layout.context_rows])
            torch.mm(normed_TH, matrix_YH.t(), out=buffer_KY[layout.slots])
            for rows in layout.padding:
                buffer_KY[rows] = 0
        ctx.plan = plan
        ctx.save_for_backward(slots_TH, context_SH, *weights, raw_queries_QX, raw_keys_KY)
        queries_QAD, keys_KGD = (
            pointwise.norm_rotate.when(plan.is_compiled)(raw, norm_D, plan.eps, *_angles(plan, rows))
            for raw, norm_D, rows in (
                (_heads(raw_queries_QX, weights), weights.query_norm_D, layout.slot_start),
                (_heads(raw_keys_KY, weights), weights.key_norm_D, 0),
            )
        )
        return queries_QAD, keys_KGD, _heads(values_KY, weights), slots_TH.view_as(slots_TH)

    @staticmethod
    @first_order
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        queries_QAD, keys_KGD, values_KGD, residual_TH = gradients
        slots_TH, context_SH, *tensors, raw_queries_QX, raw_keys_KY = ctx.saved_tensors
        weights, plan = ProjectionWeights(*tensors), ctx.plan
        layout: KeyLayout = plan.layout
        backward = pointwise.norm_rotate_backward.when(plan.is_compiled)
        raw_queries = _heads(raw_queries_QX, weights)
        queries_QX, query_norm_D = backward(
            queries_QAD, raw_queries, weights.query_norm_D, plan.eps, *_angles(plan, layout.slot_start)
        )
        raw_keys = _heads(raw_keys_KY, weights)
        keys_KY, key_norm_D = backward(keys_KGD, raw_keys, weights.key_norm_D, plan.eps, *_angles(plan, 0))
        values_KY = values_KGD.flatten(1)

        normed_TH = pointwise.normalize.when(plan.is_compiled)(slots_TH, weights.input_norm_H, plan.eps)
        queries_TX = queries_QX[: layout.slot_rows]
        (keys_SY, keys_TY), (values_SY, values_TY) = (
            (part[: layout.context_rows], part[layout.slots]) for part in (keys_KY, values_KY)
        )
        context_gradient_SH = None
        if ctx.needs_input_grad[1]:
            context_gradient_SH = (keys_SY @ weights.key_YH).addmm_(values_SY, weights.value_YH)
        normed_gradient_TH = (queries_TX @ weights.query_XH).addmm_(keys_TY, weights.key_YH)
        normed_gradient_TH.addmm_(values_TY, weights.value_YH)
        slots_gradient_TH, input_norm_H = pointwise.normalize_backward.when(plan.is_compiled)(
            normed_gradient_TH, slots_TH, weights.input_norm_H, plan.eps, residual_TH
        )
        return (
            slots_gradient_TH,
            context_gradient_SH,
            input_norm_H,
            queries_TX.t() @ normed_TH,
            (keys_TY.t() @ normed_TH).addmm_(keys_SY.t(), context_SH),
            (values_TY.t() @ normed_TH).addmm_(values_SY.t(), context_SH),
            query_norm_D,
            key_norm_D,
            None,
        )


def _heads(rows_LX: Tensor, weights: ProjectionWeights) -> Tensor:
    heads_LAD: Tensor = rows_LX.unflatten(1, (-1, len(weights.query_norm_D)))
    return heads_LAD


def _angles(plan: Plan, first_row: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines from that key row on; queries are the slots, whose keys come last."""
    return plan.rope_K.cos_L1F[first_row:], plan.rope_K.sin_L1F[first_row:]
