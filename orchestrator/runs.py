"""How a run stands: asks its host, mirrors what is there, judges what has ended, cancels what has not.

A verdict comes from records that were checked, seal by seal, and is written down once. A run that is being
started or pulled by another command is left to it. What a person reads is the views'.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from orchestrator import lifecycle, remote
from orchestrator.errors import OrchError, RecordsAltered, UnknownName
from orchestrator.experiment import Expectation
from orchestrator.following import Following
from orchestrator.ledger import RunRow
from orchestrator.lifecycle import Outcome, State, Verdict
from orchestrator.mirror import Mirror
from orchestrator.mirror_reader import checked_records
from orchestrator.remote import Stopped
from orchestrator.run_folder import RunFolder
from orchestrator.starting import refuse
from orchestrator.transports import Transport, connect
from orchestrator.workspace import Workspace

GLANCE_TIMEOUT_S = 5.0
MOST_HOSTS_AT_ONCE = 16
POLL_S = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """How a run stands: its row, what its records say, and the verdict once it has ended."""

    row: RunRow
    outcome: Outcome
    verdict: Verdict | None

    @property
    def is_host_fault(self) -> bool:
        """The run never did its work, because the host lacks something."""
        if self.verdict is None or self.verdict.is_good:
            return False
        return self.verdict.name == "refused" or self.outcome.missing_module is not None


def follow(workspace: Workspace, run_id: str) -> Following:
    """Opens the follow of a run that was launched before, once its start is over.

    Of a run that is settled no host is asked.
    """
    workspace.folder(run_id).wait_for_start()
    row = workspace.ledger.get(run_id)
    host = None if is_settled(row) else workspace.inventory.host(row.host)
    return Following(workspace.folder(run_id), host)


def cancel(workspace: Workspace, run_id: str, *, grace_s: float | None = None) -> Stopped:
    """Has a run ended: by its supervisor, or process by process where the supervisor is gone.

    A run that is being started is ended as soon as its host has it.

    Raises:
        HostError: the host cannot be asked; nothing is known to have changed.
    """
    row, folder = workspace.ledger.get(run_id), workspace.folder(run_id)
    if is_settled(row):
        return Stopped(asked=False, ended=(), survivors=())
    if folder.is_starting:
        folder.request_cancel(grace_s)
        if folder.is_starting:  # whoever starts it looks for the request when that is done
            return Stopped(asked=True, ended=(), survivors=())
    with connect(workspace.inventory.host(row.host)) as transport:
        stopped = remote.stop(transport, run_id, grace_s)
    folder.observe("cancel", asked=stopped.asked, ended=stopped.ended, survivors=stopped.survivors)
    return stopped


def wait_until_ended(workspace: Workspace, run_id: str, patience_s: float) -> bool:
    """Asks a run's host until the run has ended; tells whether it has. Needs nobody to mirror it.

    Raises:
        HostError: the host cannot be asked.
    """
    give_up_at, folder = time.monotonic() + patience_s, workspace.folder(run_id)
    while folder.is_starting:
        if time.monotonic() > give_up_at:
            return False
        time.sleep(POLL_S)
    row = workspace.ledger.get(run_id)
    if is_settled(row):
        return True
    with connect(workspace.inventory.host(row.host)) as transport:
        while remote.status(transport, [run_id])[run_id].is_alive:
            if time.monotonic() > give_up_at:
                return False
            time.sleep(POLL_S)
    return True


def refresh(workspace: Workspace, run_id: str) -> Report:
    """Mirrors what a run has written so far, without waiting, and concludes it when it has ended.

    Raises:
        HostError: the host cannot be asked; what is known stays.
    """
    row, folder = workspace.ledger.get(run_id), workspace.folder(run_id)
    if is_settled(row) or folder.is_starting:
        return report(workspace, run_id)
    with connect(workspace.inventory.host(row.host), connect_timeout_s=GLANCE_TIMEOUT_S) as transport:
        known = _standing(transport, workspace, [run_id])[run_id]
        is_whole = _catch_up(transport, folder) if known.has_started else True
    return _settle(workspace, run_id, known, is_whole=is_whole)


def glance(workspace: Workspace, rows: Iterable[RunRow]) -> dict[str, str]:
    """Finds out which of ``rows`` have ended meanwhile, one connection a host, all hosts at once.

    Returns for each host that could not be asked (or is no longer in the inventory) why not.
    """
    by_host: dict[str, list[str]] = {}
    for row in rows:
        if not is_settled(row) and not workspace.folder(row.run_id).is_starting:
            by_host.setdefault(row.host, []).append(row.run_id)
    failed: dict[str, str] = {}
    with ThreadPoolExecutor(MOST_HOSTS_AT_ONCE) as pool:
        asked = {name: pool.submit(_ask, workspace, name, run_ids) for name, run_ids in by_host.items()}
        for name, answer in asked.items():
            try:
                for run_id, known, is_whole in answer.result():
                    _settle(workspace, run_id, known, is_whole=is_whole)
            except OrchError as error:
                failed[name] = str(error)
    return failed


def conclude(workspace: Workspace, run_id: str, *, orphans: Sequence[str] = ()) -> Report:
    """Judges a run that has ended by its mirrored records, and writes the verdict down once.

    ``orphans``: processes of it that still run although its supervisor is gone.
    """
    found = report(workspace, run_id, is_over=True)
    verdict, outcome = found.verdict, found.outcome
    if verdict is None or is_settled(found.row):
        return found
    if orphans:
        alive = f"its supervisor is gone and {len(orphans)} of its processes still run: orch cancel {run_id}"
        verdict = replace(verdict, reasons=(*verdict.reasons, alive, *orphans[:3]))
    reason = "; ".join(verdict.reasons) or None
    if (found.row.state, found.row.verdict, found.row.reason) != (outcome.state, verdict.name, reason):
        workspace.ledger.update(
            run_id,
            state=outcome.state,
            verdict=verdict.name,
            exit_code=outcome.exit_code,
            signal=outcome.signal,
            reason=reason,
            pid=outcome.pid,
            started_t=outcome.started_t,
            ended_t=outcome.ended_t,
        )
        workspace.folder(run_id).observe(
            "verdict", state=str(outcome.state), verdict=verdict.name, reasons=list(verdict.reasons)
        )
    return Report(row=workspace.ledger.get(run_id), outcome=outcome, verdict=verdict)


def report(workspace: Workspace, run_id: str, *, is_over: bool = False) -> Report:
    """Reads how a run stands from ledger and mirror alone; ``is_over``: the host says that it has ended."""
    row = workspace.ledger.get(run_id)
    try:
        outcome = lifecycle.outcome_of(checked_records(workspace.folder(run_id)))
    except RecordsAltered as finding:
        verdict = Verdict(name="altered", is_good=False, reasons=(str(finding),))
        return Report(row=row, outcome=Outcome(), verdict=verdict)
    if not (is_over or lifecycle.is_terminal(row.state)):
        return Report(row=row, outcome=outcome, verdict=None)
    if outcome.end is None and is_settled(row) and row.started_t is not None:
        gone = f"its records are gone from this machine; what the ledger holds: {row.reason or 'no reason'}"
        verdict = Verdict(name=row.verdict or "lost", is_good=False, reasons=(gone,))
        return Report(row=row, outcome=outcome, verdict=verdict)
    if outcome.end is None and row.state is State.REFUSED:  # it never came as far as a record
        verdict = Verdict(name="refused", is_good=False, reasons=(row.reason or "",))
        return Report(row=row, outcome=outcome, verdict=verdict)
    return Report(
        row=row, outcome=outcome, verdict=lifecycle.judge(outcome, Expectation.from_json(row.job["expect"]))
    )


def resolve(workspace: Workspace, text: str) -> str:
    """Returns the run id that ``text`` means: ``last``, an id, or the beginning of exactly one.

    Raises:
        UnknownName: it means none, or several.
    """
    if text == "last":
        row = workspace.ledger.last()
        if row is None:
            raise UnknownName(f"there is no last run: {workspace.home} holds none yet")
        return row.run_id
    found = workspace.ledger.find(text) if text else []
    if text in found:
        return text
    if len(found) == 1:
        return found[0]
    if found:
        raise UnknownName(f"{text!r} is the beginning of several runs: {', '.join(found)}")
    raise UnknownName(f"no run {text!r} in {workspace.home}; `orch ps` lists them")


def is_settled(row: RunRow) -> bool:
    """Nothing that a host says can change the row; a lost run may still be found."""
    return lifecycle.is_terminal(row.state) and row.state is not State.LOST


def _ask(workspace: Workspace, host: str, run_ids: Sequence[str]) -> list[tuple[str, remote.Standing, bool]]:
    """Runs in a thread of its own and touches no ledger; only runs that have ended are mirrored."""
    with connect(workspace.inventory.host(host), connect_timeout_s=GLANCE_TIMEOUT_S) as transport:
        answers = []
        for run_id, known in _standing(transport, workspace, run_ids).items():
            is_over = known.has_started and not known.is_alive
            is_whole = not is_over or _catch_up(transport, workspace.folder(run_id))
            answers.append((run_id, known, is_whole))
        return answers


def _standing(
    transport: Transport, workspace: Workspace, run_ids: Sequence[str]
) -> dict[str, remote.Standing]:
    """Asks the host; a cancel that whoever started the run did not live to carry out is carried out now."""
    known = remote.status(transport, run_ids)
    for run_id, standing in known.items():
        request = workspace.folder(run_id).take_cancel_request() if standing.is_alive else None
        if request is not None:
            remote.stop(transport, run_id, request["grace_s"])
    return known


def _catch_up(transport: Transport, folder: RunFolder) -> bool:
    """Mirrors what is there now; tells whether it could: another process may be at it."""
    try:
        mirror = Mirror.acquire(folder, transport.host.name)
        if mirror is None:
            return False
        with mirror, remote.read(transport, folder.run_id, mirror.cursor, follow=False) as talk:
            for piece in talk.pieces():
                if piece is not None:
                    mirror.append(piece)
            mirror.compare_end(*talk.host_end)
    except RecordsAltered:
        return True  # the finding is noted; `report` sees what is wrong here, `conclude` writes it down
    return True


def _settle(workspace: Workspace, run_id: str, known: remote.Standing, *, is_whole: bool) -> Report:
    if known.is_alive:
        workspace.ledger.mark_running(run_id)
        return report(workspace, run_id)
    row = workspace.ledger.get(run_id)
    if not known.exists and row.state in (State.CREATED, State.STARTING):
        refuse(workspace, run_id, row.reason or "its start never arrived at the host")
        return report(workspace, run_id)
    if not is_whole:
        return report(workspace, run_id)
    return conclude(workspace, run_id, orphans=known.orphans)
