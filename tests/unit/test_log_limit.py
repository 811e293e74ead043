"""A run whose log limit cuts segments: what is left reassembles exactly, what is missing is named exactly."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from orchestrator.conversation import Cursor, Cut, Piece
from orchestrator.errors import ProtocolError, RecordsAltered, UsageError
from orchestrator.experiment import Bounds, Expectation
from orchestrator.holes import hole_after, stub_path
from orchestrator.ledger import RunRow
from orchestrator.lifecycle import CUT_REASON, MISSING, State, judge, outcome_of
from orchestrator.line_origin import LineName, SealStanding, find_origin
from orchestrator.log_filter import LineFilter, parse_pattern
from orchestrator.log_lines import LineAssembler, LogLine, select
from orchestrator.log_raw import RawOutput
from orchestrator.log_tail import tail
from orchestrator.log_view import line_json, render
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
from orchestrator.pins import pins
from orchestrator.run_folder import Record, RunFolder
from orchestrator.supervisor import tail as tail_module
from orchestrator.supervisor.cuts import SLACK_BYTES, Segment, stub_indexes
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


@pytest.fixture(autouse=True)
def _quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


@pytest.fixture
def here(tmp_path: Path, host: Host) -> Here:
    return Here(tmp_path, host)


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


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    segments=st.integers(3, 9),
    piece_bytes=st.integers(50, 4000),
    moves=st.lists(st.tuples(st.integers(1, 60), st.none() | st.integers(0, 30)), min_size=4, max_size=12),
)
def test_any_output_with_any_limit_and_any_connection_is_exact(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    segments: int,
    piece_bytes: int,
    moves: list[tuple[int, int | None]],
) -> None:
    base, choose = tmp_path_factory.mktemp("run"), random.Random(seed)
    host = Host(base, limit=segments * SEGMENT + SLACK_BYTES)
    here = Here(base, host)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tail_module, "PIECE_BYTES", piece_bytes)
        for count, most in moves:
            for _ in range(count):
                text = "".join(choose.choices('ab\n"é漢\x01', k=choose.randrange(1, 300)))
                host.print(text, choose.choice(["stdout", "stderr"]))
            if most is not None:
                here.pull(most)
        host.end()
        here.pull()
    event(f"{len(holes(here.records()))} holes")
    assert_exact(host, here)
    shutil.rmtree(base)


def lines_of(records: list[Record]) -> list[LogLine]:
    lines = LineAssembler(host="box", run_id=RUN)
    output = select(records, stream="stdout")
    return [line for record in output for line in lines.feed(record)] + list(lines.flush())


class TestALateReader:
    @pytest.fixture(autouse=True)
    def run(self, host: Host, here: Here) -> None:
        host.fill(200)
        host.end()
        here.pull()

    def test_gets_the_first_segment_one_hole_and_the_end(self, host: Host, here: Here) -> None:
        assert_exact(host, here)
        (hole,) = holes(here.records())
        assert (hole["start"]["segment"], hole["through"]) == (0, max(host.removed))
        assert hole["bytes"] == sum(map(len, host.removed.values()))
        assert sorted(host.removed) == list(range(1, max(host.removed) + 1))
        assert stub_indexes(str(host.records)) == stub_indexes(str(here.folder.records)) == [hole["through"]]

    def test_sees_one_line_in_the_place_of_what_is_missing(self, here: Here) -> None:
        records = here.records()
        (hole,) = holes(records)
        lines = lines_of(records)
        at = next(index for index, line in enumerate(lines) if line.cut is not None)
        says = f"[… {hole['bytes']} bytes cut by the run's log limit, records {hole['seq']}–{hole['last']}]"
        assert render(lines[at], colour=False) == f"box {RUN} | {says}"
        assert line_json(lines[at]) == {
            "cut": {"first": hole["seq"], "last": hole["last"], "size_bytes": hole["bytes"]},
            "host": "box", "run_id": RUN, "seq": hole["seq"], "t": hole["t"], "text": says,
        }  # fmt: skip
        assert "cut" not in line_json(lines[0])
        texts = [line.text for line in lines if line.cut is None]
        assert texts[0].startswith("line 0 ")
        assert texts[-1].startswith("line 199 ")
        assert [line.number for line in lines[:at]] == list(range(1, at + 1))
        assert lines[-1].number == 200
        wanted = LineFilter(pattern=parse_pattern("line 199"))
        assert [line.seq for line in filter(wanted, lines)] == [hole["seq"], lines[-1].seq]

    @pytest.mark.parametrize("count", [0, 1, 30, 10**6])
    def test_sees_it_among_the_last_lines_too(self, here: Here, count: int) -> None:
        batches = newest_batches(here.folder, end_position(here.folder))
        found, _ = tail(batches, count, host="box", run_id=RUN)
        lines = lines_of(here.records())
        assert found == lines[max(0, len(lines) - count) :]

    def test_is_not_given_a_part_for_the_raw_stream(self, here: Here) -> None:
        raw = RawOutput(host="box", run_id=RUN, proc=None, stream=None)
        with pytest.raises(UsageError, match="were cut by its log limit"):
            raw.check(here.records())

    def test_is_told_what_that_means_for_the_outcome(self, here: Here) -> None:
        outcome = outcome_of(here.records())
        assert (outcome.end, outcome.is_end_sealed, outcome.is_cut) == ("exited", True, False)
        assert "were cut by the run's log limit before they came: output, no more" in outcome.notes[0]


def test_metrics_that_were_cut_are_a_doubt(host: Host, here: Here) -> None:
    host.writer.write("spawn", pid=7)
    host.fill(20)
    host.writer.write("event", event={"kind": "metric", "name": "early", "value": 1})
    host.fill(200)
    host.end()
    here.pull()
    outcome = outcome_of(here.records())
    assert outcome.is_cut
    assert outcome.metrics == {}
    assert "is not known" in outcome.notes[0]


def test_a_verdict_that_lacks_what_may_have_been_cut_says_so() -> None:
    asked: Record = {"kind": "segment", "job": {"alloc_conf": "max_split_size_mb:128", "devices": []}}
    gap: Record = {"kind": MISSING, "seq": 5, "last": 9}
    end: list[Record] = [{"kind": "end", "outcome": "exited", "code": 0, "t": 1.0}, {"kind": "seal"}]
    metric = Expectation(metrics={"loss": Bounds(max=1.0)})
    for records, expectation, name in (
        ([asked, gap, *end], Expectation(), "unverified"),
        ([gap, *end], metric, "out_of_bounds"),
    ):
        verdict = judge(outcome_of(records), expectation)
        assert (verdict.name, CUT_REASON in verdict.reasons) == (name, True)
        without = judge(outcome_of([record for record in records if record is not gap]), expectation)
        assert (without.name, CUT_REASON in without.reasons) == (name, False)
    assert judge(outcome_of([gap, *end]), Expectation()).name == "ok"


def test_what_was_mirrored_in_time_stays_though_the_host_has_it_no_more(host: Host, here: Here) -> None:
    for _ in range(20):
        host.fill(10)
        here.pull()
    host.end()
    here.pull()
    assert host.removed
    assert here.whole_lines() == host.whole()
    assert not holes(here.records())
    assert not stub_indexes(str(here.folder.records))
    assert_exact(host, here)


def test_a_segment_that_goes_while_it_is_read_ends_where_the_mirror_was(host: Host, here: Here) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tail_module, "PIECE_BYTES", 400)
        host.fill(15)
        here.pull(6)
        kept = sorted(here.folder.records.glob("*.jsonl"))
        size = kept[-1].stat().st_size
        host.fill(200)
        host.end()
        here.pull()
    (hole,) = holes(here.records())
    index = int(kept[-1].stem)
    assert size < len(host.removed[index])
    assert hole["start"]["segment"] == index
    assert hole["start"]["offset"] <= size
    assert kept[-1].stat().st_size == size, "nothing is cut here, and nothing added"
    assert scan(here.folder).torn_bytes > 0
    assert_exact(host, here)


@pytest.mark.parametrize("before", ["a whole segment", "a hole"])
def test_a_scrap_of_a_line_before_a_hole_is_no_record(host: Host, here: Here, before: str) -> None:
    if before == "a hole":
        host.fill(100)
    else:
        host.fill(15)
    last = max(host.segments())
    mirror = Mirror.acquire(here.folder, "box")
    assert mirror is not None
    with mirror:
        for piece in host.send(mirror.cursor):
            if isinstance(piece, Piece) and piece.cursor.segment == last:
                mirror.append(Piece(piece.cursor, piece.data[:20]))
                break
            mirror.append(piece)
    host.fill(200)
    host.end()
    here.pull()
    assert here.folder.segment(last).stat().st_size == 20
    assert_exact(host, here)


def test_a_mirror_that_has_it_all_needs_no_stub_even_if_its_pins_are_gone(host: Host, here: Here) -> None:
    for _ in range(20):
        host.fill(10)
        here.pull()
    (here.folder.path / "observations.jsonl").unlink()
    host.end()
    here.pull()
    assert here.whole_lines() == host.whole()
    assert not stub_indexes(str(here.folder.records))
    assert sorted(pin.seq for pin in pins(here.folder)) == sorted(scan(here.folder).seals)


def test_a_line_is_traced_over_a_hole_and_one_in_it_is_said_to_be_cut(host: Host, here: Here) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tail_module, "PIECE_BYTES", 400)
        host.fill(15)
        here.pull(6)
        host.fill(200, 15)
        host.end()
        here.pull()

    def standing(number: int) -> SealStanding:
        name = LineName.parse(f"{RUN}/main.stdout:{number}")
        return find_origin(row, here.folder, name).standing

    row = RunRow(
        run_id=RUN,
        group_id=RUN,
        experiment="x",
        host="box",
        bundle="b",
        state=State.RUNNING,
        created_t=1.0,
        job={},
    )
    records = here.records()
    (hole,) = holes(records)
    before = [record for record in records if record["kind"] == "out" and record["seq"] < hole["seq"]]
    assert (standing(1).is_pinned, standing(1).cut_before) == (True, None)
    assert (standing(215).is_pinned, standing(215).cut_before) == (True, hole["last"])
    assert standing(before[-1]["line"] + 1) == SealStanding(is_cut=True)
    with pytest.raises(UsageError, match=r"no line main\.stdout:100: .*bytes cut by the run's log limit"):
        standing(100)


def test_a_stub_beside_a_segment_that_is_whole_says_nothing(host: Host, here: Here) -> None:
    host.fill(30)
    host.end()
    here.pull()
    for index, data in host.segments().items():
        stub_path(here.folder, index).write_bytes(data.splitlines(keepends=True)[-1])
    assert not holes(here.records())
    assert_exact(host, here)


def test_two_cuts_in_a_row_are_one_hole(host: Host, here: Here) -> None:
    host.fill(100)
    here.pull(2)
    host.fill(100)
    here.pull(1)
    assert len(stub_indexes(str(here.folder.records))) == 2
    host.fill(100)
    host.end()
    here.pull()
    assert len(holes(here.records())) == 1
    assert_exact(host, here)


def test_a_live_view_says_how_much_is_missing_when_that_is_known(host: Host, here: Here) -> None:
    host.fill(10)
    here.pull()
    host.fill(200)
    mirror = Mirror.acquire(here.folder, "box")
    assert mirror is not None
    is_over = False
    batches = arriving_batches(here.folder, lambda: is_over)
    with mirror:
        sent = host.send(mirror.cursor)
        for piece in sent:
            mirror.append(piece)
            if isinstance(piece, Cut):
                break
        while batch := next(batches):
            assert not holes(batch)
        mirror.append(next(sent))
        (hole,) = holes(next(batches))
        assert hole["bytes"] == hole_after(here.folder, hole["start"]["segment"]).size_bytes  # type: ignore[union-attr]
        is_over = True
        assert not holes([record for batch in batches for record in batch])


def test_a_hole_at_the_end_of_a_mirror_is_told_without_its_size(host: Host, here: Here) -> None:
    host.fill(200)
    here.pull(2)
    (hole,) = holes(here.records())
    assert hole["bytes"] is None
    assert "an unknown number of bytes" in lines_of(here.records())[-1].text
    assert list(arriving_batches(here.folder, lambda: True))[-1] == [hole]
    found = scan(here.folder)
    assert [part.through for part in found.holes] == [hole["through"]]
    assert found.cut_through == 0, "the record that tells of it is not here yet"


class TestTampering:
    @pytest.fixture(autouse=True)
    def run(self, host: Host, here: Here) -> None:
        host.fill(15)
        here.pull()
        host.fill(200)
        host.end()
        here.pull()
        assert_exact(host, here)

    def assert_found(self, folder: RunFolder, part: str) -> None:
        with pytest.raises(RecordsAltered):
            list(checked_records(folder))
        assert part in str(problems(folder)), problems(folder)

    def stub(self, folder: RunFolder) -> Path:
        (index,) = stub_indexes(str(folder.records))
        return stub_path(folder, index)

    @pytest.mark.parametrize(
        "change",
        [
            lambda line: line.replace(b'"seq":', b'"seq":1'),
            lambda line: line[:-4] + (b"0" if line[-4:-3] != b"0" else b"1") + line[-3:],
            lambda line: line.replace(b'"bytes":', b'"bytes":1'),
            lambda line: line + line,
            lambda _: b"",
        ],
    )
    def test_a_forged_stub_is_found(self, here: Here, change: Callable[[bytes], bytes]) -> None:
        path = self.stub(here.folder)
        path.write_bytes(change(path.read_bytes()))
        with pytest.raises(RecordsAltered):
            list(checked_records(here.folder))
        assert problems(here.folder) != (None, None, None)

    def test_a_missing_segment_without_a_stub_is_a_fault(self, here: Here) -> None:
        self.stub(here.folder).unlink()
        with pytest.raises(RecordsAltered):
            list(checked_records(here.folder))
        with pytest.raises(RecordsAltered, match="missing"):
            list(newest_batches(here.folder, end_position(here.folder)))
        assert "is missing" in str(problems(here.folder))

    def test_a_true_seal_as_a_stub_for_what_was_never_cut_is_found(self, host: Host, here: Here) -> None:
        last = max(host.segments())
        path = here.folder.segment(last - 1)
        stub_path(here.folder, last - 1).write_bytes(path.read_bytes().splitlines(keepends=True)[-1])
        path.unlink()
        (here.folder.path / "observations.jsonl").unlink()
        self.assert_found(here.folder, "is missing, and no record says that it was cut")

    def test_the_first_segment_cannot_be_cut(self, here: Here) -> None:
        first = here.folder.segment(0)
        stub_path(here.folder, 0).write_bytes(first.read_bytes().splitlines(keepends=True)[-1])
        first.unlink()
        (here.folder.path / "observations.jsonl").unlink()
        assert "segment 0 is missing" in str(problems(here.folder))
        assert here.records() == []

    @pytest.mark.parametrize("key", ["last", "sha256"])
    def test_a_record_that_does_not_tell_of_the_stub_is_found(self, here: Here, key: str) -> None:
        index = holes(here.records())[-1]["through"]
        told = next(record for record in here.records() if record.get("segment") == index)
        change_record(here.folder, told, key)
        assert f"record {told['seq']} tells of another segment {index}" in str(problems(here.folder))


def test_a_hole_that_was_widened_over_what_is_here_is_found(host: Host, here: Here) -> None:
    host.fill(15)
    here.pull()
    host.fill(200)
    here.pull()
    (through,) = stub_indexes(str(here.folder.records))
    stub_path(here.folder, through).unlink()
    last_line = here.folder.segment(through + 1).read_bytes().splitlines(keepends=True)[-1]
    stub_path(here.folder, through + 1).write_bytes(last_line)
    with pytest.raises(RecordsAltered, match="which was here, is said to be cut"):
        here.records()
    with pytest.raises(RecordsAltered, match="the mirror lacks seal"):
        check_end(here.folder)


def test_a_stub_that_is_older_than_what_is_here_is_a_finding(host: Host, here: Here) -> None:
    host.fill(60)
    here.pull()
    old = here.folder.segment(0).read_bytes().splitlines(keepends=True)[-1]
    mirror = Mirror.acquire(here.folder, "box")
    assert mirror is not None
    at, stubs = mirror.cursor, stub_indexes(str(here.folder.records))
    assert at.segment > 0
    with mirror, pytest.raises(RecordsAltered, match="is here already"):
        mirror.append(Cut(cursor=at, through=at.segment, stub=old))
    assert stub_indexes(str(here.folder.records)) == stubs


@pytest.mark.parametrize("key", ["bytes", "first", "last", "sha256"])
def test_a_record_that_does_not_tell_of_the_segment_that_is_here_is_found(
    host: Host, here: Here, key: str
) -> None:
    for _ in range(10):
        host.fill(10)
        here.pull()
    host.end()
    here.pull()
    told = next(record for record in here.records() if record["kind"] == "cut")
    change_record(here.folder, told, key)
    assert f"record {told['seq']} tells of another segment {told['segment']}" in str(problems(here.folder))


def change_record(folder: RunFolder, told: Record, key: str) -> None:
    changed = {**told, key: "0" * 64 if key == "sha256" else told[key] + 1}
    lines = (json.dumps(value, separators=(",", ":")) for value in (told, changed))
    old, new = (line.partition('"kind":"cut",')[2].encode() for line in lines)
    for path in folder.records.glob("*.jsonl"):
        path.write_bytes(path.read_bytes().replace(old, new))


class TestWhatAHostSends:
    def test_a_stub_that_is_none_or_another_than_before_is_refused(self, host: Host, here: Here) -> None:
        host.fill(200)
        cut = next(piece for piece in host.send(Cursor(segment=1)) if isinstance(piece, Cut))
        mirror = Mirror.acquire(here.folder, "box")
        assert mirror is not None
        first = host.segments()[0]
        with mirror:
            mirror.append(Piece(Cursor(), first))
            with pytest.raises(ProtocolError, match="no seal"):
                mirror.append(Cut(cursor=cut.cursor, through=cut.through, stub=b"x\n"))
            with pytest.raises(ProtocolError, match="jump"):
                mirror.append(Cut(cursor=Cursor(segment=3), through=cut.through, stub=cut.stub))
            mirror.append(cut)
            assert mirror.cursor == Cursor(segment=cut.through + 1)
        forged = cut.stub.replace(b'"bytes":', b'"bytes":1')
        with Mirror.acquire(here.folder, "box") as mirror, pytest.raises(RecordsAltered, match="sent before"):  # type: ignore[union-attr]
            mirror.append(Cut(cursor=Cursor(segment=1), through=cut.through, stub=forged))
        assert stub_path(here.folder, cut.through).read_bytes() == cut.stub

    @pytest.mark.parametrize(
        ("through", "stub"),
        [
            (10**12, b'{"seq":9,"t":1.0,"kind":"seal","bytes":5,"sha256":"%s"}\n' % (b"0" * 64)),
            (3, b'{"seq":%s,"t":1.0,"kind":"seal","bytes":5,"sha256":"%s"}\n' % (b"9" * 5000, b"0" * 64)),
        ],
    )
    def test_what_no_run_can_have_cut_is_refused(self, here: Here, through: int, stub: bytes) -> None:
        mirror = Mirror.acquire(here.folder, "box")
        assert mirror is not None
        with mirror, pytest.raises(ProtocolError):
            mirror.append(Cut(cursor=Cursor(segment=1), through=through, stub=stub))
        assert not stub_indexes(str(here.folder.records))

    def test_the_first_segment_is_never_cut(self, host: Host, here: Here) -> None:
        host.fill(200)
        (index,) = stub_indexes(str(host.records))
        stub = (host.records / f"{index:06}.cut").read_bytes()
        mirror = Mirror.acquire(here.folder, "box")
        assert mirror is not None
        with mirror:
            mirror.append(Piece(Cursor(), host.segments()[0][:20]))
            with pytest.raises(ProtocolError, match="first segment"):
                mirror.append(Cut(cursor=mirror.cursor, through=index, stub=stub))
        stub_path(here.folder, index).write_bytes(stub)
        here.folder.segment(index + 1).write_bytes(host.segments()[index + 1])
        assert here.records() == []
        assert "segment 1 is missing" in str(problems(here.folder))

    def test_a_stub_without_a_time_and_a_record_that_only_readers_make_are_findings(
        self, host: Host, here: Here
    ) -> None:
        host.fill(1)
        host.writer.write(MISSING)
        here.pull()
        with pytest.raises(RecordsAltered, match="no record"):
            here.records()
        first = here.folder.segment(0)
        first.write_bytes(first.read_bytes().splitlines(keepends=True)[0])
        line = b'{"seq":9,"t":1..2,"kind":"seal","bytes":5,"sha256":"%s"}\n' % (b"0" * 64)
        stub_path(here.folder, 3).write_bytes(line)
        with pytest.raises(RecordsAltered, match="is no seal"):
            here.records()
        assert "is no seal" in str(problems(here.folder))

    def test_bytes_that_do_not_follow_from_the_stub_are_a_finding(self, host: Host, here: Here) -> None:
        host.fill(200)
        host.end()
        (index,) = stub_indexes(str(host.records))
        path = host.records / f"{index:06}.cut"
        path.write_bytes(path.read_bytes().replace(b'"bytes":', b'"bytes":1'))
        with pytest.raises(RecordsAltered, match="does not match"):
            here.pull()


class TestTheHost:
    def test_what_is_interrupted_anywhere_can_still_be_read(self, tmp_path: Path) -> None:
        """The supervisor is killed at each step of a removal in turn; the run is then as it lies there."""
        for step in range(8):
            base = tmp_path / str(step)
            base.mkdir()
            host = Host(base)
            here = Here(base, host)
            host.fill(100)
            left = [step]

            def counted(real: Callable[..., Any], left: list[int] = left) -> Callable[..., Any]:
                def call(*arguments: Any) -> Any:
                    left[0] -= 1
                    if left[0] < 0:
                        raise KeyboardInterrupt
                    return real(*arguments)

                return call

            with pytest.MonkeyPatch.context() as patch:
                for name in ("rename", "unlink"):
                    patch.setattr(os, name, counted(getattr(os, name)))
                with pytest.raises(KeyboardInterrupt):
                    host.fill(200, 100)
            here.pull()
            records = here.records()
            expected = 0
            for record in records:
                assert record["seq"] == expected
                expected = (record["last"] if record["kind"] == MISSING else expected) + 1
            assert records[-1]["kind"] in ("seal", "segment"), step
            assert problems(here.folder) == (None, None, None)
            assert all(hole.through <= scan(here.folder).cut_through for hole in scan(here.folder).holes)

    def test_a_disk_that_takes_no_stub_leaves_the_segments_for_the_next_time(self, host: Host) -> None:
        host.fill(10)

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        host.limit *= 2
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "rename", full)
            host.fill(100)
        assert not host.removed
        before = len(host.segments())
        host.fill(30)
        host.end()
        assert len(host.removed) > before - 9
        assert host.size() <= host.limit // 2
