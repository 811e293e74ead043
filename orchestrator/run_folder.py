"""A run's folder on this machine: where its mirror lies, what the controller alone knows, who is at work.

``<home>/runs/<run-id>/`` holds records/ (the mirror), observations.jsonl, prediction.json, pull.lock,
start.lock and cancel. An observation is one JSON line; each seal that was checked on arrival is one, and so
pinned.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

from orchestrator.errors import StorageError
from orchestrator.supervisor.cuts import segment_name
from orchestrator.supervisor.locks import is_held

Record = dict[str, Any]

NOTED_KINDS = ("created", "adopted")  # which hold the job
REMOVED_THERE = "removed_there"
FETCHED = "fetched"  # a file of the run's artifacts
COLLECTED = "collected"  # the artifacts that its experiment names
KEPT_KINDS = frozenset(
    {
        *("created", "adopted", "started", "cancel", "verdict", "finding", "clock", "removed"),
        *(REMOVED_THERE, FETCHED, COLLECTED),
    }
)

START_POLL_S = 0.05
_SEAL_MARK = b'"kind": "seal"'  # as `RunFolder.observe` writes it
_MARK_WITHIN_BYTES = 48


class RunFolder:
    """``<home>/runs/<run-id>/``: records/, observations.jsonl, pull.lock; made 0700 with the first write."""

    def __init__(self, home: Path, run_id: str) -> None:
        self.run_id = run_id
        self.path = home / "runs" / run_id
        self.records = self.path / "records"
        self.observations_path = self.path / "observations.jsonl"
        self.artifacts = self.path / "artifacts"

    def make(self) -> None:
        """Makes the folders that are not there, each of them private."""
        for folder in (self.path.parent, self.path, self.records):
            folder.mkdir(mode=0o700, exist_ok=True)

    def observe(self, kind: str, **fields: Any) -> None:
        """Appends what only the controller knows: one line, written whole.

        Raises:
            StorageError: the disk does not take it.
        """
        line = json.dumps({"t": round(time.time(), 6), "kind": kind, **fields}) + "\n"
        with self._storing(f"note {kind!r}"):
            self.make()
            fd = os.open(self.observations_path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
            with os.fdopen(fd, "ab", buffering=0) as file:
                size = file.tell()
                is_cut = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
                view = memoryview((b"\n" if is_cut else b"") + line.encode())
                while view:
                    view = view[file.write(view) :]

    def observations(self) -> Iterator[Record]:
        """Yields the observations that are there now, in order.

        A line cut by a crash or a full disk is passed over.
        """
        return (entry for line in self._observed_lines() if (entry := parse_observation(line)) is not None)

    def notes(self) -> Iterator[Record]:
        """Yields the same but for the pinned seals, which are nearly all of a long run's."""
        for line in self._observed_lines():
            if _SEAL_MARK in line[:_MARK_WITHIN_BYTES]:  # not parsed at all
                continue
            entry = parse_observation(line)
            if entry is not None and entry.get("kind") != "seal":
                yield entry

    def forget_seals(self) -> None:
        """Replaces the observations by those that stay when the records are removed on purpose."""
        kept = [entry for entry in self.notes() if entry.get("kind") in KEPT_KINDS]
        new = self.path / "observations.jsonl.new"
        lines = [json.dumps(entry) + "\n" for entry in (*kept, {"t": time.time(), "kind": "removed"})]
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
        new.rename(self.observations_path)

    def keep_prediction(self, prediction: Record) -> None:
        """Keeps what was predicted of the run before it began, in a file that is replaced whole.

        Raises:
            StorageError: the disk does not take it.
        """
        new = self.path / "prediction.json.new"
        with self._storing("keep what was predicted"):
            self.make()
            with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                json.dump(prediction, file)
            new.rename(self.path / "prediction.json")

    @property
    def has_prediction(self) -> bool:
        """Something was predicted of the run before it began."""
        return (self.path / "prediction.json").exists()

    @property
    def prediction(self) -> Record | None:
        """What `keep_prediction` kept; None where there is nothing, or nothing whole."""
        try:
            kept = json.loads((self.path / "prediction.json").read_bytes())
        except (OSError, ValueError, RecursionError):
            return None
        return kept if isinstance(kept, dict) else None

    @property
    def was_removed(self) -> bool:
        """Its records were removed here on purpose; of what they said the ledger keeps the verdict."""
        return any(entry.get("kind") == "removed" for entry in self.notes())

    @property
    def was_removed_there(self) -> bool:
        """Its folder on its host was removed from here on purpose."""
        return any(entry.get("kind") == REMOVED_THERE for entry in self.notes())

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Marks the run as being started from here: nobody judges it meanwhile.

        Raises:
            StorageError: the disk does not take it.
        """
        with self._storing("mark a run as being started"):
            self.make()
            fd = os.open(self.path / "start.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def end_starting(self) -> None:
        """Ends the mark that `starting_together` has put on this run, before those of the others."""
        (self.path / "start.lock").unlink(missing_ok=True)

    def request_cancel(self, grace_s: float | None) -> None:
        """Leaves word for whoever starts the run to end it as soon as its host has it.

        Raises:
            StorageError: the disk does not take it.
        """
        with self._storing("leave word to cancel a run"):
            fd = os.open(self.path / "cancel", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(fd, "w") as file:
                json.dump({"grace_s": grace_s}, file)

    @property
    def cancel_request(self) -> dict[str, Any] | None:
        """The word that was left, ``{"grace_s": …}``; None when there is none."""
        try:
            request: dict[str, Any] = json.loads((self.path / "cancel").read_text("utf-8"))
        except (FileNotFoundError, ValueError):
            return None
        return request

    def drop_cancel_request(self) -> None:
        """Takes the word away that was left, once it is carried out."""
        (self.path / "cancel").unlink(missing_ok=True)

    def link_start(self, first: RunFolder) -> None:
        """Puts the mark that ``first`` has on this run too.

        Raises:
            StorageError: the disk does not take it.
        """
        with self._storing("mark a run as being started"):
            self.make()
            os.link(first.path / "start.lock", self.path / "start.lock")

    @property
    def is_starting(self) -> bool:
        """Somebody on this machine is starting the run now."""
        return is_held(str(self.path / "start.lock"))

    def wait_for_start(self, leaving: Event | None = None) -> None:
        """Returns when nobody on this machine is starting the run any more, or ``leaving`` is set.

        It does not queue for the lock: that is one for a whole group, whose other runs may take longer.
        """
        leaving = leaving or Event()
        while self.is_starting and not leaving.wait(START_POLL_S):
            pass

    def stopped_puller(self) -> int | None:
        """Returns the process id of a command here that pulls the run and is stopped (SIGSTOP, Ctrl-Z)."""
        try:
            inode = (self.path / "pull.lock").stat().st_ino
            locks = [line.split() for line in Path("/proc/locks").read_text("ascii").splitlines()]
            for lock in locks:
                if lock[1] == "FLOCK" and lock[5].endswith(f":{inode}"):
                    state = Path(f"/proc/{int(lock[4])}/stat").read_text().rpartition(")")[2].split()[0]
                    return int(lock[4]) if state in ("T", "t") else None
        except (OSError, ValueError, IndexError):
            return None
        return None

    def segment(self, index: int) -> Path:
        """Returns a segment's path."""
        return self.records / segment_name(index)

    def _observed_lines(self) -> Iterator[bytes]:
        """Yields the lines that are there when the first is asked for, one in memory at a time."""
        try:
            file = self.observations_path.open("rb")
        except FileNotFoundError:
            return
        with file:
            left = os.fstat(file.fileno()).st_size
            while left > 0 and (line := file.readline(left)):
                left -= len(line)
                yield line

    @contextmanager
    def _storing(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StorageError(f"{self.path}: cannot {what}: {error}") from error


@contextmanager
def starting_together(folders: Sequence[RunFolder]) -> Iterator[None]:
    """Marks many runs as `RunFolder.starting` does, with one lock that is linked into each folder."""
    first, *others = folders
    with first.starting():
        for folder in others:
            folder.link_start(first)
        yield


def parse_observation(line: bytes) -> Record | None:
    """Returns a line of observations.jsonl; None where it is none."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) else None
