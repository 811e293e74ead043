"""Offsets of clocks: what a round trip tells, and which of several measurements is used for when."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator import clocks
from orchestrator.clocks import Offset

DAY_S = 86400.0
times = st.floats(0, 2e9)


@given(sent_t=times, out_s=st.floats(0, 5), back_s=st.floats(0, 5), ahead_s=st.floats(-1e6, 1e6))
def test_the_true_offset_lies_within_the_error(
    sent_t: float, out_s: float, back_s: float, ahead_s: float
) -> None:
    offset = clocks.measured(sent_t, out_s + back_s, sent_t + out_s + ahead_s)
    assert offset is not None
    assert abs(offset.offset_s - ahead_s) <= offset.error_s + 1e-5


@pytest.mark.parametrize("answer", [None, "12", True, float("nan"), float("inf"), [1.0]])
def test_an_answer_that_is_no_time_tells_nothing(answer: object) -> None:
    assert clocks.measured(0.0, 1.0, answer) is None


def test_what_is_noted_is_found_again_among_other_observations() -> None:
    offset = Offset(offset_s=3.25, error_s=0.001, t=1000.0)
    entries = [
        {"kind": "seal", "t": 1.0},
        {"kind": "clock", "t": 1000.0, **offset.noted()},
        {"kind": "clock", "t": 1000.0, "offset_s": "much", "error_s": 0.1},
        {"kind": "clock", "t": 1000.0, "offset_s": 1.0},
    ]
    assert list(clocks.kept(entries)) == [offset]


def test_a_coarse_measurement_at_the_time_beats_a_fine_one_of_another_day() -> None:
    coarse = Offset(offset_s=1.0, error_s=0.05, t=1000.0)
    fine = Offset(offset_s=9.0, error_s=0.001, t=1000.0 + DAY_S)
    assert clocks.best([fine, coarse], 1000.0, 1060.0) is coarse
    assert clocks.best([coarse, fine], DAY_S, DAY_S + 2000.0) is fine
    assert clocks.best([], 0.0, 1.0) is None


@pytest.mark.parametrize(
    ("known", "now_t", "is_worth"),
    [
        (None, 1e6, True),
        (Offset(offset_s=0.0, error_s=0.02, t=1000.0), 1010.0, True),  # a start's measurement, just ended
        (Offset(offset_s=0.0, error_s=0.02, t=1000.0), 1000.0 + DAY_S, False),  # today's would be worse
        (Offset(offset_s=0.0, error_s=0.0004, t=1000.0), 1000.0, False),  # good enough
    ],
)
def test_a_host_is_asked_only_where_its_answer_could_be_better(
    known: Offset | None, now_t: float, is_worth: bool
) -> None:
    assert clocks.is_worth_asking(known, 990.0, 1000.0, now_t) is is_worth


def test_an_offset_is_shown_with_how_wrong_it_may_be_at_the_time() -> None:
    offset = Offset(offset_s=3.2141, error_s=0.0004, t=1000.0)
    assert clocks.shown(offset, 900.0, 1100.0) == "+3.214 s ± 0.4 ms"
    small = Offset(offset_s=-0.00002, error_s=0.0004, t=1000.0)
    assert clocks.shown(small, 900.0, 1100.0) == "+0.0 ms ± 0.4 ms"
    assert clocks.shown(offset, 1000.0 + DAY_S, 1000.0 + 2 * DAY_S) == "+3.214 s ± 8.64 s"


def test_one_clock_is_told_once_by_what_holds_for_all_unless_it_was_set() -> None:
    span = (1000.0, 1060.0)
    fine = Offset(offset_s=3.2140, error_s=0.0004, t=1000.0)
    coarse = Offset(offset_s=3.2155, error_s=0.0020, t=1010.0)
    stepped = Offset(offset_s=7.0, error_s=0.0010, t=1020.0)
    assert clocks.least_sure([(fine, span), (coarse, span), (fine, span)]) == [(coarse, span)]
    assert clocks.least_sure([(fine, span), (stepped, span)]) == [(stepped, span), (fine, span)]
    assert clocks.least_sure([]) == []
