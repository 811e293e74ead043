"""Every storage that a step allocates, with its shape, type, and the payload's functions on the stack."""

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PAYLOAD = "dflash"


@dataclass(frozen=True, kw_only=True, slots=True)
class Birth:
    """A new storage; `stack` has the payload's functions, innermost first; autograd's has the step alone."""

    shape: tuple[int, ...]
    dtype: str
    size_bytes: int
    operator: str
    stack: tuple[str, ...]


class Births(TorchDispatchMode):
    """Notes each storage when an operator first returns it, and keeps it, so that no address comes twice.

    Uncompiled flex attention is one operator of torch's own; its plain implementation runs under this too.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.all: list[Birth] = []
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = _plain_flex(function)
        if plain is not None:
            with self:
                return plain(*args, **(kwargs or {}))
        self._remember((args, kwargs))
        result = function(*args, **(kwargs or {}))
        for tensor in self._remember(result):
            storage = tensor.untyped_storage()
            dtype = str(tensor.dtype).removeprefix("torch.")
            self.all.append(
                Birth(
                    shape=tuple(tensor.shape),
                    dtype=dtype,
                    size_bytes=storage.nbytes(),
                    operator=str(function),
                    stack=_payload_stack(),
                )
            )
        return result

    def _remember(self, values: Any) -> list[Tensor]:
        """Return the tensors whose storage was not known."""
        new = []
        for tensor in tree_leaves(values):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in self._known:
                self._known[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
                new.append(tensor)
        return new


def _plain_flex(function: Any) -> Any:
    module = sys.modules.get("torch._higher_order_ops.flex_attention")
    if module is None or not isinstance(function, torch._ops.HigherOrderOperator):
        return None
    plain = {"flex_attention": module.sdpa_dense, "flex_attention_backward": module.sdpa_dense_backward}
    return plain.get(function.name())


def _payload_stack() -> tuple[str, ...]:
    names = []
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.split(".")[0] == PAYLOAD:
            names.append(f"{module}.{frame.f_code.co_qualname.replace('.<locals>', '')}")
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(names)
