"""What was being made, from the phase, the stack and what lives beside it."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.forensics.captures import read_capture
from orchestrator.forensics.explain import Facts, explain
from orchestrator.forensics.making import being_made

HEAD = {"category": "parameter", "name": "lm_head.weight", "shape": [248320, 1024], "dtype": "bfloat16"}
WEIGHT = {"category": "parameter", "name": "0.weight", "shape": [8192, 8192], "dtype": "float32"}
LOGITS = {"category": "logits", "name": None, "shape": [8192, 248320], "dtype": "bfloat16"}
STATES = {"category": "activation", "name": None, "shape": [8192, 1024], "dtype": "bfloat16"}
WEIGHT_BYTES = 8192 * 8192 * 4


@pytest.mark.parametrize(
    ("event", "made"),
    [
        (
            {"phase": "optimizer", "requested_bytes": WEIGHT_BYTES, "largest": [WEIGHT],
             "stack": ["train.py:8 <module>", "adamw.py:175 _init_group"]},
            "optimizer state [8192, 8192] float32, the shape of 0.weight",
        ),
        (
            {"phase": "optimizer", "stack": ["train.py:8 <module>", "adamw.py:400 _multi_tensor_adamw"]},
            "a temporary of the optimizer's step",
        ),
        (
            {"phase": "backward", "autograd_node": "AddmmBackward0", "requested_bytes": WEIGHT_BYTES,
             "largest": [STATES, WEIGHT]},
            "a gradient [8192, 8192] float32, the shape of 0.weight",
        ),
        ({"phase": "backward", "autograd_node": "AccumulateGrad"}, "a gradient"),
        ({"phase": "backward", "autograd_node": "MulBackward0"}, "a gradient or a temporary of backward"),
        (
            {"phase": "backward", "requested_bytes": 8192 * 248320 * 4, "largest": [HEAD, LOGITS]},
            "logits or their gradient [8192, 248320] float32",
        ),
        (
            {"phase": "forward", "stack": ["train.py:5 <genexpr>", "linear.py:106 __init__"],
             "requested_bytes": WEIGHT_BYTES, "largest": [WEIGHT]},
            "a parameter of a module that is being made [8192, 8192] float32, the shape of 0.weight",
        ),
        (
            {"phase": "forward", "stack": ["train.py:8 <module>"], "requested_bytes": 8192 * 248320 * 4,
             "largest": [LOGITS, HEAD, STATES]},
            "logits [8192, 248320] float32",
        ),
        (
            {"phase": "forward", "requested_bytes": 8192 * 248320 * 2, "largest": [HEAD, STATES]},
            "logits [8192, 248320] bfloat16 or [4096, 248320] float32",
        ),
        (
            {"phase": "forward", "requested_bytes": 248320 * 1024 * 4, "largest": [HEAD]},
            "a copy of a parameter [248320, 1024] float32, the shape of lm_head.weight",
        ),
        (
            {"phase": "forward", "requested_bytes": 8192 * 1024 * 4, "largest": [STATES]},
            "an activation [8192, 1024] float32",
        ),
        ({"phase": "forward", "requested_bytes": 3 * 2**30 + 512, "largest": [WEIGHT]}, None),
        ({"requested_bytes": None, "largest": [{"shape": []}, {"shape": [0]}, {"shape": None}]}, None),
    ],
)  # fmt: skip
def test_phase_stack_and_live_tensors_say_what_it_was(event: dict[str, Any], made: str | None) -> None:
    assert being_made(read_capture(event, proc="main")) == made


def test_a_script_without_shapes_is_told_it_in_the_first_line() -> None:
    event = {
        "phase": "forward",
        "asked_bytes": 7760 * 2**20,
        "requested_bytes": 8192 * 248320 * 4,
        "largest": [LOGITS],
        "module": "drafter",
        "stack": ["train.py:8 <module>"],
    }
    found = explain(Facts(captures=(read_capture(event, proc="main"),)))
    assert found is not None
    assert (
        "7.58 GiB asked for logits [8192, 248320] float32 in drafter at train.py:8 <module>" in found.answer
    )
