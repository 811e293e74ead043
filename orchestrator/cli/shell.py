"""``orch shell``: a log-in shell on a host, or one command there, over the way that runs take."""

from __future__ import annotations

from pathlib import Path

import click

from orchestrator.cli.leaving import Left, leaving
from orchestrator.cli.options import ProgramCommand, inventory_option
from orchestrator.inventory import find_inventory, load_inventory
from orchestrator.transports import connect


@click.command(cls=ProgramCommand)
@click.argument("host_name", metavar="HOST")
@click.argument("argv", metavar="[-- COMMAND [ARGS]...]", nargs=-1, type=click.UNPROCESSED)
@inventory_option
def shell(host_name: str, argv: tuple[str, ...], inventory: Path | None) -> int:
    """Open a log-in shell on HOST, or run COMMAND there with its ARGS as they are: no shell reads them.

    Keys, jump hosts and containers are those of the inventory, and the exit code is that of what ran. On a
    terminal it gets a terminal, also for COMMAND; in a pipe, bytes are passed on as they are. It is no run:
    nothing of it is recorded (for that there is `orch exec`).
    """
    host = load_inventory(inventory or find_inventory(Path.cwd())).host(host_name)
    try:
        with leaving(), connect(host) as transport:
            status = transport.attach(argv or None)
    except Left as left:
        return left.exit_code
    return status if status >= 0 else 128 - status
