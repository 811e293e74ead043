"""``orch ps``, ``show``, ``wait``, ``cancel`` and ``hosts``: short questions and answers."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import click

from orchestrator import runs, views
from orchestrator.cli.leaving import Left, leaving, say_goodbye
from orchestrator.cli.options import inventory_option, json_option, open_workspace, run_argument
from orchestrator.cli.run import RunWatcher, finish
from orchestrator.cli.terminal import Screen
from orchestrator.cli.terminal import show as show_table
from orchestrator.errors import HostError, RecordsAltered, StorageError
from orchestrator.workspace import Workspace

SHOWN_RUNS = 30
MOST_SHOWN = 100_000
MOST_GRACE_S = 7 * 86400
GRACE_S = 10.0
ENDING_S = 20.0


@click.command()
@click.option("--host", "host_name", metavar="NAME", help="Only this host's runs.")
@click.option(
    "-n", "count", type=click.IntRange(1, MOST_SHOWN), default=SHOWN_RUNS, show_default=True, help="How many."
)
@inventory_option
@json_option
def ps(host_name: str | None, count: int, inventory: Path | None, as_json: bool) -> int:
    """List runs, the newest first; those that have not ended are brought up to date first."""
    with open_workspace(inventory) as workspace:
        name = workspace.inventory.host(host_name).name if host_name else None
        screen = Screen()
        for host, message in runs.glance(workspace, workspace.ledger.recent(count, name)).items():
            screen.note(f"{message}; what is shown of {host} may be old")
        rows = workspace.ledger.recent(count, name)
        if as_json:
            print(json.dumps([views.run_json(row) for row in rows], indent=2))
        else:
            show_table(views.runs_table(rows, now_t=time.time()))
        return 0


@click.command()
@run_argument
@inventory_option
@json_option
def show(run: str, inventory: Path | None, as_json: bool) -> int:
    """Show what is known of RUN: code, host, process, devices, allocator, metrics, verdict."""
    with open_workspace(inventory) as workspace:
        run_id = runs.resolve(workspace, run)
        try:
            report = runs.refresh(workspace, run_id)
        except (HostError, StorageError) as error:
            Screen().note(f"{error}; showing what is known here")
            report = runs.report(workspace, run_id)
        if as_json:
            print(json.dumps(views.summary_json(report.row, report.outcome, report.verdict), indent=2))
        else:
            show_table(views.summary(report.row, report.outcome, report.verdict))
        is_altered = report.verdict is not None and report.verdict.name == "altered"
        return RecordsAltered.exit_code if is_altered else 0


@click.command()
@run_argument
@inventory_option
@json_option
def wait(run: str, inventory: Path | None, as_json: bool) -> int:
    """Wait until RUN has ended, print its summary and exit as `orch run` would have."""
    with open_workspace(inventory) as workspace:
        run_id = runs.resolve(workspace, run)
        try:
            with leaving():
                _follow_to_the_end(workspace, run_id)
                return finish(workspace, run_id, as_json=as_json)
        except Left as left:
            return say_goodbye(left, run_id)


def _finite(_ctx: click.Context, _param: click.Parameter, value: float | None) -> float | None:
    if value is not None and not math.isfinite(value):
        raise click.BadParameter("must be a number of seconds")
    return value


@click.command()
@run_argument
@click.option(
    "--grace",
    "grace_s",
    type=click.FloatRange(0, MOST_GRACE_S),
    callback=_finite,
    metavar="SECONDS",
    help="Time to save before SIGKILL.",
)
@inventory_option
@json_option
def cancel(run: str, grace_s: float | None, inventory: Path | None, as_json: bool) -> int:
    """End RUN and everything it started; returns when all of it is gone.

    Exit code 0 when it is: also for a run that had ended before.
    """
    with open_workspace(inventory) as workspace:
        run_id = runs.resolve(workspace, run)
        screen = Screen()
        stopped = runs.cancel(workspace, run_id, grace_s=grace_s)
        for process in stopped.ended:
            screen.note(f"ended, though its supervisor was gone: {process}")
        if not stopped.asked and not stopped.ended:
            screen.note(f"nothing of run {run_id} was alive")
        try:
            with leaving():
                has_ended = runs.wait_until_ended(workspace, run_id, (grace_s or GRACE_S) + ENDING_S)
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


@click.command()
@inventory_option
@json_option
def hosts(inventory: Path | None, as_json: bool) -> int:
    """List the hosts of the inventory; contacts none of them."""
    with open_workspace(inventory) as workspace:
        found = list(workspace.inventory.hosts.values())
        if as_json:
            print(json.dumps([views.host_json(host) for host in found], indent=2))
        else:
            show_table(views.hosts_table(found))
        return 0


def _follow_to_the_end(workspace: Workspace, run_id: str) -> None:
    screen = Screen()
    watcher = RunWatcher(screen, run_id, workspace.ledger.get(run_id).host)
    try:
        with runs.follow(workspace, run_id) as following:
            for _ in following.records(watcher):
                pass
    finally:
        screen.close()
