"""The local copy of a run's records: byte for byte what the host wrote, checked seal by seal as it arrives.

`Mirror` appends what one puller receives, compares whatever it already has, and pins each seal. Nothing here
is ever cut or written twice; what does not agree is a finding.
"""

from __future__ import annotations

import fcntl
import os
from typing import NoReturn, Self

from orchestrator.errors import ProtocolError, RecordsAltered, StorageError
from orchestrator.remote import Cursor, Piece
from orchestrator.run_folder import RunFolder
from orchestrator.supervisor.seals import SealBroken, SealChecker


class Mirror:
    """The writing side; a context manager that holds the run's pull lock, so that there is one puller."""

    def __init__(self, folder: RunFolder, host: str, lock_fd: int) -> None:
        self._folder = folder
        self._host = host
        self._lock_fd = lock_fd
        self._fd: int | None = None
        self._open_index = -1
        self.cursor = Cursor()
        self._before = 0
        self._checker = SealChecker(folder.run_id)
        self._pins = folder.pins()
        self._resume()

    @classmethod
    def acquire(cls, folder: RunFolder, host: str) -> Self | None:
        """Opens the mirror for writing, or returns None while another process pulls this run.

        Raises:
            StorageError: the folder cannot be written.
        """
        try:
            folder.make()
            fd = os.open(folder.path / "pull.lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise StorageError(f"{folder.path}: cannot mirror a run here: {error}") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return cls(folder, host, fd)
        except BlockingIOError:
            os.close(fd)
            return None
        except BaseException:
            os.close(fd)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close_segment()
        os.close(self._lock_fd)

    def append(self, piece: Piece) -> None:
        """Takes the next bytes; those that are here already are compared, the rest is written.

        Raises:
            RecordsAltered: the host's bytes are not those it sent before, or do not match their seal.
            ProtocolError: bytes between are missing.
            StorageError: this disk does not take them; what it took stays and is compared later.
        """
        if piece.cursor.segment != self.cursor.segment:
            if piece.cursor != Cursor(segment=self.cursor.segment + 1):
                raise self._gap(piece.cursor)
            self._before += self.cursor.offset
            self.cursor = piece.cursor
        if piece.cursor.offset != self.cursor.offset:
            raise self._gap(piece.cursor)
        size = self._open_segment(piece.cursor.segment)
        have = min(max(size - piece.cursor.offset, 0), len(piece.data))
        assert self._fd is not None
        if have and os.pread(self._fd, have, piece.cursor.offset) != piece.data[:have]:
            self._find(
                f"segment {piece.cursor.segment} differs from the mirror after byte {piece.cursor.offset}"
            )
        self._write(memoryview(piece.data)[have:])
        self.cursor = Cursor(segment=piece.cursor.segment, offset=piece.cursor.offset + len(piece.data))
        self._check(piece.data)

    def compare_end(self, segment: int, size: int) -> None:
        """Notes when the host has less than the mirror: a finding, never a reason to cut.

        Raises:
            RecordsAltered: the host lost bytes.
        """
        here = self._folder.segment(segment + 1).exists() or self._size(segment) > size
        if here:
            lost = sum(self._size(index) for index in self._indexes() if index >= segment) - size
            self._find(f"the host lost {lost} bytes of this run's records; the mirror keeps them")

    def _resume(self) -> None:
        """Starts after the last pinned seal that is here: a mirror that a crash cut short is filled again.

        Raises:
            RecordsAltered: what stands in a pinned seal's place is not that seal.
        """
        for pin in reversed(list(self._folder.pins().values())):
            segment, start, end = pin["segment"], pin["line_start"], pin["line_end"]
            if self._size(segment) < end:
                continue
            line = self._read(segment, start, end)
            if f'"sha256":"{pin["sha256"]}"}}\n'.encode() not in line:
                self._find(f"the mirror was altered: seal {pin['seq']} is not the one that was pinned")
            self.cursor = Cursor(segment=segment, offset=end)
            self._before = sum(self._size(index) for index in self._indexes() if index < segment)
            self._checker = SealChecker(self._folder.run_id, start=self._before + start, resume=True)
            self._checker.feed(line)
            return

    def _check(self, data: bytes) -> None:
        try:
            seals = self._checker.feed(data)
        except SealBroken as broken:
            self._find(f"{broken} (from byte {broken.at} of the run on)")
        for seal in seals:
            pin = self._pins.get(seal.seq)
            if pin is not None and pin["sha256"] != seal.sha256:
                self._find(f"the host's seal {seal.seq} is not the one that was pinned")
            if pin is not None:
                continue
            end = seal.end - self._before
            self._folder.observe(
                "seal",
                seq=seal.seq,
                sha256=seal.sha256,
                segment=self.cursor.segment,
                line_start=end - seal.line_bytes,
                line_end=end,
            )

    def _find(self, message: str) -> NoReturn:
        self._folder.observe("finding", message=message)
        raise RecordsAltered(f"{self._host}: run {self._folder.run_id}: {message}; nothing was overwritten")

    def _gap(self, cursor: Cursor) -> ProtocolError:
        message = f"the records jump from {self.cursor} to {cursor}"
        return ProtocolError(message, host=self._host)

    def _open_segment(self, index: int) -> int:
        try:
            if index != self._open_index:
                self._close_segment()
                flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
                self._fd = os.open(self._folder.segment(index), flags, 0o600)
                self._open_index = index
            assert self._fd is not None
            return os.fstat(self._fd).st_size
        except OSError as error:
            raise self._disk(error) from error

    def _close_segment(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd, self._open_index = None, -1

    def _write(self, view: memoryview) -> None:
        assert self._fd is not None
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError as error:
            raise self._disk(error) from error

    def _disk(self, error: OSError) -> StorageError:
        return StorageError(
            f"{self._folder.path}: cannot write the mirror: {error}; "
            f"the run goes on, and `orch logs -f {self._folder.run_id}` continues here once there is space"
        )

    def _read(self, segment: int, start: int, end: int) -> bytes:
        try:
            with self._folder.segment(segment).open("rb") as file:
                file.seek(start)
                return file.read(end - start)
        except FileNotFoundError:
            return b""

    def _indexes(self) -> list[int]:
        return sorted(int(path.stem) for path in self._folder.records.glob("*.jsonl"))

    def _size(self, index: int) -> int:
        path = self._folder.segment(index)
        return path.stat().st_size if path.exists() else 0
