"""The large tensors of one configuration, as its payload declares them, checked.

A payload's `shapes` program answers with one set for each file of parameters: every tensor with its dtype,
its dimensions as expressions with values, and whether this configuration makes it at all. A payload is
somebody's code, so nothing in its answer is taken on trust: names are made printable and cut, numbers are
bounded, and a size that its own dimensions contradict is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from orchestrator.errors import UsageError
from orchestrator.text import printable, quoted

__all__ = [
    "ITEM_BYTES",
    "Dimension",
    "FreeQuantity",
    "ShapeSet",
    "TensorShape",
    "read_shape_set",
    "read_shape_sets",
]

ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int64": 8,
    "int32": 4,
    "bool": 1,
    "uint8": 1,
}
MOST_TENSORS, MOST_DIMENSIONS, MOST_CHARACTERS, MOST_NOTES = 5000, 8, 300, 8
MOST_COUNT = 2**53


@dataclass(frozen=True, kw_only=True, slots=True)
class FreeQuantity:
    """What the parameters leave open of a dimension, within bounds; value = offset + factor · quantity."""

    name: str
    value: int
    least: int
    most: int
    factor: int = 1
    offset: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Dimension:
    """One dimension: an expression of the parameters, the same with their numbers, and what it comes to."""

    name: str
    expression: str
    value: int
    numbers: str | None = None
    free: FreeQuantity | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorShape:
    """One tensor, or several of one shape that one place makes.

    ``when`` says which configurations make it, ``count`` how many there can be at once, ``born`` where in the
    payload, ``remedy`` which parameters would avoid it, ``notes`` why it is as it is.
    """

    name: str
    category: str
    dtype: str
    dimensions: tuple[Dimension, ...]
    applies: bool
    when: str
    count: int
    born: str
    remedy: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """The declared values."""
        return tuple(dimension.value for dimension in self.dimensions)

    @property
    def size_bytes(self) -> int:
        """The size at the declared values."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True, slots=True)
class ShapeSet:
    """The tensors of one configuration; ``label`` names whose it is: a run's id, a file.

    ``notes`` are what the payload says of all of it, ``unknown`` the parameters that it does not know,
    ``misspelt`` a sentence for each of these that is nearly one that it knows.
    """

    label: str
    tensors: tuple[TensorShape, ...]
    params: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    notes: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    misspelt: tuple[str, ...] = ()

    @property
    def is_foreign(self) -> bool:
        """Whether parameters are given and none is the payload's: what it makes by default is not theirs."""
        return bool(self.params) and self.params.keys() <= set(self.unknown)


def read_shape_sets(
    sets: Sequence[object], *, labels: Sequence[str], params: Sequence[Mapping[str, Any]]
) -> tuple[ShapeSet, ...]:
    """Returns the sets of an answer, one for each label, in the order in which they were asked for.

    Raises:
        UsageError: one is not of that form.
    """
    return tuple(
        read_shape_set(part, label=label, params=given)
        for part, label, given in zip(sets, labels, params, strict=True)
    )


def read_shape_set(values: object, *, label: str, params: Mapping[str, Any]) -> ShapeSet:
    """Returns one set of an answer.

    Raises:
        UsageError: it is not of that form; the message says where.
    """
    given = _mapping(values, "a set")
    tensors = _list(given.get("tensors"), "tensors", most=MOST_TENSORS)
    return ShapeSet(
        label=label,
        tensors=tuple(_tensor(entry, f"tensors[{index}]") for index, entry in enumerate(tensors)),
        params=MappingProxyType(dict(params)),
        notes=_notes(given, "notes"),
        unknown=tuple(
            name for name in params if name in _list(given.get("unknown", []), "unknown", most=MOST_TENSORS)
        ),
        misspelt=_notes(given, "misspelt"),
    )


def _tensor(entry: object, where: str) -> TensorShape:
    values = _mapping(entry, where)
    dtype = _text(values, "dtype", where)
    if dtype not in ITEM_BYTES:
        raise UsageError(f"{where}.dtype is {quoted(dtype)}; known: {', '.join(ITEM_BYTES)}")
    dimensions = _list(values.get("dims"), f"{where}.dims", most=MOST_DIMENSIONS)
    remedy = values.get("remedy")
    tensor = TensorShape(
        name=_text(values, "name", where),
        category=_text(values, "category", where),
        dtype=dtype,
        dimensions=tuple(_dimension(part, f"{where}.dims[{at}]") for at, part in enumerate(dimensions)),
        applies=_flag(values, "applies", where),
        when=_text(values, "when", where),
        count=_count(values, "count", where),
        born=_text(values, "born", where),
        remedy=None if remedy is None else _remedy(remedy, f"{where}.remedy"),
        notes=_notes(values, f"{where}.notes"),
    )
    if tensor.size_bytes != _count(values, "bytes", where):
        raise UsageError(f"{where}.bytes is {values['bytes']}; its dimensions make {tensor.size_bytes}")
    return tensor


def _dimension(entry: object, where: str) -> Dimension:
    values = _mapping(entry, where)
    free, numbers = values.get("free"), values.get("numbers")
    return Dimension(
        name=_text(values, "name", where),
        expression=_text(values, "expression", where),
        value=_count(values, "value", where),
        numbers=None if numbers is None else _shown(numbers, f"{where}.numbers"),
        free=None if free is None else _free(free, f"{where}.free"),
    )


def _free(entry: object, where: str) -> FreeQuantity:
    values = _mapping(entry, where)
    free = FreeQuantity(
        name=_text(values, "name", where),
        **{name: _count(values, name, where) for name in ("value", "least", "most", "factor", "offset")},
    )
    if free.factor < 1 or free.least > free.most:
        raise UsageError(f"{where} has factor {free.factor} and bounds {free.least} to {free.most}")
    return free


def _notes(values: Mapping[str, Any], where: str) -> tuple[str, ...]:
    name = where.rpartition(".")[2]
    return tuple(_shown(note, where) for note in _list(values.get(name, []), where, most=MOST_NOTES))


def _remedy(entry: object, where: str) -> Mapping[str, Any]:
    values = _mapping(entry, where)
    for name, value in values.items():
        if not isinstance(value, str | int | float | bool | None):
            raise UsageError(f"{where}.{printable(name)} is {quoted(value)}; it must be one value")
    return MappingProxyType(
        {
            _shown(name, where): _shown(value, where) if isinstance(value, str) else value
            for name, value in values.items()
        }
    )


def _mapping(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise UsageError(f"{where} is {quoted(value)}; it must be a JSON object")
    return value


def _list(value: object, where: str, *, most: int) -> list[object]:
    if not isinstance(value, list):
        raise UsageError(f"{where} is {quoted(value)}; it must be a list")
    if len(value) > most:
        raise UsageError(f"{where} has {len(value)} entries; at most {most} are read")
    return value


def _text(values: Mapping[str, Any], name: str, where: str) -> str:
    return _shown(values.get(name), f"{where}.{name}")


def _shown(value: object, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise UsageError(f"{where} is {quoted(value)}; it must be a text")
    return printable(value[:MOST_CHARACTERS])


def _flag(values: Mapping[str, Any], name: str, where: str) -> bool:
    value = values.get(name)
    if not isinstance(value, bool):
        raise UsageError(f"{where}.{name} is {quoted(value)}; it must be true or false")
    return value


def _count(values: Mapping[str, Any], name: str, where: str) -> int:
    value = values.get(name)
    if type(value) is not int or not 0 <= value <= MOST_COUNT:
        raise UsageError(f"{where}.{name} is {quoted(value)}; it must be a whole number of at least 0")
    return value
