"""Options that several commands share, and the workspace they open."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from orchestrator.cli.terminal import Screen
from orchestrator.workspace import Workspace

Command = Callable[..., Any]

inventory_option = click.option(
    "--inventory",
    type=click.Path(path_type=Path),
    help="The inventory file (default: the nearest inventory.yaml upward).",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
detach_option = click.option("--detach", is_flag=True, help="Start it and return.")
dry_run_option = click.option("--dry-run", is_flag=True, help="Show what would run; contact nobody.")
estimate_option = click.option(
    "--estimate/--no-estimate",
    "has_estimate",
    default=True,
    help="Say first what it will hold on its card (default), where the payload can tell.",
)
wait_option = click.option(
    "--wait/--no-wait",
    "waits_for_cards",
    default=True,
    help="Queue for cards that are taken (default), or be refused.",
)
share_option = click.option(
    "--share", "shares_cards", is_flag=True, help="Use cards that others use, runs or strangers."
)
run_argument = click.argument("run", metavar="RUN")


def program_options(command: Command) -> Command:
    """Adds what an experiment's keys say, for a program that no experiment describes."""
    return _with_options(
        command,
        click.option(
            "--devices", metavar="LIST", help="0,1 or UUIDs, or count=2,free_memory=90GiB; default: none."
        ),
        click.option("--alloc-conf", metavar="TEXT", help="Allocator settings: expandable_segments:True,…"),
        click.option("--env", multiple=True, metavar="NAME=VALUE", help="A variable for it; repeatable."),
        click.option("--timeout", metavar="TIME", help="Such as 90s, 10m, 2h; default: none."),
        click.option("--grace", metavar="TIME", help="From SIGTERM to SIGKILL; default: 10s."),
    )


def script_options(command: Command) -> Command:
    """Adds what only a Python program can be asked for."""
    return _with_options(
        command,
        click.option("--processes", metavar="N", help="So many ranks, as torchrun starts them; default: 1."),
        click.option("--memory-limit", metavar="SIZE", help="What each card is to look as if it had: 96GiB."),
    )


def _with_options(command: Command, *options: Callable[[Command], Command]) -> Command:
    for option in reversed(options):
        command = option(command)
    return command


class ProgramCommand(click.Command):
    """A command with another program's words behind ``--``: says so where an option may be one of those."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses as any command does."""
        words = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            is_near = error.possibilities and not any(word.endswith(".py") for word in words)
            if "--" in words or is_near:
                raise
            message = f"{error.message.rstrip('.')}; a program's own options go behind --"
            raise click.NoSuchOption(error.option_name, message, ctx=error.ctx) from None


@contextmanager
def open_workspace(inventory: Path | None) -> Iterator[Workspace]:
    """Opens the project that ``--inventory`` and ORCH_HOME name."""
    home = os.environ.get("ORCH_HOME")
    workspace = Workspace.open(inventory, Path(home) if home else None)
    if workspace.lost_ledger:
        Screen().note(f"{workspace.home}: the ledger is gone, runs are there; see: orch ledger rebuild")
    try:
        yield workspace
    finally:
        workspace.close()
