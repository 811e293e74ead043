"""``orch run`` and ``orch rerun``: from a file, or from an earlier run, to a verdict."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path

import click

from orchestrator import runs, starting, views
from orchestrator.cli.leaving import Left, leaving, say_goodbye
from orchestrator.cli.options import inventory_option, json_option, open_workspace, run_argument
from orchestrator.cli.terminal import Screen, show
from orchestrator.errors import HostError, RecordsAltered, UnknownName
from orchestrator.experiment import load_experiment
from orchestrator.following import Watcher
from orchestrator.log_lines import LineAssembler
from orchestrator.log_view import render
from orchestrator.remote import Started
from orchestrator.run_folder import Record
from orchestrator.text import printable
from orchestrator.workspace import Workspace

SHOWN_NAMES = 3
EXIT_BAD_VERDICT = 1
EXIT_HOST_FAULT = 3


@click.command()
@click.argument("experiment", type=click.Path(path_type=Path))
@click.option("--host", "host_name", metavar="NAME", help="A host of the inventory; it must be named.")
@click.option("--profile", metavar="P", help="One of the experiment's profiles.")
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change a parameter; repeatable."
)
@click.option("--detach", is_flag=True, help="Start it and return.")
@click.option("--dry-run", is_flag=True, help="Show what would run; contact nobody.")
@inventory_option
@json_option
def run(
    experiment: Path,
    host_name: str | None,
    profile: str | None,
    overrides: tuple[str, ...],
    detach: bool,
    dry_run: bool,
    inventory: Path | None,
    as_json: bool,
) -> int:
    """Run EXPERIMENT (a YAML file) on a host, follow its log, end with a verdict.

    Exit code 0 only when the verdict is good. Ctrl-C leaves the view and not the run; a second one cancels
    it.
    """
    with open_workspace(inventory) as workspace:
        if host_name is None:
            raise click.UsageError(
                f"name a host with --host; known are {', '.join(workspace.inventory.hosts)}"
            )
        host = workspace.inventory.host(host_name)
        loaded = load_experiment(experiment, profile=profile, overrides=overrides)
        plan = starting.prepare(workspace, loaded, host)
        if dry_run:
            print(json.dumps(_plan_json(plan), indent=2) if as_json else _plan_text(plan))
            return 0
        screen = Screen(lines_to_stderr=as_json)
        watcher = RunWatcher(screen, plan.job["run_id"], host.name)
        screen.note(f"run {plan.job['run_id']} of {loaded.name} on {host.name}, {_bundle_line(plan)}")
        return _launch(workspace, plan, watcher, detach=detach, as_json=as_json)


@click.command()
@run_argument
@click.option("--host", "host_name", metavar="NAME", help="Another host than the one it ran on.")
@click.option("--detach", is_flag=True, help="Start it and return.")
@inventory_option
@json_option
def rerun(run: str, host_name: str | None, detach: bool, inventory: Path | None, as_json: bool) -> int:
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
        screen.note(f"run {plan.job['run_id']}, retry of {run_id}, on {host.name}, {_bundle_line(plan)}")
        return _launch(workspace, plan, watcher, detach=detach, as_json=as_json)


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

    def shipped(self, started: Started) -> None:
        """Says what had to travel."""
        self.has_started = True
        sent = (
            f"sent {started.sent_files} files, {started.sent_bytes} bytes"
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


def _show_records(watcher: RunWatcher, records: Iterable[Record]) -> None:
    """Writes output lines as they arrive."""
    screen = watcher.screen
    lines = LineAssembler(host=watcher.host, run_id=watcher.run_id)
    for record in records:
        for line in lines.feed(record):
            screen.line(render(line, colour=screen.colour))
    for line in lines.flush():
        screen.line(render(line, colour=screen.colour))
    screen.flush()
    screen.close()


def finish(workspace: Workspace, run_id: str, *, as_json: bool) -> int:
    """Concludes a run that has ended, prints its summary and returns the exit code."""
    report = runs.conclude(workspace, run_id)
    if as_json:
        print(json.dumps(views.summary_json(report.row, report.outcome, report.verdict), indent=2))
    else:
        show(views.summary(report.row, report.outcome, report.verdict))
    if report.verdict is not None and report.verdict.is_good:
        return 0
    if report.verdict is not None and report.verdict.name == "altered":
        return RecordsAltered.exit_code
    return EXIT_HOST_FAULT if report.is_host_fault else EXIT_BAD_VERDICT


def _launch(
    workspace: Workspace, plan: starting.Plan, watcher: RunWatcher, *, detach: bool, as_json: bool
) -> int:
    run_id = plan.job["run_id"]
    try:
        with leaving():
            following = starting.launch(workspace, plan, watcher, is_followed=not detach)
            if following is None:
                print(json.dumps({"run_id": run_id}) if as_json else run_id)
                return 0
            with following:
                _show_records(watcher, following.records(watcher))
            return finish(workspace, run_id, as_json=as_json)
    except Left as left:
        watcher.screen.close()
        if not watcher.has_started:
            watcher.screen.note(f"left while run {run_id} was being started; see: orch show {run_id}")
            return left.exit_code
        return say_goodbye(left, run_id, lambda: _cancel(workspace, run_id))


def _cancel(workspace: Workspace, run_id: str) -> None:
    runs.cancel(workspace, run_id)
    with runs.follow(workspace, run_id) as following:
        for _ in following.records(Watcher()):
            pass
    runs.conclude(workspace, run_id)


def _bundle_line(plan: starting.Plan) -> str:
    bundle = plan.bundle
    names = ", ".join(
        (*bundle.excluded[:SHOWN_NAMES], *(["…"] if len(bundle.excluded) > SHOWN_NAMES else []))
    )
    excluded = f"; left out by rule: {names}" if names else ""
    commit = (bundle.provenance.commit or "no commit")[:12] + ("*" if bundle.provenance.dirty else "")
    size = f"{len(bundle.entries)} files, {bundle.size_bytes} bytes{excluded}"
    return f"bundle {bundle.id[:12]} ({size}), commit {commit}"


def _plan_text(plan: starting.Plan) -> str:
    job, expect = plan.job, plan.job["expect"]
    timeout = "none" if job["timeout_s"] is None else f"{job['timeout_s']:g} s"
    facts = {
        "host": f"{plan.host.name}, {plan.host.python}, root {plan.host.root}",
        "module": job["module"],
        "bundle": _bundle_line(plan).removeprefix("bundle "),
        "allocator": job["alloc_conf"] or "nothing asked",
        "devices": ", ".join(job["devices"]) or "none",
        "variables": ", ".join(sorted(job["env"])) or "none",
        "secrets": ", ".join(f"{name} from {source}" for name, source in job["secrets"].items()) or "none",
        "timeout": timeout,
        "expected": f"verdict {' or '.join(expect['verdicts'])}, metrics {json.dumps(expect['metrics'])}",
        "parameters": json.dumps(job["params"]),
    }
    return "\n".join(printable(f"{label:11} {value}") for label, value in facts.items())


def _plan_json(plan: starting.Plan) -> dict[str, object]:
    files = [
        {"path": entry.path, "size_bytes": entry.size_bytes, "sha256": entry.sha256}
        for entry in plan.bundle.entries
    ]
    bundle = {"id": plan.bundle.id, "files": files, "excluded": list(plan.bundle.excluded)}
    return {"host": plan.host.name, "bundle": bundle, "job": plan.job}
