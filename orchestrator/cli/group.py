"""Groups: ``orch run`` of a matrix or on several hosts, and ``wait``, ``show`` and ``cancel`` of a group."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

from orchestrator import reconciling, runs, submitting
from orchestrator.cancelling import cancel_all
from orchestrator.cli.collecting import collect_artifacts
from orchestrator.cli.estimates import beside_measured, estimating
from orchestrator.cli.leaving import Left, leaving, say_goodbye
from orchestrator.cli.plans import bundle_line, group_plan_json, group_text
from orchestrator.cli.terminal import Screen
from orchestrator.cli.terminal import show as show_table
from orchestrator.errors import HostError, RecordsAltered
from orchestrator.experiment import Experiment
from orchestrator.group_following import Event, GroupFollowing
from orchestrator.group_view import (
    case_of,
    group_exit_code,
    group_json,
    group_notes,
    group_table,
    group_tally,
)
from orchestrator.inventory import Host
from orchestrator.job import setup_text
from orchestrator.ledger import RunRow
from orchestrator.lifecycle import State
from orchestrator.log_lines import LineAssembler, LogLine
from orchestrator.log_view import render, waiting_note
from orchestrator.runs import Report
from orchestrator.starting import Plan
from orchestrator.text import counted, printable
from orchestrator.workspace import Workspace

MOST_EXPLAINED, MOST_LOOKED_AT = 5, 20


def run_group(
    workspace: Workspace,
    experiment: Experiment,
    hosts: Sequence[Host],
    *,
    detach: bool,
    dry_run: bool,
    as_json: bool,
    has_estimate: bool,
) -> int:
    """Runs every case on every host; returns the exit code."""
    plans = submitting.prepare_group(workspace, experiment, hosts)
    if dry_run:
        print(json.dumps(group_plan_json(plans), indent=2) if as_json else group_text(plans))
        return 0
    group_id, screen = plans[0].job["group_id"], Screen(lines_to_stderr=as_json)
    named = ", ".join(host.name for host in hosts)
    screen.note(
        f"group {group_id} of {experiment.name}, {len(plans)} runs on {named}, {bundle_line(plans[0].bundle)}"
    )
    try:
        with (
            leaving(),
            estimating(
                workspace, plans, screen, is_wanted=has_estimate, file=experiment.path
            ) as tell_estimates,
        ):
            are_submitted = _submit(workspace, submitting.with_preparations(workspace, plans), screen)
            tell_estimates(lambda: False)
    except Left as left:
        screen.close()
        text = f"left while group {group_id} was being submitted; what was not will never run"
        screen.note(f"{text}; see: orch show {group_id}")
        return left.exit_code
    if detach:
        run_ids = [plan.job["run_id"] for plan in plans]
        named_ids = json.dumps({"group_id": group_id, "run_ids": run_ids})
        print(named_ids if as_json else "\n".join((group_id, *run_ids)))
        return 0 if are_submitted else HostError.exit_code
    try:
        with leaving():
            return _follow_to_the_end(workspace, group_id, screen, as_json=as_json)
    except Left as left:
        screen.close()
        return say_goodbye(
            left, group_id, lambda: _cancel(workspace, group_id, screen), what="group", come_back="orch wait"
        )


def wait_group(workspace: Workspace, rows: Sequence[RunRow], *, as_json: bool) -> int:
    """Waits until every run of a group has ended, shows the table and returns the exit code."""
    group_id, screen = rows[0].group_id, Screen(lines_to_stderr=as_json)
    try:
        with leaving():
            reconciling.glance(workspace, rows)  # what has ended, or never arrived, needs no follow
            return _follow_to_the_end(workspace, group_id, screen, as_json=as_json, shows_lines=False)
    except Left as left:
        screen.close()
        return say_goodbye(left, group_id, what="group", come_back="orch wait")


def show_group(workspace: Workspace, rows: Sequence[RunRow], *, as_json: bool) -> int:
    """Shows how each run of a group stands; returns 0, or 5 when one's records were altered, as for a run."""
    group_id = rows[0].group_id
    reports = _reports(workspace, group_id, Screen())
    _print(workspace, group_id, reports, as_json=as_json)
    altered = RecordsAltered.exit_code
    return altered if group_exit_code(reports) == altered else 0


def cancel_group(
    workspace: Workspace, rows: Sequence[RunRow], *, grace_s: float | None, as_json: bool
) -> int:
    """Ends every run of a group; returns 0 when all of it is gone, 3 when a host could not be asked."""
    group_id, screen = rows[0].group_id, Screen(lines_to_stderr=as_json)
    try:
        with leaving():
            code = _cancel(workspace, group_id, screen, grace_s=grace_s)
            _print(workspace, group_id, _reports(workspace, group_id, screen), as_json=as_json)
    except Left as left:
        done = "it is being cancelled over there:"
        return say_goodbye(left, group_id, done=done, what="group", come_back="orch wait")
    return code


class _GroupScreen:
    """Shows what happens to the runs of a group, each line with its source."""

    def __init__(self, screen: Screen, rows: Sequence[RunRow], *, shows_lines: bool) -> None:
        self._screen = screen
        self._rows = {row.run_id: row for row in rows}
        self._numbers = {row.run_id: number for number, row in enumerate(rows)}
        self._shows_lines = shows_lines
        self._lines: dict[str, LineAssembler] = {}
        self._since = time.monotonic()
        self._ended = 0

    def waiting(self) -> None:
        """Keeps the status line and the pipe's reader up to date."""
        self._screen.flush()
        seconds = int(time.monotonic() - self._since)
        ended = f"{self._ended} of {len(self._rows)} have ended"
        self._screen.status(f"{ended} · {seconds // 60}:{seconds % 60:02}")

    def event(self, event: Event) -> None:
        """Shows a record's lines, the begin of a case, and what became of a connection."""
        row = self._rows[event.run_id]
        if event.note is not None:
            self._screen.note(event.note)
        if event.record is not None:
            note = waiting_note(event.record, row.run_id)
            if note is not None and event.record.get("kind") not in ("queued", "turn"):
                self._screen.note(note)
            if event.record.get("kind") == "spawn":
                self._screen.note(f"{case_of(row)} begins on {row.host}, run {row.run_id}")
            if self._shows_lines:
                self._show(row, event)
        if event.is_end:
            self._flush(row)
            self._ended += 1
            if event.error is not None:
                self._screen.note(f"{case_of(row)}, run {row.run_id}: {event.error}")

    def ended(self, report: Report) -> None:
        """Says what became of a case."""
        verdict = "has no verdict yet" if report.verdict is None else f"ends: {report.verdict.name}"
        self._screen.note(f"{case_of(report.row)} on {report.row.host} {verdict}, run {report.row.run_id}")

    def _show(self, row: RunRow, event: Event) -> None:
        lines = self._lines.get(row.run_id)
        if lines is None:
            lines = self._lines[row.run_id] = LineAssembler(host=row.host, run_id=row.run_id)
        assert event.record is not None
        self._write(row, lines.feed(event.record))

    def _flush(self, row: RunRow) -> None:
        lines = self._lines.pop(row.run_id, None)
        if lines is not None:
            self._write(row, lines.flush())
        self._screen.flush()

    def _write(self, row: RunRow, lines: Iterable[LogLine]) -> None:
        """Each run has its colour, and its lines say whose they are."""
        screen, run = self._screen, self._numbers[row.run_id]
        for line in lines:
            screen.line(render(line, colour=screen.colour, columns=screen.columns, run=run))


def _submit(workspace: Workspace, plans: Sequence[Plan], screen: Screen) -> bool:
    """Tells whether every run is at its host."""
    failed: dict[str, str] = {}
    sent_files = submitted = 0
    for plan in plans:
        if (made := plan.job.get("prepares")) is not None:
            screen.note(f"run {plan.job['run_id']} prepares {setup_text(made)} on {plan.host.name} first")
    for submission in submitting.submit(workspace, plans):
        sent_files += submission.sent_files
        reason = submission.refusal or submission.doubt
        submitted += reason is None
        host = submission.plan.host.name
        if reason is not None and failed.get(host) != reason:
            failed[host] = reason
            screen.note(reason)
        screen.status(f"{submitted} of {len(plans)} submitted")
    screen.close()
    sent = f"sent {counted(sent_files, 'file')}" if sent_files else "no file sent"
    rest = f", {sent}; they need nobody here any more" if submitted else ""
    screen.note(f"{submitted} of {len(plans)} runs submitted{rest}")
    return submitted == len(plans)


def _follow_to_the_end(
    workspace: Workspace, group_id: str, screen: Screen, *, as_json: bool, shows_lines: bool = True
) -> int:
    rows = workspace.ledger.group(group_id)
    view = _GroupScreen(screen, rows, shows_lines=shows_lines)
    still_open = [row for row in rows if not runs.is_settled(row)]
    try:
        with GroupFollowing(workspace, still_open) as following:
            for event in following.events():
                if event is None:
                    view.waiting()
                    continue
                view.event(event)
                if event.record is not None:
                    runs.note_begin(workspace, event.run_id, event.record)
                if event.is_end and event.error is None:
                    view.ended(runs.conclude(workspace, event.run_id))
    finally:
        screen.close()
    reports = _reports(workspace, group_id, screen)
    for report in reports:
        if runs.is_settled(report.row):
            collect_artifacts(workspace, report.row.run_id, screen)
    _print(workspace, group_id, reports, as_json=as_json)
    _explain(workspace, reports, screen)
    return group_exit_code(reports)


def _explain(workspace: Workspace, reports: Sequence[Report], screen: Screen) -> None:
    """Says in a line each why runs were out of memory, of the first few that were."""
    ended = [report for report in reports if report.row.state in (State.FAILED, State.KILLED)]
    if not ended:
        return
    from orchestrator.cli.explaining import explain_shortly  # noqa: PLC0415  (good runs do not pay for it)

    explained = 0
    for report in ended[:MOST_LOOKED_AT]:
        explained += explain_shortly(workspace, report, screen, most_lines=2)
        if explained == MOST_EXPLAINED:
            return


def _reports(workspace: Workspace, group_id: str, screen: Screen) -> list[Report]:
    """Brings a group up to date and returns how its runs stand, host by host in the order of the queue."""
    looked = reconciling.glance(workspace, workspace.ledger.group(group_id))
    for host, message in looked.failed.items():
        screen.note(f"{host}: {message}; what is shown of {host} may be old")
    rows = workspace.ledger.group(group_id)
    reports = [runs.report(workspace, row.run_id) for row in rows]
    return [replace(report, observed=looked.seen.get(report.row.run_id)) for report in reports]


def _print(workspace: Workspace, group_id: str, reports: Sequence[Report], *, as_json: bool) -> None:
    besides = {report.row.run_id: beside_measured(workspace, report) for report in reports}
    predicted = {run_id: beside for run_id, beside in besides.items() if beside is not None}
    if as_json:
        predictions = {run_id: beside.as_json() for run_id, beside in predicted.items()}
        print(json.dumps(group_json(group_id, reports, predictions), indent=2))
        return
    show_table(group_table(reports, now_t=time.time()))
    for report in reports:
        if (beside := predicted.get(report.row.run_id)) is not None:
            print(printable(f"estimate of {case_of(report.row)} on {report.row.host}: {beside.line}"))
    for note in group_notes(reports):
        print(note)
    print(f"group {group_id}: {group_tally(reports)}")


def _cancel(workspace: Workspace, group_id: str, screen: Screen, *, grace_s: float | None = None) -> int:
    """Returns 0 when all of the group is gone, 3 when a host could not be asked, 1 when some of it lives."""
    found = cancel_all(workspace, workspace.ledger.group(group_id), grace_s=grace_s)
    for host, message in found.failed.items():
        screen.note(f"{host}: {message}; nothing is known to have changed there")
    for process in found.survivors:
        screen.note(f"could not be ended: {process}")
    if found.failed:
        return HostError.exit_code
    return 0 if found.have_all_ended and not found.survivors else 1
