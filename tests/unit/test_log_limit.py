"""A run whose log limit cuts segments: what is left reassembles exactly, what is missing is named exactly."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from orchestrator.conversation import Cut, Piece
from orchestrator.errors import UsageError
from orchestrator.experiment import Bounds, Expectation
from orchestrator.holes import hole_after, stub_path
from orchestrator.ledger import RunRow
from orchestrator.lifecycle import State
from orchestrator.line_origin import LineName, SealStanding, find_origin
from orchestrator.log_filter import LineFilter, parse_pattern
from orchestrator.log_lines import LineAssembler, LogLine, select
from orchestrator.log_raw import RawOutput
from orchestrator.log_tail import tail
from orchestrator.log_view import line_json, render
from orchestrator.mirror import Mirror
from orchestrator.mirror_reader import (
    arriving_batches,
    end_position,
    newest_batches,
)
from orchestrator.mirror_scan import scan
from orchestrator.outcome import MISSING, outcome_of
from orchestrator.pins import pins
from orchestrator.run_folder import Record
from orchestrator.supervisor import tail as tail_module
from orchestrator.supervisor.cuts import SLACK_BYTES, stub_indexes
from orchestrator.verdict import CUT_REASON, judge
from tests.unit.limited_run import RUN, SEGMENT, Here, Host, assert_exact, holes, problems


@pytest.fixture(autouse=True)
def _quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)


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
