"""The index of every run that this controller knows: one row each, in SQLite.

Knows how to store, find and change rows while other processes do the same, and how to bring an older file up
to date. What a state means is lifecycle's business; what a run wrote stands in its records, from which rows
can be made again. The values of a job's environment may be secrets and are never stored, only their names.

Writers queue: each change is one ``BEGIN IMMEDIATE`` transaction that waits up to `BUSY_TIMEOUT_S` for its
turn. Rows are numbered as they are inserted, and "recent" and "last" mean that order; clocks of a controller
can be set back. A `Ledger` belongs to the thread that opened it.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, Self, TypedDict, Unpack

from orchestrator.errors import StorageError, UnknownName
from orchestrator.lifecycle import State, check_transition

APPLICATION_ID = 0x6F726368  # "orch", in SQLite's file header
BUSY_TIMEOUT_S = 30.0
MOST_FOUND = 20
MASK = "***"

# Each entry takes the schema one version further; released entries are never edited.
MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        """
        CREATE TABLE runs (
            number     INTEGER PRIMARY KEY AUTOINCREMENT,
            run_id     TEXT NOT NULL UNIQUE,
            group_id   TEXT NOT NULL,
            retry_of   TEXT,
            experiment TEXT NOT NULL,
            profile    TEXT,
            host       TEXT NOT NULL,
            bundle     TEXT NOT NULL,
            commit_id  TEXT,
            dirty      INTEGER NOT NULL,
            state      TEXT NOT NULL,
            verdict    TEXT,
            exit_code  INTEGER,
            signal     INTEGER,
            reason     TEXT,
            created_t  REAL NOT NULL,
            started_t  REAL,
            ended_t    REAL,
            pid        INTEGER,
            job        TEXT NOT NULL
        )
        """,
        "CREATE INDEX runs_by_host ON runs (host, number)",
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRow:
    """One run; times are seconds since the epoch, ``…_t`` and ``pid`` are None until known."""

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
_GET = _SELECT + "WHERE run_id = ?"
_RECENT = _SELECT + "ORDER BY number DESC LIMIT ?"
_RECENT_ON_HOST = _SELECT + "WHERE host = ? ORDER BY number DESC LIMIT ?"
_NOT_ENDED = (State.CREATED, State.STARTING, State.LOST)
_MARK_RUNNING = (
    "UPDATE runs SET state = ?, verdict = NULL, reason = NULL, ended_t = NULL "
    "WHERE run_id = ? AND state IN (?, ?, ?)"
)
_FIND = "SELECT run_id FROM runs WHERE run_id >= ? AND run_id < ? ORDER BY run_id LIMIT ?"


class Ledger:
    """An open ledger; also a context manager that closes it.

    Every method raises StorageError when the file cannot be read or written.
    """

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path = path
        self._connection = connection

    @classmethod
    def open(cls, path: Path) -> Self:
        """Opens the ledger at ``path``, makes it (mode 0600) when there is none, and migrates an older one.

        Raises:
            StorageError: the folder cannot be written, or the file is damaged, not a ledger, or of a newer
            version.
        """
        with _translated(path):
            _create(path)
            connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
            try:
                _prepare(connection, path)
            except BaseException:
                connection.close()
                raise
        return cls(path, connection)

    def insert(self, row: RunRow) -> None:
        """Adds a run."""
        with self._transaction():
            self._connection.execute(_INSERT, [_stored(name, getattr(row, name)) for name in _COLUMNS])

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
        with self._transaction():
            self._connection.execute(_MARK_RUNNING, [State.RUNNING, run_id, *_NOT_ENDED])

    def get(self, run_id: str) -> RunRow:
        """Returns a run by its whole id.

        Raises:
            UnknownName: there is no such run.
        """
        with _translated(self.path):
            return self._get(run_id)

    def find(self, prefix: str) -> list[str]:
        """Returns the ids that begin with ``prefix``, in alphabetical order, at most `MOST_FOUND`."""
        if not _is_storable(prefix):
            return []
        with _translated(self.path):
            found = self._connection.execute(_FIND, (prefix, prefix + chr(0x10FFFF), MOST_FOUND))
            return [run_id for (run_id,) in found]

    def recent(self, limit: int, host: str | None = None) -> list[RunRow]:
        """Returns the runs inserted last, newest first."""
        query, values = (_RECENT, (limit,)) if host is None else (_RECENT_ON_HOST, (host, limit))
        with _translated(self.path):
            return [self._row(found) for found in self._connection.execute(query, values)]

    def last(self) -> RunRow | None:
        """Returns the run inserted last, None in an empty ledger."""
        return next(iter(self.recent(1)), None)

    def close(self) -> None:
        """Closes the file; may be called again."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _get(self, run_id: str) -> RunRow:
        found = self._connection.execute(_GET, (run_id,)).fetchone() if _is_storable(run_id) else None
        if found is None:
            raise UnknownName(f"no run {run_id!r} in {self.path}; 'orch ps' lists those there are")
        return self._row(found)

    def _row(self, values: tuple[Any, ...]) -> RunRow:
        found = dict(zip(_COLUMNS, values, strict=True))
        try:
            found.update(
                state=State(found["state"]), dirty=bool(found["dirty"]), job=json.loads(found["job"])
            )
        except ValueError as error:
            raise StorageError(
                f"{self.path}: the row of run {found['run_id']!r} cannot be read: {error}; {_SET_ASIDE}"
            ) from error
        return RunRow(**found)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with _translated(self.path), _transaction(self._connection, "IMMEDIATE"):
            yield


def _create(path: Path) -> None:
    """Makes an empty file that only its owner can read; SQLite gives its companions the same mode."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    with _transaction(connection, "DEFERRED"):  # what is read belongs together
        _check_owner(connection, path)
    _eventually(lambda: connection.execute("PRAGMA journal_mode = WAL"))
    if _pragma(connection, "user_version") == len(MIGRATIONS):
        return
    with _transaction(connection, "IMMEDIATE"):
        version = _check_owner(connection, path)
        for statements in MIGRATIONS[version:]:
            for statement in statements:
                connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")


def _check_owner(connection: sqlite3.Connection, path: Path) -> int:
    """Returns the schema version of a ledger, 0 for an empty file; refuses what else a file can be."""
    owner, version = _pragma(connection, "application_id"), _pragma(connection, "user_version")
    is_empty = connection.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,)
    if owner != APPLICATION_ID and not (is_empty and owner == 0 and version == 0):
        raise StorageError(
            f"{path}: this SQLite file belongs to another program; move it, or choose another folder"
        )
    if version > len(MIGRATIONS):
        raise StorageError(
            f"{path}: written by a newer orch (schema {version}, not {len(MIGRATIONS)}); update this one"
        )
    return version


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    return int(connection.execute(f"PRAGMA {name}").fetchone()[0])


@contextmanager
def _transaction(connection: sqlite3.Connection, kind: Literal["DEFERRED", "IMMEDIATE"]) -> Iterator[None]:
    connection.execute(f"BEGIN {kind}")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _eventually(action: Callable[[], object]) -> None:
    """Repeats what SQLite refuses at once, without its busy timeout, while another process does the same."""
    give_up_t = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            action()
        except sqlite3.OperationalError as error:
            if _code(error) != sqlite3.SQLITE_BUSY or time.monotonic() > give_up_t:
                raise
            time.sleep(0.02)
        else:
            return


def _stored(name: str, value: Any) -> Any:
    if name == "job":
        masked = {"env": dict.fromkeys(value["env"], MASK)} if "env" in value else {}
        return json.dumps({**value, **masked}, sort_keys=True)
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


def _is_storable(text: str) -> bool:
    """A command line's argument that is not UTF-8 holds surrogates, which no row can hold."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


_SET_ASIDE = "move it aside and orch begins a new one (the runs' records stay where they are)"

_ADVICE: dict[int, str] = {
    sqlite3.SQLITE_BUSY: f"another process kept it locked for {BUSY_TIMEOUT_S:.0f} s; try again",
    sqlite3.SQLITE_LOCKED: "another connection of this process keeps it locked",
    sqlite3.SQLITE_CANTOPEN: "check that its folder exists and that you may write there",
    sqlite3.SQLITE_READONLY: "you may not write it; check the owner and mode of the file and its folder",
    sqlite3.SQLITE_PERM: "you may not write it; check the owner and mode of the file and its folder",
    sqlite3.SQLITE_FULL: "make room on its disk and try again; nothing was changed",
    sqlite3.SQLITE_IOERR: "its disk fails or is full; check both and try again",
    sqlite3.SQLITE_CORRUPT: f"it is damaged; {_SET_ASIDE}",
    sqlite3.SQLITE_NOTADB: f"it is not a ledger, or damaged; {_SET_ASIDE}",
    sqlite3.SQLITE_CONSTRAINT: "the ledger holds that run already, or a value that it must have is missing",
}


def _code(error: sqlite3.Error) -> int:
    """Returns SQLite's primary result code; errors of the Python module itself have none."""
    return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    """Turns what SQLite and the file system raise into StorageError."""
    try:
        yield
    except sqlite3.Error as error:
        advice = _ADVICE.get(_code(error), f"if this stays so, {_SET_ASIDE}")
        raise StorageError(f"{path}: {error}; {advice}") from error
    except OSError as error:
        raise StorageError(
            f"{path}: cannot be opened: {error.strerror}; check the folder's owner and mode"
        ) from error
