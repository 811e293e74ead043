"""Attention of drafted slots over the shared context and their own block, behind one small interface.

A backend is prepared once per forward and kind of layer, and then called by every layer of that kind; all
decisions that need the host are taken while preparing. All backends give the same result, forward and
backward (on the CPU flex has no backward). Which of them can run here is `dflash.execution`'s business.

- `flex`: compiled block-sparse attention; the default on a GPU.
- `sdpa_chunked`: fused attention over chunks of neighbouring blocks; for every card, without compilation.
- `sdpa_math`: every block with a copy of its keys in PyTorch's math path, which is where a boolean mask with
  grouped heads ends on a card that no fused kernel serves; a probe of what that costs.
- `eager`: a dense mask and the textbook formula; for reading and for tests. Holds `[A, T, S + T]` scores.
"""

from collections.abc import Mapping

from dflash.attention.eager import EagerAttention
from dflash.attention.flex import prepare_flex
from dflash.attention.interface import Attend
from dflash.attention.sdpa import ChunkedAttention, MathAttention
from dflash.execution import Execution
from dflash.visibility import Visibility

__all__ = ["Attend", "prepare_attention"]


def prepare_attention(execution: Execution, visibilities: Mapping[str, Visibility]) -> dict[str, Attend]:
    """Return the chosen backend, prepared for each kind of layer; all have the same key layout."""
    if execution.attention == "flex":
        return {**prepare_flex(visibilities, is_compiled=execution.is_compiled)}
    return {kind: _prepare(execution, visibility) for kind, visibility in visibilities.items()}


def _prepare(execution: Execution, visibility: Visibility) -> Attend:
    if execution.attention == "sdpa_chunked":
        return ChunkedAttention(visibility)
    if execution.attention == "sdpa_math":
        return MathAttention(visibility, chunk_blocks=execution.chunk_blocks)
    assert execution.attention == "eager"
    return EagerAttention(visibility)
