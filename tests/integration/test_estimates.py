"""`orch estimate`, and what `orch run` and `orch show` say of memory, from the command line."""

from __future__ import annotations

import json

import pytest

from tests.estimates import GIB, add_programs
from tests.project import Project

TELLS = """
import json, os
GIB = 2**30
def tell(**event):
    os.write(int(os.environ["ORCH_EVENTS_FD"].split(":")[0]), json.dumps(event).encode() + b"\\n")
owners = [{"category": "parameter", "bytes": 4 * GIB, "blocks": 9}, {"category": "scores", "bytes": 8 * GIB}]
tell(kind="memory", device=0, peak_allocated_bytes=13 * GIB, owners=owners, is_whole=True, reason=None)
tell(kind="facts", peak_memory=[{"index": 0, "allocated_bytes": 13 * GIB, "reserved_bytes": 15 * GIB}])
"""
PARAMS = {"size_gib": 12, "fault": None}


@pytest.fixture
def estimating(project: Project) -> Project:
    add_programs(project)
    return project


def test_one_case_is_told_whole_and_its_exit_code_says_whether_it_fits(estimating: Project) -> None:
    path = estimating.experiment("", params=PARAMS, memory_limit="100GiB")
    asked = ("estimate", path, "--card", "h200", "--alternatives")
    done = estimating.orch(*asked)
    assert done.code == 0, done.err
    first, *rest = done.out.splitlines()
    assert first == (
        "trial: 12.00 GiB allocated, 13.00 GiB reserved of 100.00 GiB (NVIDIA H200, a memory limit), "
        "within 5 %: fits"
    )
    text = "\n".join(rest)
    for part in ("PHASE", "CATEGORY (in timed)", "LARGEST", "recompute=mlp", "torch 2.13.0+cpu", "a note"):
        assert part in text
    phases = [line.split() for line in rest[1:4]]
    assert phases[0] == ["PHASE", "ALLOCATED", "RESERVED", "VERDICT"]
    assert [phase[-1] for phase in phases[1:]] == ["fits", "fits"]
    too_large = estimating.orch(*asked, "--set", "size_gib=120", "--json")
    assert too_large.code == 1
    (case,) = too_large.json["cases"]
    assert (case["estimate"]["verdict"], case["estimate"]["capacity_bytes"]) == ("does not fit", 99 * GIB)
    assert "told_by_a_newer_payload" not in case["estimate"]


def test_a_matrix_is_a_table_of_its_cases(estimating: Project) -> None:
    matrix = {"params": {"size_gib": [1, 95, 200]}, "env": {"MODE": ["a", "b"]}}
    path = estimating.experiment("", params=PARAMS, matrix=matrix)
    done = estimating.orch("estimate", path, "--card", "96GiB:sm_120")
    assert done.code == 1, done.err
    title, *rows, _ = done.out.splitlines()
    assert title.split() == ["CASE", "ALLOCATED", "RESERVED", "VERDICT", "LARGEST"]
    assert len(rows) == 6
    assert "within the error" in rows[1]
    assert "does not fit" in rows[5]


def test_what_is_asked_amiss_is_refused_before_anything_runs(estimating: Project) -> None:
    path = estimating.experiment("", params=PARAMS)
    done = estimating.orch("estimate", path, "--set", "fault=refused")
    assert (done.code, done.out) == (2, "")
    assert "seq_len is -1; it must be at least 2" in done.err
    both = estimating.orch("estimate", path, "--card", "h200", "--host", "here")
    assert (both.code, "leave one out" in both.err) == (2, True)
    (estimating.folder / "payloads" / "probe" / "estimate.py").unlink()
    none = estimating.orch("estimate", path)
    assert none.code == 2
    assert "its payload ships no probe/estimate.py" in none.err
    assert "ship one that answers `python -m probe.estimate" in none.err


def test_a_host_estimates_by_a_run_of_its_own_and_once(estimating: Project) -> None:
    params = {**PARAMS, "fault": None}
    path = estimating.experiment("", params=params, devices=[0])
    first = estimating.orch("estimate", path, "--on-host", "here", "--json")
    assert first.code == 0, first.err
    assert first.json["cases"][0]["estimate"]["peak_allocated_bytes"] == 12 * GIB
    (row,) = estimating.runs()
    assert (row["experiment"], row["verdict"], row["job"]["devices"]) == ("estimate", "ok", [])
    assert f"estimated by run {row['run_id']} on here" in first.err
    assert estimating.orch("estimate", path, "--on-host", "here", "--json").json == first.json
    assert len(estimating.runs()) == 1
    lacking = estimating.orch("estimate", path, "--on-host", "here", "--set", "fault='no torch'")
    assert lacking.code == 3
    assert "here: probe.estimate: its Python has no torch" in lacking.err


def test_a_run_says_first_what_it_will_hold_and_keeps_that(estimating: Project) -> None:
    path = estimating.experiment("", params=PARAMS, devices=[0])
    done = estimating.orch("run", path, "--host", "here")  # which has no card: it is refused there
    said = "estimate: 12.00 GiB allocated, 13.00 GiB reserved, within 5 %; no verdict, since no card is known"
    assert f"orch: {said}\n" in done.err
    assert "\nestimate    12.00 GiB allocated" in done.out
    silent = estimating.orch("run", path, "--host", "here", "--no-estimate")
    assert "estimate" not in silent.err + silent.out
    group = estimating.experiment("", params=PARAMS, devices=[0], matrix={"params": {"size_gib": [3, 4]}})
    done = estimating.orch("run", group, "--host", "here", "--json")
    assert "estimate: size_gib=3 on here: 3.00 GiB allocated" in done.err
    predicted = [run["prediction"]["estimate"]["peak_allocated_bytes"] for run in done.json["runs"]]
    assert predicted == [3 * GIB, 4 * GIB]
    assert "estimate of size_gib=4 on here: 4.00 GiB" in estimating.orch("show", done.json["group_id"]).out


def test_what_was_predicted_stands_beside_what_was_measured(estimating: Project) -> None:
    path = estimating.experiment("", params=PARAMS)
    (case,) = estimating.orch("estimate", path, "--json").json["cases"]
    measured = estimating.orch("run", estimating.experiment(TELLS, name="tells"), "--host", "here", "--json")
    assert measured.code == 0, measured.err
    assert measured.json["prediction"] is None
    run_id = measured.json["run"]["run_id"]
    (estimating.folder / ".orch" / "runs" / run_id / "prediction.json").write_text(
        json.dumps({**case, "card": None})
    )
    shown = estimating.orch("show", run_id).out
    assert (
        "12.00 GiB allocated predicted, 13.00 GiB allocated on cuda:0: +1.00 GiB unexplained (+7.7%)" in shown
    )
    rows = [line.split() for line in shown[shown.index("MEMORY AT THE PEAK") :].splitlines()[1:]]
    assert rows == [
        ["parameter", "3.00", "GiB", "4.00", "GiB", "+1.00", "GiB"],
        ["activation", "3.00", "GiB", "0.00", "GiB", "-3.00", "GiB"],
        ["scores", "6.00", "GiB", "8.00", "GiB", "+2.00", "GiB"],
        ["allocated", "12.00", "GiB", "13.00", "GiB", "+1.00", "GiB"],
        ["reserved", "13.00", "GiB", "15.00", "GiB", "+2.00", "GiB"],
        ["unexplained", "+1.00", "GiB"],
    ]
    comparison = estimating.orch("show", run_id, "--json").json["prediction"]["comparison"]
    assert comparison["unexplained_bytes"] == GIB
