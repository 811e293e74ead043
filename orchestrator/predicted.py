"""What was predicted of a run's memory beside what was measured (pure).

Both are the largest over the run: of the phases of an estimate, and of the cards and processes of a run. What
is left between the two peaks is unexplained, whichever categories it is in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from orchestrator.lifecycle import State
from orchestrator.memory_held import Held
from orchestrator.outcome import Outcome, Peak
from orchestrator.payload_answers import CATEGORIES, Estimate

__all__ = ["Comparison", "Share", "compare"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """What one category holds at the peak; ``measured_bytes`` is None where the run did not tell."""

    category: str
    predicted_bytes: int
    measured_bytes: int | None

    @property
    def difference_bytes(self) -> int | None:
        """Returns how much more was measured."""
        return None if self.measured_bytes is None else self.measured_bytes - self.predicted_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """The two peaks, and who holds them; ``card`` is the one of the run that held the most.

    ``reason`` says why the measured categories are not the peak's, where they are not; ``is_cut_short``: the
    run ended, or was ended, before it held what was predicted, so nothing can be said of the rest.
    """

    card: str
    predicted_allocated_bytes: int
    measured_allocated_bytes: int
    predicted_reserved_bytes: int
    measured_reserved_bytes: int
    shares: tuple[Share, ...]
    reason: str | None
    is_cut_short: bool

    @property
    def unexplained_bytes(self) -> int:
        """Returns how much more was allocated than predicted; negative where it was less."""
        return self.measured_allocated_bytes - self.predicted_allocated_bytes

    @property
    def unexplained_share(self) -> float:
        """Returns the same as a share of what was measured."""
        return self.unexplained_bytes / max(1, self.measured_allocated_bytes)

    def as_json(self) -> dict[str, Any]:
        """Returns plain JSON values; of a run that was cut short nothing is unexplained."""
        rest = None if self.is_cut_short else self.unexplained_bytes
        return {**asdict(self), "unexplained_bytes": rest}


def compare(estimate: Estimate, outcome: Outcome) -> Comparison | None:
    """Returns both peaks; None where the run told none."""
    peak = max(outcome.peak_memory, key=lambda peak: peak.allocated_bytes, default=None)
    if peak is None:
        return None
    held = _held_at(outcome, peak)
    return Comparison(
        card=peak.card,
        predicted_allocated_bytes=estimate.peak_allocated_bytes,
        measured_allocated_bytes=peak.allocated_bytes,
        predicted_reserved_bytes=estimate.peak_reserved_bytes,
        measured_reserved_bytes=peak.reserved_bytes,
        shares=_shares(estimate, None if held is None else held.by_category),
        reason="the run told no categories" if held is None else None if held.is_whole else _why(held),
        is_cut_short=outcome.state is not State.SUCCEEDED and _is_below(peak, estimate),
    )


def _is_below(peak: Peak, estimate: Estimate) -> bool:
    """Tells whether less was held than was predicted, by more than the prediction may be off."""
    return peak.allocated_bytes < estimate.peak_allocated_bytes * (1 - estimate.error_share)


def _held_at(outcome: Outcome, peak: Peak) -> Held | None:
    return next((held for held in outcome.held if (held.proc, held.index) == (peak.proc, peak.index)), None)


def _why(held: Held) -> str:
    return held.reason or "the run did not see all of them"


def _shares(estimate: Estimate, measured: Mapping[str, int] | None) -> tuple[Share, ...]:
    predicted = {} if estimate.highest is None else estimate.highest.by_category
    names = [*CATEGORIES, *sorted({*predicted, *(measured or {})} - {*CATEGORIES})]
    return tuple(
        Share(
            category=name,
            predicted_bytes=predicted.get(name, 0),
            measured_bytes=None if measured is None else measured.get(name, 0),
        )
        for name in names
        if predicted.get(name) or (measured or {}).get(name)
    )
