"""What was seen of an open run at one look, as against what is known of it: a value, and how it is said.

A host that cannot be asked, a silent supervisor and a stopped one are observations: they change no state, and
the next look may see something else.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from orchestrator.text import printable

SILENT_S = 30.0  # a supervisor writes a heartbeat every 10 s
MOST_REASON = 80


@dataclass(frozen=True, kw_only=True, slots=True)
class Observed:
    """One look at a run.

    ``unreachable`` says why its host could not be asked, and ``since_t`` since when that is so. ``ahead``
    counts the runs of its group that it waits for, None when it does not wait. ``silent_s``: since its
    records were last written. ``obstacles`` say what keeps it from its cards, ``cards`` which ones it has.
    """

    unreachable: str | None = None
    since_t: float | None = None
    silent_s: float | None = None
    is_stopped: bool = False
    ahead: int | None = None
    obstacles: tuple[str, ...] = ()
    cards: tuple[str, ...] = ()

    @property
    def is_silent(self) -> bool:
        """Nothing was written for longer than a supervisor that works leaves between two records."""
        return self.silent_s is not None and self.silent_s > SILENT_S

    def as_json(self) -> dict[str, Any]:
        """Returns its fields, and whether that is too silent."""
        return {**asdict(self), "is_silent": self.is_silent}

    def said(self, now_t: float) -> str:
        """Returns what stands beside a run's state, empty when there is nothing to say."""
        parts = []
        if self.unreachable is not None:
            since = "" if self.since_t is None else f" since {_ago(now_t - self.since_t)}"
            parts.append(f"UNREACHABLE{since} ({_cut(printable(self.unreachable))})")
        if self.obstacles:
            more = f" and {len(self.obstacles) - 1} more" if len(self.obstacles) > 1 else ""
            parts.append(f"{_cut(printable(self.obstacles[0]))}{more}")
        elif self.ahead:
            parts.append(f"{self.ahead} ahead")
        if self.cards:
            parts.append(f"on card {_cut(printable(', '.join(self.cards)))}")
        if self.is_silent:
            parts.append(f"silent {_ago(self.silent_s or 0.0)}")
        if self.is_stopped:
            parts.append("its supervisor is stopped")
        return ", ".join(parts)


def _cut(text: str) -> str:
    return text if len(text) <= MOST_REASON else f"{text[: MOST_REASON - 1]}…"


def _ago(duration_s: float) -> str:
    seconds = max(0, round(duration_s))
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds // size}{unit}"
    return f"{seconds} s"
