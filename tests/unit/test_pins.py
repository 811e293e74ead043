"""The pinned seals: read from either end, one at a time, and compared with what stands in their places."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest

from orchestrator import pins as pins_module
from orchestrator.conversation import Cursor, Piece
from orchestrator.errors import RecordsAltered
from orchestrator.mirror import Mirror
from orchestrator.mirror_reader import check_end, checked_records
from orchestrator.pins import in_place, newest_pins, pins
from orchestrator.run_folder import Record, RunFolder, parse_observation
from orchestrator.supervisor.records import RecordWriter

RUN = "run1"
COUNT = 100


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A mirror of one segment with `COUNT` seals, all pinned."""
    host = tmp_path / "host"
    host.mkdir()
    writer = RecordWriter(str(host), RUN, {"job": {}})
    for i in range(COUNT):
        writer.write_output("main", 7, "stdout", i, i, "text", f"line {i}\n")
        writer.seal()
    writer.close()
    folder = RunFolder(tmp_path, RUN)
    folder.path.parent.mkdir()
    mirror = Mirror.acquire(folder, "box")
    assert mirror is not None
    with mirror:
        mirror.append(Piece(Cursor(), (host / "000000.jsonl").read_bytes()))
    return folder


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The observations that were read from the end."""
    lines: list[bytes] = []

    def parse(line: bytes) -> Record | None:
        lines.append(line)
        return parse_observation(line)

    monkeypatch.setattr(pins_module, "parse_observation", parse)
    return lines


@pytest.mark.parametrize("block_bytes", [1, 7, 200, 64 * 1024])
def test_from_the_end_come_the_same_pins(
    folder: RunFolder, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pins_module, "BLOCK_BYTES", block_bytes)
    folder.observe("clock", host="box")
    with folder.observations_path.open("a") as file:
        file.write('{"t":1.0,"kind":"se')
    forwards = list(pins(folder))
    assert len(forwards) == COUNT
    assert list(newest_pins(folder)) == forwards[::-1]


def test_a_reconnect_reads_the_newest_pins_only(folder: RunFolder, parsed: list[bytes]) -> None:
    mirror = Mirror.acquire(folder, "box")
    assert mirror is not None
    with mirror:
        assert mirror.cursor == Cursor(offset=folder.segment(0).stat().st_size)
    assert 0 < len(parsed) < 5


def test_the_check_of_the_end_reads_as_many_pins_as_it_covers(folder: RunFolder, parsed: list[bytes]) -> None:
    check_end(folder, 1000)
    assert 0 < len(parsed) < COUNT / 2


def test_many_pins_are_never_in_memory_together(folder: RunFolder) -> None:
    line = folder.observations_path.read_bytes().splitlines(keepends=True)[0]
    folder.observations_path.write_bytes(line * 20_000)
    tracemalloc.start()
    try:
        assert sum(1 for _ in in_place(folder, pins(folder))) == 20_000
        assert sum(1 for _ in in_place(folder, newest_pins(folder))) == 20_000
        assert not list(folder.notes())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < len(line) * 20_000 / 4


def test_a_pin_that_the_mirror_does_not_bear_out_is_found_before_a_record_is_shown(folder: RunFolder) -> None:
    entries = [json.loads(line) for line in folder.observations_path.read_text().splitlines()]
    for change in ({"sha256": "0" * 64}, {"seq": 10**6}, {"line_start": 0}, {"segment": 3}):
        changed = [{**entry, **change} if entry is entries[-1] else entry for entry in entries]
        folder.observations_path.write_text("".join(json.dumps(entry) + "\n" for entry in changed))
        with pytest.raises(RecordsAltered, match=r"pinned|which was here"):
            next(checked_records(folder))


def test_the_order_in_which_seals_were_pinned_does_not_matter(folder: RunFolder) -> None:
    lines = folder.observations_path.read_bytes().splitlines(keepends=True)
    folder.observations_path.write_bytes(b"".join([lines[0], *lines[2:], lines[1]]))
    assert list(checked_records(folder))
