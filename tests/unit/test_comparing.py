"""Two runs as values: what counts as a difference, and how it is shown."""

from __future__ import annotations

import json
import math
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.bundle import Entry, ObjectStore
from orchestrator.comparing import ABSENT, Change, RunFacts, TextDiff, compare, shortened, text_diff
from orchestrator.diff_view import Comparison, diff_json, diff_lines
from orchestrator.errors import StorageError
from orchestrator.ledger import MASK, RunRow
from orchestrator.lifecycle import State
from orchestrator.outcome import Device, Outcome, Peak
from orchestrator.provenance import commits_between
from orchestrator.verdict import Verdict
from orchestrator.views import runs_table
from tests.unit.test_views import text_of

JOB: dict[str, Any] = {
    "version": 1,
    "run_id": "a" * 12,
    "group_id": "a" * 12,
    "experiment": "trial",
    "profile": None,
    "bundle": "1" * 64,
    "module": "probe.trial",
    "params": {"lr": 1, "deep": {"er": [1, 2], "same": None}},
    "env": {"MODE": "one"},
    "alloc_conf": None,
    "devices": ["0"],
    "timeout_s": 60.0,
    "grace_s": 10.0,
    "provenance": {"commit": None},
    "expect": {"verdicts": ["ok"], "metrics": {}},
}
ROW = RunRow(
    run_id="a" * 12,
    group_id="a" * 12,
    experiment="trial",
    host="here",
    bundle="1" * 64,
    state=State.SUCCEEDED,
    verdict="ok",
    exit_code=0,
    created_t=100.0,
    started_t=101.0,
    ended_t=111.0,
    job=JOB,
)
OUTCOME = Outcome(
    end="exited",
    exit_code=0,
    python="3.11.2",
    torch="2.9.1",
    allocator="native",
    allocator_settings={"expandable_segments": False},
    devices=(Device(index=0, name="H200", uuid="GPU-1", total_bytes=1),),
    metrics={"loss": 2.5, "same": 1.0},
    peak_rss_bytes=1024**3,
    peak_memory=(Peak(index=0, allocated_bytes=1024**3, reserved_bytes=2 * 1024**3),),
)
ENTRIES = (
    Entry(path="probe/gone.py", mode=0o644, size_bytes=1, sha256="0" * 64),
    Entry(path="probe/same.py", mode=0o644, size_bytes=5, sha256="1" * 64),
    Entry(path="probe/trial.py", mode=0o644, size_bytes=9, sha256="2" * 64),
)
FACTS = RunFacts(
    row=ROW,
    job=JOB,
    has_values=True,
    outcome=OUTCOME,
    verdict=Verdict(name="ok", is_good=True, reasons=()),
    entries=ENTRIES,
)


def with_job(**changes: Any) -> RunFacts:
    return replace(FACTS, job={**JOB, **changes})


def shown(a: RunFacts, b: RunFacts, *, diffs: tuple[TextDiff, ...] = ()) -> Comparison:
    return Comparison(a=a, b=b, found=compare(a, b), diffs=diffs, commits=None)


def asked(a: RunFacts, b: RunFacts) -> dict[str, tuple[Any, Any]]:
    return {change.name: (change.a, change.b) for change in compare(a, b).asked}


def test_a_rerun_differs_in_nothing_that_was_asked() -> None:
    row = replace(ROW, run_id="b" * 12, group_id="b" * 12, retry_of="a" * 12)
    job = {**JOB, "run_id": "b" * 12, "group_id": "b" * 12, "retry_of": "a" * 12}
    lines = diff_lines(shown(FACTS, replace(FACTS, row=row, job=job)))
    for subject in ("what was asked", "the code", "what the process got", "what came of it"):
        assert f"no difference in {subject}" in lines


def test_parameters_are_compared_by_nested_paths() -> None:
    other = with_job(params={"lr": 1, "deep": {"er": [1, 3], "new": {"x": 1}}})
    assert asked(FACTS, other) == {
        "params.deep.er": ([1, 2], [1, 3]),
        "params.deep.same": (None, ABSENT),
        "params.deep.new.x": (ABSENT, 1),
    }


@pytest.mark.parametrize(("value", "other"), [(1, 1.0), (1, True), (0.0, False), ("1", 1), ({}, None)])
def test_values_that_a_payload_reads_differently_differ(value: Any, other: Any) -> None:
    assert asked(with_job(params={"x": value}), with_job(params={"x": other})) == {"params.x": (value, other)}


def test_a_number_and_its_text_are_told_apart() -> None:
    lines = diff_lines(shown(with_job(params={"x": 1}), with_job(params={"x": "1"})))
    assert '  ~ params.x 1 → "1"' in lines


def test_everything_else_that_was_asked_is_compared() -> None:
    other = with_job(alloc_conf="expandable_segments:True", devices=["1"], timeout_s=None, module="probe.b")
    other = replace(other, row=replace(ROW, host="there"))
    assert asked(FACTS, other) == {
        "host": ("here", "there"),
        "module": ("probe.trial", "probe.b"),
        "alloc_conf": (None, "expandable_segments:True"),
        "devices": (["0"], ["1"]),
        "timeout_s": (60.0, None),
    }


def test_variables_are_compared_by_value_and_secrets_are_never_shown() -> None:
    a = with_job(env={"MODE": "one", "HF_TOKEN": "hf_a", "PROXY": "http://me:pw@proxy", "SAME_KEY": "k"})
    b = with_job(env={"MODE": "two", "HF_TOKEN": "hf_b", "SAME_KEY": "k"})
    assert asked(a, b) == {
        "env.MODE": ("one", "two"),
        "env.HF_TOKEN": (MASK, MASK),
        "env.PROXY": (MASK, ABSENT),
    }
    text = "\n".join(diff_lines(shown(a, b))) + json.dumps(diff_json(shown(a, b)))
    assert not [secret for secret in ("hf_a", "hf_b", "me:pw") if secret in text]


def test_variables_whose_values_are_not_known_are_compared_by_name() -> None:
    masked = replace(with_job(env={"MODE": MASK, "NEW": MASK}), has_values=False)
    assert asked(FACTS, masked) == {"env.NEW": (ABSENT, MASK)}
    assert "names alone" in compare(FACTS, masked).notes[0]


def test_files_are_listed_as_added_removed_and_changed() -> None:
    changed = replace(ENTRIES[2], size_bytes=12, mode=0o755, sha256="3" * 64)
    added = Entry(path="probe/added.py", mode=0o644, size_bytes=7, sha256="4" * 64)
    other = replace(FACTS, row=replace(ROW, bundle="2" * 64), entries=(added, ENTRIES[1], changed))
    lines = diff_lines(shown(FACTS, other))
    assert "  + probe/added.py 7 bytes" in lines
    assert "  - probe/gone.py 1 bytes" in lines
    assert "  ~ probe/trial.py 9 → 12 bytes, mode 644 → 755" in lines
    assert not [line for line in lines if "same.py" in line]


def test_a_bundle_that_is_not_here_is_no_equal_one() -> None:
    other = replace(FACTS, row=replace(ROW, bundle="2" * 64), entries=None)
    found = compare(FACTS, other)
    assert found.files is None
    assert "not in the object store" in found.notes[0]
    assert f"  ~ bundle {'1' * 12} → {'2' * 12}" in diff_lines(shown(FACTS, other))


def test_what_the_process_got_is_compared_with_cards_by_uuid() -> None:
    outcome = replace(
        OUTCOME,
        torch=None,
        allocator_settings={"expandable_segments": True},
        devices=(replace(OUTCOME.devices[0], uuid="GPU-2"),),
    )
    assert compare(FACTS, replace(FACTS, outcome=outcome)).got == (
        Change(name="torch", a="2.9.1", b=ABSENT),
        Change(name="allocator_settings.expandable_segments", a=False, b=True),
        Change(name="devices.GPU-1", a="cuda:0 H200", b=ABSENT),
        Change(name="devices.GPU-2", a=ABSENT, b="cuda:0 H200"),
    )


def test_numbers_stand_side_by_side_with_their_difference() -> None:
    outcome = replace(OUTCOME, metrics={"loss": 3.0, "new": math.nan, "same": 1.0}, peak_memory=())
    other = replace(FACTS, row=replace(ROW, ended_t=106.0), outcome=outcome)
    measures = {
        measure.name: (measure.a, measure.b, measure.difference) for measure in compare(FACTS, other).measures
    }
    assert measures["loss"] == (2.5, 3.0, 0.5)
    assert measures["same"] == (1.0, 1.0, 0.0)
    assert measures["took_s"] == (10.0, 5.0, -5.0)
    assert measures["cuda:0.peak_reserved_bytes"] == (2 * 1024**3, None, None)
    assert measures["new"][2] is None
    lines = [line.split() for line in diff_lines(shown(FACTS, other))]
    assert ["loss", "2.5", "3", "+0.5", "(+20.0%)"] in lines
    assert ["took_s", "10", "5", "-5", "(-50.0%)"] in lines
    json.dumps(diff_json(shown(FACTS, other)), allow_nan=False)


def test_the_result_is_compared() -> None:
    row = replace(ROW, state=State.FAILED, exit_code=1)
    outcome = replace(OUTCOME, exit_code=1, exception_type="ValueError")
    verdict = Verdict(name="failed", is_good=False, reasons=("exit code 1",))
    names = [c.name for c in compare(FACTS, replace(FACTS, row=row, outcome=outcome, verdict=verdict)).result]
    assert names == ["state", "exit_code", "verdict", "exception", "reasons"]


def test_nothing_that_came_from_elsewhere_reaches_the_terminal_raw() -> None:
    hostile = "\x1b[31m\u202e\n"
    outcome = replace(OUTCOME, torch=hostile, metrics={hostile: 1.0})
    diffs = (TextDiff(path=hostile, lines=(f"+{hostile}",), reason=hostile),)
    other = replace(with_job(params={hostile: hostile}), outcome=outcome)
    assert all(line.isprintable() for line in diff_lines(shown(FACTS, other, diffs=diffs)))


def test_a_text_diff_is_unified_and_refuses_what_is_no_text() -> None:
    assert text_diff("x.py", b"a\nb\n", b"a\nc\n").lines == (
        "--- a/x.py",
        "+++ b/x.py",
        "@@ -1,2 +1,2 @@",
        " a",
        "-b",
        "+c",
    )
    assert text_diff("x.py", b"a", b"a\n").lines[-1] == "-\\ No newline at end of file"
    assert text_diff("x.py", b"", b"a\r\n").lines[-1] == "+a\r"
    assert text_diff("x", b"\xff", b"a").reason == "not text"
    assert text_diff("x", b"\0", b"a").reason == "not text"
    assert "lines" in str(text_diff("x", b"\n" * 20_001, b"a").reason)
    assert "KiB" in str(text_diff("x", b"a" * 10**6, b"a").reason)


def test_the_lines_of_all_diffs_share_one_limit() -> None:
    diffs = shortened([TextDiff(path="a", lines=("1", "2")), TextDiff(path="b", lines=("3", "4"))], 3)
    assert [(diff.lines, diff.left_out) for diff in diffs] == [(("1", "2"), 0), (("3",), 1)]
    assert "  … 1 more lines of the diff; --code shows them" in diff_lines(shown(FACTS, FACTS, diffs=diffs))


def test_ps_names_the_run_that_was_run_again() -> None:
    rows = [replace(ROW, retry_of="qrstuvwxyz12"), ROW]
    assert text_of(runs_table(rows, now_t=200.0)).count("trial, retry of qrstuvwx") == 1


def test_an_object_is_opened_only_as_what_its_name_says(tmp_path: Path) -> None:
    store = ObjectStore(tmp_path)
    sha256 = store.put(b"payload")
    with store.open_checked(sha256) as file:
        assert file.read() == b"payload"
    store.path(sha256).write_bytes(b"damaged")
    with pytest.raises(StorageError, match="is damaged"):
        store.open_checked(sha256)
    store.path(sha256).unlink()
    with pytest.raises(StorageError, match="cannot be read"):
        store.open_checked(sha256)


def test_commits_on_both_sides_are_told_apart(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def commit(subject: str) -> str:
        git("commit", "-q", "--allow-empty", "-m", subject)
        return git("rev-parse", "HEAD")

    git("init", "-q", "-b", "main")
    base = commit("base")
    left = commit("left\x85one")
    git("checkout", "-q", base)
    right = commit("right one")
    found = commits_between(tmp_path, left, right) or ()
    assert {(commit.subject, commit.is_only_in_first) for commit in found} == {
        ("left\x85one", True),
        ("right one", False),
    }
    assert commits_between(tmp_path, left, left) == ()
    assert commits_between(tmp_path, left, "f" * 40) is None
    assert commits_between(tmp_path, f"--output={tmp_path / 'stolen'}", left) is None
    assert not list(tmp_path.glob("stolen*"))
