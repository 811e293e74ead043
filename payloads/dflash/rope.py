"""Rotary positions: angles in float32 whatever the model's type, rounded to it only as cosine and sine.

Nothing here is a buffer of a module, so neither `.to(bfloat16)` nor a bfloat16 default type reaches a
frequency: a bfloat16 frequency is off by radians at position 8000.

Shape letters: L tokens, A heads, D head_dim, F = D/2 frequencies.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeTable:
    """Cosine and sine of each token's angles, `[L, 1, F]` in the model's type."""

    cos_L1F: Tensor
    sin_L1F: Tensor


def rope_table(positions_L: Tensor, *, head_dim: int, theta: float, dtype: torch.dtype) -> RopeTable:
    """Return the table for integer positions; a float64 model gets float64 angles."""
    exact = torch.promote_types(torch.float32, dtype)
    exponents_F = torch.arange(0, head_dim, 2, device=positions_L.device, dtype=exact) / head_dim
    angles_LF = positions_L[:, None].to(exact) * theta**-exponents_F
    return RopeTable(cos_L1F=angles_LF.cos()[:, None].to(dtype), sin_L1F=angles_LF.sin()[:, None].to(dtype))


def rotate(heads_LAD: Tensor, table: RopeTable) -> Tensor:
    """Return the heads rotated to their positions; dimension i pairs with i + D/2."""
    low_LAF, high_LAF = heads_LAD.chunk(2, dim=-1)
    return torch.cat(
        [
            low_LAF * table.cos_L1F - high_LAF * table.sin_L1F,
            high_LAF * table.cos_L1F + low_LAF * table.sin_L1F,
        ],
        dim=-1,
    )
