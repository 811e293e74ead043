"""``orch fetch``: files that a run wrote, from its host to here."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from orchestrator import fetching, runs
from orchestrator.artifact_names import parse_pattern
from orchestrator.cli.collecting import FetchProgress, fetch_sum, note_findings
from orchestrator.cli.options import inventory_option, json_option, open_workspace, run_argument
from orchestrator.cli.terminal import Screen, show
from orchestrator.errors import UsageError
from orchestrator.fetching import Fetch
from orchestrator.fields import parse_size
from orchestrator.text import printable
from orchestrator.views import artifacts_table


@click.command()
@run_argument
@click.argument("patterns", metavar="[PATTERN]...", nargs=-1)
@click.option(
    "--to", type=click.Path(path_type=Path), metavar="FOLDER", help="Default: the run's folder in .orch."
)
@click.option(
    "--limit", metavar="SIZE", help="At most so much in all, as 2GiB; default: the run's own, 1GiB."
)
@click.option("--list", "is_list", is_flag=True, help="Only show what is there.")
@inventory_option
@json_option
def fetch(
    run: str,
    patterns: tuple[str, ...],
    to: Path | None,
    limit: str | None,
    is_list: bool,
    inventory: Path | None,
    as_json: bool,
) -> int:
    """Bring files of RUN's artifacts folder here: those that a PATTERN means, such as 'results/**/*.json'.

    Without a pattern: those that its experiment collects, or all but orch-memory/, which holds what is kept
    of memory that ran out and comes when a pattern begins with it: 'orch-memory/*'. A run that goes on is
    fetched from as it stands. What was fetched before and has not changed is not sent again, and a file that
    broke off goes on where it did. Nothing here is overwritten but what was fetched from RUN and is still as
    it was.

    Exit code 0 when all of it is here, 1 when something is not, which is named.
    """
    checked = tuple(map(_checked, patterns))
    limit_bytes = None if limit is None else parse_size(limit)
    with open_workspace(inventory) as workspace:
        run_id = runs.resolve(workspace, run)
        if is_list:
            found = fetching.listing(workspace, run_id, checked)
            if as_json:
                print(json.dumps([asdict(artifact) for artifact in found], indent=2))
            else:
                show(artifacts_table(found))
            return 0
        screen = Screen(lines_to_stderr=as_json)
        progress = FetchProgress(screen)
        try:
            done = fetching.fetch(
                workspace, run_id, checked, to=to, limit_bytes=limit_bytes, progress=progress
            )
        finally:
            screen.close()
        if as_json:
            print(json.dumps(_as_json(done), indent=2))
        else:
            note_findings(done, screen)
            print(printable(fetch_sum(done)))
        return done.exit_code


def _checked(pattern: str) -> str:
    try:
        return parse_pattern(pattern)
    except UsageError as error:
        raise UsageError(f"a pattern: {error}") from None


def _as_json(done: Fetch) -> dict[str, object]:
    moved = set(done.moved)
    return {
        "run_id": done.run_id,
        "to": done.to,
        "files": [
            {
                "path": file.path,
                "size_bytes": file.size_bytes,
                "sha256": file.sha256,
                "was_moved": file.path in moved,
            }
            for file in done.files
        ],
        "moved_bytes": done.moved_bytes,
        "findings": [asdict(finding) for finding in done.findings],
        "left": [asdict(finding) for finding in done.left],
        "unmet": list(done.unmet),
    }
