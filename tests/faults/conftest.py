"""Faults put into the real thing: how often, on what, and what was lost is counted and printed at the end.

Each sweep has many points. By default a few of them are tried, spread over the whole; ``ORCH_FAULTS=all``
tries every one (``make faults``), which docs/reliability.md reports.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.sshd import Sshd, require_sshd

TRIES_EACH = 4
TRIES_ALL = os.environ.get("ORCH_FAULTS") == "all"  # tests see no variable of ours
_FAULT = "fault"


@pytest.fixture
def tally(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Counts one fault that was put in and survived; the test's report carries it to who sums up."""

    def count(fault: str) -> None:
        record_property(_FAULT, fault)

    return count


@pytest.fixture
def some_of() -> Callable[[Sequence[int]], list[int]]:
    """Returns the points of a sweep to try: all of them, or `TRIES_EACH` from the first to the last."""

    def choose(points: Sequence[int]) -> list[int]:
        if TRIES_ALL or len(points) <= TRIES_EACH:
            return list(points)
        last = len(points) - 1
        return [points[round(last * index / (TRIES_EACH - 1))] for index in range(TRIES_EACH)]

    return choose


@pytest.fixture
def sshd(tmp_path: Path) -> Iterator[Sshd]:
    """A real ssh server."""
    require_sshd()
    with Sshd(tmp_path / "sshd") as server:
        yield server


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints how often which fault was put in; a test that fails says what was lost."""
    reports = [report for reports in terminalreporter.stats.values() for report in reports]
    calls = [report for report in reports if getattr(report, "when", "") == "call"]
    injected = Counter(fault for report in calls for name, fault in report.user_properties if name == _FAULT)
    if injected:
        terminalreporter.section("faults put in, nothing lost")
        for fault, count in sorted(injected.items()):
            terminalreporter.write_line(f"{count:5}  {fault}")
