"""First derivatives only, said aloud.

torch's own `once_differentiable` refuses a second derivative only where the first one's inputs ask for a
gradient; a gradient that was made in forward would pass as a constant.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a Function's backward that refuses to be recorded.

    Raises:
        RuntimeError: it was called with create_graph.
    """

    @functools.wraps(backward)
    def refusing(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError("the drafter has no second derivatives; leave create_graph False")
        return backward(ctx, *gradients)

    return refusing
