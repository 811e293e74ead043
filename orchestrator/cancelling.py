"""Ends many runs at once: host by host side by side, each over one connection, the last in a queue first.

A run that waits is asked before the one whose end would give it its turn. Touches no ledger; what became of
the runs is for `reconciling` to find.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from orchestrator import remote
from orchestrator.errors import HostError, OrchError, Unreachable
from orchestrator.experiment import GRACE_S
from orchestrator.ledger import RunRow
from orchestrator.runs import MOST_HOSTS_AT_ONCE, is_settled
from orchestrator.transports import Transport, connect
from orchestrator.workspace import Workspace

ENDING_S = 20.0
POLL_S = 0.3


@dataclass(frozen=True, kw_only=True, slots=True)
class Cancelled:
    """Why hosts could not be asked, by their names; what still runs and could not be ended; runs in time."""

    failed: dict[str, str]
    survivors: tuple[str, ...]
    have_all_ended: bool


def cancel_all(workspace: Workspace, rows: Sequence[RunRow], *, grace_s: float | None = None) -> Cancelled:
    """Has every run that is not settled ended, and waits until they are or their grace is long over.

    A run that is being started is ended as soon as its host has it, or never submitted. Who leaves early ends
    the waiting, not what was asked for.
    """
    by_host: dict[str, list[RunRow]] = {}
    for row in reversed(rows):
        if not is_settled(row):
            by_host.setdefault(row.host, []).append(row)
    failed: dict[str, str] = {}
    survivors: list[str] = []
    have_all_ended = True
    left_early = threading.Event()
    with ThreadPoolExecutor(MOST_HOSTS_AT_ONCE) as pool, _set_on_leaving(left_early):
        asked = {
            name: pool.submit(_cancel, workspace, mine, grace_s, left_early) for name, mine in by_host.items()
        }
        for name, answer in asked.items():
            try:
                left, have_ended = answer.result()
            except OrchError as error:
                failed[name] = str(error).removeprefix(f"{name}: ")
            else:
                survivors += left
                have_all_ended = have_all_ended and have_ended
    return Cancelled(failed=failed, survivors=tuple(survivors), have_all_ended=have_all_ended and not failed)


def patience_s(rows: Sequence[RunRow], grace_s: float | None) -> float:
    """Returns how long to wait until all of ``rows`` have ended that were asked to end now."""
    own_s: float = max(row.job.get("grace_s") or GRACE_S for row in rows)
    return (own_s if grace_s is None else grace_s) + ENDING_S


@contextmanager
def _set_on_leaving(event: threading.Event) -> Iterator[None]:
    """Sets ``event`` before a pool waits for its threads."""
    try:
        yield
    finally:
        event.set()


def _cancel(
    workspace: Workspace, rows: Sequence[RunRow], grace_s: float | None, left_early: threading.Event
) -> tuple[list[str], bool]:
    """Returns what could not be ended on one host, and whether all of its runs have ended."""
    starting = []
    for row in rows:
        folder = workspace.folder(row.run_id)
        if folder.is_starting:
            folder.request_cancel(grace_s)
            starting.append(folder)
    give_up_at = time.monotonic() + patience_s(rows, grace_s)
    survivors: list[str] = []
    with connect(workspace.inventory.host(rows[0].host)) as transport:
        while any(folder.is_starting for folder in starting) and time.monotonic() < give_up_at:
            if left_early.wait(POLL_S):
                break
        for row in rows:
            survivors += _stop(workspace, transport, row.run_id, grace_s)
        run_ids = [row.run_id for row in rows]
        while any(known.is_alive for known in remote.status(transport, run_ids).values()):
            if time.monotonic() > give_up_at or left_early.wait(POLL_S):
                return survivors, False
    return survivors, True


def _stop(workspace: Workspace, transport: Transport, run_id: str, grace_s: float | None) -> tuple[str, ...]:
    try:
        stopped = remote.stop(transport, run_id, grace_s)
    except Unreachable:
        raise
    except HostError:
        return ()  # the host knows nothing of it: it was never submitted
    workspace.folder(run_id).observe(
        "cancel", asked=stopped.asked, ended=stopped.ended, survivors=stopped.survivors
    )
    return stopped.survivors
