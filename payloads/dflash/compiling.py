"""Functions that become kernels, by torch.compile or by Triton, safely from several threads.

Compiling and tuning are not thread-safe, and what is compiled, when, is decided deep inside a call. So the
first call of each kind (types, shapes, options) holds one lock for the whole process; later ones hold none.
Where a forward is compiled its backward is too, at once, not later in a thread of autograd's. A function is
compiled as one graph: what cannot be is an error. Where torch.compile is disabled the function runs as it
is, and that is said.

Lengths that change are compiled for twice or thrice, then once for all lengths.
"""

import contextlib
import functools
import importlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from dflash.notices import warn_once
from dflash.platforms import simulation

# More than the kinds of call there are: types, devices, and a dimension or two that turned out to vary.
RECOMPILE_LIMIT = 64

_compiling = threading.RLock()


class FirstCalls:
    """The kinds of call that are known to be compiled."""

    def __init__(self) -> None:
        self._known: set[Any] = set()

    @contextlib.contextmanager
    def guard(self, *arguments: Any) -> Iterator[None]:
        """Hold the lock for the first call of a kind that ends well."""
        kind = (*_modes(), *map(_kind, arguments))
        if kind in self._known:
            yield
            return
        with _compiling, _settings():
            yield
            self._known.add(kind)


class Compiled:
    """A function and its compiled form, which is made when it is first called."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.plain = function
        self._first_calls = FirstCalls()

    def when(self, is_compiled: bool) -> Callable[..., Any]:
        """Return the compiled form or the function itself."""
        return self if is_compiled else self.plain

    def __call__(self, *arguments: Any) -> Any:
        """Call the compiled form.

        Raises:
            torch._dynamo.exc.FailOnRecompileLimitHit: it was compiled for too many kinds of call.
        """
        simulated = simulation()
        if simulated is not None:
            return simulated.call_compiled(self.plain, arguments)
        if not torch.is_grad_enabled():
            # Else there would be one graph more for every argument that requires a gradient or does not.
            arguments = tuple(part.detach() if isinstance(part, Tensor) else part for part in arguments)
        if _config("_dynamo").disable:
            warn_once(
                "compile", "torch.compile is disabled, so nothing is compiled; unset TORCHDYNAMO_DISABLE"
            )
            return self.plain(*arguments)
        with self._first_calls.guard(*arguments):
            return self._compiled(*arguments)

    @functools.cached_property
    def _compiled(self) -> Callable[..., Any]:
        # Loading the compiler takes longer than loading torch, for nothing where nothing is compiled.
        compiled: Callable[..., Any] = torch.compile(self.plain, fullgraph=True)
        return compiled


@contextlib.contextmanager
def _settings() -> Iterator[None]:
    """Set what a call that may compile needs; some releases keep it by thread."""
    functorch = _config("_functorch")
    with contextlib.ExitStack() as stack:
        stack.enter_context(_config("_dynamo").patch(recompile_limit=RECOMPILE_LIMIT))
        if hasattr(functorch, "force_non_lazy_backward_lowering"):
            stack.enter_context(functorch.patch(force_non_lazy_backward_lowering=True))
        yield


def _config(part: str) -> Any:
    """Return the settings of a part of the compiler, which torch itself may not have loaded yet."""
    return importlib.import_module(f"torch.{part}.config")


def _modes() -> tuple[Any, ...]:
    """Return what of the process and thread graphs depend on as well."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cuda"),
        torch.is_autocast_enabled("cpu"),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch.get_default_dtype(),
    )


def _kind(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        # A graph depends on whether a tensor begins where its storage does.
        starts_at_zero = argument.storage_offset() == 0
        places = (argument.shape, argument.stride(), starts_at_zero, argument.device)
        return *places, argument.dtype, argument.requires_grad
    if isinstance(argument, Mapping):
        return tuple(sorted(argument.items()))
    if isinstance(argument, int | float | bool | str | None | torch.dtype | torch.device):
        return argument
    return type(argument)  # a block mask: its tables follow from the tensors beside it
