"""The mirror: byte for byte what came, compared with what was there, checked seal by seal, never cut."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import pytest

from orchestrator import mirror as mirror_module
from orchestrator import mirror_reader
from orchestrator.conversation import Cursor, Piece
from orchestrator.errors import ProtocolError, RecordsAltered, StorageError
from orchestrator.mirror import Mirror
from orchestrator.mirror_reader import (
    arriving_batches,
    check_end,
    checked_records,
    end_position,
    newest_batches,
    read_records,
)
from orchestrator.pins import newest_pins, pins
from orchestrator.run_folder import RunFolder
from orchestrator.supervisor.records import RecordWriter

RUN = "run1"


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    home = tmp_path / "home"
    home.mkdir()
    return RunFolder(home, RUN)


@pytest.fixture
def segments(tmp_path: Path) -> list[bytes]:
    """What a supervisor wrote for a run: several segments, each sealed several times."""
    host = tmp_path / "host"
    host.mkdir()
    writer = RecordWriter(str(host), RUN, {"job": {}}, segment_bytes=3000)
    for i in range(120):
        writer.write_output("main", 7, "stdout", i, i, "text", f"line {i}\n")
        if i % 10 == 9:
            writer.seal()
    writer.close()
    return [path.read_bytes() for path in sorted(host.glob("*.jsonl"))]


def pieces(segments: list[bytes], start: Cursor = Cursor(), seed: int = 1) -> Iterator[Piece]:  # noqa: B008
    """Yields the segments from ``start`` on in pieces of any size."""
    choose = random.Random(seed)
    for index in range(start.segment, len(segments)):
        offset = start.offset if index == start.segment else 0
        while offset < len(segments[index]):
            data = segments[index][offset : offset + choose.randrange(1, 700)]
            yield Piece(Cursor(segment=index, offset=offset), data)
            offset += len(data)


def open_mirror(folder: RunFolder) -> Mirror:
    mirror = Mirror.acquire(folder, "box")
    assert mirror is not None
    return mirror


def mirrored(folder: RunFolder) -> list[bytes]:
    return [path.read_bytes() for path in sorted(folder.records.glob("*.jsonl"))]


@pytest.mark.parametrize("seed", range(8))
def test_any_pieces_with_any_interruptions_end_in_the_same_bytes(
    folder: RunFolder, segments: list[bytes], seed: int
) -> None:
    choose = random.Random(seed)
    while mirrored(folder) != segments:
        with open_mirror(folder) as mirror:
            for piece in pieces(segments, mirror.cursor, choose.randrange(1000)):
                mirror.append(piece)
                if choose.random() < 0.05:
                    break
    assert [record["seq"] for record in read_records(folder)] == list(range(_count(segments)))
    pinned = [entry["seq"] for entry in folder.observations() if entry["kind"] == "seal"]
    sealed = [json.loads(line)["seq"] for line in b"".join(segments).splitlines() if b'"kind":"seal"' in line]
    assert sorted(set(pinned)) == sealed


def test_a_reconnect_asks_from_the_last_checked_seal(folder: RunFolder, segments: list[bytes]) -> None:
    seal_end = segments[0].index(b"\n", segments[0].index(b'"kind":"seal"')) + 1
    with open_mirror(folder) as mirror:
        mirror.append(Piece(Cursor(), segments[0][: seal_end + 50]))
    with open_mirror(folder) as mirror:
        assert mirror.cursor == Cursor(segment=0, offset=seal_end)


def test_bytes_that_changed_on_the_host_are_a_finding_and_overwrite_nothing(
    folder: RunFolder, segments: list[bytes]
) -> None:
    with open_mirror(folder) as mirror:
        mirror.append(Piece(Cursor(), segments[0][:100]))
    with open_mirror(folder) as mirror, pytest.raises(RecordsAltered, match="differs from the mirror"):
        mirror.append(Piece(Cursor(), b"X" + segments[0][1:200]))
    assert mirrored(folder) == [segments[0][:100]]
    assert [entry["kind"] for entry in folder.observations()] == ["finding"]


def test_bytes_that_do_not_match_their_seal_are_a_finding(folder: RunFolder, segments: list[bytes]) -> None:
    altered = segments[0].replace(b"line 3", b"line 8", 1)
    with open_mirror(folder) as mirror, pytest.raises(RecordsAltered, match="seal 11 does not match"):
        mirror.append(Piece(Cursor(), altered))


def test_a_mirror_that_was_altered_where_it_was_pinned_is_a_finding(
    folder: RunFolder, segments: list[bytes]
) -> None:
    with open_mirror(folder) as mirror:
        for piece in pieces(segments[:1]):
            mirror.append(piece)
    path = folder.segment(0)
    path.write_bytes(path.read_bytes()[:-70] + b"0" * 70)
    with pytest.raises(RecordsAltered, match="the mirror was altered"):
        Mirror.acquire(folder, "box")
    with pytest.raises(RecordsAltered, match="ends before seal"):
        list(checked_records(folder))


@pytest.mark.parametrize("kept", [0, 100, 1500, 2900])
def test_a_mirror_that_was_cut_short_is_filled_again(
    folder: RunFolder, segments: list[bytes], kept: int
) -> None:
    with open_mirror(folder) as mirror:
        for piece in pieces(segments[:1]):
            mirror.append(piece)
    pinned = len(list(folder.observations()))
    folder.segment(0).write_bytes(segments[0][:kept])
    with pytest.raises(RecordsAltered, match="ends before seal"):
        list(checked_records(folder))
    with open_mirror(folder) as mirror:
        for piece in pieces(segments, mirror.cursor):
            mirror.append(piece)
    assert mirrored(folder) == segments
    assert len(list(checked_records(folder))) == _count(segments)
    assert len(list(folder.observations())) > pinned


def test_a_host_that_seals_anew_what_was_pinned_is_found_out(
    folder: RunFolder, segments: list[bytes], tmp_path: Path
) -> None:
    with open_mirror(folder) as mirror:
        for piece in pieces(segments[:1]):
            mirror.append(piece)
    folder.segment(0).unlink()
    forged = tmp_path / "forged"
    forged.mkdir()
    writer = RecordWriter(str(forged), RUN, {"job": {}})
    for i in range(10):
        writer.write_output("main", 7, "stdout", i, i, "text", f"other {i}\n")
    writer.close()
    with open_mirror(folder) as mirror, pytest.raises(RecordsAltered, match="not the one that was pinned"):
        mirror.append(Piece(Cursor(), (forged / "000000.jsonl").read_bytes()))


def test_the_end_of_a_mirror_is_checked_from_a_pinned_seal_on(
    folder: RunFolder, segments: list[bytes]
) -> None:
    with open_mirror(folder) as mirror:
        for piece in pieces(segments):
            mirror.append(piece)
    check_end(folder, 3000)
    check_end(folder)
    first, last = folder.segment(0), folder.segment(len(segments) - 1)
    first.write_bytes(segments[0].replace(b"line", b"LINE", 1))
    check_end(folder, 3000)
    with pytest.raises(RecordsAltered):
        check_end(folder)
    first.write_bytes(segments[0])
    for altered in (segments[-1].replace(b"line", b"LINE", 1), segments[-1][:-1]):
        last.write_bytes(altered)
        with pytest.raises(RecordsAltered):
            check_end(folder, 3000)


def test_any_change_of_a_sealed_mirror_is_found_when_it_is_read(
    folder: RunFolder, segments: list[bytes]
) -> None:
    with open_mirror(folder) as mirror:
        for piece in pieces(segments):
            mirror.append(piece)
    whole = folder.segment(1).read_bytes()
    lines = whole.splitlines(keepends=True)
    for altered in (
        whole.replace(b"line", b"LINE", 1),
        b"".join(lines[:3] + lines[4:]),
        b"".join([*lines[:3], lines[3], *lines[3:]]),
        whole[:-1],
        b"5\n" + whole,
        b"not json\n" + whole,
    ):
        folder.segment(1).write_bytes(altered)
        with pytest.raises(RecordsAltered):
            list(checked_records(folder))
    folder.segment(1).write_bytes(whole)
    assert len(list(checked_records(folder))) == _count(segments)


def test_a_note_after_a_line_that_a_full_disk_cut_is_still_read(folder: RunFolder) -> None:
    folder.observe("first")
    path = folder.path / "observations.jsonl"
    path.write_bytes(path.read_bytes() + b'{"t":1.0,"kind":"cu')
    folder.observe("third")
    path.write_bytes(path.read_bytes() + b'5\n{"kind":"seal"}\n{"kind":"seal","seq":"x","sha256":1}\n')
    assert [*pins(folder), *newest_pins(folder)] == []
    assert [entry["kind"] for entry in folder.notes()] == ["first", "third"]
    assert [entry["kind"] for entry in folder.observations()] == ["first", "third", "seal", "seal"]


def test_a_host_that_has_less_than_the_mirror_is_a_finding(folder: RunFolder, segments: list[bytes]) -> None:
    with open_mirror(folder) as mirror:
        for piece in pieces(segments):
            mirror.append(piece)
        last = len(segments) - 1
        mirror.compare_end(last, len(segments[last]))
        with pytest.raises(RecordsAltered, match="lost 5 bytes"):
            mirror.compare_end(last, len(segments[last]) - 5)
        with pytest.raises(RecordsAltered, match=f"lost {len(segments[last])} bytes"):
            mirror.compare_end(last - 1, len(segments[last - 1]))
    assert mirrored(folder) == segments


def test_a_gap_is_refused(folder: RunFolder, segments: list[bytes]) -> None:
    with open_mirror(folder) as mirror:
        mirror.append(Piece(Cursor(), segments[0][:100]))
        for cursor in (Cursor(offset=101), Cursor(offset=99), Cursor(segment=1, offset=1), Cursor(segment=2)):
            with pytest.raises(ProtocolError, match="jump"):
                mirror.append(Piece(cursor, b"x"))
    assert mirrored(folder) == [segments[0][:100]]


def test_a_record_without_an_end_is_refused_before_it_fills_the_memory(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror_module, "MOST_LINE_BYTES", 1000)
    with open_mirror(folder) as mirror:
        mirror.append(Piece(Cursor(), b"x" * 1000))
        with pytest.raises(ProtocolError, match="a record goes on"):
            mirror.append(Piece(Cursor(offset=1000), b"x"))


@pytest.mark.parametrize("t", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_a_record_with_a_time_that_is_none_is_no_record(folder: RunFolder, t: str) -> None:
    folder.make()
    folder.segment(0).write_text(f'{{"seq":0,"t":{t},"kind":"out"}}\n')
    with pytest.raises(RecordsAltered, match="no record"):
        list(read_records(folder))


def test_there_is_one_puller_at_a_time(folder: RunFolder) -> None:
    with open_mirror(folder):
        assert Mirror.acquire(folder, "box") is None
    open_mirror(folder).__exit__()


def test_a_folder_that_cannot_be_written_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("in the way")
    with pytest.raises(StorageError, match="runs"):
        Mirror.acquire(RunFolder(tmp_path, RUN), "box")
    with pytest.raises(StorageError, match="cannot note"):
        RunFolder(tmp_path, RUN).observe("created")


def test_readers_see_whole_records_only(folder: RunFolder, segments: list[bytes]) -> None:
    folder.make()
    whole = b"".join(segments[0].splitlines(keepends=True)[:5])
    folder.segment(0).write_bytes(whole + b'{"seq":5,"half')
    assert [record["seq"] for record in read_records(folder)] == [0, 1, 2, 3, 4]
    end = end_position(folder)
    assert end == Cursor(offset=len(whole))
    newest = newest_batches(folder, end)
    assert [record["seq"] for segment in newest for record in segment] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("most_bytes", [1, 90, 700, 10**6])
def test_batches_from_the_end_hold_every_record_once_and_in_order(
    folder: RunFolder, segments: list[bytes], most_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror_reader, "FIRST_BATCH_BYTES", most_bytes)
    monkeypatch.setattr(mirror_reader, "MOST_BATCH_BYTES", 2 * most_bytes)
    folder.make()
    for index, data in enumerate(segments):
        folder.segment(index).write_bytes(data)
    with folder.segment(len(segments) - 1).open("ab") as file:
        file.write(b'{"seq":')
    batches = [[record["seq"] for record in batch] for batch in newest_batches(folder, end_position(folder))]
    assert [seq for batch in reversed(batches) for seq in batch] == list(range(_count(segments)))
    assert len(batches) >= len(segments)


def test_batches_of_a_mirror_without_records_or_without_a_segment(
    folder: RunFolder, segments: list[bytes]
) -> None:
    assert not list(newest_batches(folder, end_position(folder)))
    folder.make()
    folder.segment(0).write_bytes(segments[0])
    folder.segment(2).write_bytes(segments[2])
    with pytest.raises(RecordsAltered, match=r"000001\.jsonl is missing"):
        list(newest_batches(folder, end_position(folder)))


def test_the_last_batch_needs_no_older_bytes(
    folder: RunFolder, segments: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror_reader, "FIRST_BATCH_BYTES", 500)
    folder.make()
    folder.segment(0).write_bytes(b"no record\n" + segments[0])
    newest = list(next(newest_batches(folder, end_position(folder))))
    assert newest[-1]["seq"] == segments[0].count(b"\n") - 1


def test_a_tail_sees_what_arrives_until_it_is_over(folder: RunFolder, segments: list[bytes]) -> None:
    source = pieces(segments)
    with open_mirror(folder) as mirror:
        is_over, seen = Event(), []
        for batch in arriving_batches(folder, is_over.is_set):
            seen += [record["seq"] for record in batch]
            if not batch and not is_over.is_set():
                piece = next(source, None)
                if piece is None:
                    is_over.set()
                else:
                    mirror.append(piece)
    assert seen == list(range(_count(segments)))


def _count(segments: list[bytes]) -> int:
    return sum(segment.count(b"\n") for segment in segments)
