"""How far a host's clock is from this machine's, by round trips, and which of several measurements to trust.

A host's time that was read between two moments here tells its offset to within half of what lies between
them, whichever way took longer. Asking is left to `remote`; what was found is kept as an observation
``clock`` of the host's runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

DRIFT = 1e-4  # a clock that nobody disciplines may gain or lose 100 millionths
GOOD_ENOUGH_S = 0.005


@dataclass(frozen=True, kw_only=True, slots=True)
class Offset:
    """A host's clock showed ``offset_s`` more than this machine's at ``t`` here, give or take ``error_s``."""

    offset_s: float
    error_s: float
    t: float

    def noted(self) -> dict[str, float]:
        """Returns what an observation holds of it; when it was made, that one says."""
        return {"offset_s": round(self.offset_s, 6), "error_s": round(self.error_s, 6)}

    def error_during(self, begin_t: float, end_t: float) -> float:
        """Returns by how many seconds it may be wrong for what happened between two times here."""
        return self.error_s + DRIFT * max(0.0, begin_t - self.t, self.t - end_t)


def measured(sent_t: float, trip_s: float, host_t: object) -> Offset | None:
    """Returns what one round trip tells; None for an answer that is no time."""
    if not _is_time(host_t):
        return None
    here_t = sent_t + trip_s / 2
    return Offset(offset_s=host_t - here_t, error_s=trip_s / 2, t=here_t)


def kept(observations: Iterable[Mapping[str, Any]]) -> Iterator[Offset]:
    """Yields the measurements among a run's observations."""
    for entry in observations:
        if entry.get("kind") == "clock":
            offset_s, error_s, t = map(entry.get, ("offset_s", "error_s", "t"))
            if _is_time(offset_s) and _is_time(error_s) and _is_time(t):
                yield Offset(offset_s=offset_s, error_s=error_s, t=t)


def best(offsets: Iterable[Offset], begin_t: float, end_t: float) -> Offset | None:
    """Returns the one that may be wrong by least for what happened between two times here."""
    return min(offsets, key=lambda offset: offset.error_during(begin_t, end_t), default=None)


def is_worth_asking(known: Offset | None, begin_t: float, end_t: float, now_t: float) -> bool:
    """A measurement made now may well tell a span's times better than what is known, by enough to matter."""
    if known is None:
        return True
    error_s, least_s = known.error_during(begin_t, end_t), DRIFT * max(0.0, now_t - end_t)
    return error_s > max(GOOD_ENOUGH_S, least_s)


def least_sure(
    found: Iterable[tuple[Offset, tuple[float, float]]],
) -> list[tuple[Offset, tuple[float, float]]]:
    """Returns what holds for all, each with its span: one, unless the clock was set between the spans."""
    told: list[tuple[Offset, tuple[float, float]]] = []
    for offset, span in sorted(found, key=lambda pair: -pair[0].error_during(*pair[1])):
        error_s = offset.error_during(*span)
        apart = (abs(offset.offset_s - other.offset_s) - other.error_during(*its) for other, its in told)
        if all(apart_s > error_s for apart_s in apart):
            told.append((offset, span))
    return told


def shown(offset: Offset, begin_t: float, end_t: float) -> str:
    """Returns ``+3.214 s ± 0.4 ms``, with what it may be wrong by during a span."""
    error_s = offset.error_during(begin_t, end_t)
    error = f"{error_s * 1000:.1f} ms" if error_s < 1 else f"{error_s:.3g} s"
    ahead_ms = round(offset.offset_s * 1000, 1) + 0.0  # no -0.0
    ahead = f"{ahead_ms:+.1f} ms" if abs(ahead_ms) < 100 else f"{offset.offset_s:+.3f} s"
    return f"{ahead} ± {error}"


def _is_time(value: object) -> TypeGuard[float]:
    return isinstance(value, float) and math.isfinite(value)
