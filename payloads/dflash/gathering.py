"""Some rows of a matrix, each at most once, so that backward can write them back instead of adding.

Shape letters: T rows, R selected rows, H width.
"""

from typing import Any

import torch
from torch import Tensor

from dflash.derivatives import first_order


def select_rows(matrix_TH: Tensor, rows_R: Tensor) -> Tensor:
    """Return `matrix_TH[rows_R]`; no row may be named twice."""
    selected: Any = _Selected.apply
    rows_RH: Tensor = selected(matrix_TH, rows_R)
    return rows_RH


class _Selected(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, matrix_TH: Tensor, rows_R: Tensor) -> Tensor:
        ctx.rows = len(matrix_TH)
        ctx.save_for_backward(rows_R)
        return matrix_TH[rows_R]

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient_RH: Tensor) -> tuple[Tensor, None]:
        (rows_R,) = ctx.saved_tensors
        gradient_TH = gradient_RH.new_zeros(ctx.rows, gradient_RH.shape[1])
        return gradient_TH.index_copy_(0, rows_R, gradient_RH), None
