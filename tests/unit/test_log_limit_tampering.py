"""What is found where stubs, cut records or segments are not what a run's log limit made."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.conversation import Cursor, Cut, Piece
from orchestrator.errors import ProtocolError, RecordsAltered
from orchestrator.holes import stub_path
from orchestrator.mirror import Mirror
from orchestrator.mirror_reader import (
    check_end,
    checked_records,
    end_position,
    newest_batches,
)
from orchestrator.outcome import MISSING
from orchestrator.run_folder import Record, RunFolder
from orchestrator.supervisor.cuts import stub_indexes
from tests.unit.limited_run import Here, Host, assert_exact, holes, problems


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
