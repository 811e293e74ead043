"""The folder here into which files of a run are brought: nothing is written outside it or overwritten.

A file arrives in ``.part/`` under a name of ours, and takes its own name once its hash is right. Each step to
a file is taken from the descriptor of the folder above and follows no link. Only what was fetched from this
run, and is still as it was then, is replaced; which files these are stands in the run's observations.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from orchestrator.artifact_names import PARTS
from orchestrator.errors import OrchError
from orchestrator.remote_artifacts import Artifact
from orchestrator.run_folder import FETCHED, RunFolder

READ_BYTES = 1024 * 1024
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class NotPlaced(OrchError):
    """A file that does not get its place here; the message reads on after its name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fetched:
    """A file that was brought into the folder ``to``, as the host had it then."""

    to: str
    path: str
    size_bytes: int
    mtime_ns: int
    sha256: str


def fetched_files(folder: RunFolder) -> Iterator[Fetched]:
    """Yields what was noted of a run's fetched files, a file that was fetched anew each time."""
    for note in folder.notes():
        if note.get("kind") == FETCHED:
            values = (note.get(name) for name in ("to", "path", "size_bytes", "mtime_ns", "sha256"))
            to, path, size_bytes, mtime_ns, sha256 = values
            if isinstance(to, str) and isinstance(path, str) and isinstance(size_bytes, int):
                yield Fetched(
                    to=to, path=path, size_bytes=size_bytes, mtime_ns=mtime_ns or 0, sha256=str(sha256)
                )


def fetched_here(folder: RunFolder) -> dict[str, list[Fetched]]:
    """Returns, for each folder that a run's files were brought to, those that still stand there."""
    newest = {(fetched.to, fetched.path): fetched for fetched in fetched_files(folder)}
    found: dict[str, list[Fetched]] = {}
    for fetched in newest.values():
        if Path(fetched.to, fetched.path).is_file():
            found.setdefault(fetched.to, []).append(fetched)
    return found


def is_as_fetched(fetched: Fetched) -> bool:
    """Tells whether a fetched file that stands here is still what arrived."""
    with Path(fetched.to, fetched.path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == fetched.sha256


class Part:
    """A file that is arriving, and the hash of what there is of it."""

    def __init__(self, fd: int, name: str, artifact: Artifact) -> None:
        self.name = name
        self.artifact = artifact
        self._fd = fd
        self._total = hashlib.sha256()
        self.have_bytes = 0
        if os.fstat(fd).st_size > artifact.size_bytes:
            os.ftruncate(fd, 0)
        while piece := os.read(fd, READ_BYTES):
            self._total.update(piece)
            self.have_bytes += len(piece)

    @property
    def sha256(self) -> str:
        """The hash of the bytes that are here."""
        return self._total.hexdigest()

    def begin_at(self, start: int) -> None:
        """Keeps what is here when the rest follows it, and drops it otherwise."""
        if start != self.have_bytes:
            os.ftruncate(self._fd, start)
            os.lseek(self._fd, start, os.SEEK_SET)
            self._total, self.have_bytes = hashlib.sha256(), start

    def write(self, data: bytes) -> None:
        """Appends."""
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]
        self._total.update(data)
        self.have_bytes += len(data)

    def close(self) -> None:
        """Leaves what has arrived as it is; may be called more than once."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class ArtifactFolder:
    """``path``, opened and locked: one fetch at a time writes into it."""

    def __init__(self, path: Path, run: RunFolder, root: int, parts: int) -> None:
        self.path = path
        self._run = run
        self._root = root
        self._parts = parts
        self._known: dict[str, list[Fetched]] = {}
        for fetched in fetched_files(run):
            if fetched.to == str(path):
                self._known.setdefault(fetched.path, []).append(fetched)

    @classmethod
    @contextmanager
    def open(cls, path: Path, run: RunFolder, waiting: Callable[[], object]) -> Iterator[Self]:
        """Makes the folder, 0700, where it is not there; calls ``waiting`` before it waits for another fetch.

        Raises:
            OSError: it cannot be made, or is no folder.
        """
        run.make()
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        root = os.open(path, _FOLDER)
        try:
            if not _is_taken(root):
                waiting()
                fcntl.flock(root, fcntl.LOCK_EX)
            parts = _descend(root, [PARTS], is_made=True)
            try:
                yield cls(path, run, root, parts)
            finally:
                os.close(parts)
                with suppress(OSError):  # something in it is not whole yet
                    os.rmdir(PARTS, dir_fd=root)
        finally:
            os.close(root)

    def is_here(self, artifact: Artifact, names: Sequence[str]) -> Fetched | None:
        """Returns what was fetched before of a file that has not changed since, there or here.

        Raises:
            NotPlaced, OSError: something else stands in its place, which is not overwritten.
        """
        known = self._known.get(artifact.path, [])
        try:
            parent = _descend(self._root, names[:-1], is_made=False)
        except FileNotFoundError:
            return None
        try:
            sha256 = _sha256_of(parent, names[-1])
        finally:
            os.close(parent)
        if sha256 is None:
            return None
        if not known:
            raise NotPlaced("a file of that name that was not fetched from this run stands here already")
        if all(fetched.sha256 != sha256 for fetched in known):
            raise NotPlaced("it was changed here since it was fetched; move it away to fetch it again")
        last = known[-1]
        is_same = (last.size_bytes, last.mtime_ns) == (artifact.size_bytes, artifact.mtime_ns)
        return last if is_same and last.sha256 == sha256 else None

    def part(self, artifact: Artifact) -> Part:
        """Opens what has arrived of a file, which may be nothing."""
        name = part_name(self._run.run_id, artifact.path)
        return Part(self._open_part(name), name, artifact)

    def has_part(self, path: str) -> bool:
        """Some of a file has arrived, and not all."""
        try:
            os.stat(part_name(self._run.run_id, path), dir_fd=self._parts, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def drop(self, part: Part) -> None:
        """Throws away what has arrived of a file."""
        os.unlink(part.name, dir_fd=self._parts)

    def place(self, part: Part, names: Sequence[str]) -> Fetched:
        """Gives a file that is whole its name, and notes it.

        Raises:
            NotPlaced, OSError: its name cannot be had here.
        """
        artifact = part.artifact
        fetched = Fetched(
            to=str(self.path),
            path=artifact.path,
            size_bytes=artifact.size_bytes,
            mtime_ns=artifact.mtime_ns,
            sha256=part.sha256,
        )
        parent = _descend(self._root, names[:-1], is_made=True)
        try:
            self.is_here(artifact, names)  # nobody has put something there meanwhile
            self._note(fetched)
            os.rename(part.name, names[-1], src_dir_fd=self._parts, dst_dir_fd=parent)
        finally:
            os.close(parent)
        return fetched

    def _note(self, fetched: Fetched) -> None:
        """Before the rename: a note without a file costs another fetch, a file without one its place."""
        self._run.observe(
            FETCHED,
            to=fetched.to,
            path=fetched.path,
            size_bytes=fetched.size_bytes,
            mtime_ns=fetched.mtime_ns,
            sha256=fetched.sha256,
        )
        self._known.setdefault(fetched.path, []).append(fetched)

    def _open_part(self, name: str) -> int:
        try:
            status = os.stat(name, dir_fd=self._parts, follow_symlinks=False)
        except FileNotFoundError:
            return os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | _FILE, 0o600, dir_fd=self._parts)
        if stat.S_ISREG(status.st_mode) and status.st_nlink == 1 and status.st_uid == os.geteuid():
            return os.open(name, os.O_RDWR | _FILE, dir_fd=self._parts)
        raise NotPlaced(f"{self.path / PARTS / name} is none of orch's files; remove it")


def part_name(run_id: str, path: str) -> str:
    """Returns the name in ``.part/`` of what has arrived of a file; two runs may share a folder."""
    return hashlib.sha256(f"{run_id}\0{path}".encode()).hexdigest()[:40]


def _is_taken(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _descend(root: int, names: Sequence[str], *, is_made: bool) -> int:
    """Returns the descriptor of a folder below ``root``, which stays open."""
    fd = os.dup(root)
    for name in names:
        try:
            if is_made:
                _make(name, fd)
            below = os.open(name, _FOLDER, dir_fd=fd)
        finally:
            os.close(fd)
        fd = below
    return fd


def _make(name: str, parent: int) -> None:
    try:
        os.mkdir(name, 0o700, dir_fd=parent)
    except FileExistsError:
        return


def _sha256_of(parent: int, name: str) -> str | None:
    """Returns the hash of what stands there, None where nothing does.

    Raises:
        NotPlaced: a folder, a link or the like stands there.
    """
    try:
        fd = os.open(name, os.O_RDONLY | _FILE, dir_fd=parent)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise NotPlaced(f"something else of its name stands here: {error.strerror}") from error
    with os.fdopen(fd, "rb", buffering=0) as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise NotPlaced("a folder, or something else that is no file, of its name stands here")
        return hashlib.file_digest(file, "sha256").hexdigest()
