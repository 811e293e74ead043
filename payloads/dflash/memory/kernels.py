"""What CUDA's kernels allocate beside their results, by aten operator.

Two kinds of knowledge: temporaries of a kernel, as sizes that live while it runs; and operators that CUDA
makes of other operators, whose results are therefore storages of their own. The rest allocates its results
and nothing else. Read from ATen of torch 2.11 and 2.13; each entry names its source. Scratch that is far
below a MiB (reductions' semaphores, cub's partial sums) is left out.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

Temporaries = Callable[..., Sequence[int]]

# Each product goes through cuBLAS, which has a workspace for each handle, and each thread a handle.
PRODUCTS = {aten.mm, aten.addmm, aten.addmm_, aten.bmm, aten.baddbmm, aten.baddbmm_, aten.addmv, aten.mv}


def cublas_workspace_bytes(capability: tuple[int, int]) -> int:
    """Return the workspace of one handle on one stream (parseChosenWorkspaceSize, CublasHandlePool.cpp)."""
    hopper_or_datacenter_blackwell = capability[0] in (9, 10)
    return 32 * 2**20 if hopper_or_datacenter_blackwell else (2 * 4096 + 8 * 16) * 2**10


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _is_rows_first(tensor_BAQD: Tensor) -> bool:
    """Return whether heads of one row lie side by side, as the fused kernels write and read them."""
    _, heads, rows, width = tensor_BAQD.shape
    return tensor_BAQD.stride() == (heads * rows * width, width, heads * width, 1)


def _flash_backward(gradient: Tensor, query: Tensor, key: Tensor, *_rest: Any) -> Sequence[int]:
    # mha_bwd, flash_api.cpp: softmax_d, the float32 sum of dq, and dk, dv of every query head.
    batch, heads, rows, width = query.shape
    rounded = _up(rows, 128)
    sizes = [batch * heads * rounded * 4, batch * heads * rounded * _up(width, 32) * 4]
    if key.shape[1] != heads:
        sizes += [batch * heads * key.shape[2] * width * query.element_size()] * 2
    if not _is_rows_first(gradient):
        sizes.append(_bytes(gradient))
    return sizes


def _efficient_backward(gradient: Tensor, query: Tensor, key: Tensor, *_rest: Any) -> Sequence[int]:
    # attention_backward.cu: delta, and the kernel's workspace. The sums of dk and dv stay in registers for
    # heads of at most 128 (kPreload…, kOutputInRF of kernel_backward.h); dq's are summed in float32 over the
    # blocks of keys, unless dq itself is float32.
    batch, heads, rows, width = query.shape
    sizes = [batch * heads * rows * 4]
    if query.dtype != torch.float32:
        sizes.append(batch * heads * _up(rows, 64) * _up(width, 32) * 4)
    if width > 128:
        sizes.append(2 * batch * heads * _up(key.shape[2], 128) * _up(width, 32) * 4)
    if not _is_rows_first(gradient):
        sizes.append(_bytes(gradient))
    return sizes


def _cudnn_backward(_gradient: Tensor, query: Tensor, *_rest: Any) -> Sequence[int]:
    # The plan's workspace is cuDNN's own affair: a float32 sum of dq, and sum(dO·O), about.
    batch, heads, rows, width = query.shape
    return [batch * heads * rows * width * 4 + batch * heads * rows * 4]


def _sorted_indices(_gradient: Tensor, indices: Tensor, *_rest: Any) -> Sequence[int]:
    # embedding_dense_backward_cuda: indices and their places, sorted by cub, double-buffered.
    return [indices.numel() * 8] * 4


def _put_indices(
    _self: Tensor, indices: Sequence[Tensor | None], _values: Tensor, accumulate: bool = False, *_rest: Any
) -> Sequence[int]:
    # index_put_with_sort_kernel: linear indices and their places, sorted; without accumulation nothing.
    if not accumulate:
        return []
    rows = max((part.numel() for part in indices if part is not None), default=0)
    return [rows * 8] * 4


def _softmax_backward(gradient: Tensor, *_rest: Any) -> Sequence[int]:
    # softmax_backward_cuda_out, SoftMax.cu: gradient · output.
    return [_bytes(gradient)]


TEMPORARIES: dict[Any, Temporaries] = {
    aten._softmax_backward_data.default: _softmax_backward,
    aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn_backward,
    aten.embedding_dense_backward.default: _sorted_indices,
    aten.index_put_.default: _put_indices,
    aten.index_put.default: _put_indices,
    aten._index_put_impl_.default: _put_indices,
}


def _log_sum_exp(rows: Tensor, dims: Sequence[int], keepdim: bool = False) -> Tensor:
    # logsumexp_out_impl, ReduceOps.cpp.
    most = aten.amax.default(rows, dims, True)
    kept = most if keepdim else aten.squeeze.dims(most, dims)
    below = aten.exp_.default(aten.sub.Tensor(rows, most))
    total = aten.sum.dim_IntList(below, dims, keepdim)
    del below
    result: Tensor = aten.add_.Tensor(aten.log_.default(total), kept)
    return result


def _safe_softmax(rows: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    # _safe_softmax, SoftMax.cpp: a softmax, and zeros where a row has nothing to look at.
    shares: Tensor = aten._softmax.default(rows if dtype is None else rows.to(dtype), dim, False)
    aten.all.dim(aten.eq.Scalar(rows, -math.inf), dim, True)
    return shares  # the zeros are written where it stands


# What CUDA computes step by step; called with the recorder on, so that each step's result is seen.
STEPS: dict[Any, Callable[..., Any]] = {
    aten.logsumexp.default: _log_sum_exp,
    aten._safe_softmax.default: _safe_softmax,
}
