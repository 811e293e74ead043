"""Attention of drafted slots over the shared context and their own block, behind one small interface.

A backend is prepared once per forward and kind of layer, and then called by every layer of that kind; all
decisions that need the host are taken while preparing. All backends give the same result, forward and
backward.

- `eager`: a dense mask and the textbook formula; for reading and for tests. Holds `[A, T, S + T]` scores.
- `sdpa_chunked`: fused attention over chunks of neighbouring blocks; for every card, without compilation.

Shape letters: S context tokens, T drafted slots of all blocks, L slots of one chunk, K keys of one chunk,
A query heads, G key-value heads, R = A/G query heads of a group, D head_dim.
"""

import contextlib
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from dflash.masks import Visibility

# Every slot of a chunk meets all its slots, so a large chunk wastes keys (512 beside 2,000 to 8,000 of the
# context at the reference shape), and a small one leaves the card idle.
CHUNK_SLOTS = 512


class KeysValues(NamedTuple):
    """Keys, already rotated, and values, of context tokens or of slots."""

    keys_LGD: Tensor
    values_LGD: Tensor


class Attend(Protocol):
    """Attention prepared for one row and one kind of layer."""

    def __call__(self, queries_TAD: Tensor, context: KeysValues, slots: KeysValues) -> Tensor:
        """Return `[T, A·D]`."""


def prepare_attention(name: str, visibility: Visibility) -> Attend:
    """Return the named backend, prepared."""
    return _BACKENDS[name](visibility)


class EagerAttention:
    """Scores of every slot with every key, in float32 or wider."""

    def __init__(self, visibility: Visibility) -> None:
        blocks, context = slice(0, visibility.blocks.count), slice(0, visibility.context_length)
        self._mask_TK = visibility.mask_TK(blocks, context)

    def __call__(self, queries_TAD: Tensor, context: KeysValues, slots: KeysValues) -> Tensor:
        """Return `[T, A·D]`."""
        dtype, exact = queries_TAD.dtype, torch.promote_types(torch.float32, queries_TAD.dtype)
        heads_per_group = queries_TAD.shape[1] // slots.keys_LGD.shape[1]
        keys_KAD, values_KAD = (
            torch.cat(pair).to(exact).repeat_interleave(heads_per_group, dim=1)
            for pair in zip(context, slots, strict=True)
        )
        scores_ATK = (
            torch.einsum("tad,kad->atk", queries_TAD.to(exact), keys_KAD) / queries_TAD.shape[2] ** 0.5
        )
        shares_ATK = scores_ATK.masked_fill(~self._mask_TK, -torch.inf).softmax(dim=-1)
        return torch.einsum("atk,kad->tad", shares_ATK, values_KAD).flatten(1).to(dtype)


class ChunkedAttention:
    """Neighbouring blocks together, over the slice of the context that they can see and their own slots."""

    def __init__(self, visibility: Visibility) -> None:
        block_size = visibility.blocks.block_size
        step = max(1, CHUNK_SLOTS // block_size)
        ranges = [
            slice(first, min(first + step, visibility.blocks.count))
            for first in range(0, visibility.blocks.count, step)
        ]
        self._sizes = [(blocks.stop - blocks.start) * block_size for blocks in ranges]
        self._contexts = [visibility.context_bounds(blocks) for blocks in ranges]
        self._masks_LK = [visibility.mask_TK(*pair) for pair in zip(ranges, self._contexts, strict=True)]

    def __call__(self, queries_TAD: Tensor, context: KeysValues, slots: KeysValues) -> Tensor:
        """Return `[T, A·D]`."""
        # The slices overlap, so autograd adds dozens of gradients into the context's; in bfloat16 each sum
        # would round.
        exact = torch.promote_types(torch.float32, queries_TAD.dtype)
        exact_context = KeysValues(*(part.to(exact) for part in context))
        # `split` and not slices: its backward is one concatenation instead of a padded copy per chunk.
        parts = (queries_TAD, slots.keys_LGD, slots.values_LGD)
        chunks = zip(
            *(torch.split(part, self._sizes) for part in parts), self._contexts, self._masks_LK, strict=True
        )
        with _fused_kernel(queries_TAD):
            return torch.cat(
                [
                    _attend_chunk(
                        queries_LAD,
                        torch.cat([exact_context.keys_LGD[seen].to(keys_LGD.dtype), keys_LGD]),
                        torch.cat([exact_context.values_LGD[seen].to(values_LGD.dtype), values_LGD]),
                        mask_LK,
                    )
                    for queries_LAD, keys_LGD, values_LGD, seen, mask_LK in chunks
                ]
            )


def _attend_chunk(queries_LAD: Tensor, keys_KGD: Tensor, values_KGD: Tensor, mask_LK: Tensor) -> Tensor:
    # Query heads that share a key-value head become further queries of that head, so keys and values are
    # neither expanded nor is `enable_gqa` asked for: flash attention takes no boolean mask at all, the
    # memory-efficient kernel refuses enable_gqa in many releases, and cuDNN, which takes both, is there for
    # some cards only. What remains elsewhere is the math path: float32, heads expanded, every score held.
    length, heads, head_dim = queries_LAD.shape
    groups = keys_KGD.shape[1]
    queries_LGRD = queries_LAD.view(length, groups, -1, head_dim)
    mixed_1GLD = functional.scaled_dot_product_attention(
        queries_LGRD.permute(1, 2, 0, 3).flatten(1, 2)[None],
        keys_KGD.transpose(0, 1)[None],
        values_KGD.transpose(0, 1)[None],
        attn_mask=mask_LK.repeat(heads // groups, 1)[None, None],
    )
    mixed_GRLD = mixed_1GLD.view(groups, -1, length, head_dim)
    return mixed_GRLD.permute(2, 0, 1, 3).reshape(length, heads * head_dim)


def _fused_kernel(queries: Tensor) -> contextlib.AbstractContextManager[None]:
    # Alone, so that a card where it cannot run says so instead of falling to the math path; and not cuDNN,
    # which builds a plan for every new number of keys. It knows no float64, and the CPU has its own fused
    # kernel.
    if not queries.is_cuda or queries.dtype == torch.float64:
        return contextlib.nullcontext()
    return sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION)


_BACKENDS: dict[str, Callable[[Visibility], Attend]] = {
    "eager": EagerAttention,
    "sdpa_chunked": ChunkedAttention,
}
