"""``orch show``, ``wait`` and ``cancel``: short questions and answers."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import click

from orchestrator import cancelling, reconciling, runs, views
from orchestrator.artifact_folder import fetched_here
from orchestrator.cli.estimates import beside_measured
from orchestrator.cli.group import cancel_group, show_group, wait_group
from orchestrator.cli.leaving import Left, leaving, say_goodbye
from orchestrator.cli.options import inventory_option, json_option, open_workspace, run_argument
from orchestrator.cli.run import RunWatcher, finish
from orchestrator.cli.terminal import Screen
from orchestrator.cli.terminal import show as show_table
from orchestrator.errors import HostError, RecordsAltered, StorageError, UsageError
from orchestrator.fields import parse_grace
from orchestrator.job import program_of
from orchestrator.lifecycle import State
from orchestrator.workspace import Workspace


@click.command()
@run_argument
@inventory_option
@json_option
def show(run: str, inventory: Path | None, as_json: bool) -> int:
    """Show what is known of RUN: code, host, process, devices, allocator, metrics, verdict.

    Of a group its runs are shown as one table.
    """
    with open_workspace(inventory) as workspace:
        if (rows := runs.resolve_group(workspace, run)) is not None:
            return show_group(workspace, rows, as_json=as_json)
        run_id = runs.resolve(workspace, run)
        try:
            report = runs.refresh(workspace, run_id)
        except (HostError, StorageError) as error:
            Screen().note(f"{error}; showing what is known here")
            report = runs.report(workspace, run_id)
            if isinstance(error, HostError):
                seen = reconciling.unreachable(workspace, report.row.host, str(error))
                report = replace(report, observed=seen)
        shown = (report.row, report.outcome, report.verdict, report.observed)
        artifacts = fetched_here(workspace.folder(run_id))
        beside = beside_measured(workspace, report)
        if as_json:
            prediction = None if beside is None else beside.as_json()
            print(
                json.dumps(views.summary_json(*shown, artifacts=artifacts, prediction=prediction), indent=2)
            )
        else:
            estimate = "" if beside is None else beside.line
            show_table(views.summary(*shown, now_t=time.time(), artifacts=artifacts, estimate=estimate))
            if beside is not None:
                beside.show()
        is_altered = report.verdict is not None and report.verdict.name == "altered"
        return RecordsAltered.exit_code if is_altered else 0


@click.command()
@run_argument
@inventory_option
@json_option
def wait(run: str, inventory: Path | None, as_json: bool) -> int:
    """Wait until RUN (or a group) has ended, print its summary and exit as `orch run` would have."""
    with open_workspace(inventory) as workspace:
        if (rows := runs.resolve_group(workspace, run)) is not None:
            return wait_group(workspace, rows, as_json=as_json)
        run_id = runs.resolve(workspace, run)
        try:
            with leaving():
                _follow_to_the_end(workspace, run_id)
                return finish(workspace, run_id, as_json=as_json)
        except Left as left:
            return say_goodbye(left, run_id)


def _grace_s(_ctx: click.Context, _param: click.Parameter, value: str | None) -> float | None:
    try:
        return None if value is None else parse_grace(value)
    except UsageError as error:
        raise click.BadParameter(str(error)) from None


@click.command()
@run_argument
@click.option(
    "--grace",
    "grace_s",
    callback=_grace_s,
    metavar="TIME",
    help="From SIGTERM to SIGKILL; default: the run's own.",
)
@inventory_option
@json_option
def cancel(run: str, grace_s: float | None, inventory: Path | None, as_json: bool) -> int:
    """End RUN (or every run of a group) and everything it started; returns when all of it is gone.

    Exit code 0 when it is: also for a run that had ended before.
    """
    with open_workspace(inventory) as workspace:
        if (rows := runs.resolve_group(workspace, run)) is not None:
            return cancel_group(workspace, rows, grace_s=grace_s, as_json=as_json)
        run_id = runs.resolve(workspace, run)
        screen = Screen()
        stopped = runs.cancel(workspace, run_id, grace_s=grace_s)
        _tell_of_preparations(workspace, run_id, screen)
        for process in stopped.ended:
            screen.note(f"ended, though its supervisor was gone: {process}")
        if not stopped.asked and not stopped.ended:
            screen.note(f"nothing of run {run_id} was alive")
        try:
            with leaving():
                patience_s = cancelling.patience_s([workspace.ledger.get(run_id)], grace_s)
                has_ended = runs.wait_until_ended(workspace, run_id, patience_s)
                report = runs.refresh(workspace, run_id)
        except Left as left:
            return say_goodbye(left, run_id, done="it is being cancelled over there:")
        if report.verdict is not None:
            finish(workspace, run_id, as_json=as_json)
        elif has_ended:
            screen.note(f"run {run_id} has ended; another orch process is mirroring it, and judges it")
        else:
            screen.note(f"run {run_id} has not ended yet; see: orch show {run_id}")
        survivors = (*stopped.survivors, *report.outcome.survivors)
        for process in survivors:
            screen.note(f"could not be ended: {process}")
        return 0 if has_ended and not survivors else 1


def _tell_of_preparations(workspace: Workspace, run_id: str, screen: Screen) -> None:
    """Says which runs still prepare something for one that is cancelled: others may wait for them too."""
    for row in workspace.ledger.group(run_id):
        is_open = row.run_id != run_id and row.job.get("prepares") and not runs.is_settled(row)
        if is_open and runs.refresh(workspace, row.run_id).row.state in (State.QUEUED, State.RUNNING):
            what = program_of(row.job).text
            screen.note(f"run {row.run_id} goes on to prepare {what}; `orch cancel {row.run_id}` ends it")


def _follow_to_the_end(workspace: Workspace, run_id: str) -> None:
    screen = Screen()
    watcher = RunWatcher(screen, run_id, workspace.ledger.get(run_id).host)
    try:
        with runs.follow(workspace, run_id) as following:
            for _ in following.records(watcher):
                pass
    finally:
        screen.close()
