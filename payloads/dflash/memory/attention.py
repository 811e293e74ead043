"""Attention on a simulated card: which kernel torch takes there, and what it allocates.

torch asks a card for its kernel, and without one it takes the math path without a word. So the rules stand
here, as in sdp_utils.cpp of torch 2.11: which kernels refuse a call, and in which order a card prefers the
rest. `sdpa_kernel`'s restrictions are torch's own flags, which there are without a card too.

Shape letters: B batch, A query heads, G key-value heads, Q queries, K keys, D head_dim.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.flex_attention import sdpa_dense, sdpa_dense_backward
from torch.nn.attention.flex_attention import BlockMask

from dflash.memory.recorder import Recorder

aten = torch.ops.aten

HALVES = (torch.bfloat16, torch.float16)
ALIGNED_ELEMENTS = 8  # of a row of the memory-efficient kernel's bias
CUDNN_FIRST = (9, 10)  # majors
SMALL_SM = {(8, 6), (8, 9), (12, 0), (12, 1)}
Capability = tuple[int, int]


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    enable_gqa: bool,
    capability: Capability,
    recorder: Recorder,
) -> Tensor:
    """Do what scaled_dot_product_attention does on that card (attention.cpp)."""
    kernel = choose_kernel(query, key, value, mask, enable_gqa=enable_gqa, capability=capability)
    bias = _as_bias(mask, query.dtype)
    needs_sums = torch.is_grad_enabled() and any(part.requires_grad for part in (query, key, value))
    if kernel == "math":
        with recorder.attending(query, key):
            return _by_steps(query, key, value, bias)
    if kernel == "flash":
        results = aten._scaled_dot_product_flash_attention(query, key, value)
    elif kernel == "efficient":
        bias = _expanded(_aligned(bias), query, key)
        results = aten._scaled_dot_product_efficient_attention(query, key, value, bias, needs_sums)
    else:
        bias = _expanded(bias, query, key)
        results = aten._scaled_dot_product_cudnn_attention(query, key, value, bias, needs_sums)
    mixed: Tensor = results[0]
    return mixed


def _by_steps(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
    """Do what the math path does (_scaled_dot_product_attention_math, attention.cpp).

    torch's own would not add the bias in place here, because these tensors are of a class of their own.
    """
    exact = torch.promote_types(torch.float32, query.dtype)
    scale = math.sqrt(query.shape[-1] ** -0.5)
    # All of these live until the function returns, so each has a name of its own.
    query_BAQD, key_BGKD, value_BGKD = (part.to(exact) for part in (query, key, value))
    scaled_BAQD = query_BAQD * scale
    key_BAKD, value_BAKD = (_for_each_head(part, query) for part in (key_BGKD, value_BGKD))
    scores_BAQK = torch.matmul(scaled_BAQD, key_BAKD.transpose(-2, -1) * scale)
    if bias is not None:
        scores_BAQK.add_(bias)
    scores_BAQK = aten._safe_softmax(scores_BAQK, -1)
    _second = scores_BAQK.to(query.dtype)  # comes first, lives as long as the rest, and nobody keeps it
    return torch.matmul(scores_BAQK, value_BAKD).to(query.dtype)


def _for_each_head(part_BGKD: Tensor, query: Tensor) -> Tensor:
    heads = query.shape[1] // part_BGKD.shape[1]
    return part_BGKD if heads == 1 else part_BGKD.repeat_interleave(heads, dim=1)


def choose_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    enable_gqa: bool,
    capability: Capability,
) -> str:
    """Return "flash", "efficient", "cudnn" or "math".

    Raises:
        RuntimeError: none that is allowed can do it, as torch says it.
    """
    cuda = torch.backends.cuda
    refused = _refusals(query, key, value, mask, enable_gqa=enable_gqa, capability=capability)
    # cuDNN comes first on Hopper and on datacenter Blackwell alone (check_prefer_cudnn_attention).
    is_cudnn_first = capability[0] in CUDNN_FIRST
    order = (
        ("cudnn", cuda.cudnn_sdp_enabled() and is_cudnn_first),
        ("flash", cuda.flash_sdp_enabled()),
        ("efficient", cuda.mem_efficient_sdp_enabled()),
        ("math", cuda.math_sdp_enabled()),
        ("cudnn", cuda.cudnn_sdp_enabled()),
    )
    for kernel, is_allowed in order:
        if is_allowed and not refused[kernel]:
            return kernel
    raise RuntimeError("No available kernel. Aborting execution.")


def _refusals(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    enable_gqa: bool,
    capability: Capability,
) -> dict[str, bool]:
    """Return which kernels cannot take a call (sdp_utils.cpp's constraints)."""
    width, is_half = query.shape[-1], query.dtype in HALVES
    has_equal_heads = query.shape[1] == key.shape[1] == value.shape[1]
    can_group = enable_gqa and key.shape[1] == value.shape[1] and query.shape[1] % key.shape[1] == 0
    has_rows = all(part.stride(-1) == 1 for part in (query, key, value))
    is_strange = not has_rows or not (has_equal_heads or can_group)
    has_gradients = torch.is_grad_enabled() and any(part.requires_grad for part in (query, key, value))
    is_too_wide = width > 256 or (192 < width <= 224 and has_gradients and capability in SMALL_SM)
    is_half_card = is_half and capability >= (8, 0)
    return {
        "flash": is_strange or not is_half_card or mask is not None or is_too_wide,
        "efficient": is_strange
        or not has_equal_heads
        or query.dtype not in (*HALVES, torch.float32)
        or width % (8 if is_half else 4) > 0,
        "cudnn": is_strange or not is_half_card or width % 8 > 0 or width > 128,
        "math": False,
    }


def _as_bias(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return the mask as numbers to add (convert_boolean_attn_mask)."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    nothing = torch.scalar_tensor(-math.inf, dtype=dtype, device=mask.device)
    return torch.where(mask, torch.scalar_tensor(0.0, dtype=dtype, device=mask.device), nothing)


def _aligned(bias: Tensor | None) -> Tensor | None:
    """Return the bias with rows that begin where the kernel can read them (preprocess_mask)."""
    if bias is None or all(step % ALIGNED_ELEMENTS == 0 for step in bias.stride()[:-1]):
        return bias
    columns = bias.shape[-1]
    return torch.nn.functional.pad(bias, (0, ALIGNED_ELEMENTS - columns % ALIGNED_ELEMENTS))[..., :columns]


def _expanded(bias: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    return None if bias is None else bias.expand(*query.shape[:3], key.shape[2])


def attend_flex(
    queries_1AQD: Tensor,
    keys_1GKD: Tensor,
    values_1GKD: Tensor,
    mask: BlockMask,
    *,
    recorder: Recorder,
    is_compiled: bool,
) -> Tensor:
    """Do what flex attention does: its kernel, or uncompiled every score."""
    apply: Any = (_FlexKernel if is_compiled else _FlexDense).apply
    mixed_1AQD: Tensor = apply(queries_1AQD, keys_1GKD, values_1GKD, mask, recorder)
    return mixed_1AQD


class _FlexKernel(torch.autograd.Function):
    """The compiler's template: results beside the inputs (torch/_inductor/kernel/flex/flex_attention.py)."""

    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, keys: Tensor, values: Tensor, _mask: BlockMask, _recorder: Recorder
    ) -> Tensor:
        mixed_1AQD = torch.empty_like(queries)
        log_sums_1AQ = queries.new_empty(queries.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(queries, keys, values, mixed_1AQD, log_sums_1AQ)
        return mixed_1AQD

    @staticmethod
    def backward(ctx: Any, _gradient: Tensor) -> tuple[Tensor | None, ...]:
        queries, keys, values, _mixed, log_sums_1AQ = ctx.saved_tensors
        # Σ gradient·result; heads of a group are summed within the kernel.
        delta_1AQ = torch.empty_like(log_sums_1AQ)
        gradients = tuple(torch.empty_like(part) for part in (queries, keys, values))
        del delta_1AQ
        return *gradients, None, None


class _FlexDense(torch.autograd.Function):
    """torch's own eager formula, run as it is (torch/_higher_order_ops/flex_attention.py)."""

    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, keys: Tensor, values: Tensor, mask: BlockMask, recorder: Recorder
    ) -> Tensor:
        ctx.mask, ctx.recorder = mask, recorder
        with recorder.attending(queries, keys):
            mixed, log_sums, most = sdpa_dense(
                queries, keys, values, _unchanged, mask.as_tuple(), queries.shape[-1] ** -0.5, {}
            )
        ctx.save_for_backward(queries, keys, values, mixed, log_sums, most)
        return mixed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        queries, keys, values, mixed, log_sums, _most = ctx.saved_tensors
        with ctx.recorder.attending(queries, keys):
            gradients = sdpa_dense_backward(
                queries,
                keys,
                values,
                mixed,
                log_sums,
                gradient,
                torch.zeros_like(log_sums),
                _unchanged,
                _gradient_of_unchanged,
                ctx.mask.as_tuple(),
                queries.shape[-1] ** -0.5,
                {},
                (),
                (),
            )
        return *gradients[:3], None, None


def _unchanged(score: Tensor, *_indices: Tensor) -> Tensor:
    return score


def _gradient_of_unchanged(_score: Tensor, *rest: Tensor) -> list[Tensor | None]:
    return [rest[4], None, None, None, None]
