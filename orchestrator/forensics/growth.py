"""Whether memory that is sampled while a program runs grows step by step until it is out (pure).

What warms up and then stays is no leak: what counts is that the later half still rises, in most of its steps
by about as much each time, and never gives much back. What rises faster and faster is made larger on purpose,
as batches are that are tried until one does not fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

LEAST_SAMPLES = 6
_LEAST_RISING_SHARE = 0.6
_MOST_GIVEN_BACK_SHARE = 0.25
_LEAST_RISE_SHARE = 0.05
_LEAST_RISE_BYTES = 64 * 2**20
_ALIKE = 2.0  # steps of a leak are about as large as their median
_LEAST_ALIKE_SHARE = 0.6
_FASTER, _LEAST_FASTER_SHARE = 1.3, 0.8


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """Sizes in bytes in the order in which they were seen; ``name`` says whose and by what.

    ``stride``: one in so many steps is among them. ``is_of_all``: it counts what every process on the card
    holds.
    """

    name: str
    values: tuple[int, ...]
    stride: int = 1
    is_of_all: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Growth:
    """A series whose later half rises: from ``first_bytes`` to ``last_bytes`` in ``steps`` steps."""

    name: str
    first_bytes: int
    last_bytes: int
    steps: int
    is_of_all: bool = False

    @property
    def per_step_bytes(self) -> int:
        """What is added with each step, on average."""
        return self.rise_bytes // self.steps

    @property
    def rise_bytes(self) -> int:
        """What was added in all."""
        return self.last_bytes - self.first_bytes


def steady_growth(series: Series) -> Growth | None:
    """Returns how a series grows to its end, None where it does not, or is too short to say."""
    if len(series.values) < LEAST_SAMPLES:
        return None
    later = series.values[len(series.values) // 2 - 1 :]
    steps = [after - before for before, after in pairwise(later)]
    rise = later[-1] - later[0]
    rising = sum(step > 0 for step in steps)
    given_back = -sum(step for step in steps if step < 0)
    is_steady = rising >= max(3, _LEAST_RISING_SHARE * len(steps))
    is_large = rise >= max(_LEAST_RISE_BYTES, _LEAST_RISE_SHARE * later[-1])
    if not (is_steady and is_large and given_back <= _MOST_GIVEN_BACK_SHARE * rise):
        return None
    if not _is_even([step for step in steps if step > 0]):
        return None
    first = series.values[0]
    grown = Growth(
        name=series.name,
        first_bytes=first,
        last_bytes=later[-1],
        steps=(len(series.values) - 1) * series.stride,
        is_of_all=series.is_of_all,
    )
    return grown if grown.per_step_bytes > 0 else None


def _is_even(rises: Sequence[int]) -> bool:
    """Tells whether most rises are of one size, and they do not become ever larger."""
    middle = median(rises)
    alike = sum(middle / _ALIKE <= rise <= middle * _ALIKE for rise in rises)
    larger = sum(after > before for before, after in pairwise(rises))
    third = max(1, len(rises) // 3)
    is_faster = fmean(rises[-third:]) >= _FASTER * fmean(rises[:third])
    is_ever_larger = is_faster and larger >= _LEAST_FASTER_SHARE * (len(rises) - 1)
    return alike >= _LEAST_ALIKE_SHARE * len(rises) and not is_ever_larger
