"""Rows from jobs that somebody else wrote: made only of what every reader can bear."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.experiment import Expectation
from orchestrator.job_rows import NotAJob, noted_job, row_of
from orchestrator.ledger import MASK, RunRow
from orchestrator.lifecycle import State
from orchestrator.outcome import Outcome
from orchestrator.verdict import judge
from orchestrator.views import run_json, runs_table, summary
from tests.unit.test_views import text_of

JOB: dict[str, Any] = {
    "version": 1,
    "run_id": "r1",
    "group_id": "r1",
    "experiment": "trial",
    "profile": None,
    "bundle": "b" * 64,
    "module": "probe.go",
    "params": {"size": 1},
    "env": {"TOKEN": "hf_secret"},
    "secrets": {},
    "alloc_conf": None,
    "devices": [],
    "processes": 1,
    "memory_limit_bytes": None,
    "timeout_s": None,
    "grace_s": None,
    "provenance": {"commit": "c" * 40, "dirty": True},
    "expect": {"verdicts": ["ok"], "metrics": {}},
}

OPTIONAL = {"version", "profile", "alloc_conf", "processes", "memory_limit_bytes", "timeout_s", "grace_s"}

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def a_row(job: object, **changes: Any) -> RunRow:
    arguments = {"run_id": "r1", "host": "there", "state": State.RUNNING, "created_t": 5.0, **changes}
    return row_of(job, **arguments)


def test_a_job_gives_its_row_without_the_values_of_its_variables() -> None:
    row = a_row(JOB, is_adopted=True)
    assert (row.experiment, row.host, row.commit_id, row.dirty) == ("trial", "there", "c" * 40, True)
    assert row.job["env"] == {"TOKEN": MASK}
    assert "hf_secret" not in str(row)


def test_a_job_as_an_observation_holds_it_gives_the_same_row() -> None:
    assert a_row(noted_job(JOB)) == a_row(JOB)


@pytest.mark.parametrize("key", sorted(JOB.keys() - OPTIONAL))
def test_a_job_that_lacks_a_key_is_none(key: str) -> None:
    without = {name: value for name, value in JOB.items() if name != key}
    if key in ("module", "secrets"):  # a script has no module, an older job no secrets
        assert a_row(without)
    else:
        with pytest.raises(NotAJob):
            a_row(without)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("run_id", "another"),
        ("group_id", "../.."),
        ("group_id", "-n"),
        ("bundle", "b" * 63),
        ("experiment", "x" * 5000),
        ("timeout_s", 10**400),
        ("timeout_s", True),
        ("devices", [0]),
        ("devices", {"count": "2"}),
        ("devices", {"count": 2, "size": 1}),
        ("waits_for_cards", 1),
        ("shares_cards", "no"),
        ("provenance", {"evil": 1}),
        ("expect", {"verdicts": 3, "metrics": {}}),
        ("expect", {"verdicts": [3], "metrics": {}}),
        ("expect", {"verdicts": ["ok"], "metrics": {"loss": {"min": "0"}}}),
        ("expect", {"verdicts": ["ok"], "metrics": {"loss": {"most": 1}}}),
        ("secrets", {"A": 1}),
        ("grace_s", "10s"),
        ("processes", 0),
        ("processes", 65),
        ("processes", True),
        ("memory_limit_bytes", -1),
        ("memory_limit_bytes", 2**63),
        ("turn", {"queue": "g-1"}),
        ("turn", {"queue": "g-1", "place": "first", "at_once": 1}),
        ("turn", {"queue": "g-1", "place": 0, "at_once": 0}),
    ],
)
def test_a_job_with_a_wrong_value_is_none(key: str, value: object) -> None:
    with pytest.raises(NotAJob):
        a_row({**JOB, key: value})


@pytest.mark.parametrize("created_t", [None, "now", float("nan"), float("inf"), True, 10**400])
def test_a_time_that_is_none_is_refused(created_t: object) -> None:
    with pytest.raises(NotAJob):
        a_row(JOB, created_t=created_t)


@given(changes=st.dictionaries(st.sampled_from(sorted(JOB)), json_values, max_size=4), more=json_values)
def test_no_job_gives_a_row_that_a_view_cannot_show(changes: dict[str, Any], more: Any) -> None:
    try:
        row = a_row({**JOB, **changes, "more": more})
    except NotAJob:
        return
    assert text_of(runs_table([row], now_t=9.0))
    assert text_of(summary(row, Outcome(), None))
    assert json.dumps(run_json(row))
    assert judge(Outcome(), Expectation.from_json(row.job["expect"])).name == "lost"


def test_hostile_texts_are_shown_escaped() -> None:
    row = a_row({**JOB, "experiment": "\x1b[2J[bold]", "module": "\u202e", "profile": "\x9b"})
    shown = text_of(runs_table([row], now_t=9.0)) + text_of(summary(row, Outcome(), None))
    assert "\x1b" not in shown
    assert "\\x1b[2J[bold]" in shown
    assert "\u202e" not in shown
