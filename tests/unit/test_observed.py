"""What is said beside a run's state."""

from __future__ import annotations

import pytest

from orchestrator.observed import Observed

NOW = 1000.0


@pytest.mark.parametrize(
    ("observed", "said"),
    [
        (Observed(), ""),
        (Observed(silent_s=9.0), ""),
        (Observed(unreachable="timed out", since_t=NOW - 300), "UNREACHABLE since 5m (timed out)"),
        (Observed(silent_s=42.0, is_stopped=True), "silent 42 s, its supervisor is stopped"),
        (Observed(silent_s=3.0, is_stopped=True), "its supervisor is stopped"),
        (Observed(ahead=3), "3 ahead"),
        (Observed(ahead=0), ""),
        (Observed(unreachable="a\x1b[2Jb", since_t=NOW + 50), "UNREACHABLE since 0 s (a\\x1b[2Jb)"),
    ],
)
def test_only_what_is_amiss_is_said(observed: Observed, said: str) -> None:
    assert observed.said(NOW) == said


def test_a_long_reason_is_cut() -> None:
    assert len(Observed(unreachable="x" * 5000).said(NOW)) < 120


def test_what_keeps_a_run_from_its_cards_is_said_before_who_is_ahead() -> None:
    waiting = Observed(ahead=2, obstacles=("card 0 is held by run r1", "card 1 is for run r2"))
    assert waiting.said(0.0) == "card 0 is held by run r1 and 1 more"
    assert Observed(cards=("0 (NVIDIA H200)",)).said(0.0) == "on card 0 (NVIDIA H200)"
