"""How a run stands: asks its host, mirrors what is there, judges what has ended, cancels what has not.

A verdict comes from records that were checked, seal by seal, and is written down once. A run that is being
started or pulled by another command is left to it. Many runs at once are `reconciling`'s, what a person reads
is the views'.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from orchestrator import lifecycle, remote
from orchestrator.errors import HostError, OrchError, RecordsAltered, UnknownName
from orchestrator.experiment import Expectation
from orchestrator.following import Following
from orchestrator.ledger import RunRow
from orchestrator.lifecycle import State
from orchestrator.mirror import Mirror
from orchestrator.mirror_reader import checked_records
from orchestrator.observed import Observed
from orchestrator.outcome import Outcome, outcome_of
from orchestrator.remote import Standing, Stopped
from orchestrator.run_folder import Record, RunFolder
from orchestrator.starting import carry_out_cancel, refuse
from orchestrator.transports import Transport, connect
from orchestrator.verdict import Verdict, judge
from orchestrator.workspace import Workspace

GLANCE_TIMEOUT_S = 5.0
MOST_HOSTS_AT_ONCE = 16
POLL_S = 0.2
MOST_NAMED = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """How a run stands: its row, what its records say, the verdict once it has ended, and what was seen of it
    while it has not.
    """

    row: RunRow
    outcome: Outcome
    verdict: Verdict | None
    observed: Observed | None = None

    @property
    def is_host_fault(self) -> bool:
        """The run never did its work: its host lacks something, cannot be asked, or failed to prepare."""
        if self.verdict is None:
            return self.observed is not None and self.observed.unreachable is not None
        if self.verdict.is_good:
            return False
        if self.row.job.get("prepares"):
            return self.verdict.name in ("refused", "failed", "killed")
        return self.verdict.name == "refused" or self.outcome.missing_module is not None

    @property
    def exit_code(self) -> int:
        """0 for a good verdict, 5 for altered records, 3 where its host is at fault, else 1."""
        if self.verdict is not None and self.verdict.is_good:
            return 0
        if self.verdict is not None and self.verdict.name == "altered":
            return RecordsAltered.exit_code
        return HostError.exit_code if self.is_host_fault else OrchError.exit_code


def follow(workspace: Workspace, run_id: str, changed: threading.Event | None = None) -> Following:
    """Opens the follow of a run that was launched before, once its start is over.

    Of a run that is settled no host is asked. ``changed`` is set when something arrives.
    """
    workspace.folder(run_id).wait_for_start()
    row = workspace.ledger.get(run_id)
    host = None if is_settled(row) else workspace.inventory.host(row.host)
    return Following(workspace.folder(run_id), host, changed=changed)


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
        known = standing(transport, workspace, [run_id])[run_id]
        is_whole = catch_up(transport, folder) if known.has_started else True
    workspace.ledger.note_reachable(row.host)
    settled = settle(workspace, run_id, known, is_whole=is_whole)
    return replace(settled, observed=observe(workspace, run_id, known))


def conclude(workspace: Workspace, run_id: str, known: Standing | None = None) -> Report:
    """Judges a run that has ended by its mirrored records, and writes the verdict down once.

    ``known``: what its host said, which tells why a run is lost.
    """
    found = report(workspace, run_id, is_over=True)
    verdict, outcome = found.verdict, found.outcome
    if verdict is None or is_settled(found.row):
        return found
    if known is not None:
        verdict = replace(verdict, reasons=_exact_reasons(run_id, verdict, known))
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
        _note_verdict(workspace.folder(run_id), outcome, verdict)
    return Report(row=workspace.ledger.get(run_id), outcome=outcome, verdict=verdict)


def report(workspace: Workspace, run_id: str, *, is_over: bool = False) -> Report:
    """Reads how a run stands from ledger and mirror alone; ``is_over``: the host says that it has ended."""
    row = workspace.ledger.get(run_id)
    try:
        outcome = outcome_of(checked_records(workspace.folder(run_id)))
    except RecordsAltered as finding:
        verdict = Verdict(name="altered", is_good=False, reasons=(str(finding),))
        return Report(row=row, outcome=Outcome(), verdict=verdict)
    if not (is_over or lifecycle.is_terminal(row.state)):
        return Report(row=row, outcome=outcome, verdict=None)
    if outcome.end is None and is_settled(row):
        return Report(row=row, outcome=outcome, verdict=_verdict_of_row(workspace, row))
    return Report(row=row, outcome=outcome, verdict=judge(outcome, Expectation.from_json(row.job["expect"])))


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
    groups = workspace.ledger.find_groups(text) if text else []
    if groups:
        members = ", ".join(row.run_id for row in workspace.ledger.group(groups[0])[:MOST_NAMED])
        raise UnknownName(f"{text!r} is the group {groups[0]}; this needs one of its runs: {members}, …")
    raise UnknownName(f"no run {text!r} in {workspace.home}; `orch ps` lists them")


def resolve_group(workspace: Workspace, text: str) -> list[RunRow] | None:
    """Returns the runs of the group that ``text`` means: its id, or the beginning of exactly one.

    None where it means no group; a run that was started by itself counts as no group.

    Raises:
        UnknownName: it is the beginning of several groups, or of a group and of a run.
    """
    found = workspace.ledger.find_groups(text) if text and text != "last" else []
    if text in found:
        return workspace.ledger.group(text)
    run_ids = workspace.ledger.find(text) if found else []
    if not found or text in run_ids:
        return None
    if len(found) == 1 and not run_ids:
        return workspace.ledger.group(found[0])
    groups, members = ", ".join(found), ", ".join(run_ids)
    also = f", and of the runs {members}" if members else ""
    raise UnknownName(f"{text!r} is the beginning of the groups {groups}{also}: write more of it")


def is_settled(row: RunRow) -> bool:
    """Nothing that a host says can change the row; a lost run may still be found."""
    return lifecycle.is_settled(row.state)


def standing(transport: Transport, workspace: Workspace, run_ids: Sequence[str]) -> dict[str, Standing]:
    """Asks the host; a cancel that whoever started the run did not live to carry out is carried out now."""
    known = remote.status(transport, run_ids)
    for run_id, found in known.items():
        if found.is_alive:
            carry_out_cancel(transport, workspace.folder(run_id))
    return known


def catch_up(transport: Transport, folder: RunFolder) -> bool:
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


def settle(workspace: Workspace, run_id: str, known: Standing, *, is_whole: bool) -> Report:
    """Writes down what a host said of a run; ``is_whole``: all that it had of a run that ended is here."""
    if known.is_alive:
        mark = workspace.ledger.mark_queued if known.is_waiting else workspace.ledger.mark_running
        mark(run_id)
        return report(workspace, run_id)
    row = workspace.ledger.get(run_id)
    if not known.has_started and row.state in (State.CREATED, State.STARTING):
        what = "broke off before its first record" if known.exists else "never arrived at the host"
        refuse(workspace, run_id, row.reason or f"its start {what}")
        return report(workspace, run_id)
    if not is_whole:
        return report(workspace, run_id)
    return conclude(workspace, run_id, known)


def note_begin(workspace: Workspace, run_id: str, record: Record) -> None:
    """Writes down that a run that waited has begun, once that is seen: its host may not be there to be asked
    later.
    """
    if record.get("kind") == "spawn" and workspace.ledger.get(run_id).state is State.QUEUED:
        workspace.ledger.mark_running(run_id)


def observe(workspace: Workspace, run_id: str, known: Standing) -> Observed | None:
    """Returns what was seen of a run that lives, None of one that does not."""
    if not known.is_alive:
        return None
    ahead = workspace.ledger.ahead_of(run_id) if known.is_waiting else None
    return Observed(
        silent_s=known.silent_s,
        is_stopped=known.is_stopped,
        ahead=ahead,
        obstacles=known.obstacles,
        cards=known.cards,
    )


def _verdict_of_row(workspace: Workspace, row: RunRow) -> Verdict:
    """Returns what the ledger holds of a run that has no records here: good only if they were let go."""
    name, reason = row.verdict or "lost", row.reason or "no reason"
    if workspace.folder(row.run_id).was_removed:
        is_good = name in Expectation.from_json(row.job["expect"]).verdicts
        gone = "its records were removed here by `orch gc`; the verdict was written down before"
        return Verdict(name=name, is_good=is_good, reasons=(gone, *filter(None, [row.reason])))
    if row.state is State.REFUSED:  # it never came as far as a record
        return Verdict(name="refused", is_good=False, reasons=(reason,))
    gone = f"its records are gone from this machine; what the ledger holds: {reason}"
    return Verdict(name=name, is_good=False, reasons=(gone,))


def _exact_reasons(run_id: str, verdict: Verdict, known: Standing) -> tuple[str, ...]:
    """Puts why a run is lost in the place of that its records hold no end."""
    reasons = verdict.reasons
    if verdict.name == "lost":
        if not known.exists:
            why = "its folder is gone from the host"
        elif known.was_rebooted:
            why = "its host rebooted while it ran: its boot, or its process 1, is another one"
        else:
            why = "its supervisor is gone and wrote no end: it was killed, or crashed"
        reasons = (why, *reasons)
    if known.orphans:
        left = f"{len(known.orphans)} of its processes still run: orch cancel {run_id}"
        reasons = (*reasons, left, *known.orphans[:3])
    return reasons


def _note_verdict(folder: RunFolder, outcome: Outcome, verdict: Verdict) -> None:
    """Notes all that the ledger's row gets, so that a row can be made from it again."""
    folder.observe(
        "verdict",
        state=str(outcome.state),
        verdict=verdict.name,
        reasons=list(verdict.reasons),
        exit_code=outcome.exit_code,
        signal=outcome.signal,
        pid=outcome.pid,
        started_t=outcome.started_t,
        ended_t=outcome.ended_t,
    )
