"""``orch reconcile``, ``gc`` and ``ledger rebuild``: keep what is known true, and what is kept small."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click

from orchestrator import cleaning, home_cleaning, reconciling, views
from orchestrator.cleaning_view import cleaning_sum, cleaning_table, item_json
from orchestrator.cli.options import inventory_option, json_option, open_workspace
from orchestrator.cli.terminal import Screen, show
from orchestrator.errors import HostError, OrchError
from orchestrator.fields import parse_duration
from orchestrator.ledger import RunRow
from orchestrator.rebuilding import rebuild as rebuild_ledger
from orchestrator.text import printable
from orchestrator.workspace import Workspace, find_home

OLD = "30d"
EXIT_NOT_ASKED = HostError.exit_code


@click.command()
@click.option("--host", "host_name", metavar="NAME", help="Only this host's runs.")
@inventory_option
@json_option
def reconcile(host_name: str | None, inventory: Path | None, as_json: bool) -> int:
    """Ask every host about every run whose end is not known here, and write down what it says.

    Exit code 3 when a host could not be asked about all of them: the others stay as they are.
    """
    with open_workspace(inventory) as workspace:
        name = workspace.inventory.host(host_name).name if host_name else None
        found = reconciling.reconcile(workspace, name)
        if as_json:
            print(json.dumps(_reconciled_json(found), indent=2))
        else:
            for change in found.changes:
                print(printable(_change_line(change)))
            for host, reason in found.failed.items():
                left = found.waiting_for.get(host, 0)
                print(printable(f"{host}: UNREACHABLE ({reason}); open runs left as they are: {left}"))
            for host, count in found.unfinished.items():
                print(
                    f"{host}: the time was over before {count} runs that ended were mirrored: reconcile again"
                )
            if not found.changes and not found.failed and not found.unfinished:
                print(f"nothing changed; open runs: {found.asked}")
        return EXIT_NOT_ASKED if found.failed or found.unfinished else 0


@click.command()
@click.option("--host", "host_names", multiple=True, metavar="NAME", help="Clean up this host; repeatable.")
@click.option("--home", "is_home", is_flag=True, help="Clean up this machine.")
@click.option("--older-than", default=OLD, show_default=True, metavar="AGE", help="As 90s, 10m, 2h, 30d.")
@click.option("--keep", type=click.IntRange(0), default=0, metavar="N", help="Keep the N newest in any case.")
@click.option("--unmirrored", is_flag=True, help="From hosts also what is not whole here: it is lost then.")
@click.option("--yes", "is_real", is_flag=True, help="Remove it; without, only say what would go.")
@inventory_option
@json_option
def gc(
    host_names: tuple[str, ...],
    is_home: bool,
    older_than: str,
    keep: int,
    unmirrored: bool,
    is_real: bool,
    inventory: Path | None,
    as_json: bool,
) -> int:
    """Remove what ended runs left: their folders on hosts, their mirrors here, and what nobody needs then.

    Only says what would go unless --yes is given. Without --host and --home all hosts and this machine are
    looked at. A run that lives, waits or has processes left stays in any case; from a host only what is whole
    here goes, ten minutes after its end at the earliest. The ledger keeps every row and verdict.
    """
    with open_workspace(inventory) as workspace:
        policy = cleaning.Policy(older_than_s=parse_duration(older_than), keep=keep, unmirrored=unmirrored)
        is_everything = not host_names and not is_home
        names = list(workspace.inventory.hosts) if is_everything else dict.fromkeys(host_names)
        hosts = [workspace.inventory.host(name).name for name in names]
        items, failed = _clean(workspace, hosts, policy, is_home=is_home or is_everything, is_real=is_real)
        if as_json:
            print(json.dumps({"items": [item_json(item) for item in items], "failed": failed}, indent=2))
        else:
            show(cleaning_table(items, is_real=is_real))
            print(cleaning_sum(items, is_real=is_real))
        for host, reason in failed.items():
            Screen().note(f"{reason}; nothing is known of what {host} holds")
        return EXIT_NOT_ASKED if failed else 0


@click.group()
def ledger() -> None:
    """The index of all runs that this machine knows."""


@ledger.command(short_help="Make the ledger anew; the old file stays.")
@inventory_option
@json_option
def rebuild(inventory: Path | None, as_json: bool) -> int:
    """Make the ledger anew from what is kept of each run; the old file stays beside it.

    Exit code 1 when there are runs that no row can be made of.
    """
    home = os.environ.get("ORCH_HOME")
    _, folder = find_home(inventory, Path(home) if home else None)
    made = rebuild_ledger(folder)
    kept = None if made.kept is None else str(made.kept)
    if as_json:
        print(json.dumps({"runs": made.runs, "unreadable": dict(made.unreadable), "kept": kept}, indent=2))
    else:
        where = "there was none before" if kept is None else f"the old file is {kept}"
        print(printable(f"{folder / 'ledger.db'}: {made.runs} runs; {where}"))
        for name, why in made.unreadable.items():
            print(printable(f"{name}: not taken in: {why}"))
    return 1 if made.unreadable else 0


def _clean(
    workspace: Workspace, hosts: list[str], policy: cleaning.Policy, *, is_home: bool, is_real: bool
) -> tuple[list[cleaning.Item], dict[str, str]]:
    """Hosts come first: what is removed here is then no longer needed to tell what may go there."""
    items: list[cleaning.Item] = []
    failed: dict[str, str] = {}
    for host in hosts:
        try:
            items += cleaning.clean_host(workspace, host, policy, is_real=is_real)
        except OrchError as error:
            failed[host] = str(error)
    if is_home:
        items += home_cleaning.clean_home(workspace, policy, is_real=is_real)
    return items, failed


def _change_line(change: reconciling.Change) -> str:
    before, after = change.before, change.after
    verdict = "" if after.verdict is None else f", {after.verdict}"
    reason = "" if after.reason is None else f": {after.reason}"
    return f"{after.host} {after.run_id} {after.experiment}: {before.state} → {after.state}{verdict}{reason}"


def _reconciled_json(found: reconciling.Reconciled) -> dict[str, object]:
    def change(before: RunRow, after: RunRow) -> dict[str, object]:
        return {"run": views.run_json(after), "was": str(before.state)}

    return {
        "asked": found.asked,
        "changes": [change(pair.before, pair.after) for pair in found.changes],
        "unreachable": dict(found.failed),
        "unfinished": dict(found.unfinished),
    }
