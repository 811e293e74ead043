"""One pass over a whole mirror that goes on after what it finds wrong, and names the places.

`mirror_reader` stops at the first thing that is not as it was, since nothing after it can be trusted; here
numbers, segment headers and seals are looked at each by itself, and the first that is wrong of each is kept.
What the run's limit has removed is no fault where a stub stands for it and a sealed record tells of it.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from dataclasses import dataclass, field

from orchestrator.conversation import Cursor
from orchestrator.errors import RecordsAltered
from orchestrator.holes import Hole, cut_index, hole_after
from orchestrator.run_folder import Record, RunFolder
from orchestrator.supervisor.records import FORMAT_VERSION
from orchestrator.supervisor.seals import SEAL_LINE, SealBroken, SealChecker

READ_BYTES = 1024 * 1024
_ESCAPE = re.compile(rb"\\(.)")
_OUTPUT = re.compile(rb'"(text|b64)":"')


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A byte of a mirror; ``seq`` and ``record`` (``RUN/main.stderr:121``, for output) where known."""

    segment: int
    offset: int
    seq: int | None = None
    record: str | None = None


Problem = tuple[str, Place]


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundSeal:
    """A seal's line as it stands in the mirror, right or wrong."""

    sha256: str
    segment: int
    start: int
    end: int


@dataclass(kw_only=True, slots=True)
class Scan:
    """What one pass found; ``sizes`` are the bytes of each segment, 0 for one that is missing.

    ``torn_bytes`` came without the seal over them, which a hole swallowed. ``cut_through`` is the last
    segment of which a sealed record says that it was cut, 0 for none. ``seals_before`` holds the seal that
    each segment's header says the one before it ended with.
    """

    sizes: list[int] = field(default_factory=list)
    count: int = 0
    first: Record | None = None
    seals: dict[int, FoundSeal] = field(default_factory=dict)
    unsealed_bytes: int = 0
    torn_bytes: int = 0
    holes: list[Hole] = field(default_factory=list)
    cut_through: int = 0
    seals_before: dict[int, str] = field(default_factory=dict)
    has_ended: bool = False
    number_problem: Problem | None = None
    segment_problem: Problem | None = None
    seal_problem: Problem | None = None

    @property
    def incomplete(self) -> frozenset[int]:
        """The segments of which something is missing by the run's limit, as far as can be told here."""
        return frozenset(
            index for hole in self.holes for index in range(hole.start.segment, hole.through + 1)
        )


def scan(folder: RunFolder) -> Scan:
    """Reads the mirror of a run once, as far as it has come."""
    return _Scanner(folder).run()


def place_at(folder: RunFolder, at: Cursor) -> Place:
    """Returns the place of a byte of the mirror, with the record that it belongs to."""
    start, line = _line_at(folder, at)
    record = _parse(line)
    if record is None:
        return Place(segment=at.segment, offset=at.offset)
    name = None
    if record["kind"] == "out":
        name = _line_name(folder.run_id, record, line[: at.offset - start])
    return Place(segment=at.segment, offset=at.offset, seq=record["seq"], record=name)


class _Scanner:
    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._found = Scan()
        self._checker = SealChecker(folder.run_id)
        self._last_seal = ""
        self._last_seal_seq = -1
        self._sealed_bytes = 0
        self._is_over = False
        self._resumed_at = 0
        self._begin: int | None = 0
        self._first = 0
        self._whole: dict[int, tuple[int, int, int, str]] = {}
        self._cuts: list[tuple[Record, Place]] = []
        self._indexes = sorted(int(path.stem) for path in folder.records.glob("[0-9]" * 6 + ".jsonl"))

    def run(self) -> Scan:
        found = self._found
        for index in self._indexes:
            if index < len(found.sizes):
                continue  # a scrap of a line within a hole
            if index > len(found.sizes):
                missing = Place(segment=len(found.sizes), offset=0)
                self._note("segment", f"segment {len(found.sizes)} is missing", missing)
                self._begin = None
            found.sizes += [0] * (index + 1 - len(found.sizes))
            self._segment(index)
            self._hole(index)
        found.unsealed_bytes = sum(found.sizes) - self._sealed_bytes
        found.has_ended = self._is_over and not found.unsealed_bytes
        self._check_cuts()
        return found

    def _hole(self, index: int) -> None:
        """Goes on behind a hole: with its stub's seal and number, and unknown bytes before it."""
        found = self._found
        try:
            hole = hole_after(self._folder, index)
        except RecordsAltered as altered:
            self._note("segment", str(altered), Place(segment=index, offset=found.sizes[index]))
            return
        if hole is None:
            size = found.sizes[index]
            self._whole[index] = (size, self._first, self._last_seal_seq, self._last_seal)
            self._begin = None if self._begin is None else self._begin + size
            return
        found.holes.append(hole)
        found.sizes += [0] * (hole.through - index)
        for scrap in (other for other in self._indexes if index < other <= hole.through):
            found.sizes[scrap] = self._folder.segment(scrap).stat().st_size
        found.torn_bytes += sum(found.sizes) - self._sealed_bytes
        self._sealed_bytes = self._resumed_at = sum(found.sizes)
        self._last_seal, self._last_seal_seq = hole.sha256, hole.last
        self._checker = hole.checker(self._folder.run_id, self._resumed_at)
        self._begin = None
        found.count = hole.last + 1

    def _check_cuts(self) -> None:
        """Compares what ``cut`` records say with what is here of those segments, and holes with them."""
        found, last_seal = self._found, max(self._found.seals, default=-1)
        ends = {hole.through: (hole.last, hole.sha256) for hole in found.holes}
        for record, place in self._cuts:
            index = cut_index(record)
            told = tuple(map(record.get, ("bytes", "first", "last", "sha256")))
            if told != self._whole.get(index, told) or told[2:] != ends.get(index, told[2:]):
                self._note("segment", f"record {place.seq} tells of another segment {index}", place)
            elif record["seq"] < last_seal:
                found.cut_through = max(found.cut_through, index)
        for hole in found.holes if found.has_ended else ():
            if hole.through > found.cut_through:
                says = f"segment {hole.through} is missing, and no record says that it was cut"
                self._note("segment", says, Place(segment=hole.start.segment, offset=hole.start.offset))

    def _segment(self, index: int) -> None:
        offset = 0
        with self._folder.segment(index).open("rb") as file:
            while lines := file.readlines(READ_BYTES):
                self._check_seals(b"".join(lines), index)
                for line in lines:
                    self._line(line, index, offset)
                    offset += len(line)
                self._found.sizes[index] = offset
                if not lines[-1].endswith(b"\n"):
                    return  # what is appended meanwhile is not looked at

    def _check_seals(self, data: bytes, index: int) -> None:
        if self._found.seal_problem is not None:
            return
        try:
            self._checker.feed(data)
        except SealBroken as broken:
            is_after_hole = broken.at < self._resumed_at
            place = (
                Place(segment=index, offset=0)
                if is_after_hole
                else self._after_a_seal(self._cursor(broken.at, index))
            )
            self._note("seal", f"{broken}: these begin here", place)

    def _after_a_seal(self, at: Cursor) -> Place:
        """A sealed range begins with the line of the seal before it, which was found right."""
        _, line = _line_at(self._folder, at)
        record, end = _parse(line), at.offset + len(line)
        if record is None or record["kind"] != "seal":
            return place_at(self._folder, at)
        if end < self._folder.segment(at.segment).stat().st_size:
            return place_at(self._folder, Cursor(segment=at.segment, offset=end))
        return place_at(self._folder, Cursor(segment=at.segment + 1))

    def _cursor(self, position: int, index: int) -> Cursor:
        """Turns an offset in the run's bytes into a place; ``index`` is the last segment begun."""
        for segment, size in enumerate(self._found.sizes[:index]):
            if position < size:
                return Cursor(segment=segment, offset=position)
            position -= size
        return Cursor(segment=index, offset=position)

    def _line(self, line: bytes, index: int, offset: int) -> None:
        found = self._found
        record = _parse(line)
        place = Place(segment=index, offset=offset, seq=None if record is None else record["seq"])
        if offset == 0 and line.endswith(b"\n"):
            self._header(record, place)
        if record is None:
            if line.endswith(b"\n") or self._is_over:
                self._note("number", f"what stands in the place of record {found.count} is no record", place)
            found.count += line.endswith(b"\n")
            return
        if record["seq"] != found.count or (self._is_over and record["kind"] != "seal"):
            after = " after the end of the run" if self._is_over else f" where record {found.count} should"
            says = f"record {record['seq']} stands{after}"
            self._note("number", says, place_at(self._folder, Cursor(segment=index, offset=offset)))
        if found.first is None and index == 0 and offset == 0:
            found.first = record
        if record["kind"] == "seal":
            if SEAL_LINE.fullmatch(line) is None:
                self._note("seal", f"record {record['seq']} is no seal, though it says so", place)
            sha256 = str(record.get("sha256"))
            found.seals[record["seq"]] = FoundSeal(
                sha256=sha256, segment=index, start=offset, end=offset + len(line)
            )
            self._last_seal, self._last_seal_seq = sha256, record["seq"]
            self._sealed_bytes = sum(found.sizes[:index]) + offset + len(line)
        if record["kind"] == "cut":
            self._cuts.append((record, place))
        found.count += 1
        self._is_over = self._is_over or record["kind"] == "end"

    def _header(self, record: Record | None, place: Place) -> None:
        index = place.segment
        if record is not None:
            self._first = record["seq"]
            self._found.seals_before[index] = str(record.get("prev"))
            if self._begin is None and type(record.get("at")) is int:
                self._begin = record["at"]
        if record is None or record["kind"] != "segment":
            self._note("segment", f"segment {index} does not begin with its header", place)
        elif record.get("run") != self._folder.run_id:
            self._note("segment", f"segment {index} is of run {record.get('run')}", place)
        elif record.get("version") != FORMAT_VERSION:
            self._note("segment", f"segment {index} has format {record.get('version')}", place)
        elif record.get("first") != record["seq"]:
            self._note("segment", f"segment {index} says that it begins with {record.get('first')}", place)
        elif record.get("at", self._begin) != self._begin:
            self._note("segment", f"segment {index} says that it begins at byte {record.get('at')}", place)
        elif record.get("prev") != self._last_seal:
            says = f"segment {index} does not continue the seal that the segment before it ends with"
            self._note("segment", says, place)

    def _note(self, what: str, says: str, place: Place) -> None:
        """Keeps the first of each."""
        attribute = f"{what}_problem"
        if getattr(self._found, attribute) is None:
            setattr(self._found, attribute, (says, place))


def _parse(line: bytes) -> Record | None:
    """Returns a whole line as a record, or None when it is none."""
    try:
        record = json.loads(line) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
    if isinstance(record, dict) and type(record.get("seq")) is int and isinstance(record.get("kind"), str):
        return record
    return None


def _line_at(folder: RunFolder, at: Cursor) -> tuple[int, bytes]:
    """Returns the line that a byte stands in, and where it begins; nothing where the mirror has ended."""
    path = folder.segment(at.segment)
    if not path.exists():
        return at.offset, b""
    with path.open("rb") as file:
        start = at.offset
        while start:
            begin = max(0, start - READ_BYTES)
            file.seek(begin)
            found = file.read(start - begin).rfind(b"\n")
            if found >= 0:
                start = begin + found + 1
                break
            start = begin
        file.seek(start)
        return start, file.readline()


def _line_name(run_id: str, record: Record, before: bytes) -> str:
    """Names the line of output at a byte; ``before`` is what precedes that byte in the record's own line."""
    number = record["line"] + 1 if type(record.get("line")) is int else 1
    opening = _OUTPUT.search(before)
    if opening is not None:
        number += _line_feeds(opening.group(1), before[opening.end() :])
    return f"{run_id}/{record.get('proc')}.{record.get('stream')}:{number}"


def _line_feeds(key: bytes, value: bytes) -> int:
    if key == b"text":
        return sum(escape.group(1) == b"n" for escape in _ESCAPE.finditer(value))
    try:
        return base64.b64decode(value[: len(value) // 4 * 4]).count(b"\n")
    except binascii.Error:
        return 0
