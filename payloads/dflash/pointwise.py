"""The drafter's pointwise parts and their gradients, one or two kernels each when compiled.

All arithmetic is float32 (float64 for float64); a result is rounded once, to its input's type. No two
arguments may share memory: the compiler cannot mend that once lengths vary.

Shape letters: L rows, H width, A heads, D head_dim, F = D/2, I intermediate.
"""

import torch
from torch import Tensor
from torch.nn import functional

from dflash.compiling import Compiled
from dflash.rope import rotate


@Compiled
def normalize(rows_LH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """Return root-mean-square normed rows (arXiv 1910.07467), scaled by the weight."""
    exact_LH = _exact(rows_LH)
    return (exact_LH * _inverse_rms(exact_LH, eps) * _exact(weight_H)).to(rows_LH.dtype)


@Compiled
def normalize_backward(
    gradient_LH: Tensor, rows_LH: Tensor, weight_H: Tensor, eps: float, residual_LH: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the gradients of rows and weight; what else flows into the rows is added to the first."""
    rows_gradient_LH, weight_gradient_H = _norm_gradients(
        _exact(gradient_LH), _exact(rows_LH), _exact(weight_H), eps
    )
    if residual_LH is not None:
        rows_gradient_LH = rows_gradient_LH + _exact(residual_LH)
    return rows_gradient_LH.to(rows_LH.dtype), weight_gradient_H.to(weight_H.dtype)


@Compiled
def norm_rotate(raw_LAD: Tensor, weight_D: Tensor, eps: float, cos_L1F: Tensor, sin_L1F: Tensor) -> Tensor:
    """Return heads normed over D and rotated to their positions."""
    exact_LAD = _exact(raw_LAD)
    normed_LAD = exact_LAD * _inverse_rms(exact_LAD, eps) * _exact(weight_D)
    return rotate(normed_LAD, cos_L1F, sin_L1F).to(raw_LAD.dtype)


@Compiled
def norm_rotate_backward(
    gradient_LAD: Tensor, raw_LAD: Tensor, weight_D: Tensor, eps: float, cos_L1F: Tensor, sin_L1F: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the raw heads, `[L, A·D]`, and of the weight."""
    normed_gradient_LAD = rotate(_exact(gradient_LAD), cos_L1F, -sin_L1F)
    raw_gradient_LAD, weight_gradient_D = _norm_gradients(
        normed_gradient_LAD, _exact(raw_LAD), _exact(weight_D), eps
    )
    return raw_gradient_LAD.to(raw_LAD.dtype).flatten(1), weight_gradient_D.to(weight_D.dtype)


@Compiled
def scale_rows(rows_LH: Tensor, factors_L: Tensor) -> Tensor:
    """Return each row times its factor."""
    return (_exact(rows_LH) * factors_L[:, None]).to(rows_LH.dtype)


@Compiled
def swiglu(gate_LI: Tensor, up_LI: Tensor) -> Tensor:
    """Return silu(gate)·up (arXiv 2002.05202)."""
    return (functional.silu(_exact(gate_LI)) * _exact(up_LI)).to(up_LI.dtype)


@Compiled
def swiglu_(gate_LI: Tensor, up_LI: Tensor) -> None:
    """Put silu(gate)·up in up's place."""
    up_LI.copy_(functional.silu(_exact(gate_LI)) * _exact(up_LI))


@Compiled
def swiglu_backward_(gradient_LI: Tensor, gate_LI: Tensor, up_LI: Tensor) -> Tensor:
    """Return gate's gradient, and put up's in the incoming one's place."""
    exact_gate_gradient_LI, exact_up_gradient_LI = _swiglu_gradients(gradient_LI, gate_LI, up_LI)
    gradient_LI.copy_(exact_up_gradient_LI)
    return exact_gate_gradient_LI.to(gate_LI.dtype)


@Compiled
def swiglu_backward_in_place_(gradient_LI: Tensor, gate_LI: Tensor, up_LI: Tensor) -> None:
    """Put gate's gradient in gate's place, and up's in the incoming one's."""
    exact_gate_gradient_LI, exact_up_gradient_LI = _swiglu_gradients(gradient_LI, gate_LI, up_LI)
    gradient_LI.copy_(exact_up_gradient_LI)
    gate_LI.copy_(exact_gate_gradient_LI)


def _swiglu_gradients(gradient_LI: Tensor, gate_LI: Tensor, up_LI: Tensor) -> tuple[Tensor, Tensor]:
    exact_LI, gate, up = _exact(gradient_LI), _exact(gate_LI), _exact(up_LI)
    share = gate.sigmoid()
    return exact_LI * up * share * (1 + gate * (1 - share)), exact_LI * gate * share


def _exact(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(torch.float32, tensor.dtype))


def _inverse_rms(rows_LX: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(rows_LX.square().mean(-1, keepdim=True) + eps)


def _norm_gradients(
    gradient_LX: Tensor, rows_LX: Tensor, weight_X: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    inverse_L1 = _inverse_rms(rows_LX, eps)
    unit_LX, scaled_LX = rows_LX * inverse_L1, gradient_LX * weight_X
    projection_L1 = (scaled_LX * unit_LX).mean(-1, keepdim=True)
    weight_gradient_X = (gradient_LX * unit_LX).flatten(0, -2).sum(0)
    return (scaled_LX - unit_LX * projection_L1) * inverse_L1, weight_gradient_X
