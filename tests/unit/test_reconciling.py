"""Many hosts at once: what each says is written down, and none of them holds up the others."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import pytest

from orchestrator import reconciling
from orchestrator.errors import Unreachable
from orchestrator.inventory import Host
from orchestrator.lifecycle import State
from orchestrator.remote import Standing
from orchestrator.workspace import Workspace
from tests.unit.test_runs import a_row

HOSTS = "hosts: {good: {transport: local}, down: {transport: local}, mute: {transport: local}}\n"
ALIVE = Standing(exists=True, has_started=True, is_alive=True, orphans=())


class FakeTransport:
    """A connection to a host that answers, or to one that never does until it is closed."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.closed = threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.closed.set()


def connect(host: Host, **_: Any) -> FakeTransport:
    if host.name == "down":
        raise Unreachable("nobody is there. Next: look", host="down")
    return FakeTransport(host)


def standing(transport: FakeTransport, _: Workspace, run_ids: Sequence[str]) -> dict[str, Standing]:
    if transport.host.name == "mute":
        assert transport.closed.wait(30)
        raise Unreachable("the connection was closed", host="mute")
    return dict.fromkeys(run_ids, ALIVE)


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workspace]:
    monkeypatch.setattr(reconciling, "connect", connect)
    monkeypatch.setattr(reconciling, "standing", standing)
    monkeypatch.setattr(reconciling, "GLANCE_TIMEOUT_S", 0.0)
    (tmp_path / "inventory.yaml").write_text(HOSTS)
    opened = Workspace.open(tmp_path / "inventory.yaml", tmp_path / "home")
    opened.ledger.insert(
        a_row("g1", host="good", state=State.STARTING),
        a_row("d1", host="down", state=State.RUNNING),
        a_row("m1", host="mute", state=State.RUNNING),
        a_row("x1", host="removed", state=State.RUNNING),
        a_row("e1", host="down", state=State.SUCCEEDED),
    )
    yield opened
    opened.close()


def test_each_host_is_told_apart_and_none_waits_for_another(workspace: Workspace) -> None:
    looked = reconciling.glance(workspace, workspace.ledger.recent(9), patience_s=0.2)
    assert set(looked.failed) == {"down", "mute", "removed"}
    assert "did not answer within" in looked.failed["mute"]
    assert "removed" in looked.failed["removed"]
    assert workspace.ledger.get("g1").state is State.RUNNING
    assert {run_id: seen.unreachable for run_id, seen in looked.seen.items()} == {
        "g1": None,
        "d1": "nobody is there",
        "m1": looked.failed["mute"],
        "x1": looked.failed["removed"].partition(". Next: ")[0],
    }
    for run_id in ("d1", "m1", "x1"):
        row = workspace.ledger.get(run_id)
        assert (row.state, row.reason, row.verdict) == (State.RUNNING, None, None)


def test_who_leaves_waits_for_no_host(workspace: Workspace) -> None:
    before = signal.signal(signal.SIGALRM, _leave)
    begin = time.monotonic()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(KeyboardInterrupt):
            reconciling.glance(workspace, [workspace.ledger.get("m1")], patience_s=25.0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - begin < 10.0


def _leave(*_: object) -> None:
    raise KeyboardInterrupt


def test_what_a_host_told_before_it_was_gone_is_not_shown_as_unreachable(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = Standing(exists=False, has_started=False, is_alive=False, orphans=())
    ended = Standing(exists=True, has_started=True, is_alive=False, orphans=())

    def catch_up(*_: object) -> bool:
        raise Unreachable("it broke", host="good")

    workspace.ledger.insert(a_row("g2", host="good", state=State.RUNNING))
    monkeypatch.setattr(reconciling, "standing", lambda *_: {"g1": gone, "g2": ended})
    monkeypatch.setattr(reconciling, "catch_up", catch_up)
    monkeypatch.setattr(reconciling, "GLANCE_TIMEOUT_S", 30.0)  # so that the visit itself is not given up
    looked = reconciling.glance(workspace, map(workspace.ledger.get, ("g1", "g2")))
    assert workspace.ledger.get("g1").state is State.REFUSED
    assert looked.seen.keys() == {"g2"}


def test_a_reconcile_tells_what_changed_and_what_was_not_asked(workspace: Workspace) -> None:
    found = reconciling.reconcile(workspace, "good")
    assert [(pair.before.state, pair.after.state) for pair in found.changes] == [
        (State.STARTING, State.RUNNING)
    ]
    assert reconciling.reconcile(workspace, "good").changes == ()
    down = reconciling.reconcile(workspace, "down")
    assert (down.asked, dict(down.waiting_for), set(down.failed)) == (1, {"down": 1}, {"down"})


def test_what_is_not_mirrored_in_time_stays_open_and_is_counted(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = Standing(exists=True, has_started=True, is_alive=False, orphans=())
    monkeypatch.setattr(reconciling, "standing", lambda _, __, run_ids: dict.fromkeys(run_ids, ended))
    monkeypatch.setattr(reconciling, "GLANCE_TIMEOUT_S", 30.0)  # so that the visit itself is not given up
    looked = reconciling.glance(workspace, [workspace.ledger.get("g1")], patience_s=-1.0)
    assert (looked.unfinished, looked.failed) == ({"good": 1}, {})
    assert workspace.ledger.get("g1").state is State.STARTING


def test_since_when_a_host_is_silent_is_kept_until_it_answers(workspace: Workspace) -> None:
    first = reconciling.glance(workspace, [workspace.ledger.get("d1")]).seen["d1"].since_t
    again = reconciling.glance(workspace, [workspace.ledger.get("d1")]).seen["d1"].since_t
    assert first is not None
    assert first == again
