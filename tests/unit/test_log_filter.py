"""Which lines are asked for: durations, times, regular expressions, and what is none of them."""

from __future__ import annotations

import pytest

from orchestrator.errors import UsageError
from orchestrator.log_filter import LineFilter, parse_pattern, parse_since
from orchestrator.log_lines import LogLine

LINE = LogLine("here", "run1", "main", 7, "stdout", 1, 5, 100.0, "loss\x1b[0m 0.5")
NOON_T = 1796040000.0  # 2026-11-30 12:00 UTC


@pytest.mark.parametrize(
    ("text", "since_t"),
    [
        ("10m", NOON_T - 600),
        ("90", NOON_T - 90),
        ("2026-11-30T11:00:00Z", NOON_T - 3600),
        ("2026-11-30T12:00:00+01:00", NOON_T - 3600),
        ("2026-11-30 11:00", NOON_T - 3600),
        ("2026-11-30", NOON_T - 12 * 3600),
    ],
)
def test_a_time_is_a_duration_back_from_now_or_a_date(text: str, since_t: float) -> None:
    assert parse_since(text, now_t=NOON_T) == since_t


@pytest.mark.parametrize("text", ["", "yesterday", "-5m", "10 weeks", "2026-13-01", "\x1b[2J"])
def test_what_is_no_time_is_refused_with_examples(text: str) -> None:
    with pytest.raises(UsageError, match="neither a duration nor a time: write 10m") as refused:
        parse_since(text, now_t=NOON_T)
    assert "\x1b" not in str(refused.value)


@pytest.mark.parametrize("text", ["(", "a{99999999999999}", "*", "(?P<x>"])
def test_a_bad_pattern_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is no regular expression"):
        parse_pattern(text)


def test_a_filter_takes_what_passes_all_that_is_set() -> None:
    assert LineFilter()(LINE)
    assert LineFilter(since_t=100.0)(LINE)
    assert not LineFilter(since_t=100.1)(LINE)
    assert LineFilter(pattern=parse_pattern(r"s\x1b\[0m 0\.\d$"))(LINE)
    assert not LineFilter(since_t=0.0, pattern=parse_pattern("^0"))(LINE)
