"""The ledger's file: SQLite, made private, brought up to date, and refused when it is not one of ours.

Knows the schema and its history; which rows are asked for and changed is `ledger`'s. What SQLite and the file
system raise is translated here.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from orchestrator.errors import StorageError
from orchestrator.folders import make_private
from orchestrator.supervisor.locks import take

APPLICATION_ID = 0x6F726368  # "orch", in SQLite's file header
BUSY_TIMEOUT_S = 30.0

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
    (
        "ALTER TABLE runs ADD COLUMN is_adopted INTEGER NOT NULL DEFAULT 0",
        "CREATE INDEX runs_by_group ON runs (group_id, number)",
        """
        CREATE INDEX runs_open ON runs (number)
        WHERE state IN ('created', 'starting', 'queued', 'running', 'lost')
        """,
        """
        CREATE TABLE unreachable (
            host    TEXT PRIMARY KEY,
            since_t REAL NOT NULL
        )
        """,
    ),
)


def use(path: Path) -> int:
    """Says that the ledger at ``path`` is in use for as long as the descriptor that it returns is open."""
    with translated(path):
        make_private(path.parent)
        fd = os.open(_use_path(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_SH)
        return fd


@contextmanager
def unused(path: Path) -> Iterator[None]:
    """Keeps every other process from opening the ledger.

    Raises:
        StorageError: one has it open.
    """
    fd = use(path)
    try:
        if not take(fd, exclusive=True):
            raise StorageError(f"{path}: another orch command has it open; end that one and try again")
        yield
    finally:
        os.close(fd)


def put_in_place(new: Path, path: Path) -> Path | None:
    """Puts a whole ledger in the place of the one that nobody uses at ``path``; returns where that is now."""
    with translated(path):
        kept = _free_name(path)
        for suffix in ("-wal", "-shm"):  # they belong to the old one, and would be read into the new
            with suppress(FileNotFoundError):
                path.with_name(path.name + suffix).rename(kept.with_name(kept.name + suffix))
        with suppress(FileNotFoundError):
            kept.hardlink_to(path)
        new.rename(path)
        return kept if kept.exists() else None


def connect(path: Path) -> sqlite3.Connection:
    """Opens the file at ``path``, makes it (mode 0600) when there is none, and migrates an older one.

    Raises:
        StorageError: the folder cannot be written, or the file is damaged, not a ledger, or of a newer
        version.
    """
    with translated(path):
        _create(path)
        connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
        try:
            _prepare(connection, path)
        except BaseException:
            connection.close()
            raise
    return connection


@contextmanager
def transaction(connection: sqlite3.Connection, kind: Literal["DEFERRED", "IMMEDIATE"]) -> Iterator[None]:
    """Holds one transaction, which an error undoes."""
    connection.execute(f"BEGIN {kind}")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """Turns what SQLite and the file system raise into StorageError."""
    try:
        yield
    except sqlite3.Error as error:
        advice = _ADVICE.get(_code(error), f"if this stays so, {REBUILD}")
        raise StorageError(f"{path}: {error}; {advice}") from error
    except OSError as error:
        raise StorageError(
            f"{path}: cannot be opened: {error.strerror}; check the folder's owner and mode"
        ) from error


def _use_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.use")


def _free_name(path: Path) -> Path:
    names = (path.with_name(f"{path.name}.old-{number}") for number in itertools.count(1))
    return next(name for name in names if not name.exists())


def _create(path: Path) -> None:
    """Makes an empty file that only its owner can read; SQLite gives its companions the same mode."""
    make_private(path.parent)
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    with transaction(connection, "DEFERRED"):  # what is read belongs together
        _check_owner(connection, path)
    _eventually(lambda: connection.execute("PRAGMA journal_mode = WAL"))
    if _pragma(connection, "user_version") == len(MIGRATIONS):
        return
    with transaction(connection, "IMMEDIATE"):
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


REBUILD = "`orch ledger rebuild` makes a new one from the runs' records and keeps this file beside it"

_ADVICE: dict[int, str] = {
    sqlite3.SQLITE_BUSY: f"another process kept it locked for {BUSY_TIMEOUT_S:.0f} s; try again",
    sqlite3.SQLITE_LOCKED: "another connection of this process keeps it locked",
    sqlite3.SQLITE_CANTOPEN: "check that its folder exists and that you may write there",
    sqlite3.SQLITE_READONLY: "you may not write it; check the owner and mode of the file and its folder",
    sqlite3.SQLITE_PERM: "you may not write it; check the owner and mode of the file and its folder",
    sqlite3.SQLITE_FULL: "make room on its disk and try again; nothing was changed",
    sqlite3.SQLITE_IOERR: "its disk fails or is full; check both and try again",
    sqlite3.SQLITE_CORRUPT: f"it is damaged; {REBUILD}",
    sqlite3.SQLITE_NOTADB: f"it is not a ledger, or damaged; {REBUILD}",
    sqlite3.SQLITE_CONSTRAINT: "the ledger holds that run already, or a value that it must have is missing",
}


def _code(error: sqlite3.Error) -> int:
    """Returns SQLite's primary result code; errors of the Python module itself have none."""
    return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
