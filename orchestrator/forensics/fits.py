"""In which ways one declared tensor fits a size, and what each way keeps of the tensor's chance.

A tensor may have been as it is declared; with its open dimension at another value, a batch of another length;
in another dtype; several at once; or a part of its heads. The shares of these ways only say which is
likelier. A way that names one size keeps its share when that size fits; one that tries several keeps the part
that fits: one that solves for a dimension would have fitted many sizes, though a batch of about its declared
length is likelier than others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from orchestrator.forensics.asked import AskedSize
from orchestrator.forensics.shapes import ITEM_BYTES, Dimension, FreeQuantity, TensorShape

__all__ = ["Fit", "Solved", "Way", "find_fits", "solve"]

MOST_PIECES = 8
SPREAD = 0.2  # of the logarithm of an open quantity about its declared value
OTHER_DTYPE = {"float32": "bfloat16", "bfloat16": "float32", "float16": "float32", "bool": "bfloat16"}


class Way(StrEnum):
    """In which way a tensor fits a size."""

    DECLARED = "as declared"
    SOLVED = "with one dimension solved for"
    DTYPE = "in another dtype"
    SEVERAL = "several at once"
    PART = "a part of its heads"


SHARES = {Way.DECLARED: 0.8, Way.SOLVED: 0.15, Way.DTYPE: 0.03, Way.SEVERAL: 0.01, Way.PART: 0.01}
_INVERSE_SQUARES = sum(pieces**-2 for pieces in range(2, MOST_PIECES + 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class Solved:
    """The values of a dimension that would give the size, ends included, and what they need of what is open.

    Where the payload's bounds allow some it is those, and ``is_allowed``; else what would be needed.
    """

    at: int
    dimension: Dimension
    free: FreeQuantity
    least: int
    most: int
    is_allowed: bool

    @property
    def quantities(self) -> tuple[int, int]:
        """What is needed of the open quantity, from and to."""
        factor, offset = self.free.factor, self.free.offset
        return (self.least - offset) // factor, (self.most - offset) // factor

    @property
    def range_text(self) -> str:
        """The dimension's values."""
        return _range(str(self.least), str(self.most))

    @property
    def needed(self) -> str:
        """The open quantity's values and the bound that they keep or break."""
        values = _range(*(f"{value:,}" for value in self.quantities))
        if self.quantities[1] < self.free.least:
            return f"fewer {self.free.name} than the {self.free.least:,} that there are at least"
        return f"{self.free.name} {values} of at most {self.free.most:,}"

    def __str__(self) -> str:
        is_itself = (self.free.factor, self.free.offset) == (1, 0)
        return self.needed if is_itself else f"{self.dimension.name} {self.range_text}, {self.needed}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """One way in which a tensor fits; ``share`` is what is left of the tensor's chance.

    ``shape`` and ``dtype`` are those that fit, of SEVERAL those of one of the ``pieces``; ``solved`` is what
    the size alone leaves of the open dimension, where there is one.
    """

    tensor: TensorShape
    way: Way
    share: float
    shape: tuple[int, ...]
    dtype: str
    pieces: int = 1
    solved: Solved | None = None

    @property
    def size_bytes(self) -> int:
        """All that is asked for."""
        return self.pieces * math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def shape_text(self) -> str:
        """The shape, with a dimension that was solved for as a range."""
        values = [str(value) for value in self.shape]
        if self.way is Way.SOLVED and self.solved is not None:
            values[self.solved.at] = self.solved.range_text
        return f"[{', '.join(values)}]"


def find_fits(asked: AskedSize, tensor: TensorShape) -> Iterator[Fit]:
    """Yields every way in which a tensor fits."""
    ways = (_as_declared, _with_one_solved, _in_another_dtype, _several, _part_of_heads)
    return (fit for way in ways for fit in way(asked, tensor))


def solve(asked: AskedSize, tensor: TensorShape) -> Solved | None:
    """Returns what the first open dimension would have to be, whether or not that is allowed."""
    for at, dimension in enumerate(tensor.dimensions):
        free = dimension.free
        rest = math.prod(_with(tensor.shape, at, 1)) * ITEM_BYTES[tensor.dtype]
        if free is None or not rest:
            continue
        needed = [_steps(interval, rest, free) for interval in asked.intervals]
        needed = [steps for steps in needed if steps[0] <= steps[1]]
        allowed = [steps for steps in (_within(steps, free) for steps in needed) if steps[0] <= steps[1]]
        if needed:
            first, last = max(allowed or needed, key=lambda steps: steps[1] - steps[0])
            return Solved(
                at=at,
                dimension=dimension,
                free=free,
                least=free.offset + free.factor * first,
                most=free.offset + free.factor * last,
                is_allowed=bool(allowed),
            )
    return None


def _as_declared(asked: AskedSize, tensor: TensorShape) -> Iterator[Fit]:
    if asked.admits(tensor.size_bytes):
        yield _fit(tensor, Way.DECLARED, solved=solve(asked, tensor))


def _with_one_solved(asked: AskedSize, tensor: TensorShape) -> Iterator[Fit]:
    solved = solve(asked, tensor)
    if solved is not None and solved.is_allowed:
        shape = _with(tensor.shape, solved.at, (solved.least + solved.most) // 2)
        yield _fit(tensor, Way.SOLVED, of_way=_likelihood(solved), shape=shape, solved=solved)


def _in_another_dtype(asked: AskedSize, tensor: TensorShape) -> Iterator[Fit]:
    dtype = OTHER_DTYPE.get(tensor.dtype)
    if dtype is not None and asked.admits(math.prod(tensor.shape) * ITEM_BYTES[dtype]):
        yield _fit(tensor, Way.DTYPE, dtype=dtype)


def _several(asked: AskedSize, tensor: TensorShape) -> Iterator[Fit]:
    size = tensor.size_bytes
    for pieces in range(2, MOST_PIECES + 1):
        if asked.admits(pieces * size):
            yield _fit(tensor, Way.SEVERAL, of_way=pieces**-2 / _INVERSE_SQUARES, pieces=pieces)


def _part_of_heads(asked: AskedSize, tensor: TensorShape) -> Iterator[Fit]:
    for at, dimension in enumerate(tensor.dimensions):
        if "heads" not in dimension.name or dimension.value < 2:
            continue
        smaller = [heads for heads in range(1, dimension.value) if dimension.value % heads == 0]
        for heads in smaller:
            if asked.admits(tensor.size_bytes // dimension.value * heads):
                yield _fit(tensor, Way.PART, of_way=1 / len(smaller), shape=_with(tensor.shape, at, heads))


def _fit(
    tensor: TensorShape,
    way: Way,
    *,
    of_way: float = 1.0,
    shape: tuple[int, ...] | None = None,
    dtype: str | None = None,
    pieces: int = 1,
    solved: Solved | None = None,
) -> Fit:
    return Fit(
        tensor=tensor,
        way=way,
        share=SHARES[way] * of_way,
        shape=tensor.shape if shape is None else shape,
        dtype=dtype or tensor.dtype,
        pieces=pieces,
        solved=solved,
    )


def _steps(interval: tuple[int, int], rest: int, free: FreeQuantity) -> tuple[int, int]:
    """Return which values of the open quantity an interval of sizes leaves, from and to; crossed if none."""
    least, most = -(-interval[0] // rest), interval[1] // rest
    return -(-(least - free.offset) // free.factor), (most - free.offset) // free.factor


def _within(steps: tuple[int, int], free: FreeQuantity) -> tuple[int, int]:
    return max(steps[0], free.least), min(steps[1], free.most)


def _likelihood(solved: Solved) -> float:
    """Return how likely the open quantity lies there: its logarithm is Laplace-distributed in its bounds."""
    declared = math.log(max(1, solved.free.value))

    def below(quantity: float) -> float:
        distance = (math.log(max(0.5, quantity)) - declared) / SPREAD
        return 0.5 * math.exp(distance) if distance < 0 else 1 - 0.5 * math.exp(-distance)

    first, last = solved.quantities
    whole = below(solved.free.most + 0.5) - below(solved.free.least - 0.5)
    return min(1.0, (below(last + 0.5) - below(first - 0.5)) / whole) if whole > 0 else 0.0


def _range(least: str, most: str) -> str:
    return least if least == most else f"{least}…{most}"


def _with(shape: tuple[int, ...], at: int, value: int) -> tuple[int, ...]:
    return (*shape[:at], value, *shape[at + 1 :])
