"""What a process was making when memory ran out, from what it told of that moment alone (pure).

For programs whose payload lists no tensors: the phase and the stack tell the kind, and a live tensor of the
same size in some type tells the shape. What neither tells is not said.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from orchestrator.forensics.captures import Block, Capture
from orchestrator.forensics.shapes import ITEM_BYTES
from orchestrator.supervisor.memory_names import LEAST_VOCABULARY
from orchestrator.supervisor.memory_stacks import BACKWARD, OPTIMIZER

__all__ = ["being_made"]

_ROUNDED_BY_BYTES = 512  # by torch's allocator
_WIDENED_TO = ("float32", "bfloat16", "float16")
_LEAST_ODD = 97  # a size is a multiple of such a number by chance in one case of a hundred
_MAKERS = re.compile(
    r"(?:module|linear|sparse|conv|rnn|activation|transformer|normalization|batchnorm)\.py:\d+ "
    r"(?:__init__|_apply|convert|reset_parameters)"
)  # torch.nn's own files


def being_made(capture: Capture) -> str | None:
    """Returns category, shape and type as far as they are told: ``logits [8192, 248320] float32``."""
    if capture.phase == OPTIMIZER:
        is_state = any(frame.endswith(" _init_group") for frame in capture.stack)
        what = "optimizer state" if is_state else "a temporary of the optimizer's step"
        return f"{what}{_shape_of_parameter(capture)}"
    if capture.phase == BACKWARD or capture.autograd_node is not None:
        return _in_backward(capture)
    if any(_MAKERS.fullmatch(frame) for frame in capture.stack):
        return f"a parameter of a module that is being made{_shape_of_parameter(capture)}"
    return _in_forward(capture)


def _in_backward(capture: Capture) -> str:
    of_parameter = _shape_of_parameter(capture)
    if of_parameter or "AccumulateGrad" in (capture.autograd_node or ""):
        return f"a gradient{of_parameter}"
    block, text = next(_alike(capture), (None, ""))
    if block is not None and block.category in ("logits", "scores"):
        return f"{block.category} or their gradient{text}"
    return _logits(capture) or f"a gradient or a temporary of backward{text}"


def _in_forward(capture: Capture) -> str | None:
    named = {block.category: text for block, text in reversed(list(_alike(capture)))}
    for category in ("logits", "scores"):
        if category in named:
            return f"{category}{named[category]}"
    copied = _shape_of_parameter(capture)
    if copied:
        return f"a copy of a parameter{copied}"
    activation = f"an activation{named['activation']}" if "activation" in named else None
    return _logits(capture) or activation


def _shape_of_parameter(capture: Capture) -> str:
    """Returns the shape of a live parameter that is as large, and which that is."""
    for block, text in _alike(capture):
        if block.category == "parameter":
            return f"{text}, the shape of {block.name}" if block.name else text
    return ""


def _alike(capture: Capture) -> Iterator[tuple[Block, str]]:
    """Yields live tensors whose shape makes the size that was requested, in their own type first."""
    requested = capture.requested_bytes
    for block in capture.largest if requested else ():
        for dtype in dict.fromkeys((block.dtype, *_WIDENED_TO)):
            if block.shape and dtype in ITEM_BYTES:
                size_bytes = math.prod(block.shape) * ITEM_BYTES[dtype]
                if 0 <= (requested or 0) - size_bytes < _ROUNDED_BY_BYTES:
                    yield block, f" {list(block.shape)} {dtype}"
                    break


def _logits(capture: Capture) -> str | None:
    """Returns rows over a vocabulary that a parameter has, where only they have such a size."""
    requested = capture.requested_bytes or 0
    for block in capture.largest:
        words = max(block.shape or (0,))
        if (
            block.category != "parameter"
            or words < LEAST_VOCABULARY
            or words // (words & -words) < _LEAST_ODD
        ):
            continue
        found = [
            f"[{requested // (words * ITEM_BYTES[dtype])}, {words}] {dtype}"
            for dtype in dict.fromkeys((block.dtype, "float32"))
            if dtype in ITEM_BYTES and requested and requested % (words * ITEM_BYTES[dtype]) == 0
        ]
        if found:
            return f"logits {' or '.join(found)}"
    return None
