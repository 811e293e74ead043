"""``orch doctor``: can runs work on these hosts, and if not, what is to be done."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click

from orchestrator.cli.options import inventory_option, json_option
from orchestrator.errors import OrchError
from orchestrator.examining import Examined, examine
from orchestrator.finding import Finding, Level
from orchestrator.text import printable
from orchestrator.workspace import find_project

EXIT_FAULT = OrchError.exit_code


@click.command()
@click.argument("host_names", metavar="[HOST]...", nargs=-1)
@inventory_option
@json_option
def doctor(host_names: Sequence[str], inventory: Path | None, as_json: bool) -> int:
    """Look at hosts (without a name: all of the inventory), and say in one line each how everything that
    runs need stands there: ok, warning or fault, and what to do.

    Starts no run and allocates nothing on any card. Exit code 1 when there is a fault.
    """
    project = find_project(inventory)
    hosts = [project.host(name) for name in dict.fromkeys(host_names or project.hosts)]
    examined = []
    for one in examine(hosts):
        examined.append(one)
        if not as_json:
            _show(one, max(len(host.name) for host in hosts) if len(hosts) > 1 else 0)
    if as_json:
        print(json.dumps([_as_json(one) for one in examined], indent=2))
    has_fault = any(finding.level is Level.FAULT for one in examined for finding in one.findings)
    return EXIT_FAULT if has_fault else 0


def _show(examined: Examined, host_columns: int) -> None:
    """Writes a host's findings at once; its name begins each line where there are several."""
    host = f"{examined.host:<{host_columns}}  " if host_columns else ""
    for finding in examined.findings:
        print(f"{host}{finding.level:<7}  {finding.name:<10}  {printable(_text(finding))}", flush=True)


def _text(finding: Finding) -> str:
    return finding.says if finding.next is None else f"{finding.says}; next: {finding.next}"


def _as_json(examined: Examined) -> dict[str, object]:
    return {"host": examined.host, "checks": [asdict(finding) for finding in examined.findings]}
