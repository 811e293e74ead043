"""Keeps a run's records within a limit: whole middle segments go, the oldest first, and a stub says so.

The first segment never goes, nor the one being written. A stub, ``000005.cut``, is the last seal line of that
segment: it stands for it and for every segment before it that is not there, and from it on the seals of what
follows can be checked. The newest stub says all that older ones said, so only that one is kept: a run's
stubs need no room, however much it prints.

What is interrupted anywhere leaves a run that can be read: the ``cut`` record is sealed and on the disk
before anything is touched, the stub is written aside and renamed, and only then are segments removed.
"""

import os
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from .seals import SEAL_LINE

SEGMENT_BYTES = 64 * 1024 * 1024
LEAST_SEGMENT_BYTES = 1024 * 1024
SEGMENTS_IN_LIMIT = 8
SLACK_BYTES = 64 * 1024  # for the records and the seal that end a segment
MOST_STUB_BYTES = 4096


class Segment(NamedTuple):
    """A finished segment; ``first`` and ``last`` are record numbers, ``seal`` is its last line.

    ``others`` counts the records that say more of the run than its output does.
    """

    number: int
    size: int
    first: int
    last: int
    others: int
    seal: bytes


class Cap:
    """Decides which segments in ``folder`` go, and removes them; ``limit_bytes`` None keeps all."""

    def __init__(self, folder: str, limit_bytes: Optional[int]) -> None:
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._kept: List[Segment] = []
        self._kept_bytes = 0
        self._stub: Optional[int] = None

    def add(self, segment: Segment) -> None:
        """Takes a segment that is finished."""
        if self._limit_bytes is not None:
            self._kept.append(segment)
            self._kept_bytes += segment.size

    def surplus(self, needed_bytes: int) -> List[Segment]:
        """Returns what has to go so that ``needed_bytes`` more than the finished segments are within the
        limit.
        """
        surplus: List[Segment] = []
        if self._limit_bytes is None:
            return surplus
        size = self._kept_bytes + needed_bytes + SLACK_BYTES
        for segment in self._kept[1:]:
            if size <= self._limit_bytes:
                break
            surplus.append(segment)
            size -= segment.size
        return surplus

    def remove(self, surplus: List[Segment]) -> None:
        """Replaces segments, of which the records tell already, by a stub.

        A disk that does not take the stub leaves them where they are: the next call tries again.
        """
        if not surplus:
            return
        last = surplus[-1]
        try:
            _write_stub(os.path.join(self._folder, stub_name(last.number)), last.seal)
            for segment in surplus:
                _unlink(os.path.join(self._folder, segment_name(segment.number)))
                self._kept.remove(segment)
                self._kept_bytes -= segment.size
            if self._stub is not None:
                _unlink(os.path.join(self._folder, stub_name(self._stub)))
            self._stub = last.number
        except OSError:
            pass


def longest_segment(limit_bytes: Optional[int]) -> int:
    """Returns the bytes that segments may have so that the limit can be kept by removing whole ones."""
    if limit_bytes is None:
        return SEGMENT_BYTES
    return max(LEAST_SEGMENT_BYTES, min(SEGMENT_BYTES, limit_bytes // SEGMENTS_IN_LIMIT))


def segment_name(index: int) -> str:
    """Returns a segment's file name; names sort as indexes do."""
    return "%06d.jsonl" % index


def stub_name(index: int) -> str:
    """Returns the name of the stub that ends with segment ``index``."""
    return "%06d.cut" % index


def cut_record(segment: Segment, others: int) -> Dict[str, Any]:
    """Returns the fields of the record that tells of a segment's end; ``others`` is of all that went."""
    match = SEAL_LINE.match(segment.seal)
    assert match is not None
    return {
        "segment": segment.number,
        "bytes": segment.size,
        "first": segment.first,
        "last": segment.last,
        "others": others,
        "sha256": match.group(4).decode("ascii"),
    }


def stub_indexes(folder: str) -> List[int]:
    """Returns the indexes of the stubs in a folder, in order; none where there is no folder."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    indexes = [int(name[:-4]) for name in names if name.endswith(".cut") and name[:-4].isdigit()]
    return sorted(index for index in indexes if stub_name(index) in names)


def stub_for(folder: str, index: int) -> Optional[Tuple[int, bytes]]:
    """Returns the stub that stands for segment ``index``, which is not there: its own index and its line."""
    while True:
        found = [stub for stub in stub_indexes(folder) if stub >= index]
        if not found:
            return None
        try:
            with open(os.path.join(folder, stub_name(found[0])), "rb") as file:
                return found[0], file.read(MOST_STUB_BYTES)
        except FileNotFoundError:
            continue  # a newer one has taken its place


def _write_stub(path: str, line: bytes) -> None:
    with open(path + ".new", "wb") as file:
        file.write(line)
        file.flush()
        os.fsync(file.fileno())
    os.rename(path + ".new", path)


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
