"""``orch exec``: any command on a host as a run, without code of ours."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from orchestrator.adhoc import ProgramOptions, command_experiment
from orchestrator.cli.options import (
    ProgramCommand,
    detach_option,
    dry_run_option,
    inventory_option,
    json_option,
    open_workspace,
    program_options,
    share_option,
    wait_option,
)
from orchestrator.cli.run import run_one


@click.command(name="exec", cls=ProgramCommand)
@click.argument("host_name", metavar="HOST")
@click.argument("argv", metavar="-- COMMAND [ARGS]...", nargs=-1, required=True, type=click.UNPROCESSED)
@program_options
@wait_option
@share_option
@detach_option
@dry_run_option
@inventory_option
@json_option
def execute(
    host_name: str,
    argv: tuple[str, ...],
    waits_for_cards: bool,
    shares_cards: bool,
    detach: bool,
    dry_run: bool,
    inventory: Path | None,
    as_json: bool,
    **options: Any,
) -> int:
    """Run COMMAND on HOST as a run: followed, recorded, with a verdict.

    Nothing is sent. COMMAND is found on the host's PATH and gets its ARGS as they are, no shell reads them
    (for one, run `sh -c '…'`). It tells nothing from inside: where --devices or --alloc-conf was given, the
    verdict is `unverified`, which is good here.
    """
    with open_workspace(inventory) as workspace:
        host = workspace.inventory.host(host_name)
        experiment = replace(
            command_experiment(argv, ProgramOptions(**options)),
            waits_for_cards=waits_for_cards,
            shares_cards=shares_cards,
        )
        return run_one(workspace, experiment, host, detach=detach, dry_run=dry_run, as_json=as_json)
