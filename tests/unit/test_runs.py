"""What a name on the command line means, why a run is lost, and what observations may change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator import remote, runs
from orchestrator.errors import OrchError, UnknownName, Unreachable
from orchestrator.ledger import Ledger, RunRow
from orchestrator.lifecycle import State, is_settled
from orchestrator.remote import Standing
from orchestrator.transports import Transport
from orchestrator.workspace import Workspace

EXPECT = {"verdicts": ["ok"], "metrics": {}}
ORDER = (State.CREATED, State.STARTING, State.QUEUED, State.RUNNING)
GONE = Standing(exists=False, has_started=False, is_alive=False, orphans=())
ENDED = Standing(exists=True, has_started=True, is_alive=False, orphans=())


def a_row(run_id: str, **changes: Any) -> RunRow:
    row = RunRow(
        run_id=run_id,
        group_id=run_id,
        experiment="trial",
        host="here",
        bundle="b" * 64,
        state=State.CREATED,
        created_t=1.0,
        job={"run_id": run_id, "env": {}, "expect": EXPECT},
    )
    return replace(row, **changes)


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[Workspace]:
    (tmp_path / "inventory.yaml").write_text("hosts: {here: {transport: local}}\n")
    opened = Workspace.open(tmp_path / "inventory.yaml", tmp_path / "home")
    yield opened
    opened.close()


def test_word_to_cancel_is_kept_until_the_host_has_it(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive = Standing(exists=True, has_started=True, is_alive=True, orphans=())
    folder, transport = workspace.folder("r1"), cast("Transport", object())
    asked: list[tuple[str, float | None]] = []
    folder.make()
    folder.request_cancel(3.0)

    def stop(_: object, run_id: str, grace_s: float | None) -> None:
        asked.append((run_id, grace_s))
        if len(asked) == 1:
            raise Unreachable("it broke", host="here")

    monkeypatch.setattr(remote, "status", lambda _, run_ids: dict.fromkeys(run_ids, alive))
    monkeypatch.setattr(remote, "stop", stop)
    with pytest.raises(Unreachable):
        runs.standing(transport, workspace, ["r1"])
    runs.standing(transport, workspace, ["r1"])
    runs.standing(transport, workspace, ["r1"])
    assert asked == [("r1", 3.0)] * 2


class TestNames:
    def test_a_group_is_found_by_its_id_or_its_beginning(self, workspace: Workspace) -> None:
        workspace.ledger.insert(a_row("r1", group_id="group1"), a_row("r2", group_id="group1"))
        for text in ("group1", "gro", "g"):
            found = runs.resolve_group(workspace, text)
            assert found is not None
            assert [row.run_id for row in found] == ["r1", "r2"]

    def test_a_run_by_itself_is_no_group_even_with_a_retry_in_its_group(self, workspace: Workspace) -> None:
        workspace.ledger.insert(a_row("r1"), a_row("r2", group_id="r1", retry_of="r1"))
        assert runs.resolve_group(workspace, "r1") is None
        assert runs.resolve(workspace, "r1") == "r1"

    def test_the_beginning_of_a_run_and_of_a_group_is_neither(self, workspace: Workspace) -> None:
        workspace.ledger.insert(a_row("abc"), a_row("x", group_id="abd"))
        with pytest.raises(UnknownName, match="group") as refused:
            runs.resolve_group(workspace, "ab")
        assert "abc" in str(refused.value)
        assert "abd" in str(refused.value)

    def test_a_whole_run_id_wins_over_a_group_that_begins_with_it(self, workspace: Workspace) -> None:
        workspace.ledger.insert(a_row("abc"), a_row("x", group_id="abcd"))
        assert runs.resolve_group(workspace, "abc") is None
        assert runs.resolve_group(workspace, "abcd") is not None

    @pytest.mark.parametrize("text", ["", "last", "nothing", "\ud800", "%", "g_"])
    def test_what_is_no_group_is_none(self, workspace: Workspace, text: str) -> None:
        workspace.ledger.insert(a_row("r1", group_id="gx1"))
        assert runs.resolve_group(workspace, text) is None

    def test_a_group_where_one_run_is_needed_is_told(self, workspace: Workspace) -> None:
        workspace.ledger.insert(a_row("r1", group_id="group1"))
        with pytest.raises(UnknownName, match="is the group group1; this needs one of its runs: r1"):
            runs.resolve(workspace, "group1")

    def test_last_is_a_run_of_this_controller(self, workspace: Workspace) -> None:
        workspace.ledger.insert(a_row("mine"))
        workspace.ledger.adopt([a_row("theirs", is_adopted=True)])
        assert runs.resolve(workspace, "last") == "mine"


class TestLost:
    @pytest.mark.parametrize(
        ("known", "reason"),
        [
            (GONE, "its folder is gone from the host"),
            (replace(ENDED, was_rebooted=True), "its host rebooted while it ran"),
            (ENDED, "its supervisor is gone and wrote no end"),
            (replace(ENDED, orphans=("7 python", "8 sh")), "2 of its processes still run: orch cancel r1"),
        ],
    )
    def test_the_reason_is_exact(self, workspace: Workspace, known: Standing, reason: str) -> None:
        workspace.ledger.insert(a_row("r1", state=State.RUNNING))
        report = runs.settle(workspace, "r1", known, is_whole=True)
        assert report.row.state is State.LOST
        assert reason in (report.row.reason or "")

    @pytest.mark.parametrize("state", [State.CREATED, State.STARTING])
    def test_a_start_that_never_arrived_is_refused(self, workspace: Workspace, state: State) -> None:
        workspace.ledger.insert(a_row("r1", state=state))
        report = runs.settle(workspace, "r1", GONE, is_whole=True)
        assert (report.row.state, report.row.reason) == (
            State.REFUSED,
            "its start never arrived at the host",
        )

    def test_a_lost_run_is_found_again(self, workspace: Workspace) -> None:
        workspace.ledger.insert(a_row("r1", state=State.RUNNING))
        runs.settle(workspace, "r1", GONE, is_whole=True)
        found = replace(ENDED, is_alive=True)
        row = runs.settle(workspace, "r1", found, is_whole=True).row
        assert (row.state, row.verdict, row.reason) == (State.RUNNING, None, None)


def test_a_run_that_waits_is_queued_with_those_ahead_of_it_counted(workspace: Workspace) -> None:
    rows = [a_row(f"r{number}", group_id="g", state=State.QUEUED) for number in range(3)]
    workspace.ledger.insert(*rows, a_row("other", group_id="g", host="there"))
    waiting = replace(ENDED, is_alive=True, is_waiting=True)
    assert runs.settle(workspace, "r2", waiting, is_whole=True).row.state is State.QUEUED
    observed = runs.observe(workspace, "r2", waiting)
    assert observed is not None
    assert observed.ahead == 2
    workspace.ledger.update("r0", state=State.SUCCEEDED)
    assert workspace.ledger.ahead_of("r2") == 1
    assert runs.settle(workspace, "r2", replace(waiting, is_waiting=False), is_whole=True).row.state is (
        State.RUNNING
    )


observations = st.one_of(
    st.just("running"),
    st.just("queued"),
    st.sampled_from(State),
)


@given(steps=st.lists(observations, max_size=30))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_observation_changes_an_end_or_goes_back(
    steps: list[str | State], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever order looks and commands come in, and whatever they saw."""
    with Ledger.open(tmp_path_factory.mktemp("ledger") / "ledger.db") as ledger:
        ledger._connection.execute("PRAGMA synchronous = OFF")
        ledger.insert(a_row("r1"))
        for step in steps:
            before = ledger.get("r1").state
            if isinstance(step, State):
                with suppress(OrchError):
                    ledger.update("r1", state=step)
            elif step == "running":
                ledger.mark_running("r1")
            else:
                ledger.mark_queued("r1")
            after = ledger.get("r1").state
            if is_settled(before):
                assert after is before
            elif before is not State.LOST and after in ORDER:
                assert ORDER.index(after) >= ORDER.index(before)
            elif before is State.LOST:
                assert after not in (State.CREATED, State.STARTING)
