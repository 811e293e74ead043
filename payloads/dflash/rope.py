"""Rotary positions: angles, cosines and sines in float32 or wider, whatever the model's type.

Nothing here is a buffer of a module, so neither `.to(bfloat16)` nor a bfloat16 default type reaches a
frequency: a bfloat16 frequency is off by radians at position 8000.

Shape letters: L tokens, A heads, D head_dim, F = D/2 frequencies.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeTable:
    """Cosine and sine of each token's angles, `[L, 1, F]`."""

    cos_L1F: Tensor
    sin_L1F: Tensor


def rope_table(positions_L: Tensor, *, head_dim: int, theta: float, dtype: torch.dtype) -> RopeTable:
    """Return the table for integer positions, for a model of that type: float32, or float64 for float64."""
    exact = torch.promote_types(torch.float32, dtype)
    exponents_F = torch.arange(0, head_dim, 2, device=positions_L.device, dtype=exact) / head_dim
    angles_LF = positions_L[:, None].to(exact) * theta**-exponents_F
    return RopeTable(cos_L1F=angles_LF.cos()[:, None], sin_L1F=angles_LF.sin()[:, None])


def rotate(heads_LAD: Tensor, cos_L1F: Tensor, sin_L1F: Tensor) -> Tensor:
    """Return the heads rotated by the angles; dimension i pairs with i + D/2. Negative sines rotate back."""
    low_LAF, high_LAF = heads_LAD.chunk(2, dim=-1)
    return torch.cat([low_LAF * cos_L1F - high_LAF * sin_L1F, high_LAF * cos_L1F + low_LAF * sin_L1F], dim=-1)
