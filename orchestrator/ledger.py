"""The index of every run that this controller knows: one row each, in SQLite.

Knows how to store, find and change rows while other processes do the same; the file and its schema are
`ledger_file`'s. What a state means is lifecycle's business; what a run wrote stands in its records, from
which rows can be made again. The values of a job's environment may be secrets and are never stored, only
their names.

Writers queue: each change is one ``BEGIN IMMEDIATE`` transaction that waits up to `BUSY_TIMEOUT_S` for its
turn. Rows are numbered as they are inserted, and "recent" and "last" mean that order; clocks of a controller
can be set back. A `Ledger` belongs to the thread that opened it.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self, TypedDict, Unpack

from orchestrator.errors import StorageError, UnknownName
from orchestrator.ledger_file import REBUILD, connect, transaction, translated, use
from orchestrator.lifecycle import State, check_transition

MOST_FOUND = 20
MASK = "***"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRow:
    """One run; times are seconds since the epoch, ``…_t`` and ``pid`` are None until known.

    ``is_adopted``: another controller started it, and this one found it on its host.
    """

    run_id: str
    group_id: str
    retry_of: str | None = None
    experiment: str
    profile: str | None = None
    host: str
    bundle: str
    commit_id: str | None = None
    dirty: bool = False
    state: State
    verdict: str | None = None
    exit_code: int | None = None
    signal: int | None = None
    reason: str | None = None
    created_t: float
    started_t: float | None = None
    ended_t: float | None = None
    pid: int | None = None
    is_adopted: bool = False
    job: dict[str, Any]


class RunChanges(TypedDict, total=False):
    """What may change in a row after it was inserted."""

    state: State
    verdict: str | None
    exit_code: int | None
    signal: int | None
    reason: str | None
    started_t: float | None
    ended_t: float | None
    pid: int | None


_COLUMNS = tuple(item.name for item in fields(RunRow))
_CHANGING = frozenset(RunChanges.__annotations__)
_SELECT = f"SELECT {', '.join(_COLUMNS)} FROM runs "  # noqa: S608  (our own column names)
_INSERT = f"INSERT INTO runs ({', '.join(_COLUMNS)}) VALUES ({', '.join('?' * len(_COLUMNS))})"  # noqa: S608
_ADOPT = _INSERT + " ON CONFLICT (run_id) DO NOTHING"
_GET = _SELECT + "WHERE run_id = ?"
_RECENT = _SELECT + "ORDER BY number DESC LIMIT ?"
_RECENT_ON_HOST = _SELECT + "WHERE host = ? ORDER BY number DESC LIMIT ?"
_IS_OPEN = "state IN ('created', 'starting', 'queued', 'running', 'lost')"  # as the index has it
_OPEN = _SELECT + f"WHERE {_IS_OPEN} ORDER BY number"
_OF_GROUP = _SELECT + "WHERE group_id = ? ORDER BY number"
_LAST = _SELECT + (  # what was prepared for a run is not the last that somebody asked for
    "WHERE NOT is_adopted AND (group_id = run_id OR json_extract(job, '$.prepares') IS NULL) "
    "ORDER BY number DESC LIMIT 1"
)
_AHEAD = (
    "SELECT count(*) FROM runs WHERE group_id = (SELECT group_id FROM runs WHERE run_id = ?1) "  # noqa: S608
    "AND host = (SELECT host FROM runs WHERE run_id = ?1) "
    f"AND number < (SELECT number FROM runs WHERE run_id = ?1) AND {_IS_OPEN}"
)
_MARK = (
    "UPDATE runs SET state = ?, verdict = NULL, reason = NULL, ended_t = NULL "
    "WHERE run_id = ? AND state IN (?, ?, ?, ?)"
)
_FIND = "SELECT run_id FROM runs WHERE run_id >= ? AND run_id < ? ORDER BY run_id LIMIT ?"
_FIND_GROUPS = (
    "SELECT DISTINCT group_id FROM runs WHERE group_id >= ? AND group_id < ? "
    "AND NOT EXISTS (SELECT 1 FROM runs AS own WHERE own.run_id = runs.group_id) ORDER BY group_id LIMIT ?"
)
_NOTE_UNREACHABLE = "INSERT INTO unreachable VALUES (?, ?) ON CONFLICT (host) DO NOTHING"
_UNREACHABLE_SINCE = "SELECT since_t FROM unreachable WHERE host = ?"


class Ledger:
    """An open ledger; also a context manager that closes it.

    Every method raises StorageError when the file cannot be read or written.
    """

    def __init__(self, path: Path, connection: sqlite3.Connection, use_fd: int) -> None:
        self.path = path
        self._connection = connection
        self._use_fd: int | None = use_fd

    @classmethod
    def open(cls, path: Path) -> Self:
        """Opens the ledger at ``path``, makes it (mode 0600) when there is none, and migrates an older one.

        Raises:
            StorageError: the folder cannot be written, or the file is damaged, not a ledger, or of a newer
            version.
        """
        use_fd = use(path)
        try:
            return cls(path, connect(path), use_fd)
        except BaseException:
            os.close(use_fd)
            raise

    def insert(self, *rows: RunRow) -> None:
        """Adds runs, all of them or none."""
        with self._transaction():
            for row in rows:
                self._connection.execute(_INSERT, _values(row))

    def adopt(self, rows: Iterable[RunRow]) -> list[str]:
        """Adds those runs that are not here yet, all at once; returns their ids."""
        with self._transaction():
            return [row.run_id for row in rows if self._connection.execute(_ADOPT, _values(row)).rowcount]

    def update(self, run_id: str, **changes: Unpack[RunChanges]) -> RunRow:
        """Changes a run and returns the row as it stands then.

        Raises:
            UnknownName: there is no such run.
            OrchError: the state cannot follow the one in the ledger; nothing was changed.
        """
        assert changes.keys() <= _CHANGING, f"not a column that changes: {changes.keys() - _CHANGING}"
        with self._transaction():
            row = self._get(run_id)
            if "state" in changes:
                check_transition(row.state, changes["state"])
            if changes:
                assignments = ", ".join(f"{name} = ?" for name in changes)
                values = [_stored(name, value) for name, value in changes.items()]
                self._connection.execute(f"UPDATE runs SET {assignments} WHERE run_id = ?", [*values, run_id])  # noqa: S608
            return self._get(run_id)

    def mark_running(self, run_id: str) -> None:
        """Notes that a run was seen alive, unless its end is known already; a lost run is found again."""
        self._mark(run_id, State.RUNNING, State.QUEUED)

    def mark_queued(self, run_id: str) -> None:
        """Notes that a run was seen waiting on its host, unless it is known to have come further."""
        self._mark(run_id, State.QUEUED, State.CREATED)

    def get(self, run_id: str) -> RunRow:
        """Returns a run by its whole id.

        Raises:
            UnknownName: there is no such run.
        """
        with translated(self.path):
            return self._get(run_id)

    def find(self, prefix: str) -> list[str]:
        """Returns the ids that begin with ``prefix``, in alphabetical order, at most `MOST_FOUND`."""
        return self._prefixed(_FIND, prefix)

    def recent(self, limit: int, host: str | None = None) -> list[RunRow]:
        """Returns the runs inserted last, newest first."""
        query, values = (_RECENT, (limit,)) if host is None else (_RECENT_ON_HOST, (host, limit))
        with translated(self.path):
            return [self._row(found) for found in self._connection.execute(query, values)]

    def last(self) -> RunRow | None:
        """Returns the run of this controller inserted last, None when there is none; one that prepared
        something for others does not count.
        """
        with translated(self.path):
            found = self._connection.execute(_LAST).fetchone()
        return None if found is None else self._row(found)

    def open_runs(self, host: str | None = None) -> list[RunRow]:
        """Returns the runs whose end is not known, lost ones included, in the order of their insertion."""
        with translated(self.path):
            rows = [self._row(found) for found in self._connection.execute(_OPEN)]
        return [row for row in rows if host in (None, row.host)]

    def group(self, group_id: str) -> list[RunRow]:
        """Returns the runs of a group in the order of their insertion; none for an id that is no group's."""
        if not _is_storable(group_id):
            return []
        with translated(self.path):
            return [self._row(found) for found in self._connection.execute(_OF_GROUP, (group_id,))]

    def find_groups(self, prefix: str) -> list[str]:
        """Returns the ids that begin with ``prefix`` and are groups' alone, as `find` does.

        A run that was started by itself is a group by its own id, and that names the run.
        """
        return self._prefixed(_FIND_GROUPS, prefix)

    def ahead_of(self, run_id: str) -> int:
        """Returns how many earlier runs of a run's group on its host have not ended, as far as is known."""
        with translated(self.path):
            return int(self._connection.execute(_AHEAD, (run_id,)).fetchone()[0])

    def note_unreachable(self, host: str) -> float:
        """Notes that a host could not be asked; returns since when that is so."""
        with self._transaction():
            self._connection.execute(_NOTE_UNREACHABLE, (host, time.time()))
            return float(self._connection.execute(_UNREACHABLE_SINCE, (host,)).fetchone()[0])

    def note_reachable(self, host: str) -> None:
        """Notes that a host answered; writes only when it did not before."""
        with translated(self.path):
            if self._connection.execute(_UNREACHABLE_SINCE, (host,)).fetchone() is None:
                return
        with self._transaction():
            self._connection.execute("DELETE FROM unreachable WHERE host = ?", (host,))

    def close(self) -> None:
        """Closes the file; may be called again."""
        self._connection.close()
        if self._use_fd is not None:
            os.close(self._use_fd)
            self._use_fd = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _mark(self, run_id: str, state: State, earlier: State) -> None:
        before = (State.CREATED, State.STARTING, State.LOST, earlier)
        with self._transaction():
            self._connection.execute(_MARK, [state, run_id, *before])

    def _prefixed(self, query: str, prefix: str) -> list[str]:
        if not _is_storable(prefix):
            return []
        with translated(self.path):
            found = self._connection.execute(query, (prefix, prefix + chr(0x10FFFF), MOST_FOUND))
            return [name for (name,) in found]

    def _get(self, run_id: str) -> RunRow:
        found = self._connection.execute(_GET, (run_id,)).fetchone() if _is_storable(run_id) else None
        if found is None:
            raise UnknownName(f"no run {run_id!r} in {self.path}; 'orch ps' lists those there are")
        return self._row(found)

    def _row(self, values: tuple[Any, ...]) -> RunRow:
        found = dict(zip(_COLUMNS, values, strict=True))
        try:
            found.update(
                state=State(found["state"]),
                dirty=bool(found["dirty"]),
                is_adopted=bool(found["is_adopted"]),
                job=json.loads(found["job"]),
            )
        except ValueError as error:
            raise StorageError(
                f"{self.path}: the row of run {found['run_id']!r} cannot be read: {error}; {REBUILD}"
            ) from error
        return RunRow(**found)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with translated(self.path), transaction(self._connection, "IMMEDIATE"):
            yield


def _values(row: RunRow) -> list[Any]:
    return [_stored(name, getattr(row, name)) for name in _COLUMNS]


def _stored(name: str, value: Any) -> Any:
    if name == "job":
        masked = {"env": dict.fromkeys(value["env"], MASK)} if "env" in value else {}
        return json.dumps({**value, **masked}, sort_keys=True)
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


def _is_storable(text: str) -> bool:
    """A command line's argument that is not UTF-8 holds surrogates, which no row can hold."""
    return not any("\ud800" <= character <= "\udfff" for character in text)
