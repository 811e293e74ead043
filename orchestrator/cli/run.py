"""``orch run`` and ``orch rerun``: from a file, or from an earlier run, to a verdict.

A matrix, and several hosts, are `cli.group`'s.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from orchestrator import runs, starting, views
from orchestrator.adhoc import ProgramOptions, script_experiment
from orchestrator.artifact_folder import fetched_here
from orchestrator.cli.collecting import collect_artifacts
from orchestrator.cli.estimates import beside_measured, estimating
from orchestrator.cli.leaving import Left, leaving, say_goodbye
from orchestrator.cli.options import (
    ProgramCommand,
    detach_option,
    dry_run_option,
    estimate_option,
    inventory_option,
    json_option,
    open_workspace,
    program_options,
    run_argument,
    script_options,
    share_option,
    wait_option,
)
from orchestrator.cli.plans import bundle_line, plan_json, plan_text
from orchestrator.cli.terminal import Screen, show
from orchestrator.errors import HostError, UnknownName, UsageError
from orchestrator.experiment import Experiment, file_hint, load_experiment
from orchestrator.following import Watcher
from orchestrator.inventory import Host
from orchestrator.job import program_of
from orchestrator.ledger import RunRow
from orchestrator.lifecycle import State
from orchestrator.log_lines import LineAssembler
from orchestrator.log_view import render, waiting_note
from orchestrator.remote import Started
from orchestrator.run_folder import Record
from orchestrator.text import counted, quoted
from orchestrator.workspace import Workspace

NEEDS_NONE = "'devices: none' needs no card"  # says a host's supervisor where it has no driver


@click.command(cls=ProgramCommand)
@click.argument("experiment", metavar="FILE", type=click.Path(path_type=Path))
@click.argument("args", metavar="[-- ARGS]...", nargs=-1, type=click.UNPROCESSED)
@click.option("--host", "host_names", multiple=True, metavar="NAME", help="A host; repeat it for several.")
@click.option("--profile", metavar="P", help="One of the experiment's profiles.")
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change a parameter; repeatable."
)
@program_options
@script_options
@wait_option
@share_option
@estimate_option
@detach_option
@dry_run_option
@inventory_option
@json_option
def run(
    experiment: Path,
    args: tuple[str, ...],
    host_names: tuple[str, ...],
    profile: str | None,
    overrides: tuple[str, ...],
    waits_for_cards: bool,
    shares_cards: bool,
    has_estimate: bool,
    detach: bool,
    dry_run: bool,
    inventory: Path | None,
    as_json: bool,
    **options: Any,
) -> int:
    """Run FILE on a host, follow its log, end with a verdict.

    FILE is an experiment (YAML), or a Python script (….py) with ARGS. An experiment with a matrix, or several
    hosts, make a group: every case on every host. A script is sent alone, one inside payloads/NAME/ with that
    whole payload; --devices, --alloc-conf, --env, --timeout, --grace, --processes and --memory-limit are for
    scripts, an experiment has keys for them.

    Exit code 0 only when every verdict is good. Ctrl-C leaves the view and not the run; a second one cancels
    it.
    """
    with open_workspace(inventory) as workspace:
        if not host_names:
            raise click.UsageError(
                f"name a host with --host; known are {', '.join(workspace.inventory.hosts)}"
            )
        hosts = [workspace.inventory.host(name) for name in dict.fromkeys(host_names)]
        typed = ProgramOptions(**options)
        if experiment.suffix == ".py":
            _refuse_for_script(profile, overrides)
            loaded = script_experiment(experiment, args, typed, project=workspace.project)
        else:
            _refuse_for_experiment(experiment, args, typed)
            _refuse_other_programs(experiment)
            loaded = load_experiment(experiment, profile=profile, overrides=overrides)
        loaded = replace(loaded, waits_for_cards=waits_for_cards, shares_cards=shares_cards)
        how = {"detach": detach, "dry_run": dry_run, "as_json": as_json, "has_estimate": has_estimate}
        if loaded.matrix is not None or len(hosts) > 1:
            from orchestrator.cli.group import run_group  # noqa: PLC0415  (a single run has no use for it)

            return run_group(workspace, loaded, hosts, **how)
        return run_one(workspace, loaded, hosts[0], **how)


def run_one(
    workspace: Workspace,
    experiment: Experiment,
    host: Host,
    *,
    detach: bool,
    dry_run: bool,
    as_json: bool,
    has_estimate: bool = False,
) -> int:
    """Runs an experiment without a matrix on one host; returns the exit code."""
    plan = starting.prepare(workspace, experiment, host)
    if dry_run:
        print(json.dumps(plan_json(plan), indent=2) if as_json else plan_text(plan))
        return 0
    screen = Screen(lines_to_stderr=as_json)
    watcher = RunWatcher(screen, plan.job["run_id"], host.name)
    screen.note(f"run {plan.job['run_id']} of {experiment.name} on {host.name}, {bundle_line(plan.bundle)}")
    file = experiment.path
    with estimating(workspace, [plan], screen, is_wanted=has_estimate, file=file) as tell_estimate:
        code = _launch(workspace, plan, watcher, tell_estimate, detach=detach, as_json=as_json)
    name_cardless_profiles(experiment, workspace.ledger.get(plan.job["run_id"]), screen)
    return code


def name_cardless_profiles(experiment: Experiment, row: RunRow, screen: Screen) -> None:
    """Says which profiles a host without cards can run, where that is why it refused."""
    if row.state is State.REFUSED and NEEDS_NONE in (row.reason or "") and experiment.cardless_profiles:
        options = ", ".join(f"--profile {name}" for name in experiment.cardless_profiles)
        screen.note(f"of {experiment.name} these need no card: {options}")


def _refuse_for_script(profile: str | None, overrides: tuple[str, ...]) -> None:
    if profile is not None:
        raise UsageError("--profile is for experiments: a script has no profiles")
    if overrides:
        raise UsageError("--set is for experiments: give a script its arguments after --")


def _refuse_for_experiment(experiment: Path, args: tuple[str, ...], options: ProgramOptions) -> None:
    if args:
        raise UsageError(
            f"{quoted(args[0])}: arguments are for scripts (….py), and {experiment} is none: change a "
            "parameter with --set key=value"
        )
    for option, key in options.given():
        raise UsageError(f"{option} is for scripts (….py): write `{key}:` in {experiment} or in its profile")


def _refuse_other_programs(experiment: Path) -> None:
    if experiment.suffix not in (".yaml", ".yml"):
        hint = file_hint(experiment)
        raise UsageError(
            f"{quoted(str(experiment))} is neither an experiment (….yaml) nor a script (….py): another "
            f"program runs with orch exec NAME -- COMMAND, one of yours from a script or a payload{hint}"
        )


@click.command()
@run_argument
@click.option("--host", "host_name", metavar="NAME", help="Another host than the one it ran on.")
@estimate_option
@detach_option
@inventory_option
@json_option
def rerun(
    run: str,
    host_name: str | None,
    has_estimate: bool,
    detach: bool,
    inventory: Path | None,
    as_json: bool,
) -> int:
    """Run what RUN did once more: its code and its job as they were, as a new run; exit like `orch run`.

    Nothing is read from the payload's folder, the experiment's file, or the variables in the inventory.
    """
    with open_workspace(inventory) as workspace:
        run_id = runs.resolve(workspace, run)
        host = workspace.inventory.host(host_name or workspace.ledger.get(run_id).host)
        screen = Screen(lines_to_stderr=as_json)
        _bring_up_to_date(workspace, run_id, screen)
        plan = starting.prepare_again(workspace, run_id, host)
        watcher = RunWatcher(screen, plan.job["run_id"], host.name)
        screen.note(
            f"run {plan.job['run_id']}, retry of {run_id}, on {host.name}, {bundle_line(plan.bundle)}"
        )
        with estimating(workspace, [plan], screen, is_wanted=has_estimate) as tell_estimate:
            return _launch(workspace, plan, watcher, tell_estimate, detach=detach, as_json=as_json)


def _bring_up_to_date(workspace: Workspace, run_id: str, screen: Screen) -> None:
    """Of a detached run that nobody looked at the records are still on its host alone."""
    try:
        runs.refresh(workspace, run_id)
    except (HostError, UnknownName) as error:
        screen.note(f"{error}; using what is known here of run {run_id}")


class RunWatcher(Watcher):
    """Shows on the screen what happens around a run."""

    def __init__(self, screen: Screen, run_id: str, host: str) -> None:
        self.screen = screen
        self.run_id = run_id
        self.host = host
        self._since = time.monotonic()
        self._is_cut = False
        self.has_started = False
        self.preparers: list[str] = []

    def preparing(self, run_id: str, what: str) -> None:
        """Says which run is seen to first."""
        self.preparers.append(run_id)
        self.screen.note(f"run {run_id} prepares {what} on {self.host} first")

    def shipped(self, started: Started) -> None:
        """Says what had to travel."""
        self.has_started = True
        sent = (
            f"sent {counted(started.sent_files, 'file')}, {counted(started.sent_bytes, 'byte')}"
            if started.sent_files
            else "no file sent"
        )
        self.screen.note(f"started; {sent}")

    def unreachable(self, message: str, retry_in_s: float) -> None:
        """Says it once; the status line counts on."""
        if not self._is_cut:
            over_there = "the run goes on over there, " if self.has_started else ""
            self.screen.note(f"{message}; {over_there}trying again")
        self._is_cut = True
        self.screen.status(f"UNREACHABLE {self.host}, next try in {retry_in_s:.0f} s")

    def reachable(self) -> None:
        """Says that it is over."""
        self._is_cut = False
        self.screen.note(f"{self.host} answers again")

    def waiting(self) -> None:
        """Keeps the status line and the pipe's reader up to date."""
        self.screen.flush()
        if not self._is_cut:
            seconds = int(time.monotonic() - self._since)
            self.screen.status(f"run {self.run_id} on {self.host} · {seconds // 60}:{seconds % 60:02}")


def _show_records(workspace: Workspace, watcher: RunWatcher, records: Iterable[Record]) -> None:
    """Writes output lines as they arrive."""
    screen = watcher.screen
    lines = LineAssembler(host=watcher.host, run_id=watcher.run_id)
    for record in records:
        runs.note_begin(workspace, watcher.run_id, record)
        is_known = record["kind"] == "preparing" and record.get("by") in watcher.preparers
        if not is_known and (note := waiting_note(record, watcher.run_id)) is not None:
            screen.note(note)
        for line in lines.feed(record):
            screen.line(render(line, colour=screen.colour, columns=screen.columns))
    for line in lines.flush():
        screen.line(render(line, colour=screen.colour, columns=screen.columns))
    screen.flush()
    screen.close()


def finish(workspace: Workspace, run_id: str, *, as_json: bool) -> int:
    """Concludes a run that has ended, brings what it collects, prints its summary; returns the exit code."""
    report = runs.conclude(workspace, run_id)
    if report.row.state is State.LOST:
        with suppress(HostError):  # it knows why, if it can be asked
            report = runs.refresh(workspace, run_id)
    collect_artifacts(workspace, run_id, Screen(lines_to_stderr=as_json))
    shown = (report.row, report.outcome, report.verdict)
    artifacts = fetched_here(workspace.folder(run_id))
    beside = beside_measured(workspace, report)
    if as_json:
        prediction = None if beside is None else beside.as_json()
        print(json.dumps(views.summary_json(*shown, artifacts=artifacts, prediction=prediction), indent=2))
    else:
        estimate = "" if beside is None else beside.line
        show(views.summary(*shown, artifacts=artifacts, estimate=estimate))
    if report.row.state in (State.FAILED, State.KILLED):
        from orchestrator.cli.explaining import explain_shortly  # noqa: PLC0415  (a run that ended well pays nothing)

        explain_shortly(workspace, report, Screen(lines_to_stderr=as_json))
    return report.exit_code


def _launch(
    workspace: Workspace,
    plan: starting.Plan,
    watcher: RunWatcher,
    tell_estimate: Callable[[Callable[[], bool]], None],
    *,
    detach: bool,
    as_json: bool,
) -> int:
    run_id = plan.job["run_id"]
    try:
        with leaving():
            following = starting.launch(workspace, plan, watcher, is_followed=not detach)
            if following is None:
                tell_estimate(lambda: False)
                print(json.dumps({"run_id": run_id}) if as_json else run_id)
                return 0
            with following:
                tell_estimate(lambda: following.is_over)
                for preparer in watcher.preparers:
                    show_preparation(workspace, preparer, watcher)
                _show_records(workspace, watcher, following.records(watcher))
            return finish(workspace, run_id, as_json=as_json)
    except Left as left:
        watcher.screen.close()
        if not watcher.has_started:
            watcher.screen.note(f"left while run {run_id} was being started; see: orch show {run_id}")
            return left.exit_code
        return say_goodbye(left, run_id, lambda: _cancel(workspace, run_id, watcher.preparers))


def show_preparation(workspace: Workspace, run_id: str, watcher: RunWatcher) -> runs.Report:
    """Shows a run that prepares something, to its end, and says what became of it."""
    own = RunWatcher(watcher.screen, run_id, watcher.host)
    own.has_started = True
    with runs.follow(workspace, run_id) as following:
        _show_records(workspace, own, following.records(own))
    report = runs.conclude(workspace, run_id)
    verdict, what = report.verdict, program_of(report.row.job).text
    if verdict is not None and verdict.is_good:
        watcher.screen.note(f"run {run_id} has prepared {what}")
    elif verdict is not None:
        reasons = "; ".join((verdict.name, *verdict.reasons))
        watcher.screen.note(f"run {run_id} could not prepare {what} on {watcher.host}: {reasons}")
    return report


def _cancel(workspace: Workspace, run_id: str, preparers: Sequence[str]) -> None:
    for each in (run_id, *reversed(preparers)):  # who waits for another goes before it
        runs.cancel(workspace, each)
    with runs.follow(workspace, run_id) as following:
        for _ in following.records(Watcher()):
            pass
    runs.conclude(workspace, run_id)
