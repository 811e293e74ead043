"""What speaks for a tensor and against another, in lines for a terminal; knows nothing of confidence."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from orchestrator.forensics.asked import AskedSize, size_as_torch
from orchestrator.forensics.fits import Fit, Way, find_fits, solve
from orchestrator.forensics.shapes import ShapeSet, TensorShape
from orchestrator.text import printable

__all__ = ["ADMITTED", "difference_text", "differences", "may_be", "nearest", "reasons", "why_not"]

ADMITTED = {Way.DECLARED, Way.SOLVED}  # as the parameters say, at some length of a batch at least
MOST_DIFFERENCES = 3


def reasons(asked: AskedSize, fit: Fit) -> Iterator[str]:
    """Yields what the numbers say, the strongest first."""
    tensor = fit.tensor
    names = " × ".join(dimension.name for dimension in tensor.dimensions)
    several = f"{fit.pieces} at once, each " if fit.pieces > 1 else ""
    yield f"{several}{fit.shape_text} {fit.dtype} is {size_as_torch(fit.size_bytes)}: {names}"
    if not tensor.applies:
        yield f"these parameters should not make it; it is made when {tensor.when}"
    if fit.way in {Way.DTYPE, Way.PART}:
        yield f"{fit.way.value}; it is declared as {_declared_text(tensor)}"
    for dimension in tensor.dimensions:
        if dimension.numbers is not None:
            yield f"{dimension.name} {dimension.value} = {dimension.expression} = {dimension.numbers}"
    given = [
        f"{dimension.name} {dimension.value} = {dimension.expression}"
        for dimension in tensor.dimensions
        if dimension.numbers is None and dimension.name != dimension.expression
    ]
    if given:
        yield ", ".join(given)
    if fit.solved is not None:
        yield f"{asked.text} alone leaves {fit.solved}"
    if fit.way is not Way.DTYPE and fit.dtype == "float32":
        yield f"in bfloat16 it would be {size_as_torch(fit.size_bytes // 2)}"


def may_be(asked: AskedSize, tensor: TensorShape) -> bool:
    """Returns whether its parameters admit a tensor of that size."""
    return tensor.applies and any(fit.way in ADMITTED for fit in find_fits(asked, tensor))


def why_not(asked: AskedSize, tensor: TensorShape) -> str:
    """Returns why a tensor does not have that size."""
    if not tensor.applies:
        return f"it makes no {tensor.name}; they are made when {tensor.when}"
    solved = solve(asked, tensor)
    if solved is None:
        return f"{tensor.name} are {_declared_text(tensor)}"
    numbers = [dimension for dimension in tensor.dimensions if dimension.numbers and dimension.free is None]
    given = "".join(f" with {dimension.name} {dimension.numbers}" for dimension in numbers)
    return f"{tensor.name} are {size_as_torch(tensor.size_bytes)}; {asked.text}{given} needs {solved.needed}"


def nearest(asked: AskedSize, part: ShapeSet) -> Iterator[str]:
    """Yields the next smaller and larger tensors that a run makes, and what the smaller one would need."""
    made = sorted((tensor for tensor in part.tensors if tensor.applies), key=lambda tensor: tensor.size_bytes)
    smaller = [tensor for tensor in made if tensor.size_bytes < asked.least_bytes][-1:]
    larger = [tensor for tensor in made if tensor.size_bytes > asked.most_bytes][:1]
    for word, found in (("smaller", smaller), ("larger", larger)):
        yield from (f"the next {word} one: {tensor.name}, {_declared_text(tensor)}" for tensor in found)
    for tensor in smaller:
        solved = solve(asked, tensor)
        if solved is not None and not solved.is_allowed:
            yield why_not(asked, tensor)


def differences(here: Mapping[str, Any], there: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Returns the parameters that are not the same, with both values; None: it is not given."""
    names = sorted(here.keys() | there.keys())
    return {name: (here.get(name), there.get(name)) for name in names if here.get(name) != there.get(name)}


def difference_text(found: Mapping[str, tuple[Any, Any]]) -> str:
    """Returns the first few of them as words."""
    shown = [
        f"{printable(name)[:40]} is {_value_text(there)} (here {_value_text(here)})"
        for name, (here, there) in list(found.items())[:MOST_DIFFERENCES]
    ]
    more = len(found) - MOST_DIFFERENCES
    return ", ".join(shown) + (f" and {more} more differ" if more > 0 else "")


def _declared_text(tensor: TensorShape) -> str:
    return f"{list(tensor.shape)} {tensor.dtype}, {size_as_torch(tensor.size_bytes)}"


def _value_text(value: object) -> str:
    return "not given" if value is None else printable(json.dumps(value)[:40])
