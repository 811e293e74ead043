"""Options that several commands share, and the workspace they open."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from orchestrator.workspace import Workspace

Command = Callable[..., Any]

inventory_option = click.option(
    "--inventory",
    type=click.Path(path_type=Path),
    help="The inventory file (default: the nearest inventory.yaml upward).",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
run_argument = click.argument("run", metavar="RUN")


@contextmanager
def open_workspace(inventory: Path | None) -> Iterator[Workspace]:
    """Opens the project that ``--inventory`` and ORCH_HOME name."""
    home = os.environ.get("ORCH_HOME")
    workspace = Workspace.open(inventory, Path(home) if home else None)
    try:
        yield workspace
    finally:
        workspace.close()
