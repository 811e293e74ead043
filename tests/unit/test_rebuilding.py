"""A ledger from the runs' folders: the same rows as before, and a name for what cannot be read."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator import rebuilding
from orchestrator.errors import StorageError
from orchestrator.ledger import MASK, Ledger, RunRow
from orchestrator.lifecycle import State
from orchestrator.starting import refuse
from orchestrator.workspace import Workspace
from tests.unit.housekeeping import a_run, a_workspace


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[Workspace]:
    opened = a_workspace(tmp_path)
    yield opened
    opened.close()


def rebuilt(workspace: Workspace) -> dict[str, RunRow]:
    """Returns the rows of the new ledger."""
    workspace.close()
    rebuilding.rebuild(workspace.home)
    with Ledger.open(workspace.home / "ledger.db") as ledger:
        return {row.run_id: row for row in reversed(ledger.recent(100))}


def without_time(row: RunRow) -> RunRow:
    return replace(row, created_t=0.0)


def edit_observations(workspace: Workspace, run_id: str, dropped: str) -> None:
    path = workspace.folder(run_id).path / "observations.jsonl"
    lines = [line for line in path.read_text().splitlines() if json.loads(line)["kind"] != dropped]
    path.write_text("".join(f"{line}\n" for line in lines))


def test_every_row_comes_back_in_the_order_of_creation(workspace: Workspace) -> None:
    before = [a_run(workspace, name, code=code) for name, code in (("z", 0), ("m", 3), ("a", None))]
    rows = rebuilt(workspace)
    assert list(rows) == ["z", "m", "a"]
    assert [without_time(row) for row in rows.values()] == [without_time(row) for row in before]
    assert rows["z"].job["env"] == {"TOKEN": MASK}


def test_no_value_of_a_variable_gets_into_the_new_file(workspace: Workspace) -> None:
    a_run(workspace, "r1")
    rebuilt(workspace)
    assert b"hf_secret" not in (workspace.home / "ledger.db").read_bytes()


def test_a_run_that_nobody_judged_is_judged_by_its_records(workspace: Workspace) -> None:
    a_run(workspace, "r1", code=3, is_judged=False)
    row = rebuilt(workspace)["r1"]
    assert (row.state, row.verdict, row.exit_code, row.pid) == (State.FAILED, "failed", 3, 4242)


def test_a_run_whose_records_were_altered_is_not_judged_by_them(workspace: Workspace) -> None:
    a_run(workspace, "r1", code=0, is_judged=False)
    path = workspace.folder("r1").segment(0)
    path.write_bytes(path.read_bytes().replace(b'"code":0', b'"code":1'))
    row = rebuilt(workspace)["r1"]
    assert (row.state, row.verdict) == (State.LOST, "altered")


def test_a_run_without_an_end_stays_open_and_one_that_never_arrived_is_starting(
    workspace: Workspace,
) -> None:
    a_run(workspace, "running", code=None)
    a_run(workspace, "starting", code=None)
    workspace.folder("starting").segment(0).unlink()
    edit_observations(workspace, "starting", "started")
    rows = rebuilt(workspace)
    assert (rows["running"].state, rows["starting"].state) == (State.RUNNING, State.STARTING)


def test_a_refusal_and_a_removed_mirror_keep_their_verdicts(workspace: Workspace) -> None:
    a_run(workspace, "refused", code=None)
    refuse(workspace, "refused", "no card 9")
    before = a_run(workspace, "removed", code=3)
    workspace.folder("removed").forget_seals()
    workspace.folder("removed").segment(0).unlink()
    rows = rebuilt(workspace)
    assert (rows["refused"].state, rows["refused"].reason) == (State.REFUSED, "no card 9")
    assert without_time(rows["removed"]) == without_time(before)


def test_what_cannot_be_read_is_named_and_the_rest_is_taken_in(workspace: Workspace) -> None:
    a_run(workspace, "good")
    a_run(workspace, "foreign")
    edit_observations(workspace, "foreign", "created")
    a_run(workspace, "other")
    workspace.folder("other").path.rename(workspace.home / "runs" / "renamed")
    (workspace.home / "runs" / "empty").mkdir()
    workspace.close()
    made = rebuilding.rebuild(workspace.home)
    assert made.runs == 1
    assert set(made.unreadable) == {"foreign", "renamed", "empty"}
    assert "another run" in made.unreadable["renamed"]
    assert "which host" in made.unreadable["foreign"]


def test_the_old_file_stays_beside_the_new_one_with_what_was_not_yet_in_it(workspace: Workspace) -> None:
    a_run(workspace, "r1")
    copied = workspace.home / "crashed.db"
    for suffix in ("", "-wal"):  # as a machine that crashed leaves them
        source = workspace.home / f"ledger.db{suffix}"
        copied.with_name(copied.name + suffix).write_bytes(source.read_bytes())
    workspace.close()
    for suffix in ("", "-wal"):
        copied.with_name(copied.name + suffix).rename(workspace.home / f"ledger.db{suffix}")
    made = rebuilding.rebuild(workspace.home)
    assert made.kept is not None
    with sqlite3.connect(made.kept) as kept:
        assert kept.execute("SELECT run_id FROM runs").fetchall() == [("r1",)]
    kept.close()
    again = rebuilding.rebuild(workspace.home)
    assert again.kept not in (None, made.kept)


def test_a_damaged_ledger_is_replaced(workspace: Workspace) -> None:
    a_run(workspace, "r1")
    workspace.close()
    (workspace.home / "ledger.db").write_bytes(b"no database" * 1000)
    with pytest.raises(StorageError, match="orch ledger rebuild"):
        Ledger.open(workspace.home / "ledger.db")
    assert list(rebuilt(workspace)) == ["r1"]


def test_a_ledger_that_another_command_has_open_is_left_alone(workspace: Workspace) -> None:
    a_run(workspace, "r1")
    with pytest.raises(StorageError, match="another orch command"):
        rebuilding.rebuild(workspace.home)
    assert workspace.ledger.get("r1")


def test_a_home_without_runs_gets_an_empty_ledger(tmp_path: Path) -> None:
    made = rebuilding.rebuild(tmp_path)
    assert (made.runs, made.kept) == (0, None)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("ledger.db.new")] == []
