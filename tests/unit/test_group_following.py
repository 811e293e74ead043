"""The follow of a group: who leaves it waits for nobody."""

from __future__ import annotations

import threading
from pathlib import Path

from orchestrator.group_following import GroupFollowing
from orchestrator.ledger import RunRow
from orchestrator.lifecycle import State
from orchestrator.run_folder import starting_together
from orchestrator.workspace import Workspace


def test_it_is_left_while_its_runs_are_still_being_started(tmp_path: Path) -> None:
    (tmp_path / "inventory.yaml").write_text("hosts: {here: {transport: local}}\n")
    workspace = Workspace.open(tmp_path / "inventory.yaml", tmp_path / "home")
    rows = [
        RunRow(
            run_id=f"run{place}",
            group_id="group",
            experiment="trial",
            host="here",
            bundle="b" * 64,
            state=State.CREATED,
            created_t=1.0,
            job={"run_id": f"run{place}", "turn": {"queue": "group", "place": place, "at_once": 2}},
        )
        for place in range(3)
    ]
    group = GroupFollowing(workspace, rows)
    with starting_together([workspace.folder(row.run_id) for row in rows]):
        with group:
            assert next(group.events()) is None
            assert len(_followers()) == 2
        assert not _followers()
    workspace.close()


def _followers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "orch-follow-here"]
