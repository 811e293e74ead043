"""`orch logs --merge` over mirrors: how much of them is in memory, and what one host's trouble says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator import following
from orchestrator.cli import log_merge
from orchestrator.cli.log_merge import HostWatcher, MergedView
from orchestrator.cli.log_output import Asked
from orchestrator.cli.terminal import Screen
from orchestrator.conversation import Cursor, Piece
from orchestrator.errors import UnknownName
from orchestrator.ledger import RunRow
from orchestrator.lifecycle import State
from orchestrator.log_filter import LineFilter
from orchestrator.mirror import Mirror
from orchestrator.supervisor.records import RecordWriter
from orchestrator.workspace import Workspace

EXPECT = {"verdicts": ["ok"], "metrics": {}}
COUNT = 20


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[Workspace]:
    (tmp_path / "inventory.yaml").write_text("hosts: {here: {transport: local}}\n")
    opened = Workspace.open(tmp_path / "inventory.yaml", tmp_path / "home")
    yield opened
    opened.close()


def add_run(workspace: Workspace, run_id: str, **changes: Any) -> str:
    """Enters a run that is settled, unless ``changes`` say otherwise, and mirrors three lines of it."""
    job = {"run_id": run_id, "env": {}, "expect": EXPECT}
    row = RunRow(
        run_id=run_id,
        group_id=run_id,
        experiment="trial",
        host="here",
        bundle="b" * 64,
        state=State.SUCCEEDED,
        created_t=1.0,
        job=job,
        verdict="ok",
    )
    workspace.ledger.insert(replace(row, **changes))
    host = workspace.project / run_id
    host.mkdir()
    writer = RecordWriter(str(host), run_id, {"job": job})
    for i in range(3):
        writer.write_output("main", 7, "stdout", 7 * i, i, "text", f"line {i}\n")
    if not changes:
        writer.write("end", outcome="exited", code=0)
    writer.close()
    mirror = Mirror.acquire(workspace.folder(run_id), "here")
    assert mirror is not None
    with mirror:
        mirror.append(Piece(Cursor(), (host / "000000.jsonl").read_bytes()))
    return run_id


def view_of(workspace: Workspace, run_ids: Sequence[str]) -> MergedView:
    asked = Asked(proc=None, stream=None, wanted=LineFilter(), as_json=False, is_long=False)
    return MergedView(workspace, run_ids, asked)


@pytest.mark.parametrize("follows", [False, True])
def test_many_runs_are_read_in_small_pieces(
    workspace: Workspace, follows: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes: list[int] = []
    module, name = (following, "arriving_batches") if follows else (log_merge, "checked_records")
    real = getattr(module, name)

    def read(*arguments: Any) -> Any:
        sizes.append(arguments[-1])
        return real(*arguments)

    monkeypatch.setattr(module, name, read)
    monkeypatch.setattr(log_merge, "MOST_READ_BYTES", 200_000)
    view = view_of(workspace, [add_run(workspace, f"run{i}") for i in range(COUNT)])
    if follows:
        assert view.follow(None) == 0
    else:
        view.show(None)
    assert len(sizes) == COUNT
    assert sum(sizes) <= 200_000
    assert capsys.readouterr().out.count("line 2") == COUNT


def test_the_last_lines_of_all_runs_together_are_shown(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    view = view_of(workspace, [add_run(workspace, name) for name in ("first", "second", "third")])
    view.show(4)
    shown = [line.rsplit(" | ", 1)[1] for line in capsys.readouterr().out.splitlines()]
    assert shown == ["line 2", "line 0", "line 1", "line 2"]


def test_a_host_that_is_not_in_the_inventory_ends_its_own_runs_follow_only(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [add_run(workspace, "lost", host="gone", state=State.RUNNING, verdict=None)]
    runs.append(add_run(workspace, "kept"))
    assert view_of(workspace, runs).follow(None) == UnknownName.exit_code
    said = capsys.readouterr()
    assert said.out.count("line 2") == 2
    assert "run lost: " in said.err
    assert "gone" in said.err
    assert "run kept has ended" in said.err


def test_each_host_is_said_to_be_back_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen()
    one, other = HostWatcher(screen, "one"), HostWatcher(screen, "other")
    for watcher, name in ((one, "one"), (one, "one"), (other, "other")):
        watcher.unreachable(f"{name}: no route", 0.5)
    other.reachable()
    one.unreachable("one: no route", 1.0)
    one.reachable()
    one.reachable()
    notes = capsys.readouterr().err
    assert [notes.count(f"{name}: no route") for name in ("one", "other")] == [1, 1]
    assert [notes.count(f"{name}: answers again") for name in ("one", "other")] == [1, 1]
