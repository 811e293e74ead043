"""The table of a group, and what its runs come to."""

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from orchestrator.group_view import (
    group_exit_code,
    group_json,
    group_notes,
    group_table,
    group_tally,
    shown_metrics,
)
from orchestrator.ledger import RunRow
from orchestrator.lifecycle import State
from orchestrator.observed import Observed
from orchestrator.outcome import Outcome
from orchestrator.runs import Report
from orchestrator.verdict import Verdict

STATES = {"ok": State.SUCCEEDED, "failed": State.FAILED, "refused": State.REFUSED, "altered": State.SUCCEEDED}


def _report(run_id: str, verdict: str | None = "ok", **changes: Any) -> Report:
    metrics = changes.pop("metrics", {})
    bounds = changes.pop("bounds", {})
    case = changes.pop("case", f"case={run_id}")
    row = RunRow(
        run_id=run_id,
        group_id="g-1",
        experiment="trial",
        host="here",
        bundle="0" * 64,
        state=State.RUNNING if verdict is None else STATES[verdict],
        created_t=1.0,
        started_t=2.0,
        ended_t=None if verdict is None else 5.0,
        verdict=verdict,
        job={"case": case, "expect": {"metrics": bounds}},
    )
    found = None
    if verdict is not None:
        found = Verdict(
            name=verdict, is_good=verdict == "ok", reasons=() if verdict == "ok" else ("because",)
        )
    seen = changes.pop("observed", None)
    return Report(row=replace(row, **changes), outcome=Outcome(metrics=metrics), verdict=found, observed=seen)


@pytest.mark.parametrize(
    ("reports", "code"),
    [
        ([_report("a"), _report("b")], 0),
        ([_report("a"), _report("b", "failed")], 1),
        ([_report("a"), _report("b", None)], 1),
        ([_report("a"), _report("b", None, observed=Observed(unreachable="timed out"))], 3),
        ([_report("a", "failed"), _report("b", None, observed=Observed(unreachable="timed out"))], 1),
        ([_report("a"), _report("b", "refused")], 3),
        ([_report("a", "failed"), _report("b", "refused")], 1),
        ([_report("a", "altered"), _report("b", "failed")], 5),
        ([_report("a", "failed"), _report("b", retry_of="a")], 0),
        ([_report("a"), _report("b", "failed", retry_of="a")], 1),
        ([_report("a", "failed"), _report("b", retry_of="a", is_adopted=True)], 1),
        (
            [
                _report("a", "failed"),
                _report("b", "failed", retry_of="a"),
                _report("c", retry_of="a", created_t=2.0),
            ],
            0,
        ),
        (
            [
                _report("a", "failed"),
                _report("b", retry_of="a"),
                _report("c", "failed", retry_of="a", created_t=2.0),
            ],
            1,
        ),
        (
            [
                _report("a", "failed", is_adopted=True),
                _report("b", "failed", retry_of="a"),
                _report("c", retry_of="a", created_t=2.0, is_adopted=True),
            ],
            1,
        ),
        (
            [_report(run_id, retry_of=first, is_adopted=True) for run_id, first in ("ab", "ba", "ca")],
            0,
        ),
        (
            [
                _report("a", "failed", is_adopted=True),
                _report("b", "failed", retry_of="a", is_adopted=True),
                _report("c", "failed", retry_of="a"),
                _report("d", retry_of="b", created_t=2.0),
            ],
            1,
        ),
        ([_report("a", "failed", is_adopted=True), _report("b", retry_of="a", is_adopted=True)], 0),
    ],
)
def test_the_exit_code_is_zero_only_when_every_run_that_counts_is_good(
    reports: list[Report], code: int
) -> None:
    assert group_exit_code(reports) == code
    assert group_json("g-1", reports)["exit_code"] == code


def test_the_tally_counts_a_retry_in_the_place_of_what_it_retries() -> None:
    assert group_tally([_report("a", "failed"), _report("b"), _report("c", retry_of="a")]) == "2 ok"
    assert group_tally([_report("a"), _report("b", None, retry_of="a")]) == "1 running"
    twice = [_report("b", "failed", retry_of="a"), _report("c", retry_of="a", created_t=2.0)]
    assert group_tally([_report("a", "failed"), *twice]) == "1 ok"


def test_metrics_with_bounds_have_columns_or_else_those_that_differ_and_the_rest_is_counted() -> None:
    same = {f"m{number}": 1.0 for number in range(7)}
    judged = [
        _report("a", metrics={**same, "loss": 1.0, "judged": 5.0}, bounds={"judged": {"min": 0}}),
        _report("b", metrics={**same, "loss": 2.0}),
    ]
    assert shown_metrics(judged) == ["judged"]
    assert group_notes(judged) == ["8 more metrics: --json shows them"]
    assert group_json("g-1", judged)["runs"][1]["outcome"]["metrics"] == {**same, "loss": 2.0}
    assert shown_metrics([_report("a", metrics={**same, "loss": 1.0}), judged[1]]) == ["loss"]
    assert shown_metrics([_report("a", metrics=same)]) == ["m0", "m1", "m2", "m3", "m4", "m5"]


def test_a_row_shows_case_host_run_verdict_time_and_metrics_and_no_escape_sequence() -> None:
    reports = [
        _report("a" * 12, metrics={"loss": float("nan")}, exit_code=0),
        _report("b" * 12, None, case="x=\x1b[31m"),
        _report("c" * 12, "failed", signal=9, retry_of="a" * 12, case=None),
    ]
    console = Console(file=io.StringIO(), width=200)
    console.print(group_table(reports, now_t=4.0))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]  # it is the StringIO above
    assert [line.split() for line in lines] == [
        ["CASE", "HOST", "RUN", "STATE", "VERDICT", "TOOK", "EXIT", "loss"],
        [f"case={'a' * 12}", "here", "a" * 12, "succeeded", "ok", "3s", "0", "nan"],
        ["x=\\x1b[31m", "here", "b" * 12, "running", "-", "2s", "-", "-"],
        ["trial,", "retry", "of", "a" * 8, "here", "c" * 12, "failed", "failed", "3s", "signal", "9", "-"],
    ]


def test_reasons_that_many_runs_of_a_host_share_are_told_once() -> None:
    reports = [_report("a", "failed"), _report("b", "failed"), _report("c", "failed", host="there")]
    assert group_notes(reports) == ["case=a and 1 more on here: because", "case=c on there: because"]
