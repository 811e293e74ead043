"""Functions that torch.compile turns into kernels, safely from several threads.

Compiling and tuning are not thread-safe, and what is compiled, when, is decided deep inside a call. So the
first call with each set of shapes holds one lock for the whole process; later ones hold none. A function is
compiled as one graph: what cannot be is an error, and never runs uncompiled in silence.

Lengths that change are compiled for twice or thrice, then once for all lengths.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# More than the kinds of call there are: types, devices, and a dimension or two that turned out to vary.
RECOMPILE_LIMIT = 64

_compiling = threading.RLock()


class Compiled:
    """A function and its compiled form, which is made when it is first called."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.plain = function
        self._compiled = torch.compile(function, fullgraph=True)
        self._known: set[Any] = set()

    def when(self, is_compiled: bool) -> Callable[..., Any]:
        """Return the compiled form or the function itself."""
        return self if is_compiled else self.plain

    def __call__(self, *arguments: Any) -> Any:
        """Call the compiled form.

        Raises:
            torch._dynamo.exc.FailOnRecompileLimitHit: it was compiled for too many kinds of call.
        """
        if not torch.is_grad_enabled():
            # Else there would be one graph more for every argument that requires a gradient or does not.
            arguments = tuple(part.detach() if isinstance(part, Tensor) else part for part in arguments)
        kind = (torch.is_grad_enabled(), torch.get_default_dtype(), *map(_kind, arguments))
        if kind in self._known:
            return self._compiled(*arguments)
        # The limit is set here, around each call that may compile: some releases keep it by thread, and
        # backward runs in threads of its own.
        with _compiling, torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT):  # noqa: SLF001
            result = self._compiled(*arguments)
            self._known.add(kind)
            return result


def _kind(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        # A graph depends on whether a tensor begins where its storage does.
        starts_at_zero = argument.storage_offset() == 0
        places = (argument.shape, argument.stride(), starts_at_zero, argument.device)
        return *places, argument.dtype, argument.requires_grad
    # Whatever else there is follows from the tensors, or is a number that may be compiled in.
    return argument if isinstance(argument, int | float | bool | str | None) else type(argument)
