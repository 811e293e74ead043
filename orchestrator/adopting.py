"""Runs that are on a host and not in this ledger: another controller started them, or this one's was lost.

A host's list is its word. What it says is checked before a row is made of it; a run that stands there under
an id that is known here with another job is a finding, and is left alone. How an adopted run ended is found
out as of any other: from its records, once they are mirrored and checked.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator import remote
from orchestrator.errors import UnknownName, UsageError
from orchestrator.job_rows import NotAJob, noted_job, row_of
from orchestrator.ledger import RunRow
from orchestrator.lifecycle import State
from orchestrator.runs import GLANCE_TIMEOUT_S
from orchestrator.supervisor.listing import job_digest
from orchestrator.text import check_name, quoted
from orchestrator.transports import connect
from orchestrator.workspace import Workspace

JOBS_AT_ONCE = 500


@dataclass(frozen=True, kw_only=True, slots=True)
class Adoption:
    """What a host's list came to.

    ``run_ids`` are those there that are in the ledger now, the newest first; ``adopted`` of them were not
    before. ``findings`` are runs that are not what they say, ``left`` those that no row can be made of.
    """

    run_ids: tuple[str, ...]
    adopted: tuple[str, ...]
    findings: tuple[str, ...]
    left: Mapping[str, str]


def adopt(workspace: Workspace, host_name: str) -> Adoption:
    """Asks a host for all its runs, and enters those into the ledger that are not in it.

    Raises:
        HostError: the host cannot be asked.
    """
    host = workspace.inventory.host(host_name)
    left: dict[str, str] = {}
    findings: list[str] = []
    with connect(host, connect_timeout_s=GLANCE_TIMEOUT_S) as transport:
        listed = dict(_named(remote.listing(transport), left))
        unknown = []
        for run_id, entry in listed.items():
            row = _known(workspace, run_id)
            if row is None:
                unknown.append(run_id)
            elif "digest" in entry and entry["digest"] != job_digest(row.job):
                findings.append(_find(workspace, host_name, run_id))
        rows = []
        for asked in _in_parts(unknown):
            for entry in remote.listing(transport, asked):
                row = _row(entry, host_name, asked, left)
                if row is not None:
                    rows.append(row)
    rows.sort(key=lambda row: row.created_t)
    adopted = workspace.ledger.adopt(rows)
    new = set(adopted)
    for row in rows:
        if row.run_id in new:
            workspace.folder(row.run_id).observe(
                "adopted", host=host_name, created_t=row.created_t, job=noted_job(row.job)
            )
    kept = [run_id for run_id in listed if run_id not in left]
    kept.sort(key=lambda run_id: _time(listed[run_id]), reverse=True)
    return Adoption(run_ids=tuple(kept), adopted=tuple(adopted), findings=tuple(findings), left=left)


def _named(
    entries: Iterable[Mapping[str, Any]], left: dict[str, str]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields the entries whose names can be run ids."""
    for entry in entries:
        name = entry.get("run")
        try:
            yield check_name("run", name if isinstance(name, str) else ""), entry
        except UsageError:
            left[quoted(name)] = "no run has such a name"


def _known(workspace: Workspace, run_id: str) -> RunRow | None:
    try:
        return workspace.ledger.get(run_id)
    except UnknownName:
        return None


def _row(
    entry: Mapping[str, Any], host_name: str, asked: Sequence[str], left: dict[str, str]
) -> RunRow | None:
    run_id = entry.get("run")
    if run_id not in asked:
        return None
    assert isinstance(run_id, str)
    state = State.QUEUED if entry.get("standing") == "waiting" else State.RUNNING
    try:
        if not isinstance(entry.get("text"), str):
            raise NotAJob("it never started" if entry.get("standing") == "never started" else _UNREADABLE)
        first = json.loads(entry["text"])
        if not isinstance(first, dict) or first.get("run") != run_id:
            raise NotAJob("its first record is that of another run")
        return row_of(
            first.get("job"),
            run_id=run_id,
            host=host_name,
            state=state,
            created_t=first.get("t"),
            is_adopted=True,
        )
    except (NotAJob, ValueError, RecursionError) as error:
        left[run_id] = str(error)
        return None


def _find(workspace: Workspace, host_name: str, run_id: str) -> str:
    message = f"{host_name} has a run {run_id} whose job is not that of the run {run_id} here"
    folder = workspace.folder(run_id)
    if not any(entry.get("message") == message for entry in folder.notes()):
        folder.observe("finding", message=message)
    return message


def _in_parts(run_ids: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(run_ids), JOBS_AT_ONCE):
        yield run_ids[start : start + JOBS_AT_ONCE]


def _time(entry: Mapping[str, Any]) -> float:
    told = entry.get("t")
    return float(told) if isinstance(told, int | float) else 0.0


_UNREADABLE = "its first record cannot be read"
