"""A matrix: what an experiment varies, and the points that this makes (pure).

Knows the form of ``matrix:`` and what may be varied. Laying a point over the experiment is the experiment's
business, running the cases on hosts `submitting`'s.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.allocator import AllocValue, parse_alloc_conf, render_alloc_conf
from orchestrator.errors import UsageError
from orchestrator.fields import Secret, check_variable
from orchestrator.parameters import check_declared, do_overlap
from orchestrator.text import printable
from orchestrator.yaml_source import Field, Key, Source, StrictModel

__all__ = ["MOST_CASES", "Axis", "Matrix", "MatrixForm", "Point", "read_matrix"]

MOST_CASES = 1000
MOST_AT_ONCE = 1000
_MOST_SHOWN = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """One thing that is varied: ``kind`` is params, env or alloc_conf, ``name`` the parameter or variable."""

    kind: str
    name: str
    values: tuple[Any, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One case's values; ``label`` tells it from the others of its matrix."""

    label: str
    values: tuple[tuple[Axis, Any], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Matrix:
    """The axes in the file's order, and how many cases of a host run at once."""

    axes: tuple[Axis, ...]
    at_once: int = 1

    @property
    def varied_params(self) -> tuple[str, ...]:
        """Returns the parameters that differ from case to case."""
        return tuple(axis.name for axis in self.axes if axis.kind == "params")

    def points(self) -> tuple[Point, ...]:
        """Returns every combination; the last axis varies fastest."""
        combined = list(itertools.product(*(axis.values for axis in self.axes)))
        labels = [", ".join(map(_label, self.axes, values)) for values in combined]
        if len(set(labels)) < len(labels):  # values that differ only where a label was cut
            labels = [f"{label} #{number}" for number, label in enumerate(labels, 1)]
        return tuple(
            Point(label=label, values=tuple(zip(self.axes, values, strict=True)))
            for label, values in zip(labels, combined, strict=True)
        )


class MatrixForm(StrictModel):
    """``matrix:`` as it stands in a file."""

    params: dict[str, list[Any]] = Field(default_factory=dict)
    env: dict[str, list[Any]] = Field(default_factory=dict)
    alloc_conf: list[Any] | None = None
    at_once: int = 1


def read_matrix(
    source: Source,
    form: MatrixForm,
    *,
    params: Mapping[str, Any],
    env: Mapping[str, str | Secret],
    alloc_conf: Mapping[str, AllocValue],
) -> Matrix:
    """Returns the checked matrix over an experiment's settings.

    Raises:
        ConfigError: something in it is wrong, with its line.
    """
    given = source.data["matrix"]
    axes: list[Axis] = []
    for kind in given:
        if kind == "params":
            axes += [_parameter(source, params, name, values) for name, values in form.params.items()]
        elif kind == "env":
            axes += [_variable(source, env, name, values) for name, values in form.env.items()]
        elif kind == "alloc_conf" and form.alloc_conf is not None:
            axes.append(_allocator(source, alloc_conf, form.alloc_conf))
    if not axes:
        raise source.error("varies nothing: name params, env or alloc_conf", "matrix")
    names = [axis.name for axis in axes if axis.kind == "params"]
    for first, second in itertools.combinations(names, 2):
        if do_overlap(first, second):
            raise source.error(f"varies {first} too, which holds the same", "matrix", "params", second)
    if not 1 <= form.at_once <= MOST_AT_ONCE:
        raise source.error(f"must be from 1 to {MOST_AT_ONCE}", "matrix", "at_once")
    count = math.prod(len(axis.values) for axis in axes)
    if count > MOST_CASES:
        sizes = " × ".join(str(len(axis.values)) for axis in axes)
        raise source.error(f"makes {count} cases ({sizes}), more than {MOST_CASES}", "matrix")
    return Matrix(axes=tuple(axes), at_once=form.at_once)


def _parameter(source: Source, params: Mapping[str, Any], name: str, values: Sequence[Any]) -> Axis:
    here = ("matrix", "params", name)
    with source.at_key(*here):
        check_declared(params, name)
    _check_list(source, values, here)
    return _axis(source, "params", name, values, here)


def _variable(source: Source, env: Mapping[str, str | Secret], name: str, values: Sequence[Any]) -> Axis:
    here = ("matrix", "env", name)
    if isinstance(env.get(name), Secret):
        raise source.error("is a secret, and secrets cannot vary", *here)
    _check_list(source, values, here)
    for position, value in enumerate(values):
        if isinstance(value, Mapping):
            raise source.error("must be text: secrets cannot vary", *here, position)
        with source.at(*here, position):
            check_variable(name, value)
    return _axis(source, "env", name, values, here)


def _allocator(source: Source, base: Mapping[str, AllocValue], values: Sequence[Any]) -> Axis:
    """Text replaces the experiment's settings, a mapping changes what it names, as in a profile."""
    here = ("matrix", "alloc_conf")
    _check_list(source, values, here)
    rendered = []
    for position, value in enumerate(values):
        with source.at(*here, position):
            if not isinstance(value, str | Mapping):
                raise UsageError("must be a mapping or text such as expandable_segments:True")
            own = parse_alloc_conf(value)
            whole = own if isinstance(value, str) else parse_alloc_conf({**base, **own})
            rendered.append(render_alloc_conf(whole))
    return _axis(source, "alloc_conf", "alloc_conf", rendered, here)


def _check_list(source: Source, values: Sequence[Any], here: Sequence[Key]) -> None:
    if not values:
        raise source.error("must list at least one value", *here)


def _axis(source: Source, kind: str, name: str, values: Sequence[Any], here: Sequence[Key]) -> Axis:
    """Two values that JSON spells the same would make two cases of one."""
    seen: dict[str, int] = {}
    for position, value in enumerate(values):
        spelt = json.dumps(value, sort_keys=True)
        if spelt in seen:
            text = f"is value {seen[spelt] + 1} of this list again: two cases would be equal"
            raise source.error(text, *here, position)
        seen[spelt] = position
    return Axis(kind=kind, name=name, values=tuple(values))


def _label(axis: Axis, value: Any) -> str:
    text = printable(value if isinstance(value, str) else json.dumps(value))
    text = text or ("none" if axis.kind == "alloc_conf" else "''")
    return f"{axis.name}={text if len(text) <= _MOST_SHOWN else f'{text[:_MOST_SHOWN]}…'}"
