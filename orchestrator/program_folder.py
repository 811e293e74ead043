"""What running a payload's own programs needs on this disk, by bundle: its code, and answers that were given.

``<home>/estimates/<bundle-id>/`` holds code/ (the bundle's files, hashed at each use), answers/ and locks.
Whoever uses one holds its lock shared. With each new one those that were used longest ago go, when they are
too many or too large.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from orchestrator.bundle import Bundle, ObjectStore
from orchestrator.errors import StorageError
from orchestrator.folders import make_private
from orchestrator.supervisor.locks import is_at, take
from orchestrator.text import printable

__all__ = ["MOST_ANSWERS", "MOST_BUNDLES", "ProgramFolder"]

MOST_BUNDLES = 16
MOST_BYTES = 2 * 1024**3
MOST_ANSWERS = 2000
MOST_ANSWER_BYTES = 8 * 1024**2
PATIENCE_S = 60.0
SCRATCH_S = 3600.0
_BYTE_CODE = "__pycache__"


class ProgramFolder:
    """A bundle's place while it is used; `open` makes it."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self.code = path / "code"
        self._answers = path / "answers"
        self._lock = lock

    @classmethod
    @contextmanager
    def open(cls, home: Path, bundle: Bundle, store: ObjectStore) -> Iterator[ProgramFolder]:
        """Puts the bundle's code there unless it is, unaltered, and keeps others from removing it.

        Raises:
            StorageError: this disk does not take it, or the object store lacks some of the code.
        """
        path = home / "estimates" / bundle.id
        try:
            lock = _locked(path)
            try:
                folder = cls(path, lock)
                folder._place(bundle, store)
                yield folder
            finally:
                os.close(lock)
        except OSError as error:
            raise StorageError(f"{printable(str(path))}: cannot be used: {error}") from error

    def answer(self, key: str, most_s: float | None = None) -> bytes | None:
        """Returns what was kept under ``key``, if that is no longer ago than ``most_s``."""
        try:
            with (self._answers / key).open("rb") as file:
                is_old = most_s is not None and time.time() - os.fstat(file.fileno()).st_mtime > most_s
                return None if is_old else file.read(MOST_ANSWER_BYTES)
        except FileNotFoundError:
            return None

    def keep(self, key: str, answer: bytes) -> None:
        """Keeps an answer, the newest `MOST_ANSWERS` of them."""
        make_private(self._answers)
        fd, temporary = tempfile.mkstemp(dir=self._answers, prefix=".")
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(answer)
            Path(temporary).rename(self._answers / key)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        for old in _newest(self._answers)[MOST_ANSWERS:]:
            old.unlink(missing_ok=True)

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """Yields an empty folder, and removes it with all that is in it."""
        with tempfile.TemporaryDirectory(
            dir=self.path, prefix="scratch-", ignore_cleanup_errors=True
        ) as made:
            yield Path(made)

    def _place(self, bundle: Bundle, store: ObjectStore) -> None:
        os.utime(self.path / "lock")
        self._sweep()
        if _is_as_shipped(self.code, bundle):
            return
        writing = os.open(
            self.path / "writing.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
        )
        try:
            _take(writing, self.path, exclusive=True)
            if not _is_as_shipped(self.code, bundle):
                self._write(bundle, store)
        finally:
            os.close(writing)
        with suppress(OSError):  # housekeeping: the next one tries again
            _remove_oldest(self.path.parent, self.path)

    def _sweep(self) -> None:
        """Removes what was left by an orch that was killed: no run of a program takes that long."""
        for left in self.path.glob("scratch-*"):
            with suppress(OSError):
                if time.time() - left.stat().st_mtime > SCRATCH_S:
                    shutil.rmtree(left, ignore_errors=True)

    def _write(self, bundle: Bundle, store: ObjectStore) -> None:
        """Writes the code whole and then puts it there: somebody may still run what was altered."""
        with self.scratch() as scratch:
            _write(scratch / "new", bundle, store)
            with suppress(FileNotFoundError):
                self.code.rename(scratch / "old")
            (scratch / "new").rename(self.code)


def _locked(path: Path) -> int:
    """Returns the lock, held shared, of a folder that is there: another process may remove it just before."""
    while True:
        make_private(path)
        with suppress(FileNotFoundError):
            lock = path / "lock"
            fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                _take(fd, path, exclusive=False)
                if is_at(fd, str(lock)):
                    fd, held = -1, fd
                    return held
            finally:
                if fd >= 0:
                    os.close(fd)


def _take(fd: int, path: Path, *, exclusive: bool) -> None:
    if not take(fd, exclusive=exclusive, patience_s=PATIENCE_S):
        raise StorageError(
            f"{printable(str(path))}: another orch process uses it; try again when it has ended"
        )


def _is_as_shipped(code: Path, bundle: Bundle) -> bool:
    """Tells whether the files there are the bundle's and no others but byte code, which Python writes."""
    found = set()
    for parent, folders, names in os.walk(code):
        folders[:] = [name for name in folders if name != _BYTE_CODE]
        found |= {str(Path(parent, name).relative_to(code)) for name in names}
    if found != {entry.path for entry in bundle.entries}:
        return False
    return all(_sha256(code / entry.path) == entry.sha256 for entry in bundle.entries)


def _sha256(path: Path) -> str:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ""
    with os.fdopen(fd, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write(code: Path, bundle: Bundle, store: ObjectStore) -> None:
    for entry in bundle.entries:
        target = code / entry.path
        make_private(target.parent)
        mode = 0o700 if entry.mode & 0o100 else 0o600
        with (
            store.open_checked(entry.sha256) as source,
            os.fdopen(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file,
        ):
            shutil.copyfileobj(source, file)
    make_private(code)


def _remove_oldest(root: Path, but: Path) -> None:
    """Lets the bundles go that were used longest ago, as far as they are too many or too large together."""
    size_bytes = 0
    for number, folder in enumerate(_newest(root, mark="lock")):
        size_bytes += _size_bytes(folder)
        if folder != but and (number >= MOST_BUNDLES or size_bytes > MOST_BYTES):
            _remove(folder)


def _size_bytes(folder: Path) -> int:
    """Returns the size of what is in a folder, as far as it stays there meanwhile: others use it."""
    size_bytes = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                size_bytes += Path(parent, name).lstat().st_size
    return size_bytes


def _remove(folder: Path) -> None:
    """Removes a bundle's folder, unless it is in use."""
    with suppress(FileNotFoundError):
        fd = os.open(folder / "lock", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if take(fd, exclusive=True):
                aside = folder.with_name(f".gone-{secrets.token_hex(6)}")
                folder.rename(aside)
                shutil.rmtree(aside, ignore_errors=True)
        finally:
            os.close(fd)


def _newest(folder: Path, mark: str = "") -> list[Path]:
    """Returns what is in a folder, the newest first; of a folder its ``mark`` has the time."""
    aged = []
    for path in folder.iterdir():
        if not path.name.startswith("."):
            with suppress(FileNotFoundError):
                aged.append(((path / mark).stat().st_mtime_ns, path))
    return [path for _, path in sorted(aged, reverse=True)]
