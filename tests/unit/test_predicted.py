"""What was predicted stands beside what was measured, category by category, and the rest is one number."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from orchestrator.estimate_view import comparison_line, comparison_table, estimate_line
from orchestrator.outcome import Outcome, outcome_of
from orchestrator.payload_answers import Estimate, as_json, estimate_of
from orchestrator.predicted import compare
from orchestrator.predicting import Prediction

GIB = 2**30
CUT_SHORT = "12.00 GiB allocated predicted; the run ended at 5.00 GiB allocated on cuda:0"


def _estimate(**changes: Any) -> Estimate:
    def phase(name: str, peak: int, **held: int) -> dict[str, Any]:
        sizes = {"peak_allocated_bytes": peak * GIB, "peak_reserved_bytes": (peak + 1) * GIB}
        by_category = {category: size * GIB for category, size in held.items()}
        return {"name": name, **sizes, "by_category": by_category, "largest": []}

    value = {
        "format": 1,
        "entry": "probe.trial",
        "torch": "2.13",
        "seconds": 1.0,
        "card": None,
        "capacity_bytes": None,
        "outside_bytes": 0,
        "error_share": 0.01,
        "peak_allocated_bytes": 12 * GIB,
        "peak_reserved_bytes": 13 * GIB,
        "verdict": "no card",
        "failure": None,
        "phases": [phase("warmup", 12, parameter=4, scores=8), phase("timed", 6, parameter=4, logits=2)],
        "execution": "eager",
        "notes": [],
        **changes,
    }
    estimate = estimate_of(value)
    assert estimate is not None
    return estimate


def _outcome(*events: dict[str, Any], allocated: int = 14 * GIB) -> Outcome:
    peak = {"index": 0, "allocated_bytes": allocated, "reserved_bytes": 15 * GIB}
    small = {"index": 1, "allocated_bytes": GIB, "reserved_bytes": GIB}
    records = [{"kind": "event", "proc": "main", "event": {"kind": "memory", **event}} for event in events]
    return outcome_of([*records, {"kind": "facts", "proc": "main", "peak_memory": [small, peak]}])


def _memory(**changes: Any) -> dict[str, Any]:
    owners = [{"category": "parameter", "bytes": 4 * GIB}, {"category": "scores", "bytes": 9 * GIB}]
    whole = {"device": 0, "peak_allocated_bytes": 14 * GIB, "owners": owners, "is_whole": True}
    return {**whole, "reason": None, "largest": [], **changes}


def test_the_largest_peaks_are_compared_and_what_is_between_them_is_unexplained() -> None:
    found = compare(
        _estimate(), _outcome(_memory(owners=[*_memory()["owners"], {"category": "new", "bytes": GIB}]))
    )
    assert found is not None
    assert [(share.category, share.difference_bytes) for share in found.shares] == [
        ("parameter", 0),
        ("scores", GIB),
        ("new", GIB),
    ]
    assert (found.unexplained_bytes, found.measured_reserved_bytes, found.card) == (
        2 * GIB,
        15 * GIB,
        "cuda:0",
    )
    assert found.reason is None
    assert found.as_json()["unexplained_bytes"] == 2 * GIB
    line = comparison_line(Prediction(estimate=_estimate(), card=None), found)
    assert (
        line == "12.00 GiB allocated predicted, 14.00 GiB allocated on cuda:0: +2.00 GiB unexplained (+14.3%)"
    )
    columns = [list(column.cells) for column in comparison_table(found).columns]
    assert [str(cell) for cell in columns[0]][-3:] == ["allocated", "reserved", "unexplained"]
    assert [str(cell) for cell in columns[3]][-3:] == ["+2.00 GiB", "+2.00 GiB", "+2.00 GiB"]


@pytest.mark.parametrize(
    ("end", "allocated", "line"),
    [
        ({"exit_code": 1}, 5 * GIB, CUT_SHORT),
        ({"end": "cancelled"}, 5 * GIB, CUT_SHORT),
        ({"end": "timeout"}, 5 * GIB, CUT_SHORT),
        ({"signal": 9}, 5 * GIB, CUT_SHORT),
        ({"exit_code": 1}, 13 * GIB, "13.00 GiB allocated on cuda:0: +1.00 GiB unexplained (+7.7%)"),
        ({"exit_code": 1}, 12 * GIB - 2**20, "12.00 GiB allocated on cuda:0: -1.0 MiB unexplained (-0.0%)"),
        ({"exit_code": 0}, 5 * GIB, "5.00 GiB allocated on cuda:0: -7.00 GiB unexplained (-140.0%)"),
    ],
)
def test_nothing_is_unexplained_of_a_run_that_ended_before_its_peak(
    end: dict[str, Any], allocated: int, line: str
) -> None:
    ended: dict[str, Any] = {"end": "exited", "is_end_sealed": True, **end}
    outcome = replace(_outcome(allocated=allocated), **ended)
    found = compare(_estimate(), outcome)
    assert found is not None
    assert comparison_line(Prediction(estimate=_estimate(), card=None), found).endswith(line)
    last = [list(column.cells)[-1] for column in comparison_table(found).columns]
    assert (str(last[3]) == "-") == (line == CUT_SHORT)
    assert (found.as_json()["unexplained_bytes"] is None) == (line == CUT_SHORT)


def test_a_run_that_told_no_categories_still_has_its_peak() -> None:
    found = compare(_estimate(), _outcome(allocated=12 * GIB - 4096))
    assert found is not None
    assert {share.measured_bytes for share in found.shares} == {None}
    assert found.reason == "the run told no categories"
    assert "-4.0 KiB unexplained" in comparison_line(Prediction(estimate=_estimate(), card=None), found)


def test_categories_that_are_not_the_peaks_say_why() -> None:
    event = _memory(is_whole=False, reason="the peak lies before the last 200000 events")
    found = compare(_estimate(), _outcome(event))
    assert found is not None
    assert found.reason == "the peak lies before the last 200000 events"


def test_a_run_without_a_peak_leaves_the_prediction_alone() -> None:
    prediction = Prediction(estimate=_estimate(), card=None)
    assert compare(_estimate(), Outcome()) is None
    assert comparison_line(prediction, None).endswith("no peak was measured")


@pytest.mark.parametrize(
    "event",
    [
        {"kind": "memory"},
        _memory(peak_allocated_bytes="much"),
        _memory(peak_allocated_bytes=-1),
        _memory(owners={"category": "scores"}),
    ],
)
def test_an_event_of_another_form_tells_nothing(event: dict[str, Any]) -> None:
    assert _outcome(event).held == ()


def test_odd_owners_are_passed_over() -> None:
    (held,) = _outcome(_memory(owners=[3, {"category": 4}, {"category": "scores", "bytes": 2**70}])).held
    assert held.by_category == {"scores": 0}


def test_an_estimate_is_read_again_as_it_was_written() -> None:
    estimate = _estimate()
    again = estimate_of(as_json(estimate))
    assert again is not None
    assert as_json(again) == as_json(estimate)
    assert estimate_of({"format": 1}) is None


def test_a_verdict_names_the_card_and_its_own_doubt() -> None:
    card = {"name": "NVIDIA H200", "key": "h200", "total_bytes": 14 * GIB, "capability": [9, 0]}
    held = {"outside_bytes": GIB, "verdict": "within the error"}
    known = _estimate(card=card, capacity_bytes=13 * GIB, **held)
    expected = (
        "12.00 GiB allocated, 13.00 GiB reserved of 14.00 GiB (NVIDIA H200), within 1 %: it may fit or not"
    )
    assert estimate_line(known) == expected
    limited = _estimate(card=card, capacity_bytes=9 * GIB, **held)  # by the program itself
    assert "reserved of 10.00 GiB (NVIDIA H200, a memory limit), within" in estimate_line(limited)
    without = _estimate(capacity_bytes=9 * GIB, **held)
    assert "reserved of 10.00 GiB (a memory limit), within" in estimate_line(without)
