"""Brings many runs up to date at once: one connection a host, all hosts side by side, bounded time for each.

What a host says goes into the ledger; that it said nothing goes into none but the note since when. Each host
is asked in a thread of its own, which touches no ledger.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from contextlib import contextmanager
from dataclasses import dataclass

from orchestrator.errors import OrchError, StorageError, Unreachable
from orchestrator.ledger import RunRow
from orchestrator.observed import Observed
from orchestrator.remote import Standing
from orchestrator.runs import (
    GLANCE_TIMEOUT_S,
    MOST_HOSTS_AT_ONCE,
    catch_up,
    is_settled,
    observe,
    settle,
    standing,
)
from orchestrator.transports import Transport, connect
from orchestrator.workspace import Workspace

HOST_PATIENCE_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Glance:
    """What one look showed: of each open run that was asked about what was seen, of hosts why they could not
    be asked, and how many of their runs ended and are not mirrored because the time was over.
    """

    seen: Mapping[str, Observed]
    failed: Mapping[str, str]
    unfinished: Mapping[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A run that is not what it was before it was looked at."""

    before: RunRow
    after: RunRow


@dataclass(frozen=True, kw_only=True, slots=True)
class Reconciled:
    """What a reconcile found: how many open runs there were, what changed, what could not be asked.

    ``waiting_for`` counts the runs of each host that could not be asked.
    """

    asked: int
    changes: tuple[Change, ...]
    failed: Mapping[str, str]
    unfinished: Mapping[str, int]
    waiting_for: Mapping[str, int]


def glance(workspace: Workspace, rows: Iterable[RunRow], *, patience_s: float = HOST_PATIENCE_S) -> Glance:
    """Finds out how those of ``rows`` stand that may not have ended, and concludes those that have.

    A host that does not answer within ``patience_s`` counts as one that could not be asked; runs that ended
    and are not mirrored by then stay as they are.
    """
    by_host: dict[str, list[str]] = {}
    for row in rows:
        if not is_settled(row) and not workspace.folder(row.run_id).is_starting:
            by_host.setdefault(row.host, []).append(row.run_id)
    seen: dict[str, Observed] = {}
    failed: dict[str, str] = {}
    visits = {name: _Visit(workspace, name, run_ids) for name, run_ids in by_host.items()}
    with ThreadPoolExecutor(MOST_HOSTS_AT_ONCE) as pool, _ended_on_leaving(visits.values()):
        answers = {name: pool.submit(visit.ask, patience_s) for name, visit in visits.items()}
        for name, answer in answers.items():
            try:
                _wait(answer, visits[name], patience_s)
                workspace.ledger.note_reachable(name)
            except OrchError as error:
                failed[name] = str(error).removeprefix(f"{name}: ")
                if not isinstance(error, StorageError):  # that is this machine's fault, not the host's
                    seen.update(_unreachable(workspace, name, by_host[name], failed[name]))
            for run_id, known, is_whole in visits[name].answers:
                settled = settle(workspace, run_id, known, is_whole=is_whole)
                if (observed := observe(workspace, run_id, known)) is not None:
                    seen[run_id] = observed
                elif is_settled(settled.row):
                    seen.pop(run_id, None)  # the host told of it before it was gone
    unfinished = {name: visit.late for name, visit in visits.items() if visit.late}
    return Glance(seen=seen, failed=failed, unfinished=unfinished)


def reconcile(workspace: Workspace, host: str | None = None) -> Reconciled:
    """Asks every host (or one) about every run whose end is not known here."""
    before = workspace.ledger.open_runs(host)
    looked = glance(workspace, before)
    pairs = [Change(before=row, after=workspace.ledger.get(row.run_id)) for row in before]
    changes = tuple(pair for pair in pairs if pair.before.state is not pair.after.state)
    waiting_for: dict[str, int] = {}
    for row in before:
        if row.host in looked.failed:
            waiting_for[row.host] = waiting_for.get(row.host, 0) + 1
    return Reconciled(
        asked=len(before),
        changes=changes,
        failed=looked.failed,
        unfinished=looked.unfinished,
        waiting_for=waiting_for,
    )


def unreachable(workspace: Workspace, host: str, reason: str) -> Observed:
    """Returns the observation that a host could not be asked, and notes since when."""
    since_t = workspace.ledger.note_unreachable(host)
    what, _, _ = reason.removeprefix(f"{host}: ").partition(". Next: ")
    return Observed(unreachable=what, since_t=since_t)


def _unreachable(workspace: Workspace, host: str, run_ids: Sequence[str], reason: str) -> dict[str, Observed]:
    return dict.fromkeys(run_ids, unreachable(workspace, host, reason))


@contextmanager
def _ended_on_leaving(visits: Iterable[_Visit]) -> Iterator[None]:
    """Who leaves early waits for no host: their pool waits for its threads."""
    try:
        yield
    except BaseException:
        for visit in visits:
            visit.abandon(0.0)
        raise


def _wait(answer: Future[None], visit: _Visit, patience_s: float) -> None:
    """Ends a visit that takes too long by closing its connection under it."""
    try:
        answer.result(patience_s + GLANCE_TIMEOUT_S)
    except NotYet:
        visit.abandon(patience_s)
        answer.result()


class _Visit:
    """One host asked about some runs; ``answers`` grows as it tells."""

    def __init__(self, workspace: Workspace, host: str, run_ids: Sequence[str]) -> None:
        self._workspace = workspace
        self._host = host
        self._run_ids = run_ids
        self._lock = threading.Lock()
        self._transport: Transport | None = None
        self._why_left = ""
        self.answers: list[tuple[str, Standing, bool]] = []
        self.late = 0

    def ask(self, patience_s: float) -> None:
        """Asks how the runs stand and mirrors those that have ended, until the time is over."""
        give_up_at = time.monotonic() + patience_s
        host = self._workspace.inventory.host(self._host)
        try:
            with connect(host, connect_timeout_s=GLANCE_TIMEOUT_S) as transport:
                with self._lock:
                    self._transport = transport
                    is_late = bool(self._why_left)
                if not is_late:
                    self._ask(transport, give_up_at)
        except OrchError:
            if not self._why_left:
                raise
        if self._why_left:
            raise Unreachable(self._why_left, host=self._host)

    def abandon(self, patience_s: float) -> None:
        """Closes the connection: whatever waits for it ends with an error."""
        with self._lock:
            self._why_left = f"it did not answer within {patience_s:.0f} s"
            if self._transport is not None:
                self._transport.close()

    def _ask(self, transport: Transport, give_up_at: float) -> None:
        for run_id, known in standing(transport, self._workspace, self._run_ids).items():
            is_over = known.has_started and not known.is_alive
            is_late = is_over and time.monotonic() > give_up_at
            is_whole = not is_over or (not is_late and catch_up(transport, self._workspace.folder(run_id)))
            self.late += is_late
            self.answers.append((run_id, known, is_whole))
