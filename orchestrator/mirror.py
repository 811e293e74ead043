"""The local copy of a run's records: byte for byte what the host wrote, checked seal by seal as it arrives.

`Mirror` appends what one puller receives, compares whatever it already has, and pins each seal. Nothing here
is ever cut or written twice; what does not agree is a finding. Of what the run's limit removed on the host it
keeps what is here, and the host's stub beside it.
"""

from __future__ import annotations

import fcntl
import os
from typing import NoReturn, Self

from orchestrator.conversation import Cursor, Cut, Piece
from orchestrator.errors import ProtocolError, RecordsAltered, StorageError
from orchestrator.holes import MOST_CUT_SEGMENTS, stub_after, stub_path
from orchestrator.pins import newest_pins
from orchestrator.run_folder import RunFolder
from orchestrator.supervisor.cuts import MOST_STUB_BYTES
from orchestrator.supervisor.seals import SEAL_LINE, SealBroken, SealChecker

READ_BYTES = 1024 * 1024
MOST_LINE_BYTES = 32 * 1024 * 1024  # four times what a supervisor's longest record has


class Mirror:
    """The writing side; a context manager that holds the run's pull lock, so that there is one puller."""

    def __init__(self, folder: RunFolder, host: str, lock_fd: int) -> None:
        self._folder = folder
        self._host = host
        self._lock_fd = lock_fd
        self._fd: int | None = None
        self._open_index = -1
        self.cursor = Cursor()
        self._base = 0  # where the segment begins, as the checker counts
        self._checker = SealChecker(folder.run_id)
        self._pins: dict[int, str] = {}  # of what a mirror that was cut short lacks, normally none
        self._newest_seq = -1
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

    def append(self, piece: Piece | Cut) -> None:
        """Takes the next bytes; those that are here already are compared, the rest is written.

        Raises:
            RecordsAltered: the host's bytes are not those it sent before, or do not match their seal.
            ProtocolError: bytes between are missing, or a record does not end.
            StorageError: this disk does not take them; what it took stays and is compared later.
        """
        self._move_to(piece.cursor)
        if isinstance(piece, Cut):
            self._skip(piece)
            return
        size = self._open_segment(piece.cursor.segment)
        have = min(max(size - piece.cursor.offset, 0), len(piece.data))
        assert self._fd is not None
        if have and os.pread(self._fd, have, piece.cursor.offset) != piece.data[:have]:
            self._find(
                f"segment {piece.cursor.segment} differs from the mirror after byte {piece.cursor.offset}"
            )
        self._write(memoryview(piece.data)[have:])
        self._advance(piece.data)

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
        for pin in newest_pins(self._folder):
            self._pins.setdefault(pin.seq, pin.sha256)
            if self._size(pin.segment) < pin.end:
                continue
            line = self._read(pin.segment, pin.start, pin.end)
            if f'"sha256":"{pin.sha256}"}}\n'.encode() not in line:
                self._find(f"the mirror was altered: seal {pin.seq} is not the one that was pinned")
            self.cursor = Cursor(segment=pin.segment, offset=pin.end)
            self._newest_seq = pin.seq
            self._checker = SealChecker(self._folder.run_id, start=pin.start, resume=True)
            self._checker.feed(line)
            return

    def _move_to(self, cursor: Cursor) -> None:
        if cursor.segment != self.cursor.segment:
            if cursor != Cursor(segment=self.cursor.segment + 1):
                raise self._gap(cursor)
            self._base += self.cursor.offset
            self.cursor = cursor
        if cursor.offset != self.cursor.offset:
            raise self._gap(cursor)

    def _advance(self, data: bytes) -> None:
        self.cursor = Cursor(segment=self.cursor.segment, offset=self.cursor.offset + len(data))
        self._check(data)

    def _skip(self, cut: Cut) -> None:
        """Goes on after what the host has no more, once all of it that is here is checked."""
        seal = SEAL_LINE.fullmatch(cut.stub) if len(cut.stub) <= MOST_STUB_BYTES else None
        if cut.cursor.segment == 0:
            raise ProtocolError("the first segment is said to be cut, which never is", host=self._host)
        if seal is None or cut.through - cut.cursor.segment > MOST_CUT_SEGMENTS:
            raise ProtocolError(f"the stub of segment {cut.through} is no seal", host=self._host)
        sha256, seq = seal.group(4).decode(), int(seal.group(2))
        if self._pins.get(seq, sha256) != sha256:
            self._find(f"the host's seal {seq} is not the one that was pinned")
        path = stub_path(self._folder, cut.through)
        if path.exists() and path.read_bytes() != cut.stub:
            self._find(f"the host's stub of segment {cut.through} is not the one it sent before")
        self._take_what_is_here(cut.through)
        at = self.cursor
        last_line = self._read(at.segment, max(0, at.offset - len(cut.stub)), at.offset)
        if at.segment > cut.through or last_line == cut.stub:
            return
        if seq <= self._newest_seq:
            self._find(f"the host's stub is seal {seq}, but seal {self._newest_seq} is here already")
        self._write_stub(cut)
        self._folder.observe("cut", **self.cursor.as_json(), through=cut.through, seq=seq, sha256=sha256)
        self._jump(cut.through, cut.stub)

    def _take_what_is_here(self, through: int) -> None:
        """Goes on as far as the mirror has the bytes, or a stub for them, up to the end of ``through``."""
        while self.cursor.segment <= through:
            segment, offset = self.cursor.segment, self.cursor.offset
            stub = stub_after(self._folder, segment)
            if data := self._read(segment, offset, offset + READ_BYTES):
                self._advance(data)
            elif stub is not None and stub <= through:
                self._jump(stub, stub_path(self._folder, stub).read_bytes())
            elif stub is None and segment < through and self._folder.segment(segment + 1).exists():
                self._move_to(Cursor(segment=segment + 1))
            else:
                return

    def _jump(self, through: int, stub: bytes) -> None:
        self._checker = SealChecker(self._folder.run_id, start=-len(stub), resume=True)
        self._checker.feed(stub)
        self._base = 0
        self.cursor = Cursor(segment=through + 1)

    def _write_stub(self, cut: Cut) -> None:
        path = stub_path(self._folder, cut.through)
        try:
            self._folder.make()
            new = path.with_name(f"{path.name}.new")
            with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(cut.stub)
                file.flush()
                os.fsync(file.fileno())  # an empty stub would count as an altered one ever after
            new.replace(path)
        except OSError as error:
            raise self._disk(error) from error

    def _check(self, data: bytes) -> None:
        try:
            seals = self._checker.feed(data)
        except SealBroken as broken:
            self._find(f"{broken} ({self._where(broken.at)})")
        if self._checker.line_bytes > MOST_LINE_BYTES:
            message = f"a record goes on for more than {MOST_LINE_BYTES} bytes, and no supervisor's does"
            raise ProtocolError(message, host=self._host)
        for seal in seals:
            self._newest_seq = seal.seq
            pinned = self._pins.pop(seal.seq, None)
            if pinned is not None and pinned != seal.sha256:
                self._find(f"the host's seal {seal.seq} is not the one that was pinned")
            if pinned is not None:
                continue
            end = seal.end - self._base
            self._folder.observe(
                "seal",
                seq=seal.seq,
                sha256=seal.sha256,
                segment=self.cursor.segment,
                line_start=end - seal.line_bytes,
                line_end=end,
            )

    def _where(self, at: int) -> str:
        segment, offset = self.cursor.segment, at - self._base
        return f"from byte {offset} of segment {segment} on" if offset >= 0 else f"up to segment {segment}"

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
