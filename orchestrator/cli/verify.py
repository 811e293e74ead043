"""``orch verify``: are a run's records and code what was recorded, here and on its host."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from orchestrator import runs
from orchestrator.cli.options import inventory_option, json_option, open_workspace, run_argument
from orchestrator.mirror_scan import Place
from orchestrator.text import printable
from orchestrator.verification import Verification
from orchestrator.verification import verify as verify_run


@click.command()
@run_argument
@inventory_option
@json_option
def verify(run: str, inventory: Path | None, as_json: bool) -> int:
    """Prove that RUN's records and code are what was recorded, or say where they are not.

    Changes nothing, here or on the host. Exit code 0 when every check is ok, 5 when something differs, 3 when
    the host could not be asked, 1 when something else is left unchecked.
    """
    with open_workspace(inventory) as workspace:
        found = verify_run(workspace, runs.resolve(workspace, run))
        if as_json:
            print(json.dumps(_as_json(found), indent=2))
        else:
            _show(found)
        return found.exit_code


def _show(found: Verification) -> None:
    for check in found.checks:
        where = "" if check.place is None else f" ({_where(check.place)})"
        print(f"{check.status:<11}  {check.name:<14}  {printable(check.says + where)}")


def _where(place: Place) -> str:
    seq = "" if place.seq is None else f", record {place.seq}"
    record = "" if place.record is None else f", {place.record}"
    return f"segment {place.segment}, byte {place.offset}{seq}{record}"


def _as_json(found: Verification) -> dict[str, object]:
    return {
        "run_id": found.run_id,
        "host": found.host,
        "is_proved": found.exit_code == 0,
        "checks": [asdict(check) for check in found.checks],
    }
