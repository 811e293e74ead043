"""Lines of several runs in one order: of mirrors as they lie there, and of runs that go on."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.errors import RecordsAltered
from orchestrator.log_filter import LineFilter, parse_pattern
from orchestrator.log_lines import LineAssembler
from orchestrator.merging import HOLD_S, LiveMerge, Placed, RunLines, merge

Records = list[dict[str, Any]]


def records_of(times: list[float], text: str = "x") -> Records:
    """One line a record, in the order of ``times``."""
    line = {"kind": "out", "proc": "main", "pid": 7, "stream": "stdout"}
    size = len(text) + 1
    return [
        {**line, "seq": seq, "t": t, "off": seq * size, "line": seq, "text": f"{text}\n"}
        for seq, t in enumerate(times)
    ]


def run_lines(run: int, offset_s: float = 0.0, **options: Any) -> RunLines:
    return RunLines(run, LineAssembler(host="box", run_id=f"run{run}"), offset_s=offset_s, **options)


def places(lines: Iterator[Placed]) -> list[tuple[int, int]]:
    return [(placed.run, placed.line.seq) for placed in lines]


def test_lines_are_ordered_by_corrected_time_and_then_by_run() -> None:
    first = run_lines(0).read(records_of([10.0, 11.0, 13.0]))
    ahead = run_lines(1, offset_s=3600.0).read(records_of([3610.0, 3612.0]))
    assert places(merge([first, ahead])) == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2)]


def test_a_clock_that_was_set_back_changes_no_order_within_its_run() -> None:
    stepped = run_lines(0).read(records_of([10.0, 50.0, 11.0, 12.0, 51.0]))
    steady = run_lines(1).read(records_of([20.0, 50.5]))
    assert places(merge([stepped, steady])) == [(0, 0), (1, 0), (0, 1), (0, 2), (0, 3), (1, 1), (0, 4)]


@given(st.lists(st.tuples(st.floats(-100, 100), st.lists(st.floats(0, 100), max_size=8)), max_size=4))
def test_any_runs_keep_their_own_order_and_lose_nothing(runs: list[tuple[float, list[float]]]) -> None:
    parts = [run_lines(run, offset_s).read(records_of(times)) for run, (offset_s, times) in enumerate(runs)]
    merged = list(merge(parts))
    for run, (_, times) in enumerate(runs):
        assert [placed.line.seq for placed in merged if placed.run == run] == list(range(len(times)))
    assert [placed.order_t for placed in merged] == sorted(placed.order_t for placed in merged)


def test_a_filter_is_by_the_hosts_clock_and_a_line_without_end_comes_last() -> None:
    records = records_of([10.0, 20.0, 30.0])
    records[-1]["text"] = "y"
    wanted = LineFilter(since_t=15.0, pattern=parse_pattern("[xy]"))
    placed = list(run_lines(0, offset_s=5.0, wanted=wanted).read(records))
    assert [(line.t_here, line.line.is_finished) for line in placed] == [(15.0, True), (25.0, False)]


@dataclass
class Clock:
    t: float = 1000.0

    def __call__(self) -> float:
        return self.t


@dataclass
class Arriving:
    """A run whose batches a test adds; ``asked`` counts how many were taken."""

    batches: list[Records] = field(default_factory=list)
    is_over: bool = False
    error: RecordsAltered | None = None
    taken: int = 0

    def __iter__(self) -> Iterator[Records]:
        while True:
            if self.batches:
                self.taken += 1
                yield self.batches.pop(0)
            elif self.error is not None:
                raise self.error
            elif self.is_over:
                return
            else:
                yield []


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def live(clock: Clock) -> LiveMerge:
    return LiveMerge(now_t=clock, now_s=clock)


def join(live: LiveMerge, count: int) -> list[Arriving]:
    runs = [Arriving() for _ in range(count)]
    for number, run in enumerate(runs):
        live.add(run_lines(number), iter(run))
    return runs


def test_a_line_waits_for_an_older_one_that_arrives_in_time(live: LiveMerge, clock: Clock) -> None:
    first, second = join(live, 2)
    first.batches.append(records_of([999.9]))
    assert places(live.ready()) == []
    assert 0 < live.wait_s(10.0) <= HOLD_S
    clock.t += HOLD_S / 2
    second.batches.append(records_of([999.8]))
    assert places(live.ready()) == [(1, 0)]  # and (0, 0) waits: run 1 may yet say more
    clock.t += HOLD_S
    assert places(live.ready()) == [(0, 0)]


def test_a_sign_of_life_or_the_end_of_a_run_lets_the_others_go(live: LiveMerge) -> None:
    first, second, third = join(live, 3)
    first.batches.append(records_of([999.9]))
    second.batches.append([{"kind": "heartbeat", "seq": 0, "t": 1000.0}])
    assert places(live.ready()) == []
    third.is_over = True
    assert places(live.ready()) == [(0, 0)]
    assert live.take_ended() == [(2, None)]
    assert live.count == 2


def test_lines_that_are_old_already_do_not_wait(live: LiveMerge) -> None:
    first, _ = join(live, 2)
    first.batches += [records_of([10.0]), records_of([11.0])]
    assert places(live.ready()) == [(0, 0), (0, 0)]


def test_a_clock_that_is_wrongly_ahead_holds_nobody_up(live: LiveMerge, clock: Clock) -> None:
    first, second = join(live, 2)
    first.batches.append(records_of([5000.0, 5001.0]))
    assert places(live.ready()) == []
    clock.t += HOLD_S
    second.batches.append(records_of([1000.1]))
    assert places(live.ready()) == [(1, 0), (0, 0), (0, 1)]


def test_what_is_not_shown_yet_stays_in_the_mirror(live: LiveMerge) -> None:
    first, second = join(live, 2)
    first.batches += [records_of([999.9 + i / 1000]) for i in range(100)]
    second.batches.append([{"kind": "heartbeat", "seq": 0, "t": 999.0}])
    assert places(live.ready()) == []
    assert first.taken == 1


def test_an_error_ends_its_own_run_after_its_lines(live: LiveMerge) -> None:
    first, second = join(live, 2)
    first.batches.append(records_of([10.0]))
    first.error = RecordsAltered("seal 4 is not the pinned one")
    assert places(live.ready()) == [(0, 0)]
    assert live.take_ended() == [(0, first.error)]
    second.batches.append(records_of([999.9]))
    assert places(live.ready()) == [(1, 0)]


@given(st.lists(st.lists(st.integers(0, 20), min_size=1, max_size=6), min_size=1, max_size=4), st.randoms())
def test_lines_that_arrive_within_the_window_come_in_exact_order(times: list[list[int]], chance: Any) -> None:
    """However arrivals are spread over the window, the live order is that of the mirrors."""
    clock = Clock()
    live = LiveMerge(now_t=clock, now_s=clock)
    wanted = [records_of(sorted(1000.0 + t / 10 for t in of_run)) for of_run in times]
    runs, shown = join(live, len(times)), []
    to_come = []
    for records in wanted:
        arrive_t = [record["t"] + chance.uniform(0.0, HOLD_S / 2) for record in records]
        to_come.append(deque(zip(accumulate(arrive_t, max), records, strict=True)))
    while live.count:
        for run, coming in zip(runs, to_come, strict=True):
            while coming and coming[0][0] <= clock.t:
                run.batches.append([coming.popleft()[1]])
            run.is_over = not coming
        shown += places(live.ready())
        live.take_ended()
        clock.t += 0.05
    assert shown == places(merge(run_lines(run).read(records) for run, records in enumerate(wanted)))


def test_a_line_without_end_comes_when_its_run_is_over(live: LiveMerge) -> None:
    (run,) = join(live, 1)
    records = records_of([10.0, 11.0])
    records[-1]["text"] = "no end"
    run.batches.append(records)
    assert places(live.ready()) == [(0, 0)]
    run.is_over = True
    assert [placed.line.text for placed in live.ready()] == ["no end"]
    assert live.take_ended() == [(0, None)]
