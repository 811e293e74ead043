"""A new ledger from what each run's folder on this machine holds: first records and observations.

The ledger is an index: who ran what where stands in the folders, and so does each verdict that was written
down. A run without one is judged by its records, or stays open for the next command that asks its host.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from orchestrator.errors import RecordsAltered, StorageError
from orchestrator.experiment import Expectation
from orchestrator.job_rows import NotAJob, row_of
from orchestrator.ledger import Ledger, RunRow
from orchestrator.ledger_file import put_in_place, unused
from orchestrator.lifecycle import State
from orchestrator.mirror_reader import checked_records
from orchestrator.outcome import Outcome, outcome_of
from orchestrator.run_folder import NOTED_KINDS, Record, RunFolder
from orchestrator.supervisor.listing import FIRST_BYTES
from orchestrator.verdict import Verdict, judge


@dataclass(frozen=True, kw_only=True, slots=True)
class Rebuilt:
    """How many runs the new ledger has, which folders none could be made of and why, where the old one is."""

    runs: int
    unreadable: Mapping[str, str]
    kept: Path | None


def rebuild(home: Path) -> Rebuilt:
    """Makes the ledger of ``home`` anew and keeps the file that was there beside it.

    Raises:
        StorageError: another command has the ledger open, or this disk fails.
    """
    path, new = home / "ledger.db", home / "ledger.db.new"
    with unused(path):
        rows, unreadable = _rows(home)
        try:
            _remove(new)
            with Ledger.open(new) as ledger:
                ledger.insert(*rows)
            kept = put_in_place(new, path)
            _remove(new)
        except OSError as error:
            raise StorageError(f"{new}: cannot be written: {error}") from error
    return Rebuilt(runs=len(rows), unreadable=unreadable, kept=kept)


def _rows(home: Path) -> tuple[list[RunRow], dict[str, str]]:
    rows, unreadable = [], {}
    try:
        names = sorted(entry.name for entry in os.scandir(home / "runs") if entry.is_dir())
    except FileNotFoundError:
        names = []
    for name in names:
        try:
            rows.append(_row(RunFolder(home, name)))
        except (NotAJob, OSError, ValueError, RecursionError) as error:
            unreadable[name] = str(error)
    rows.sort(key=lambda row: row.created_t)
    return rows, unreadable


def _row(folder: RunFolder) -> RunRow:
    noted: dict[str, Record] = {}
    for entry in folder.notes():
        kind = str(entry.get("kind"))
        if kind not in NOTED_KINDS or kind not in noted:  # the first note of a run's job, the last verdict
            noted[kind] = entry
    first = _first_record(folder)
    origin = next((noted[kind] for kind in NOTED_KINDS if kind in noted), {})
    if not isinstance(origin.get("host"), str):
        raise NotAJob("no note says on which host it ran: `orch ps --host … --all` finds it there")
    is_adopted = origin["kind"] == "adopted"
    row = row_of(
        first.get("job") or origin.get("job"),
        run_id=folder.run_id,
        host=origin["host"],
        state=State.RUNNING if first or "started" in noted else State.STARTING,
        created_t=origin.get("created_t") if is_adopted else origin.get("t"),
        is_adopted=is_adopted,
    )
    if "verdict" in noted:
        return _with_noted_verdict(row, noted["verdict"], folder)
    return _with_judged_verdict(row, folder) if first else row


def _with_noted_verdict(row: RunRow, noted: Record, folder: RunFolder) -> RunRow:
    facts: Mapping[str, Any] = noted
    if "exit_code" not in noted:  # what a verdict's note did not hold at first
        outcome = _outcome(folder) or Outcome()
        facts = {
            name: getattr(outcome, name) for name in ("exit_code", "signal", "pid", "started_t", "ended_t")
        }
    return replace(
        row,
        state=State(noted["state"]),
        verdict=noted["verdict"],
        reason="; ".join(noted["reasons"]) or None,
        exit_code=facts["exit_code"],
        signal=facts["signal"],
        pid=facts["pid"],
        started_t=facts["started_t"],
        ended_t=facts["ended_t"],
    )


def _with_judged_verdict(row: RunRow, folder: RunFolder) -> RunRow:
    outcome = _outcome(folder)
    if outcome is None:
        return replace(row, state=State.LOST, verdict="altered", reason="its records are not what was sealed")
    if outcome.state is State.LOST:  # no end is here yet: its host may know
        return row
    verdict: Verdict = judge(outcome, Expectation.from_json(row.job["expect"]))
    return replace(
        row,
        state=outcome.state,
        verdict=verdict.name,
        reason="; ".join(verdict.reasons) or None,
        exit_code=outcome.exit_code,
        signal=outcome.signal,
        pid=outcome.pid,
        started_t=outcome.started_t,
        ended_t=outcome.ended_t,
    )


def _outcome(folder: RunFolder) -> Outcome | None:
    """Returns what the records say, None when they are not what was sealed."""
    try:
        return outcome_of(checked_records(folder))
    except RecordsAltered:
        return None


def _first_record(folder: RunFolder) -> Record:
    """Returns the mirror's first record, empty where there is none, or another run's."""
    try:
        with folder.segment(0).open("rb") as file:
            line = file.readline(FIRST_BYTES)
        first = json.loads(line)
    except (OSError, ValueError):
        return {}
    return first if isinstance(first, dict) and first.get("run") == folder.run_id else {}


def _remove(new: Path) -> None:
    for suffix in ("", "-wal", "-shm", ".use"):
        new.with_name(new.name + suffix).unlink(missing_ok=True)
