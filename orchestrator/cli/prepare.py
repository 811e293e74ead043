"""``orch prepare``: what a host's runs need is prepared before the first of them asks for it."""

from __future__ import annotations

import json
import time
from pathlib import Path

import click

from orchestrator import starting
from orchestrator.cli.leaving import Left, leaving, say_goodbye
from orchestrator.cli.options import inventory_option, json_option, open_workspace
from orchestrator.cli.run import RunWatcher, show_preparation
from orchestrator.cli.terminal import Screen
from orchestrator.errors import UsageError
from orchestrator.experiment import load_experiment
from orchestrator.host_starter import HostStarter
from orchestrator.job import setup_text
from orchestrator.remote import Prepared
from orchestrator.runs import Report
from orchestrator.starting import Plan
from orchestrator.text import printable
from orchestrator.views import duration
from orchestrator.workspace import Workspace


@click.command()
@click.argument("host_name", metavar="HOST")
@click.argument("experiment", metavar="[EXPERIMENT]", required=False, type=click.Path(path_type=Path))
@click.option("--profile", metavar="P", help="One of the experiment's profiles.")
@click.option("--force", is_flag=True, help="Make anew what is there, once no run uses it.")
@inventory_option
@json_option
def prepare(
    host_name: str,
    experiment: Path | None,
    profile: str | None,
    force: bool,
    inventory: Path | None,
    as_json: bool,
) -> int:
    """Prepare on HOST what the setup: of its entry names, and then that of EXPERIMENT.

    What is there already is only told of. Runs do the same by themselves; this does it ahead of them. Each
    preparation is a run, for ps, logs and cancel. Exit code 3 when one failed.
    """
    with open_workspace(inventory) as workspace:
        host = workspace.inventory.host(host_name)
        if experiment is None and profile is not None:
            raise UsageError("--profile is for experiments: name one")
        loaded = None if experiment is None else load_experiment(experiment, profile=profile)
        plan = starting.plan_setup(workspace, host, loaded, force=force)
        if plan is None:
            named = "" if experiment is None else f", and neither has {experiment}"
            raise UsageError(
                f"{host.name} has no setup: in {printable(str(workspace.inventory.path))}{named}"
            )
        return _prepare_all(workspace, plan, force=force, as_json=as_json)


def _prepare_all(workspace: Workspace, plan: Plan, *, force: bool, as_json: bool) -> int:
    host, specs = plan.host, plan.job["setup"]
    screen, code, told = Screen(lines_to_stderr=as_json), 0, []
    with HostStarter(host, workspace.store) as starter:
        found = starter.prepared(specs)
    for place, (spec, known) in enumerate(zip(specs, found, strict=True)):
        run_id = known.made_by
        if run_id is None or force:
            if known.preparer is not None:
                screen.note(f"{setup_text(spec)}: run {known.preparer or '?'} is at it: this waits for that")
            report = _prepare_one(workspace, plan, place, screen)
            if isinstance(report, int):
                return report
            code, run_id = report.exit_code, report.row.run_id
        elif not as_json:
            print(f"{host.name}: {printable(setup_text(spec))}: {_ready(known)}")
        told.append({"setup": setup_text(spec), "digest": known.digest, "run_id": run_id, "exit_code": code})
        if code != 0:
            break
    if as_json:
        print(json.dumps({"host": host.name, "prepared": told}, indent=2))
    return code


def _prepare_one(workspace: Workspace, plan: Plan, place: int, screen: Screen) -> Report | int:
    """Runs one preparation; returns how it stands, or the exit code when the view was left."""
    preparation = starting.plan_preparation(workspace, plan, place, ())
    run_id = preparation.job["run_id"]
    watcher = RunWatcher(screen, run_id, plan.host.name)
    screen.note(f"run {run_id} prepares {setup_text(plan.job['setup'][place])} on {plan.host.name}")
    try:
        with leaving():
            starting.launch(workspace, preparation, watcher, is_followed=False)
            return show_preparation(workspace, run_id, watcher)
    except Left as left:
        screen.close()
        return say_goodbye(left, run_id)


def _ready(known: Prepared) -> str:
    ago = "" if known.made_t is None else f" {duration(time.time() - known.made_t)} ago"
    return f"ready, prepared{ago} by run {known.made_by}"
