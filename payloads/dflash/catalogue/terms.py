"""Numbers that remember the expression they came from, and tensors made of them.

A term has a value, an expression in the parameters' names, the same with their numbers, and perhaps one
quantity in it that the parameters leave open: a batch's length, the rows that a loss mask leaves.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "bool": 1}


@dataclass(frozen=True, kw_only=True, slots=True)
class Free:
    """An open quantity, at its declared value and within bounds; the term is offset + factor · quantity."""

    name: str
    value: int
    least: int
    most: int
    factor: int = 1
    offset: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Term:
    """A value and where it comes from."""

    value: int
    expression: str
    numbers: str
    free: Free | None = None

    def __mul__(self, other: "Term") -> "Term":
        return Term(
            value=self.value * other.value,
            expression=f"{_grouped(self.expression)} · {_grouped(other.expression)}",
            numbers=f"{_grouped(self.numbers)} · {_grouped(other.numbers)}",
            free=_scaled(self.free, other.value) or _scaled(other.free, self.value),
        )

    def __add__(self, other: "Term") -> "Term":
        return Term(
            value=self.value + other.value,
            expression=f"{self.expression} + {other.expression}",
            numbers=f"{self.numbers} + {other.numbers}",
            free=_shifted(self.free, other.value) or _shifted(other.free, self.value),
        )


def term(expression: str, value: int, *, numbers: str | None = None, free: Free | None = None) -> Term:
    """Return a term of its own, such as one parameter."""
    return Term(value=value, expression=expression, numbers=numbers or str(value), free=free)


def least_of(first: Term, second: Term) -> Term:
    """Return the smaller of two, which keeps what the smaller one leaves open."""
    smaller = first if first.value <= second.value else second
    return Term(
        value=smaller.value,
        expression=f"min({first.expression}, {second.expression})",
        numbers=f"min({first.numbers}, {second.numbers})",
        free=smaller.free,
    )


def tiled(rows: Term, tile: int) -> Term:
    """Return the rows filled up to whole tiles; what is open in them counts in tiles then."""
    value, free = -(-rows.value // tile) * tile, None
    if rows.free is not None:
        least, most = (-(-(rows.free.offset + rows.free.factor * end) // tile) for end in _bounds(rows.free))
        free = Free(
            name=f"{rows.free.name} in tiles of {tile}",
            value=value // tile,
            least=least,
            most=most,
            factor=tile,
        )
    return Term(
        value=value,
        expression=f"{_grouped(rows.expression)} in tiles of {tile}",
        numbers=f"{_grouped(rows.numbers)} in tiles of {tile}",
        free=free,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A tensor, or several of one shape and type that belong together; the fields are those of the program.

    `dims` are (name, term); `count` is how many a step holds at once by design. `born` names a function
    that is on the stack when it is made, or, for what autograd makes in backward, the one it belongs to.
    """

    name: str
    category: str
    dtype: str
    dims: tuple[tuple[str, Term], ...]
    applies: bool
    when: str
    born: str
    count: int = 1
    remedy: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()

    @property
    def values(self) -> tuple[int, ...]:
        """The dimensions."""
        return tuple(size.value for _, size in self.dims)

    @property
    def size_bytes(self) -> int:
        """The size."""
        return math.prod(self.values) * ITEM_BYTES[self.dtype]


def _grouped(expression: str) -> str:
    return f"({expression})" if " + " in expression or " − " in expression else expression


def _scaled(free: Free | None, by: int) -> Free | None:
    return None if free is None else replace(free, factor=free.factor * by, offset=free.offset * by)


def _shifted(free: Free | None, by: int) -> Free | None:
    return None if free is None else replace(free, offset=free.offset + by)


def _bounds(free: Free) -> tuple[int, int]:
    return free.least, free.most
