"""Groups between ledger and hosts: what is asked of a host, in which order, and what is written down."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import pytest

from orchestrator import cancelling, host_starter, remote
from orchestrator.cancelling import cancel_all
from orchestrator.errors import HostError, Unreachable, UsageError
from orchestrator.experiment import load_experiment
from orchestrator.inventory import Host
from orchestrator.lifecycle import State
from orchestrator.remote import Standing, Stopped
from orchestrator.starting import Plan
from orchestrator.submitting import prepare_group, submit
from orchestrator.workspace import Workspace

MATRIX = "payload: probe\nrun: probe.go\nparams: {a: 0}\nmatrix: {params: {a: [1, 2, 3]}, at_once: 2}\n"
INVENTORY = "hosts:\n  up: {transport: local}\n  down: {transport: local}\n"


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[Workspace]:
    (tmp_path / "inventory.yaml").write_text(INVENTORY)
    (tmp_path / "payloads" / "probe").mkdir(parents=True)
    (tmp_path / "payloads" / "probe" / "go.py").touch()
    opened = Workspace.open(tmp_path / "inventory.yaml")
    yield opened
    opened.close()


def _plans(workspace: Workspace, *hosts: str, text: str = MATRIX) -> tuple[Plan, ...]:
    path = workspace.project / "trial.yaml"
    path.write_text(text)
    return prepare_group(workspace, load_experiment(path), [workspace.inventory.host(name) for name in hosts])


class _Talk:
    hello: Mapping[str, Any] = MappingProxyType({})
    clock = None

    def close(self) -> None:
        pass


class _Transport:
    def __init__(self, host: Host) -> None:
        self.host = host

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        pass


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Hosts without machines: every connection, start and stop is written down; `down` cannot be reached."""
    calls: list[str] = []

    def connect(host: Host) -> _Transport:
        calls.append(f"connect {host.name}")
        if host.name == "down":
            raise Unreachable("nobody answers", host=host.name)
        return _Transport(host)

    def start(transport: _Transport, job: dict[str, Any], *_: object) -> tuple[remote.Started, _Talk]:
        calls.append(f"start {job['run_id']}")
        return remote.Started(is_new=True, sent_files=0, sent_bytes=0), _Talk()

    def stop(transport: _Transport, run_id: str, grace_s: float | None) -> Stopped:
        calls.append(f"stop {run_id}")
        return Stopped(asked=True, ended=(), survivors=())

    def status(transport: _Transport, run_ids: list[str]) -> dict[str, Standing]:
        over = Standing(exists=True, has_started=True, is_alive=False, orphans=())
        return dict.fromkeys(run_ids, over)

    for module in (host_starter, cancelling):
        monkeypatch.setattr(module, "connect", connect)
    for function in (start, stop, status):
        monkeypatch.setattr(remote, function.__name__, function)
    return calls


def test_every_case_on_every_host_has_its_place_in_one_group(workspace: Workspace) -> None:
    plans = _plans(workspace, "up", "down")
    (group_id,) = {plan.job["group_id"] for plan in plans}
    assert [(plan.host.name, plan.job["params"]["a"], plan.job["turn"]) for plan in plans] == [
        (host, place + 1, {"queue": group_id, "place": place, "at_once": 2})
        for host in ("up", "down")
        for place in range(3)
    ]
    assert len({plan.job["run_id"] for plan in plans}) == 6


def test_runs_are_submitted_in_their_order_over_one_connection_a_host(
    workspace: Workspace, asked: list[str]
) -> None:
    plans = _plans(workspace, "up")
    outcomes = list(submit(workspace, plans))
    assert asked == ["connect up", *(f"start {plan.job['run_id']}" for plan in plans)]
    assert [outcome.refusal for outcome in outcomes] == [None] * 3
    rows = workspace.ledger.group(plans[0].job["group_id"])
    assert [row.state for row in rows] == [State.QUEUED] * 3
    assert not any(workspace.folder(row.run_id).is_starting for row in rows)


def test_a_host_that_fails_one_start_is_asked_no_more_and_another_is(
    workspace: Workspace, asked: list[str]
) -> None:
    plans = _plans(workspace, "down", "up")
    list(submit(workspace, plans))
    assert asked.count("connect down") == 1
    rows = workspace.ledger.group(plans[0].job["group_id"])
    assert [row.state for row in rows] == [State.REFUSED] * 3 + [State.QUEUED] * 3
    assert {row.reason for row in rows[:3]} == {"down: nobody answers"}


def test_all_rows_and_marks_are_there_before_the_first_start(
    workspace: Workspace, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = _plans(workspace, "up")
    seen: list[bool] = []

    def start(*_: object) -> None:
        seen.extend(workspace.folder(plan.job["run_id"]).is_starting for plan in plans)
        raise HostError("no", host="up")

    monkeypatch.setattr(remote, "start", start)
    first = next(iter(submit(workspace, plans)))
    assert seen == [True] * 3
    assert first.refusal == "up: no"
    assert len(workspace.ledger.group(plans[0].job["group_id"])) == 3


def test_a_run_that_was_cancelled_before_its_start_is_not_submitted(
    workspace: Workspace, asked: list[str]
) -> None:
    plans = _plans(workspace, "up")
    folder = workspace.folder(plans[1].job["run_id"])
    folder.make()
    folder.request_cancel(None)
    outcomes = list(submit(workspace, plans))
    assert [outcome.refusal is None for outcome in outcomes] == [True, False, True]
    assert f"start {folder.run_id}" not in asked


def test_a_missing_secret_is_found_before_anything_is_written(workspace: Workspace, asked: list[str]) -> None:
    plans = _plans(workspace, "up", text=f"{MATRIX}env: {{TOKEN: {{secret: true, from_env: NOT_THERE}}}}\n")
    with pytest.raises(UsageError, match="NOT_THERE"):
        list(submit(workspace, plans))
    assert (asked, workspace.ledger.recent(10)) == ([], [])


def test_a_group_is_cancelled_from_its_end(workspace: Workspace, asked: list[str]) -> None:
    plans = _plans(workspace, "up")
    list(submit(workspace, plans))
    asked.clear()
    rows = workspace.ledger.group(plans[0].job["group_id"])
    found = cancel_all(workspace, rows)
    assert asked == ["connect up", *(f"stop {plan.job['run_id']}" for plan in reversed(plans))]
    assert found.have_all_ended


def test_who_leaves_a_cancel_waits_for_no_grace(
    workspace: Workspace, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    alive = Standing(exists=True, has_started=True, is_alive=True, orphans=())
    monkeypatch.setattr(remote, "status", lambda _, run_ids: dict.fromkeys(run_ids, alive))
    plans = _plans(workspace, "up")
    list(submit(workspace, plans))
    rows = workspace.ledger.group(plans[0].job["group_id"])
    before = signal.signal(signal.SIGALRM, _leave)
    begin = time.monotonic()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(KeyboardInterrupt):
            cancel_all(workspace, rows, grace_s=600.0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - begin < 10.0
    assert sum(call.startswith("stop ") for call in asked) == 3


def _leave(*_: object) -> None:
    raise KeyboardInterrupt
