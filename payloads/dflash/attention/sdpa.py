"""Attention by PyTorch's scaled_dot_product_attention: the fused kernel over chunks, and the math path.

Query heads that share a key-value head become further queries of that head in the chunked form, so keys and
values are neither expanded nor is `enable_gqa` asked for: flash attention takes no boolean mask at all, the
memory-efficient kernel refuses enable_gqa in many releases, and cuDNN, which takes both, is there for some
cards only. What remains elsewhere is the math path: float32, heads expanded, every score held.

Shape letters: S context tokens, T slots of all blocks, n blocks of a chunk, B slots of a block, L slots of a
chunk, K keys of a chunk, A query heads, G key-value heads, R = A/G query heads of a group, D head_dim.
"""

import contextlib
import threading
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from dflash.attention.interface import dense_layout
from dflash.platforms import platform_of
from dflash.tiling import CHUNK_SLOTS
from dflash.visibility import Visibility


class ChunkedAttention:
    """Neighbouring blocks together, over the slice of the context that they can see and their own slots."""

    def __init__(self, visibility: Visibility) -> None:
        block_size = visibility.blocks.block_size
        ranges = _chunks(visibility.blocks.count, max(1, CHUNK_SLOTS // block_size))
        self.layout = dense_layout(visibility.context_length, visibility.blocks.count * block_size)
        self._sizes = [(blocks.stop - blocks.start) * block_size for blocks in ranges]
        self._contexts = [visibility.context_bounds(blocks) for blocks in ranges]
        self._masks_LK = [visibility.mask_LK(*pair) for pair in zip(ranges, self._contexts, strict=True)]

    def __call__(self, queries_QAD: Tensor, keys_KGD: Tensor, values_KGD: Tensor) -> Tensor:
        """Return `[T, A·D]`."""
        # The slices overlap, so autograd adds dozens of gradients into the context's; in bfloat16 each sum
        # would round.
        exact = torch.promote_types(torch.float32, queries_QAD.dtype)
        contexts, slots = zip(
            *(
                part.split([self.layout.context_rows, self.layout.slot_rows])
                for part in (keys_KGD, values_KGD)
            ),
            strict=True,
        )
        exact_keys_SGD, exact_values_SGD = (part.to(exact) for part in contexts)
        # `split` and not slices: its backward is one concatenation instead of a padded copy per chunk.
        chunks = zip(
            *(torch.split(part, self._sizes) for part in (queries_QAD, *slots)),
            self._contexts,
            self._masks_LK,
            strict=True,
        )
        with _fused_kernel(queries_QAD):
            return torch.cat(
                [
                    _attend_chunk(
                        queries_LAD,
                        torch.cat([exact_keys_SGD[seen].to(own_keys_LGD.dtype), own_keys_LGD]),
                        torch.cat([exact_values_SGD[seen].to(own_values_LGD.dtype), own_values_LGD]),
                        mask_LK,
                    )
                    for queries_LAD, own_keys_LGD, own_values_LGD, seen, mask_LK in chunks
                ]
            )


class MathAttention:
    """A batch of blocks, each with its own copy of the keys that it might see, in the math path.

    For a chunk of n blocks it holds `[n, A, S + B, D]` twice in float32, beside scores `[n, A, B, S + B]`.
    """

    def __init__(self, visibility: Visibility, *, chunk_blocks: int) -> None:
        self._block_size = visibility.blocks.block_size
        self._ranges = _chunks(visibility.blocks.count, chunk_blocks)
        self.layout = dense_layout(visibility.context_length, visibility.blocks.count * self._block_size)
        self._visibility = visibility

    def __call__(self, queries_QAD: Tensor, keys_KGD: Tensor, values_KGD: Tensor) -> Tensor:
        """Return `[T, A·D]`."""
        with _only(SDPBackend.MATH):
            return torch.cat(
                [self._attend(blocks, queries_QAD, keys_KGD, values_KGD) for blocks in self._ranges]
            )

    def _attend(self, blocks: slice, queries_QAD: Tensor, keys_KGD: Tensor, values_KGD: Tensor) -> Tensor:
        count, size = blocks.stop - blocks.start, self._block_size
        queries_LAD = queries_QAD[blocks.start * size : blocks.stop * size]
        keys_nKGD, values_nKGD = (self._copies(blocks, part) for part in (keys_KGD, values_KGD))
        mixed_nABD = _attend(
            queries_LAD.unflatten(0, (count, size)).transpose(1, 2),
            keys_nKGD.transpose(1, 2),
            values_nKGD.transpose(1, 2),
            self._visibility.masks_nBK(blocks, slice(0, self.layout.context_rows))[:, None],
            enable_gqa=True,
        )
        return mixed_nABD.transpose(1, 2).reshape(count * size, -1)

    def _copies(self, blocks: slice, part_KGD: Tensor) -> Tensor:
        count, size, context_rows = blocks.stop - blocks.start, self._block_size, self.layout.context_rows
        slots_TGD = part_KGD[context_rows:]
        slots_nBGD = slots_TGD[blocks.start * size : blocks.stop * size].unflatten(0, (count, size))
        return torch.cat([part_KGD[:context_rows].expand(count, -1, -1, -1), slots_nBGD], dim=1)


def _chunks(count: int, step: int) -> list[slice]:
    return [slice(first, min(first + step, count)) for first in range(0, count, step)]


def _attend_chunk(queries_LAD: Tensor, keys_KGD: Tensor, values_KGD: Tensor, mask_LK: Tensor) -> Tensor:
    length, heads, head_dim = queries_LAD.shape
    groups = keys_KGD.shape[1]
    queries_LGRD = queries_LAD.view(length, groups, -1, head_dim)
    mixed_1GLD = _attend(
        queries_LGRD.permute(1, 2, 0, 3).flatten(1, 2)[None],
        keys_KGD.transpose(0, 1)[None],
        values_KGD.transpose(0, 1)[None],
        mask_LK.repeat(heads // groups, 1)[None, None],
        enable_gqa=False,
    )
    mixed_GRLD = mixed_1GLD.view(groups, -1, length, head_dim)
    return mixed_GRLD.permute(2, 0, 1, 3).reshape(length, heads * head_dim)


def _attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, *, enable_gqa: bool) -> Tensor:
    simulated = platform_of(queries.device).simulation
    if simulated is not None:
        return simulated.attend(queries, keys, values, mask, enable_gqa=enable_gqa)
    return functional.scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask, enable_gqa=enable_gqa
    )


@contextlib.contextmanager
def _only(kernel: SDPBackend) -> Iterator[None]:
    """Allow one kernel alone. The choice is the whole process's, so threads take turns with it."""
    with _choosing, sdpa_kernel(kernel):
        yield


def _fused_kernel(queries: Tensor) -> contextlib.AbstractContextManager[None]:
    # Alone, so that a card where it cannot run says so instead of falling to the math path; and not cuDNN,
    # which builds a plan for every new number of keys. It knows no float64, and the CPU has its own fused
    # kernel.
    if not platform_of(queries.device).is_cuda or queries.dtype == torch.float64:
        return contextlib.nullcontext()
    return _only(SDPBackend.EFFICIENT_ATTENTION)


_choosing = threading.Lock()
