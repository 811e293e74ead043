"""Gated-delta-net layers (Qwen3-Next, Qwen3.5) that begin anew with each document of a row.

Such a layer has two memories. Its convolution reaches a kernel's length back: the tokens in the gap before a
document are zeroed at the layer's entry. Its recurrent state decays by exp(g) before each token: on a
document's first token the gate is set so that g ≤ -20, and what was before is gone, 2e-9 of it left.

transformers does neither by position ids alone (a relative error of 1.5 was seen).

Shape letters: T tokens of the row as the target runs it, N documents.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dflash.target.rows import TargetRow
from dflash.transfer import to_device

DECAY = 20.0  # more would cost digits: gates are summed along a chunk of tokens in float32


def recurrent_layers(decoder: nn.Module) -> list[Any]:
    """Return the modules whose memories can be emptied here."""
    return [
        module
        for module in decoder.modules()
        if all(hasattr(module, name) for name in ("A_log", "dt_bias", "conv1d", "conv_kernel_size"))
        and _gate(module) is not None
    ]


def gap_for(layers: list[Any]) -> int:
    """Return how many tokens must be between two documents for no convolution to reach across."""
    return max((layer.conv_kernel_size - 1 for layer in layers), default=0)


@contextmanager
def beginning_anew(layers: list[Any], row: TargetRow) -> Iterator[None]:
    """Empty the layers' memories before each document while this row runs."""
    with ExitStack() as hooks:
        for device in {layer.A_log.device for layer in layers}:
            is_text_T, firsts_N = to_device(row.is_text_T, device), to_device(row.firsts_N, device)
            for layer in (one for one in layers if one.A_log.device == device):
                entry = layer.register_forward_pre_hook(_silence(is_text_T), with_kwargs=True)
                hooks.enter_context(_removing(entry))
                gate = _gate(layer).register_forward_hook(_forget(layer, firsts_N))
                hooks.enter_context(_removing(gate))
        yield


@contextmanager
def _removing(handle: Any) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()


def _gate(layer: Any) -> Any:
    return getattr(layer, "in_proj_a", None) or getattr(layer, "in_proj_ba", None)


def _silence(is_text_T: Tensor) -> Callable[..., Any]:
    def hook(_layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (args[0] * is_text_T[None, :, None], *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": kwargs["hidden_states"] * is_text_T[None, :, None]}

    return hook


def _forget(layer: Any, firsts_N: Tensor) -> Callable[..., Tensor]:
    """Return a hook on the gate's projection: softplus(a + dt_bias)·exp(A_log) ≥ DECAY on first tokens."""
    gate = DECAY / layer.A_log.float().exp() - layer.dt_bias.float()

    def hook(_projection: nn.Module, _args: Any, gates: Tensor) -> Tensor:
        values = gate.clamp(max=torch.finfo(gates.dtype).max).to(gates.dtype)
        if gates.shape[-1] == len(values):
            gates[0, firsts_N] = values
        else:  # Qwen3-Next: for each key head, b of its value heads, then a of the same
            heads = gates.unflatten(-1, (layer.num_k_heads, -1))
            own = heads.shape[-1] // 2
            heads[0, firsts_N, :, own:] = values.view(layer.num_k_heads, own)
        return gates

    return hook
