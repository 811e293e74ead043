"""A run whose host keeps to a log limit, and its mirror: for tests of what is cut and told of."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from orchestrator.conversation import Cursor, Cut, Piece
from orchestrator.mirror import Mirror
from orchestrator.mirror_reader import (
    arriving_batches,
    check_end,
    checked_records,
    end_position,
    newest_batches,
    read_records,
)
from orchestrator.mirror_scan import scan
from orchestrator.outcome import MISSING
from orchestrator.run_folder import Record, RunFolder
from orchestrator.supervisor.cuts import SLACK_BYTES, Segment
from orchestrator.supervisor.records import RecordWriter
from orchestrator.supervisor.tail import Tail

RUN = "run1"
SEGMENT = 1500


class Left(Exception):
    """The connection is cut."""


class Host:
    """A run's records as its supervisor writes them below a limit; remembers what it has removed."""

    def __init__(self, base: Path, limit: int = 6 * SEGMENT + SLACK_BYTES) -> None:
        self.records = base / "host"
        self.records.mkdir()
        self.removed: dict[int, bytes] = {}
        self.limit = limit
        clock = iter(range(10**9))
        self.writer = RecordWriter(
            str(self.records), RUN, {"job": {}}, lambda: float(next(clock)), SEGMENT, limit_bytes=limit
        )
        (self.records / "reserve").unlink()
        remove = self.writer._cap.remove

        def remember(surplus: list[Segment]) -> None:
            before = self.segments()
            remove(surplus)
            self.removed |= {index: data for index, data in before.items() if index not in self.segments()}

        self.writer._cap.remove = remember  # type: ignore[method-assign]  # the files are gone afterwards
        self.off = {"stdout": 0, "stderr": 0}
        self.lines = {"stdout": 0, "stderr": 0}

    def print(self, text: str, stream: str = "stdout") -> None:
        self.writer.write_output("main", 7, stream, self.off[stream], self.lines[stream], "text", text)
        self.off[stream] += len(text.encode())
        self.lines[stream] += text.count("\n")
        assert self.size() <= self.limit

    def fill(self, count: int, first: int = 0) -> None:
        for number in range(first, first + count):
            self.print(f"line {number} {'x' * 60}\n")

    def end(self) -> None:
        self.writer.write("end", outcome="exited", code=0)
        self.writer.close()

    def segments(self) -> dict[int, bytes]:
        return {int(path.stem): path.read_bytes() for path in self.records.glob("*.jsonl")}

    def size(self) -> int:
        return sum(path.stat().st_size for path in self.records.iterdir())

    def whole(self) -> bytes:
        """Returns all bytes that were ever written."""
        segments = {**self.removed, **self.segments()}
        return b"".join(segments[index] for index in sorted(segments))

    def send(self, cursor: Cursor) -> Iterator[Piece | Cut]:
        """Yields what a reader that asks from ``cursor`` on is sent now."""
        sent: list[Piece | Cut] = []

        def send(segment: int, offset: int, data: bytes) -> None:
            sent.append(Piece(Cursor(segment=segment, offset=offset), data))

        def cut(segment: int, offset: int, through: int, stub: bytes) -> None:
            sent.append(Cut(cursor=Cursor(segment=segment, offset=offset), through=through, stub=stub))

        Tail(str(self.records), cursor.segment, cursor.offset, send, cut).pump()
        return iter(sent)


class Here:
    """The mirror of that run."""

    def __init__(self, base: Path, host: Host) -> None:
        home = base / "home"
        home.mkdir()
        self.folder = RunFolder(home, RUN)
        self.host = host

    def pull(self, most: int | None = None) -> None:
        """Connects, takes at most ``most`` pieces, and goes."""
        mirror = Mirror.acquire(self.folder, "box")
        assert mirror is not None
        with mirror:
            for count, piece in enumerate(self.host.send(mirror.cursor)):
                if count == most:
                    return
                mirror.append(piece)

    def records(self) -> list[Record]:
        return list(checked_records(self.folder))

    def whole_lines(self) -> bytes:
        """Returns the bytes of the whole lines that are here."""
        paths = sorted(self.folder.records.glob("*.jsonl"))
        return b"".join(data[: data.rfind(b"\n") + 1] for data in map(Path.read_bytes, paths))


def holes(records: list[Record]) -> list[Record]:
    return [record for record in records if record["kind"] == MISSING]


def problems(folder: RunFolder) -> tuple[object, ...]:
    found = scan(folder)
    return found.number_problem, found.segment_problem, found.seal_problem


def assert_exact(host: Host, here: Here) -> None:
    """What is here and what is said to be missing make up the whole run, record for record, byte for byte."""
    written = [json.loads(line) for line in host.whole().splitlines()]
    found, expected, missing_bytes = here.records(), 0, 0
    for record in found:
        assert record["seq"] == expected
        if record["kind"] == MISSING:
            expected = record["last"] + 1
            missing_bytes += record["bytes"]
            gone = written[record["seq"] : record["last"] + 1]
            assert gone[-1]["kind"] == "seal"
        else:
            assert record == written[expected]
            expected += 1
    assert expected == len(written)
    assert len(here.whole_lines()) + missing_bytes == len(host.whole())
    assert list(read_records(here.folder)) == found
    backwards = [list(batch) for batch in newest_batches(here.folder, end_position(here.folder))]
    assert [record for batch in reversed(backwards) for record in batch] == found
    arriving = [record for batch in arriving_batches(here.folder, lambda: True) for record in batch]
    assert arriving == found
    for size in (10, 2000, 10**6):
        check_end(here.folder, size)
    scanned = scan(here.folder)
    assert problems(here.folder) == (None, None, None)
    assert scanned.has_ended
    assert [hole.as_record() for hole in scanned.holes] == holes(found)
    assert scanned.count == len(written)
