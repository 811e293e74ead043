"""How this process computes what a configuration asks for: which attention, and whether kernels are compiled.

What cannot run here is replaced by what can, and a warning says why; results do not change.
"""

import importlib.util
from dataclasses import dataclass

import torch

from dflash.config import DrafterConfig
from dflash.notices import warn_once
from dflash.platforms import Platform, platform_of
from dflash.tiling import ALIGNED_BYTES, LEAST_FLEX_HEAD_DIM

ANYWHERE = "sdpa_chunked"
LAST_RESORT = "sdpa_math"
CONSUMER_BLACKWELL = 12  # sm_12x
LARGEST_SM12X_HEAD_DIM = 128  # above, its backward needs more shared memory than such a card has


@dataclass(frozen=True, kw_only=True, slots=True)
class Execution:
    """The attention backend in use, and whether it and the pointwise parts are compiled."""

    attention: str
    is_compiled: bool
    chunk_blocks: int


def choose_execution(
    config: DrafterConfig, *, device: torch.device, dtype: torch.dtype, needs_gradients: bool
) -> Execution:
    """Return how to compute on a device; `attention="auto"` is flex on a GPU, else sdpa_chunked.

    On the CPU nothing is compiled, and flex has no backward.
    """
    platform = platform_of(device)
    is_cuda = platform.is_cuda
    attention = config.attention
    if attention == "auto":
        attention = "flex" if is_cuda else ANYWHERE
    if attention == "flex":
        reason = _why_not_flex(config, platform, dtype, needs_gradients=needs_gradients)
        if reason is not None:
            warn_once("attention", f"flex cannot run here: {reason}; {ANYWHERE} is used instead")
            attention = ANYWHERE
    if attention == ANYWHERE and is_cuda and dtype != torch.float64:
        row_bytes = config.head_dim * dtype.itemsize
        if row_bytes % ALIGNED_BYTES:
            warn_once(
                "attention",
                f"{ANYWHERE} cannot run here: head_dim {config.head_dim} makes rows of {row_bytes} bytes, "
                f"and its kernel needs a multiple of {ALIGNED_BYTES}; {LAST_RESORT} is used instead",
            )
            attention = LAST_RESORT
    is_compiled = config.compile and is_cuda and _can_compile(platform)
    if config.compile and is_cuda and not is_compiled:
        warn_once("compile", "Triton is not installed, so nothing is compiled; install triton for speed")
    return Execution(attention=attention, is_compiled=is_compiled, chunk_blocks=config.chunk_blocks)


def ways_text(execution: Execution) -> str:
    """Return in words how a drafter computes."""
    chunks = f" of {execution.chunk_blocks} blocks" if execution.attention == "sdpa_math" else ""
    kernels = "compiled kernels" if execution.is_compiled else "nothing compiled"
    return f"{execution.attention}{chunks}, {kernels}"


def has_triton() -> bool:
    """Return whether Triton, which compiled code on a GPU is written in, can be imported."""
    return importlib.util.find_spec("triton") is not None


def _can_compile(platform: Platform) -> bool:
    # Where a card is real, torch's builds for it bring Triton; this one, which simulates it, may be without.
    return platform.simulation is not None or has_triton()


def _why_not_flex(
    config: DrafterConfig, platform: Platform, dtype: torch.dtype, *, needs_gradients: bool
) -> str | None:
    if not platform.is_cuda:
        return f"it has no backward on {platform.device.type}" if needs_gradients else None
    if not config.compile:
        return None
    if not _can_compile(platform):
        return "Triton is not installed"
    major, _ = platform.capability
    width, is_wide = config.head_dim, config.head_dim > LARGEST_SM12X_HEAD_DIM
    reasons = (
        (dtype == torch.float64, "its kernels know no float64"),
        (
            width < LEAST_FLEX_HEAD_DIM,
            f"head_dim is {width}, and its kernels need at least {LEAST_FLEX_HEAD_DIM}",
        ),
        (
            needs_gradients and major == CONSUMER_BLACKWELL and is_wide,
            f"head_dim is {width}, and its backward on sm_12x takes at most {LARGEST_SM12X_HEAD_DIM}",
        ),
    )
    return next((reason for applies, reason in reasons if applies), None)
