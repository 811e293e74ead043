"""``orch ps``: the runs that are known here, or those that a host has.

A history of any length costs what is shown of it: what asks hosts is imported when there is something to ask.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from orchestrator import views
from orchestrator.cli.options import inventory_option, json_option, open_workspace
from orchestrator.cli.terminal import Screen
from orchestrator.cli.terminal import show as show_table
from orchestrator.ledger import RunRow
from orchestrator.lifecycle import is_settled
from orchestrator.observed import Observed
from orchestrator.text import counted
from orchestrator.workspace import Workspace

SHOWN_RUNS = 30
MOST_SHOWN = 100_000
MOST_NAMED = 10


@click.command()
@click.option("--host", "host_name", metavar="NAME", help="Only this host's runs.")
@click.option(
    "--all", "is_all", is_flag=True, help="With --host: all runs that are there, whoever started them."
)
@click.option(
    "-n", "count", type=click.IntRange(1, MOST_SHOWN), default=SHOWN_RUNS, show_default=True, help="How many."
)
@inventory_option
@json_option
def ps(host_name: str | None, is_all: bool, count: int, inventory: Path | None, as_json: bool) -> int:
    """List runs, the newest first; those that have not ended are brought up to date first.

    With --all the host is asked which runs it has, and those that are unknown here are entered into the
    ledger: from then on every command works on them.
    """
    if is_all and host_name is None:
        raise click.UsageError("--all needs a host: name it with --host")
    with open_workspace(inventory) as workspace:
        name = workspace.inventory.host(host_name).name if host_name else None
        screen = Screen()
        run_ids = _adopted(workspace, name, count, screen) if is_all and name else None
        rows = _rows(workspace, run_ids, count, name)
        seen: Mapping[str, Observed] = {}
        if not all(is_settled(row.state) for row in rows):
            seen = _glance(workspace, rows, screen)
            rows = _rows(workspace, run_ids, count, name)
        if as_json:
            print(json.dumps([views.run_json(row, seen.get(row.run_id)) for row in rows], indent=2))
        else:
            show_table(views.runs_table(rows, now_t=time.time(), seen=seen))
        return 0


def _rows(workspace: Workspace, run_ids: Sequence[str] | None, count: int, host: str | None) -> list[RunRow]:
    if run_ids is None:
        return workspace.ledger.recent(count, host)
    return [workspace.ledger.get(run_id) for run_id in run_ids]


def _glance(workspace: Workspace, rows: Sequence[RunRow], screen: Screen) -> Mapping[str, Observed]:
    from orchestrator import reconciling  # noqa: PLC0415  (only when there is something to ask)

    looked = reconciling.glance(workspace, rows)
    for host, message in looked.failed.items():
        screen.note(f"{host}: {message}; what is shown of {host} may be old")
    return looked.seen


def _adopted(workspace: Workspace, host: str, count: int, screen: Screen) -> Sequence[str]:
    """Enters what is unknown here, and returns the ids of the newest runs that are there."""
    from orchestrator import adopting  # noqa: PLC0415  (only when a host is asked)

    found = adopting.adopt(workspace, host)
    known = f"{len(found.adopted)} were unknown here and are in the ledger now"
    more = f"; shown are the newest {count}, -n shows more" if count < len(found.run_ids) else ""
    screen.note(f"{host} has {counted(len(found.run_ids), 'run')}; {known}{more}")
    for finding in found.findings:
        screen.note(f"finding: {finding}; nothing of it was taken over")
    for name, why in list(found.left.items())[:MOST_NAMED]:
        screen.note(f"{host}: {name} was left alone: {why}")
    if len(found.left) > MOST_NAMED:
        screen.note(f"{host}: {len(found.left) - MOST_NAMED} more were left alone")
    return found.run_ids[:count]
