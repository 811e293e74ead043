"""Two tensors of one size are told apart by the function that stands in the stack."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.forensics.asked import asked_from_text
from orchestrator.forensics.naming import Naming, name_tensor
from orchestrator.forensics.placing import placed
from orchestrator.forensics.shapes import ShapeSet, read_shape_set


def shapes(label: str, born: dict[str, str], rows: int = 16384) -> ShapeSet:
    """Tensors of one size, each with the function that makes it."""
    tensors = [_tensor(name, function, rows) for name, function in born.items()]
    return read_shape_set({"tensors": tensors}, label=label, params={"rows": rows})


def _tensor(name: str, born: str, rows: int) -> dict[str, Any]:
    dims = [{"name": "rows", "expression": "rows", "value": rows}]
    dims.append({"name": "columns", "expression": "65536", "value": 65536})
    size = rows * 65536 * 4
    fixed = {"category": "activation", "dtype": "float32", "applies": True, "when": "always", "count": 1}
    return {"name": name, "born": born, "dims": dims, "bytes": size, **fixed}


TWINS = {"gate": "dflash.feed_forward.gate", "scores": "dflash.attention.flex.Flex.attend"}


def twins() -> Naming:
    return name_tensor(asked_from_text("4.00 GiB"), own=shapes("run 1", TWINS))


def test_without_a_stack_both_are_as_likely() -> None:
    naming = placed(twins(), [])
    confidences = {candidate.tensor.name: candidate.confidence for candidate in naming.candidates}
    assert confidences["gate"] == pytest.approx(confidences["scores"])


@pytest.mark.parametrize(
    ("stack", "name"),
    [
        (["flex.py:120 attend", "layers.py:40 forward"], "scores"),
        (
            ["functional.py:3 softmax", "attention/flex.py:120 Flex.attend", "feed_forward.py:9 gate"],
            "scores",
        ),
        (["feed_forward.py:9 gate", "flex.py:120 attend"], "gate"),
    ],
)
def test_the_innermost_function_that_makes_one_of_them_made_it(stack: list[str], name: str) -> None:
    best = placed(twins(), stack).candidates[0]
    assert best.tensor.name == name
    assert best.confidence > 0.9
    assert any("the function that makes it is in the stack: " in reason for reason in best.evidence)


@pytest.mark.parametrize("stack", [["flex.py:120 other", "other.py:1 attend"], ["garbage"], [""]])
def test_a_stack_without_their_functions_says_nothing(stack: list[str]) -> None:
    assert placed(twins(), stack) == twins()
