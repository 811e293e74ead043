"""The views' way into a mirror: complete records in order, from a position on, checked where it matters.

A line that a crash or a full disk cut is not read until it is whole. Where the run's limit has removed
records before they came, a record of kind `outcome.MISSING` stands in their place. Nothing here writes.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from itertools import takewhile
from pathlib import Path

from orchestrator.conversation import Cursor
from orchestrator.errors import RecordsAltered
from orchestrator.holes import Hole, cut_index, hole_after, is_complete, mirrored
from orchestrator.outcome import MISSING
from orchestrator.pins import Pin, in_place, newest_pins, pins
from orchestrator.run_folder import Record, RunFolder
from orchestrator.supervisor.seals import SealBroken, SealChecker

READ_BYTES = 1024 * 1024
CHECKED_END_BYTES = 8 * 1024 * 1024
FIRST_BATCH_BYTES = 256 * 1024
MOST_BATCH_BYTES = 8 * 1024 * 1024


def read_records(folder: RunFolder) -> Iterator[Record]:
    """Yields the mirrored records that are complete, in order.

    Raises:
        RecordsAltered: a line is none of ours.
    """
    reader = _Reader(folder, Cursor())
    while batch := reader.batch(is_final=True):
        yield from batch


def checked_records(folder: RunFolder, read_bytes: int = READ_BYTES) -> Iterator[Record]:
    """Yields the mirrored records while checking them: numbers without a gap, seals, and the pinned ones.

    What is missing because of the run's limit is no gap, if a record of the run says that it was cut.
    About ``read_bytes`` are in memory at a time.

    Raises:
        RecordsAltered: at the first thing that is not as it was; what was yielded before counts for nothing.
    """
    reader, check = _Reader(folder, Cursor(), read_bytes), _Check(folder)
    while part := reader.read(is_final=True):
        if isinstance(part, Hole):
            check.skip(part)
            yield part.as_record()
            continue
        check.seals(part)
        for record in map(reader.parse, part):
            check.record(record)
            yield record
    check.finish()


def recorded_job(folder: RunFolder) -> Record | None:
    """Returns the job as the run's first record holds it, all records checked; None while there is none.

    Raises:
        RecordsAltered: as `checked_records`.
    """
    first, job = True, None
    for record in checked_records(folder):
        job, first = record.get("job") if first else job, False
    return job if isinstance(job, dict) else None


def check_end(folder: RunFolder, size_bytes: int = CHECKED_END_BYTES) -> None:
    """Checks the last ``size_bytes`` of a mirror, from the pinned seal before them on: quick for any length.

    Raises:
        RecordsAltered: a seal does not match, or a pinned one is not there.
    """
    checker, at = SealChecker(folder.run_id), Cursor()
    start = _pin_before_end(folder, size_bytes)
    after = takewhile(lambda pin: start is None or pin.seq > start.seq, newest_pins(folder))
    lacking = set(in_place(folder, after))  # no more than there are in these bytes
    if start is not None:
        at = Cursor(segment=start.segment, offset=start.start)
        checker = SealChecker(folder.run_id, start=at.offset, resume=True)
    for part in mirrored(folder, at):
        if isinstance(part, Hole):
            checker = part.checker(folder.run_id)
            continue
        try:
            lacking.difference_update(seal.seq for seal in checker.feed(part))
        except SealBroken as broken:
            raise RecordsAltered(f"run {folder.run_id}: the mirror was altered: {broken}") from broken
    if lacking:
        raise RecordsAltered(f"run {folder.run_id}: the mirror lacks seal {min(lacking)}, which was here")


def arriving_batches(
    folder: RunFolder,
    is_over: Callable[[], bool],
    start: Cursor | None = None,
    read_bytes: int = READ_BYTES,
) -> Iterator[list[Record]]:
    """Yields records as they arrive, an empty batch while nothing is new: the caller waits as it likes.

    A batch is of about ``read_bytes``. Ends when ``is_over()`` and nothing is left to read.
    """
    reader = _Reader(folder, start or Cursor(), read_bytes)
    while True:
        over = is_over()  # asked first: what was mirrored before it was over is then seen by this pass
        batch = reader.batch(is_final=over)
        if over and not batch:
            return
        yield batch


def end_position(folder: RunFolder) -> Cursor:
    """Returns the place after the last complete record that is here now."""
    paths = sorted(folder.records.glob("*.jsonl"))
    if not paths:
        return Cursor()
    with paths[-1].open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        while size:
            begin = max(0, size - READ_BYTES)
            file.seek(begin)
            found = file.read(size - begin).rfind(b"\n")
            if found >= 0:
                return Cursor(segment=int(paths[-1].stem), offset=begin + found + 1)
            size = begin
    return Cursor(segment=int(paths[-1].stem))


def newest_batches(folder: RunFolder, until: Cursor) -> Iterator[Iterator[Record]]:
    """Yields the records up to ``until`` batch by batch, the newest first, each batch with its own in order.

    Batches grow on the way back: who needs little reads little, who needs all is not called too often.

    Raises:
        RecordsAltered: a segment is missing.
    """
    most_bytes, index, end = FIRST_BATCH_BYTES, until.segment, until.offset
    while True:
        reader, path = _Reader(folder, Cursor(segment=index)), folder.segment(index)
        while end:
            begin, lines = _lines_before(path, end, most_bytes)
            yield map(reader.parse, lines)
            end = begin
            most_bytes = min(2 * most_bytes, MOST_BATCH_BYTES)
        if index == 0:
            return
        before = max((earlier for earlier in _indexes(folder) if earlier < index), default=0)
        hole = hole_after(folder, before)
        if hole is not None and hole.through == index - 1:
            yield iter([hole.as_record()])
            index, end = hole.start.segment, hole.start.offset
        elif before == index - 1 and folder.segment(before).exists():
            index, end = before, folder.segment(before).stat().st_size
        else:
            missing = folder.segment(index - 1)
            raise RecordsAltered(f"run {folder.run_id}: {missing} is missing from the mirror")


def _pin_before_end(folder: RunFolder, size_bytes: int) -> Pin | None:
    """Returns the last pin that has at least ``size_bytes`` of the mirror after it."""
    after: dict[int, int] = {}
    total = 0
    for index in reversed(_indexes(folder)):
        total += folder.segment(index).stat().st_size
        after[index] = total
    known = (pin for pin in newest_pins(folder) if after.get(pin.segment, 0) - pin.end >= size_bytes)
    return next(known, None)


def _indexes(folder: RunFolder) -> list[int]:
    return sorted(int(path.stem) for path in folder.records.glob("*.jsonl"))


def _lines_before(path: Path, end: int, most_bytes: int) -> tuple[int, list[bytes]]:
    """Returns the whole lines in the last ``most_bytes`` before ``end``, and where they begin."""
    with path.open("rb") as file:
        while True:
            begin = max(0, end - most_bytes)
            file.seek(begin)
            data = file.read(end - begin)
            cut = data.find(b"\n") + 1 if begin else 0
            if not begin or cut < len(data):
                return begin + cut, data[cut:].split(b"\n")[:-1]
            most_bytes *= 2


class _Check:
    """What `checked_records` knows on its way; each method raises `RecordsAltered`."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._run_id = folder.run_id
        self._newest_pin = max(in_place(folder, pins(folder)), default=-1)
        self._newest_seal = -1
        self._checker = SealChecker(folder.run_id)
        self._holes: list[range] = []
        self._expected = 0
        self._missing_through = 0
        self._cut_through = 0
        self._has_ended = False

    def skip(self, hole: Hole) -> None:
        """Goes on after a hole."""
        self._checker = hole.checker(self._run_id)
        self._holes.append(range(hole.first, hole.last + 1))
        self._expected, self._missing_through = hole.last + 1, hole.through

    def seals(self, lines: list[bytes]) -> None:
        """Checks the seals in these lines."""
        try:
            seals = self._checker.feed(b"".join(lines))
        except SealBroken as broken:
            raise RecordsAltered(f"run {self._run_id}: the mirror was altered: {broken}") from broken
        if seals:
            self._newest_seal = seals[-1].seq

    def record(self, record: Record) -> None:
        """Checks a record's number, and takes word of what was cut."""
        if record["seq"] != self._expected:
            raise RecordsAltered(f"run {self._run_id}: record {self._expected} is missing from the mirror")
        self._expected += 1
        if record["kind"] == "cut":
            self._cut_through = max(self._cut_through, cut_index(record))
        elif record["kind"] == "end":
            self._has_ended = True

    def finish(self) -> None:
        """Asks whether all that should be here was."""
        if self._newest_seal < self._newest_pin:
            says = f"the mirror ends before seal {self._newest_pin}, which was here"
            raise RecordsAltered(f"run {self._run_id}: {says}")
        for pin in pins(self._folder) if self._holes else ():
            if any(pin.seq in hole for hole in self._holes):
                raise RecordsAltered(f"run {self._run_id}: seal {pin.seq}, which was here, is said to be cut")
        if self._has_ended and self._missing_through > self._cut_through:
            segment = f"segment {self._missing_through}"
            raise RecordsAltered(
                f"run {self._run_id}: {segment} is missing, and no record says that it was cut"
            )


class _Reader:
    """Reads complete lines from where it was."""

    def __init__(self, folder: RunFolder, start: Cursor, read_bytes: int = READ_BYTES) -> None:
        self._folder = folder
        self._read_bytes = read_bytes
        self._index = start.segment
        self._offset = start.offset
        self._rest = b""

    def batch(self, *, is_final: bool = False) -> list[Record]:
        """Returns the records of what `read` returns."""
        part = self.read(is_final=is_final)
        return [part.as_record()] if isinstance(part, Hole) else [self.parse(line) for line in part]

    def read(self, *, is_final: bool = False) -> list[bytes] | Hole:
        """Returns the next complete lines with their line feeds, or the hole in their place.

        An empty list when there is nothing more to read now. How large a hole is is known with the segment
        after it: until then it is waited for, unless this ``is_final``.

        Raises:
            RecordsAltered: a hole does not fit what is here.
        """
        while True:
            complete = is_complete(self._folder, self._index)  # asked first: then this is all of the segment
            try:
                with self._folder.segment(self._index).open("rb") as file:
                    file.seek(self._offset)
                    data = file.read(self._read_bytes)
            except FileNotFoundError:
                return []
            if not data:
                if not complete:
                    return []
                hole = hole_after(self._folder, self._index)
                if hole is not None and hole.size_bytes is None and not is_final:
                    return []
                self._index = (self._index if hole is None else hole.through) + 1
                self._offset, self._rest = 0, b""
                if hole is not None:
                    return hole
                continue
            self._offset += len(data)
            *lines, self._rest = (self._rest + data).split(b"\n")
            if lines:
                return [line + b"\n" for line in lines]

    def parse(self, line: bytes) -> Record:
        """Returns a line as a record with ``seq``, ``t`` and ``kind`` of their types."""
        try:
            record = json.loads(line)
            seq, t, kind = record["seq"], record["t"], record["kind"]
        except (ValueError, KeyError, TypeError, RecursionError):
            record, seq, t, kind = None, None, None, None
        is_timed = isinstance(t, float) and math.isfinite(t)
        is_ours = type(seq) is int and is_timed and isinstance(kind, str) and kind != MISSING
        if isinstance(record, dict) and is_ours:
            return record
        shown = line[:80].decode("utf-8", "replace").strip()
        where = self._folder.segment(self._index)
        raise RecordsAltered(f"run {self._folder.run_id}: {where} holds a line that is no record: {shown}")
