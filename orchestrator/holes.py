"""Where a mirror lacks records because the run's limit had removed them on the host before they came.

The host says so with a stub: the last seal line of what is gone, kept beside the segments as ``000010.cut``.
It stands for segment 10 and all before it that is not here: the rest of the last segment that is, and the
whole ones after that. A `Hole` names exactly what is missing. Only reads.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.conversation import Cursor
from orchestrator.errors import RecordsAltered
from orchestrator.outcome import MISSING
from orchestrator.run_folder import Record, RunFolder
from orchestrator.supervisor.cuts import MOST_STUB_BYTES, stub_indexes, stub_name
from orchestrator.supervisor.seals import SEAL_LINE, SealChecker

READ_BYTES = 1024 * 1024
MOST_CUT_SEGMENTS = 1_000_000  # at the smallest a limit allows, two terabytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Hole:
    """Records ``first`` to ``last``: from ``start``, after the last whole line here, to ``through``'s end.

    ``size_bytes`` is None while the segment after them is not here. ``t`` and ``sha256`` are those of the
    last seal among them, whose line ``stub`` is.
    """

    start: Cursor
    through: int
    first: int
    last: int
    size_bytes: int | None
    t: float
    sha256: str
    stub: bytes

    def as_record(self) -> Record:
        """Returns what readers find in its place."""
        return {
            "seq": self.first,
            "t": self.t,
            "kind": MISSING,
            "last": self.last,
            "bytes": self.size_bytes,
            "start": self.start.as_json(),
            "through": self.through,
        }

    def checker(self, run_id: str, end: int = 0) -> SealChecker:
        """Returns one that checks what follows; its offsets count from ``end``."""
        checker = SealChecker(run_id, start=end - len(self.stub), resume=True)
        checker.feed(self.stub)
        return checker


def stub_path(folder: RunFolder, index: int) -> Path:
    """Returns a stub's path."""
    return folder.records / stub_name(index)


def is_complete(folder: RunFolder, segment: int) -> bool:
    """Nothing will be added to a segment: others follow, or a hole."""
    return folder.segment(segment + 1).exists() or stub_after(folder, segment) is not None


def stub_after(folder: RunFolder, segment: int) -> int | None:
    """Returns the index of the stub that goes on where the bytes of ``segment`` end here, if one does."""
    path = stub_path(folder, segment)
    if path.exists() and not _ends_with(folder.segment(segment), path.read_bytes()):
        return segment
    if folder.segment(segment + 1).exists():
        return None
    return next((index for index in stub_indexes(str(folder.records)) if index > segment), None)


def hole_after(folder: RunFolder, segment: int) -> Hole | None:
    """Returns the hole that begins where the bytes of ``segment`` end here; None where none does.

    Raises:
        RecordsAltered: the stub is none, or does not fit what is here.
    """
    through = stub_after(folder, segment)
    if through is None:
        return None
    while _last_line(folder.segment(through + 1))[1] == b"":  # between two holes, a scrap is no record
        further = stub_after(folder, through + 1)
        if further is None:
            break
        through = further
    line = stub_path(folder, through).read_bytes()[:MOST_STUB_BYTES]
    seal, t = SEAL_LINE.fullmatch(line), _time(line)
    if seal is None or t is None or through - segment > MOST_CUT_SEGMENTS:
        raise RecordsAltered(f"run {folder.run_id}: {stub_path(folder, through)} is no seal")
    start, before = _last_whole_line(folder, segment)
    if before is None:  # a run's first record is never cut
        return None
    first, last = before + 1, int(seal.group(2))
    if last < first:
        raise RecordsAltered(
            f"run {folder.run_id}: {stub_path(folder, through)} is seal {last}, but record {before} is here"
        )
    here, there = _begin(folder, start.segment), _begin(folder, through + 1)
    size = None if here is None or there is None else there - here - start.offset
    if size is not None and size <= 0:
        following = folder.segment(through + 1)
        raise RecordsAltered(f"run {folder.run_id}: {following} does not follow what is here")
    return Hole(
        start=start,
        through=through,
        first=first,
        last=last,
        size_bytes=size,
        t=t,
        sha256=seal.group(4).decode(),
        stub=line,
    )


def cut_index(record: Record) -> int:
    """Returns the segment that a ``cut`` record tells of; older ones, but the first, went before it."""
    index = record.get("segment")
    return index if type(index) is int else 0


def mirrored(folder: RunFolder, start: Cursor) -> Iterator[bytes | Hole]:
    """Yields the mirror's bytes from ``start`` on in pieces, and each hole in its place.

    Raises:
        RecordsAltered: as `hole_after`.
    """
    index, offset = start.segment, start.offset
    while True:
        try:
            with folder.segment(index).open("rb") as file:
                file.seek(offset)
                while data := file.read(READ_BYTES):
                    yield data
        except FileNotFoundError:
            return
        hole = hole_after(folder, index)
        if hole is not None:
            yield hole
        index, offset = (index if hole is None else hole.through) + 1, 0


def _time(line: bytes) -> float | None:
    try:
        return float(json.loads(line)["t"])
    except (ValueError, KeyError, TypeError):
        return None


def _begin(folder: RunFolder, segment: int) -> int | None:
    """Returns where a segment begins in the run's bytes, as its first record says."""
    if segment == 0:
        return 0
    try:
        with folder.segment(segment).open("rb") as file:
            line = file.readline(READ_BYTES)
        begin: Any = json.loads(line)["at"] if line.endswith(b"\n") else None
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    return begin if type(begin) is int else None


def _last_whole_line(folder: RunFolder, segment: int) -> tuple[Cursor, int | None]:
    """Returns the place after the last whole line up to the end of ``segment``, and its record's number."""
    for index in range(segment, -1, -1):
        end, line = _last_line(folder.segment(index))
        if line:
            try:
                return Cursor(segment=index, offset=end), int(json.loads(line)["seq"])
            except (ValueError, KeyError, TypeError) as error:
                path = folder.segment(index)
                raise RecordsAltered(f"run {folder.run_id}: {path} ends with what is no record") from error
    return Cursor(), None


def _last_line(path: Path) -> tuple[int, bytes]:
    """Returns the last whole line of a file and the offset after it; nothing where there is none."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return 0, b""
    with file:
        size, data = file.seek(0, os.SEEK_END), b""
        want = 64 * 1024
        while True:
            begin = max(0, size - want)
            file.seek(begin)
            data = file.read(size - begin)
            end = data.rfind(b"\n") + 1
            before = data.rfind(b"\n", 0, max(0, end - 1)) + 1
            if not begin or before:
                return begin + end, data[before:end]
            want *= 4


def _ends_with(path: Path, line: bytes) -> bool:
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - len(line)))
            return file.read() == line
    except FileNotFoundError:
        return False
