"""The seals that were pinned here when they arrived, one observation each: their places and hashes.

A run that prints has one for each second of it, so they are read one at a time, in the order in which they
came or the newest first, and compared with what stands in their places. Only reads; `mirror` pins.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import BinaryIO, NamedTuple

from orchestrator.errors import RecordsAltered
from orchestrator.run_folder import Record, RunFolder, parse_observation
from orchestrator.supervisor.cuts import MOST_STUB_BYTES
from orchestrator.supervisor.seals import SEAL_LINE

BLOCK_BYTES = 64 * 1024


class Pin(NamedTuple):
    """A seal as it arrived; its line is the bytes ``start`` to ``end`` of its segment."""

    seq: int
    sha256: str
    segment: int
    start: int
    end: int


def as_pin(entry: Record | None) -> Pin | None:
    """Returns what an observation pins; None when it pins nothing, or not a whole seal."""
    if entry is None or entry.get("kind") != "seal":
        return None
    numbers = [entry.get(name) for name in ("seq", "segment", "line_start", "line_end")]
    sha256 = entry.get("sha256")
    if not all(type(number) is int and number >= 0 for number in numbers) or not isinstance(sha256, str):
        return None
    return Pin(entry["seq"], sha256, entry["segment"], entry["line_start"], entry["line_end"])


def pins(folder: RunFolder) -> Iterator[Pin]:
    """Yields the pins in the order in which they came."""
    return (pin for entry in folder.observations() if (pin := as_pin(entry)) is not None)


def newest_pins(folder: RunFolder) -> Iterator[Pin]:
    """Yields the pins that are there at the call, the newest first; who needs few reads few."""
    try:
        size = folder.observations_path.stat().st_size
    except FileNotFoundError:
        size = 0
    lines = _lines_from_end(folder, size)
    return (pin for line in lines if (pin := as_pin(parse_observation(line))) is not None)


def in_place(folder: RunFolder, pinned: Iterable[Pin]) -> Iterator[int]:
    """Yields the numbers of the seals that stand where they were pinned.

    That these are seals of the mirror, and right, is for its reader to find.

    Raises:
        RecordsAltered: at the first that does not.
    """
    for index, here in groupby(pinned, key=lambda pin: pin.segment):
        with _open_or_none(folder.segment(index)) as file:
            for pin in here:
                _check_place(folder, file, pin)
                yield pin.seq


def _check_place(folder: RunFolder, file: BinaryIO | None, pin: Pin) -> None:
    size = min(max(0, pin.end - pin.start), MOST_STUB_BYTES)
    line = b"" if file is None else os.pread(file.fileno(), size, pin.start)
    if not line.endswith(b"\n"):
        raise RecordsAltered(f"run {folder.run_id}: the mirror ends before seal {pin.seq}, which was here")
    seal = SEAL_LINE.fullmatch(line)
    if seal is None or (int(seal[2]), seal[4].decode()) != (pin.seq, pin.sha256):
        raise RecordsAltered(f"run {folder.run_id}: seal {pin.seq} is not the one that was pinned")


@contextmanager
def _open_or_none(path: Path) -> Iterator[BinaryIO | None]:
    try:
        file = path.open("rb")
    except FileNotFoundError:
        yield None
        return
    with file:
        yield file


def _lines_from_end(folder: RunFolder, end: int) -> Iterator[bytes]:
    """Yields the lines of the first ``end`` bytes of the observations, the last one first."""
    if not end:
        return
    rest = b""
    with folder.observations_path.open("rb") as file:
        while end:
            begin = max(0, end - BLOCK_BYTES)
            file.seek(begin)
            rest, *lines = (file.read(end - begin) + rest).split(b"\n")
            yield from reversed(lines)
            end = begin
    yield rest
