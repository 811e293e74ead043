"""``orch hosts``: the hosts of the inventory, and their keys."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from orchestrator import enrolling, transports, views
from orchestrator.cli.options import inventory_option, json_option, open_workspace
from orchestrator.cli.terminal import Screen, show
from orchestrator.enrolling import Question
from orchestrator.errors import HostError, UsageError

NOT_CONFIRMED = 1

fingerprint_option = click.option(
    "--fingerprint",
    metavar="SHA256:…",
    help="The key's fingerprint, from the host's own console; confirms it without a question.",
)


@click.group(invoke_without_command=True)
@inventory_option
@json_option
@click.pass_context
def hosts(context: click.Context, inventory: Path | None, as_json: bool) -> int:
    """List the hosts of the inventory; contacts none of them."""
    context.obj = inventory
    if context.invoked_subcommand is not None:
        return 0
    with open_workspace(inventory) as workspace:
        found = list(workspace.inventory.hosts.values())
        if as_json:
            print(json.dumps([views.host_json(host) for host in found], indent=2))
        else:
            show(views.hosts_table(found))
        return 0


@hosts.command()
@click.argument("name")
@click.argument("target", metavar="[USER@]HOST[:PORT]")
@fingerprint_option
@inventory_option
@click.pass_obj
def add(outer: Path | None, name: str, target: str, fingerprint: str | None, inventory: Path | None) -> int:
    """Write a rented machine into the inventory, its key pinned once you have compared it."""
    screen = Screen()
    fields = enrolling.parse_target(target)
    with open_workspace(inventory or outer) as workspace:
        host = enrolling.add(
            workspace.inventory, name, fields, confirm=lambda question: _confirm(question, fingerprint)
        )
        if host is None:
            screen.note(f"{name} was not added: its key was not confirmed")
            return NOT_CONFIRMED
        screen.note(f"{name} is in {workspace.inventory.path}")
        try:
            transports.connect(host).close()
        except HostError as error:
            screen.note(f"it cannot be used yet: {error}")
            return error.exit_code
        screen.note(f"logged in; next: orch run EXPERIMENT --host {name}")
        return 0


@hosts.command()
@click.argument("name")
@fingerprint_option
@inventory_option
@click.pass_obj
def repin(outer: Path | None, name: str, fingerprint: str | None, inventory: Path | None) -> int:
    """Pin the key that a host shows now, once you have compared it: after a reinstallation, say."""
    screen = Screen()
    with open_workspace(inventory or outer) as workspace:
        is_pinned = enrolling.repin(
            workspace.inventory, name, confirm=lambda question: _confirm(question, fingerprint)
        )
        if is_pinned is None:
            screen.note(f"{name} shows the key that is known; nothing to do")
        elif is_pinned:
            screen.note(f"{name}: the key is pinned in {workspace.inventory.path}")
        else:
            screen.note(f"{name}: its key was not confirmed; nothing was changed")
        return NOT_CONFIRMED if is_pinned is False else 0


def _confirm(question: Question, fingerprint: str | None) -> bool:
    """Compares with what was given, or asks a person once; never waits for one who is not there."""
    if fingerprint is not None:
        if fingerprint != question.fingerprint:
            raise UsageError(
                f"{question.host} shows {question.key_type} {question.fingerprint}, not {fingerprint}; "
                "nothing was written"
            )
        return True
    if not sys.stdin.isatty():
        raise UsageError(
            f"{question.host} shows {question.key_type} {question.fingerprint}; nobody can be asked here: "
            f"compare it on the host's own console, then give --fingerprint {question.fingerprint}"
        )
    if question.known is not None:
        click.echo(f"known until now: {question.known}", err=True)
    kind = question.key_type.removeprefix("ssh-").partition("-")[0]
    click.echo(f"shown now:       {question.fingerprint} ({question.key_type})", err=True)
    click.echo(
        f"compare with:    ssh-keygen -lf /etc/ssh/ssh_host_{kind}_key.pub, on its own console", err=True
    )
    return click.confirm(f"Is this the key of {question.host}?", default=False, err=True)
