"""The views' way into a mirror: complete records in order, from a position on, checked where it matters.

A line that a crash or a full disk cut is not read until it is whole. Nothing here writes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from orchestrator.errors import RecordsAltered
from orchestrator.remote import Cursor
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
    while batch := reader.batch():
        yield from batch


def checked_records(folder: RunFolder) -> Iterator[Record]:
    """Yields the mirrored records while checking them: numbers without a gap, seals, and the pinned ones.

    Raises:
        RecordsAltered: at the first thing that is not as it was; what was yielded before counts for nothing.
    """
    pins, checker, expected = folder.pins(), SealChecker(folder.run_id), 0
    reader = _Reader(folder, Cursor())
    while lines := reader.lines():
        try:
            seals = checker.feed(b"".join(lines))
        except SealBroken as broken:
            raise RecordsAltered(f"run {folder.run_id}: the mirror was altered: {broken}") from broken
        for seal in seals:
            pin = pins.pop(seal.seq, None)
            if pin is not None and pin["sha256"] != seal.sha256:
                raise RecordsAltered(f"run {folder.run_id}: seal {seal.seq} is not the one that was pinned")
        for record in map(reader.parse, lines):
            if record["seq"] != expected:
                raise RecordsAltered(f"run {folder.run_id}: record {expected} is missing from the mirror")
            expected += 1
            yield record
    if pins:
        raise RecordsAltered(f"run {folder.run_id}: the mirror ends before seal {min(pins)}, which was here")


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
    pins = list(folder.pins().values())
    sizes = [path.stat().st_size for path in sorted(folder.records.glob("*.jsonl"))]
    begin = sum(sizes) - size_bytes
    known = [pin for pin in pins if sum(sizes[: pin["segment"]]) + pin["line_end"] <= begin]
    start = known[-1] if known else None
    segment, offset = (start["segment"], start["line_start"]) if start else (0, 0)
    checker = SealChecker(folder.run_id, start=offset, resume=start is not None)
    wanted = {pin["seq"]: pin["sha256"] for pin in pins if start is None or pin["seq"] > start["seq"]}
    for index in range(segment, len(sizes)):
        with folder.segment(index).open("rb") as file:
            file.seek(offset if index == segment else 0)
            while data := file.read(READ_BYTES):
                try:
                    seals = checker.feed(data)
                except SealBroken as broken:
                    raise RecordsAltered(f"run {folder.run_id}: the mirror was altered: {broken}") from broken
                for seal in seals:
                    if wanted.pop(seal.seq, seal.sha256) != seal.sha256:
                        raise RecordsAltered(f"run {folder.run_id}: seal {seal.seq} is not the pinned one")
    if wanted:
        raise RecordsAltered(f"run {folder.run_id}: the mirror lacks seal {min(wanted)}, which was here")


def tail_records(
    folder: RunFolder, is_over: Callable[[], bool], wait: Callable[[], None], start: Cursor | None = None
) -> Iterator[Record]:
    """Yields records as they arrive; ends when ``is_over()`` and nothing is left to read."""
    reader = _Reader(folder, start or Cursor())
    while True:
        over = is_over()  # asked first: what was mirrored before it was over is then seen by this pass
        batch = reader.batch()
        yield from batch
        if batch:
            continue
        if over:
            return
        wait()


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
    most_bytes = FIRST_BATCH_BYTES
    for index in range(until.segment, -1, -1):
        reader = _Reader(folder, Cursor(segment=index))
        path = folder.segment(index)
        if index < until.segment and not path.exists():
            raise RecordsAltered(f"run {folder.run_id}: {path} is missing from the mirror")
        end = until.offset if index == until.segment else path.stat().st_size
        while end:
            begin, lines = _lines_before(path, end, most_bytes)
            yield map(reader.parse, lines)
            end = begin
            most_bytes = min(2 * most_bytes, MOST_BATCH_BYTES)


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


class _Reader:
    """Reads complete lines from where it was."""

    def __init__(self, folder: RunFolder, start: Cursor) -> None:
        self._folder = folder
        self._index = start.segment
        self._offset = start.offset
        self._rest = b""

    def batch(self) -> list[Record]:
        """Returns the records of the next lines; none when there is nothing more to read now."""
        return [self.parse(line) for line in self.lines()]

    def lines(self) -> list[bytes]:
        """Returns the next complete lines with their line feeds, reading on until there is one or no more."""
        while True:
            has_next = self._folder.segment(self._index + 1).exists()
            try:
                with self._folder.segment(self._index).open("rb") as file:
                    file.seek(self._offset)
                    data = file.read(READ_BYTES)
            except FileNotFoundError:
                return []
            if not data:
                if not has_next:
                    return []
                self._index, self._offset, self._rest = self._index + 1, 0, b""
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
        if isinstance(record, dict) and type(seq) is int and isinstance(t, float) and isinstance(kind, str):
            return record
        shown = line[:80].decode("utf-8", "replace").strip()
        where = self._folder.segment(self._index)
        raise RecordsAltered(f"run {self._folder.run_id}: {where} holds a line that is no record: {shown}")
