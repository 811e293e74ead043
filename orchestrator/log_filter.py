"""Which lines of a log are asked for: by time and by what they say.

Times are those of records, and so by the host's clock; a duration counts back from this machine's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime

from orchestrator.errors import UsageError
from orchestrator.fields import parse_duration
from orchestrator.log_lines import LogLine
from orchestrator.text import quoted


@dataclass(frozen=True, kw_only=True, slots=True)
class LineFilter:
    """Takes a line that passes all that is set.

    ``pattern`` is searched in the text as the payload wrote it, as far as the line holds it: of a line that
    is too long for any view in its beginning.
    """

    since_t: float | None = None
    pattern: re.Pattern[str] | None = None

    def __call__(self, line: LogLine) -> bool:
        """Tells whether the line is asked for; that records are missing is never left out by its text."""
        return (self.since_t is None or line.t >= self.since_t) and (
            self.pattern is None or line.cut is not None or self.pattern.search(line.text) is not None
        )


def parse_since(text: str, *, now_t: float) -> float:
    """Returns seconds since the epoch from a duration before ``now_t``, or a time (UTC unless it says more).

    Raises:
        UsageError: neither.
    """
    try:
        return now_t - parse_duration(text)
    except UsageError:
        pass
    try:
        time = datetime.fromisoformat(text)
        return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        raise UsageError(
            f"--since {quoted(text)} is neither a duration nor a time: write 10m, 2h or 2026-11-29T20:00:00Z"
        ) from None


def parse_pattern(text: str) -> re.Pattern[str]:
    """Returns a regular expression, in Python's syntax.

    Raises:
        UsageError: it is none.
    """
    try:
        return re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise UsageError(f"--grep {quoted(text)} is no regular expression: {error}") from None
