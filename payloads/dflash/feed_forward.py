"""A layer's second half as one step: norm, gate and up, SwiGLU, down, and the residual.

Autograd keeps the step's input and, unless they are to be computed again, gate and up. Their product and the
normed input are made again in backward; the product with `down` never is. Computed again, the intermediate
columns may be taken a part at a time: every weight's gradient is still one product, and only a part of gate,
up and their gradients exists at once. What was computed again is overwritten by its gradients.

Shape letters: T slots, H hidden, I intermediate, C intermediate columns of a part.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dflash import pointwise
from dflash.derivatives import first_order


class FeedForwardWeights(NamedTuple):
    """A layer's weights after attention; gate and up are `[I, H]`, down is `[H, I]`."""

    norm_H: Tensor
    gate_IH: Tensor
    up_IH: Tensor
    down_HI: Tensor


def feed_forward(
    slots_TH: Tensor,
    weights: FeedForwardWeights,
    *,
    eps: float,
    part_columns: int | None,
    is_compiled: bool,
) -> Tensor:
    """Return x + down(silu(gate(norm(x)))·up(norm(x))), `[T, H]`.

    With `part_columns` neither gate nor up is kept; backward computes that many of their columns at a time.
    """
    apply: Any = _FeedForward.apply
    output_TH: Tensor = apply(slots_TH, *weights, eps, part_columns, is_compiled)
    return output_TH


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, slots_TH: Tensor, *rest: Any) -> Tensor:
        *tensors, eps, part_columns, is_compiled = rest
        weights = FeedForwardWeights(*tensors)
        normed_TH = pointwise.normalize.when(is_compiled)(slots_TH, weights.norm_H, eps)
        gate_TI, up_TI = normed_TH @ weights.gate_IH.t(), normed_TH @ weights.up_IH.t()
        del normed_TH
        ctx.eps, ctx.part_columns, ctx.is_compiled = eps, part_columns, is_compiled
        if part_columns is None:
            ctx.save_for_backward(slots_TH, *weights, gate_TI, up_TI)
            inner_TI = pointwise.swiglu.when(is_compiled)(gate_TI, up_TI)
        else:
            ctx.save_for_backward(slots_TH, *weights)
            pointwise.swiglu_.when(is_compiled)(gate_TI, up_TI)
            inner_TI = up_TI
        del gate_TI, up_TI
        return torch.addmm(slots_TH, inner_TI, weights.down_HI.t())

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient_TH: Tensor) -> tuple[Tensor | None, ...]:
        slots_TH, *tensors = ctx.saved_tensors
        weights, kept = FeedForwardWeights(*tensors[:4]), tensors[4:]
        normed_TH = pointwise.normalize.when(ctx.is_compiled)(slots_TH, weights.norm_H, ctx.eps)
        gradients = _Gradients(weights, normed_TH, gradient_TH, is_compiled=ctx.is_compiled)
        columns = len(weights.gate_IH)
        if kept:
            gradients.add(slice(0, columns), *kept, is_ours=False)
        else:
            for first in range(0, columns, ctx.part_columns):
                gradients.add_again(slice(first, first + ctx.part_columns))
        slots_gradient_TH, norm_gradient_H = pointwise.normalize_backward.when(ctx.is_compiled)(
            gradients.of_normed_TH, slots_TH, weights.norm_H, ctx.eps, gradient_TH
        )
        return slots_gradient_TH, norm_gradient_H, *gradients.of_weights, None, None, None


class _Gradients:
    """Gradients of the three matrices and of the normed input, gathered over parts of the columns."""

    def __init__(
        self, weights: FeedForwardWeights, normed_TH: Tensor, gradient_TH: Tensor, *, is_compiled: bool
    ) -> None:
        self.of_normed_TH = torch.empty_like(normed_TH)
        self.of_weights = tuple(torch.empty_like(matrix) for matrix in weights[1:])
        self._weights = weights
        self._input_TH = normed_TH
        self._incoming_TH = gradient_TH
        self._is_compiled = is_compiled

    def add_again(self, columns: slice) -> None:
        """Compute gate and up of these columns again and add what they contribute."""
        gate_TC, up_TC = (
            self._input_TH @ matrix_IH[columns].t()
            for matrix_IH in (self._weights.gate_IH, self._weights.up_IH)
        )
        self.add(columns, gate_TC, up_TC, is_ours=True)

    def add(self, columns: slice, gate_TC: Tensor, up_TC: Tensor, *, is_ours: bool) -> None:
        """Add what these columns contribute; gate and up may be overwritten if they are ours."""
        gate_gradient_IH, up_gradient_IH, down_gradient_HI = self.of_weights
        inner_TC = pointwise.swiglu.when(self._is_compiled)(gate_TC, up_TC)
        torch.mm(self._incoming_TH.t(), inner_TC, out=down_gradient_HI[:, columns])
        up_gradient_TC = torch.mm(self._incoming_TH, self._weights.down_HI[:, columns], out=inner_TC)
        if is_ours:
            pointwise.swiglu_backward_in_place_.when(self._is_compiled)(up_gradient_TC, gate_TC, up_TC)
            gate_gradient_TC = gate_TC
        else:
            gate_gradient_TC = pointwise.swiglu_backward_.when(self._is_compiled)(
                up_gradient_TC, gate_TC, up_TC
            )
        torch.mm(gate_gradient_TC.t(), self._input_TH, out=gate_gradient_IH[columns])
        torch.mm(up_gradient_TC.t(), self._input_TH, out=up_gradient_IH[columns])
        # The first part finds nothing to add to.
        is_first = columns.start == 0
        self.of_normed_TH.addmm_(gate_gradient_TC, self._weights.gate_IH[columns], beta=0 if is_first else 1)
        self.of_normed_TH.addmm_(up_gradient_TC, self._weights.up_IH[columns])
