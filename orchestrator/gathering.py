"""Gets the runs of a merged view ready: up to date with their hosts, and each with its clock's offset.

Hosts are asked side by side, each over one more connection; of one that cannot be asked what is mirrored here
and what was known of its clock has to do.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from orchestrator import clocks, remote
from orchestrator.clocks import Offset
from orchestrator.errors import OrchError, StorageError
from orchestrator.ledger import RunRow
from orchestrator.reconciling import glance
from orchestrator.runs import GLANCE_TIMEOUT_S, MOST_HOSTS_AT_ONCE, catch_up, is_settled
from orchestrator.transports import connect
from orchestrator.workspace import Workspace


@dataclass(frozen=True, kw_only=True, slots=True)
class Gathered:
    """Offsets by run id, None where nothing is known; ``notes`` tell a person of the clocks and of hosts."""

    offsets: Mapping[str, Offset | None]
    notes: tuple[str, ...]


def gather(workspace: Workspace, run_ids: Sequence[str]) -> Gathered:
    """Mirrors what the runs have written so far, measures their hosts' clocks where that tells more than what
    is known, and keeps what it measured beside the runs.
    """
    failed = dict(glance(workspace, map(workspace.ledger.get, run_ids)).failed)
    by_host: dict[str, list[RunRow]] = {}
    for run_id in run_ids:
        row = workspace.ledger.get(run_id)
        by_host.setdefault(row.host, []).append(row)
    known = {host: _kept(workspace, rows) for host, rows in by_host.items()}
    asked = [
        host
        for host, rows in by_host.items()
        if host not in failed and any(_is_worth_asking(row, known[host]) for row in rows)
    ]
    with ThreadPoolExecutor(MOST_HOSTS_AT_ONCE) as pool:
        answers = {host: pool.submit(_visit, workspace, host, by_host[host]) for host in asked}
    for host, answer in answers.items():
        try:
            offset = answer.result()
        except OrchError as error:
            failed[host] = str(error).removeprefix(f"{host}: ")
            continue
        known[host].append(offset)
        for row in by_host[host]:
            with suppress(StorageError):  # a full disk here keeps nobody from looking
                workspace.folder(row.run_id).observe("clock", host=host, **offset.noted())
    offsets = {
        row.run_id: clocks.best(known[host], *_span(row)) for host, rows in by_host.items() for row in rows
    }
    notes = (note for host, rows in by_host.items() for note in _notes(host, rows, offsets, failed.get(host)))
    return Gathered(offsets=offsets, notes=tuple(dict.fromkeys(notes)))


def _visit(workspace: Workspace, host: str, rows: Sequence[RunRow]) -> Offset:
    """Runs in a thread of its own and touches no ledger."""
    with connect(workspace.inventory.host(host), connect_timeout_s=GLANCE_TIMEOUT_S) as transport:
        offset = remote.clock(transport)
        for row in rows:
            folder = workspace.folder(row.run_id)
            if not is_settled(row) and not folder.is_starting:
                catch_up(transport, folder)
        return offset


def _kept(workspace: Workspace, rows: Iterable[RunRow]) -> list[Offset]:
    return [offset for row in rows for offset in clocks.kept(workspace.folder(row.run_id).notes())]


def _is_worth_asking(row: RunRow, known: Iterable[Offset]) -> bool:
    span = _span(row)
    return not is_settled(row) or clocks.is_worth_asking(clocks.best(known, *span), *span, time.time())


def _span(row: RunRow) -> tuple[float, float]:
    """Returns when the run was there, by this machine's clock; how long it took its host's clock says."""
    if not is_settled(row):
        return row.created_t, time.time()
    ended_t, started_t = row.ended_t, row.started_t
    took_s = 0.0 if ended_t is None or started_t is None else max(0.0, ended_t - started_t)
    return row.created_t, row.created_t + took_s


def _notes(
    host: str, rows: Iterable[RunRow], offsets: Mapping[str, Offset | None], why_not: str | None
) -> Iterable[str]:
    if why_not is not None:
        yield f"{host}: {why_not}; showing what is mirrored here"
    found = [(offset, _span(row)) for row in rows if (offset := offsets[row.run_id]) is not None]
    if not found:
        yield f"clock of {host} is not known: its lines stand by its own times"
    for offset, span in clocks.least_sure(found):
        yield f"clock of {host}: {clocks.shown(offset, *span)}"
