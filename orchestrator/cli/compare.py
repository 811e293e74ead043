"""``orch diff``: two runs beside each other; gathers what is known of them here."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import click

from orchestrator import comparing, runs, starting
from orchestrator.bundle import Entry
from orchestrator.cli.options import inventory_option, json_option, open_workspace
from orchestrator.cli.terminal import Screen
from orchestrator.comparing import MOST_TEXT_BYTES, FileChange, RunFacts, TextDiff
from orchestrator.diff_view import Comparison, diff_json, diff_lines
from orchestrator.errors import HostError, RecordsAltered, StorageError, UnknownName
from orchestrator.ledger import RunRow
from orchestrator.provenance import Commit, commits_between
from orchestrator.workspace import Workspace

SHOWN_LINES = 40


@click.command()
@click.argument("first", metavar="A")
@click.argument("second", metavar="B")
@click.option("--code", is_flag=True, help=f"Show all changed lines, not the first {SHOWN_LINES}.")
@inventory_option
@json_option
def diff(first: str, second: str, code: bool, inventory: Path | None, as_json: bool) -> int:
    """Show what differs between runs A and B: what was asked, the code, what they got, what came of it.

    Exit code 0 whether they differ or not. Of variables that look like secrets only the names are shown.
    """
    with open_workspace(inventory) as workspace:
        run_ids = [runs.resolve(workspace, text) for text in (first, second)]
        a, b = (_facts(workspace, run_id) for run_id in run_ids)
        found = comparing.compare(a, b)
        diffs = tuple(_text_diffs(workspace, found.files or ()))
        shown = Comparison(
            a=a,
            b=b,
            found=found,
            diffs=diffs if code else comparing.shortened(diffs, SHOWN_LINES),
            commits=_commits(workspace, a.row, b.row),
        )
        print(json.dumps(diff_json(shown), indent=2) if as_json else "\n".join(diff_lines(shown)))
        return 0


def _facts(workspace: Workspace, run_id: str) -> RunFacts:
    try:
        report = runs.refresh(workspace, run_id)
    except (HostError, StorageError, UnknownName) as error:
        Screen().note(f"{error}; comparing what is known here")
        report = runs.report(workspace, run_id)
    try:
        job = starting.original_job(workspace, run_id)
    except RecordsAltered as finding:
        Screen().note(f"{finding}; taking what the ledger holds")
        job = None
    return RunFacts(
        row=report.row,
        job=job or report.row.job,
        has_values=job is not None,
        outcome=report.outcome,
        verdict=report.verdict,
        entries=_entries(workspace, report.row.bundle),
    )


def _entries(workspace: Workspace, bundle_id: str) -> tuple[Entry, ...] | None:
    try:
        return workspace.store.load_manifest(bundle_id).entries
    except (UnknownName, StorageError):
        return None


def _text_diffs(workspace: Workspace, files: Iterable[FileChange]) -> Iterator[TextDiff]:
    """Only files that both have are diffed: the whole of an added one says nothing about the other run."""
    for file in files:
        if file.a is None or file.b is None or file.a.sha256 == file.b.sha256:
            continue
        if max(file.a.size_bytes, file.b.size_bytes) > MOST_TEXT_BYTES:
            yield TextDiff(path=file.path, reason=f"more than {MOST_TEXT_BYTES // 1024} KiB")
            continue
        try:
            with (
                workspace.store.open_checked(file.a.sha256) as a,
                workspace.store.open_checked(file.b.sha256) as b,
            ):
                yield comparing.text_diff(file.path, a.read(), b.read())
        except StorageError as error:
            yield TextDiff(path=file.path, reason=str(error))


def _commits(workspace: Workspace, a: RunRow, b: RunRow) -> tuple[Commit, ...] | None:
    if a.commit_id is None or b.commit_id is None:
        return None
    return commits_between(workspace.project, a.commit_id, b.commit_id)
