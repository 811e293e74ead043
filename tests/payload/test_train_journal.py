"""What a training tells: records, event files and a line with the same figures, rates, and counted work."""

import io
import json
import math
import os
import stat
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash import flops
from dflash.anchors import draw_anchors
from dflash.blocks import lay_out
from dflash.cards import CARDS
from dflash.notices import DFlashWarning
from dflash.packing import pack
from dflash.training import journal as journal_module
from dflash.training.journal import COUNTERS, Journal
from dflash.training.progress_line import ProgressLine
from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
    EventAccumulator,
)

from tests.payload.cases import FULL, SLIDING, Case, fresh_drafter

FIGURES = {
    "loss_sum": 6.0,
    "weight_sum": 3.0,
    "correct_slots": 5.0,
    "valid_slots": 10.0,
    "streak_sum": 8.0,
    "blocks": 4.0,
    "teacher_correct_slots": 0.0,
    "tokens": 100.0,
    "micro_batches": 2.0,
    "nonfinite_micro_batches": 0.0,
    "rows_without_loss": 0.0,
    "grad_norm": 0.5,
}


@dataclass
class Result:
    figures: Mapping[str, float]
    reads: int = 0

    def read(self) -> Mapping[str, float]:
        self.reads += 1
        return self.figures


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(journal_module, "perf_counter", clock)
    return clock


class Watcher:
    def __init__(self) -> None:
        self._reader, self.writer = os.pipe()
        self._lines: list[bytes] = []
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def metrics(self) -> dict[int, dict[str, Any]]:
        """Return each step's metrics; nothing can be told afterwards."""
        os.close(self.writer)
        self._thread.join()
        by_step: dict[int, dict[str, Any]] = {}
        for event in map(json.loads, self._lines):
            if event["kind"] != "metric":
                continue
            by_step.setdefault(event["step"], {})[event["name"]] = event["value"]
        return by_step

    def _read(self) -> None:
        with open(self._reader, "rb") as pipe:  # noqa: PTH123  a descriptor has no path
            self._lines = pipe.readlines()


@pytest.fixture
def watcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watcher]:
    watcher = Watcher()
    found = os.fstat(watcher.writer)
    assert stat.S_ISFIFO(found.st_mode)
    monkeypatch.setenv("ORCH_EVENTS_FD", f"{watcher.writer}:{found.st_ino}")
    yield watcher
    if watcher._thread.is_alive():
        watcher.metrics()


def journal(stream: io.StringIO | None = None, **options: Any) -> Journal:
    line = ProgressLine(io.StringIO() if stream is None else stream)
    return Journal(**{"every": 2, "total_steps": 10, "line": line, **options})


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    found = EventAccumulator(str(folder))
    found.Reload()
    tags = found.Tags()["scalars"]
    return {tag: [(event.step, event.value) for event in found.Scalars(tag)] for tag in tags}


def test_records_event_files_and_line_tell_the_same_means_over_the_steps_between(
    clock: Clock, watcher: Watcher, tmp_path: Path
) -> None:
    stream = io.StringIO()
    told = journal(stream, tensorboard=tmp_path)
    told.end_step(1, Result(FIGURES), lr=1e-3, queue_depth=1)
    clock.now += 4
    told.end_step(2, Result({**FIGURES, "loss_sum": 3.0, "grad_norm": 0.25}), lr=5e-4, queue_depth=3)
    told.close()
    values = watcher.metrics()[2]
    assert values["train.peak_rss_gib"] > 0
    assert values == {
        "train.peak_rss_gib": values["train.peak_rss_gib"],
        "train.loss": 1.5,
        "train.accuracy": 0.5,
        "train.avg_streak": 2.0,
        "train.teacher_accuracy": 0.0,
        "train.lr": 5e-4,
        "train.grad_norm": 0.25,
        "train.queue_depth": 3.0,
        "train.tokens_per_s": 50.0,
        "train.step_ms": 2000.0,
        "train.tokens": 200.0,
        "train.micro_batches": 4.0,
        "train.nonfinite_micro_batches": 0.0,
        "train.rows_without_loss": 0.0,
        "train.skipped_steps": 0.0,
    }
    for name, points in scalars(tmp_path).items():
        [(step, value)] = points
        assert (step, pytest.approx(value)) == (2, values.pop(name.replace("/", ".")))
    assert not values
    assert stream.getvalue() == (
        "step 2/10 · loss 1.5000 · accuracy 0.500 · streak 2.00 · lr 5.00e-04 · norm 0.25 · 50 tokens/s "
        "· queue 3 · 0 min 16 s left\n"
    )


def test_nobody_waits_for_the_device_until_a_record_is_due(clock: Clock) -> None:
    told, results = journal(every=3), [Result(FIGURES) for _ in range(3)]
    for number, result in enumerate(results[:2]):
        told.end_step(number + 1, result, lr=1.0, queue_depth=0)
    assert [result.reads for result in results] == [0, 0, 0]
    told.end_step(3, results[2], lr=1.0, queue_depth=0)
    assert [result.reads for result in results] == [1, 1, 1]


def test_last_step_is_told_though_no_record_is_due(watcher: Watcher) -> None:
    told = journal(every=100, total_steps=3)
    for number in (1, 2, 3):
        told.end_step(number, Result(FIGURES), lr=1.0, queue_depth=0)
    assert list(watcher.metrics()) == [3]


def test_rates_leave_validations_and_saves_out(clock: Clock, watcher: Watcher) -> None:
    told = journal(every=1)
    clock.now += 2
    with told.aside():
        clock.now += 1000
    told.end_step(1, Result(FIGURES), lr=1.0, queue_depth=0)
    assert watcher.metrics()[1]["train.tokens_per_s"] == 50


def test_share_of_the_peak_is_counted_work_by_time(clock: Clock, watcher: Watcher) -> None:
    told = journal(every=1, peak_flops_per_s=1e6)
    for step in (1, 2):
        told.add_flops(1e6)
        told.add_flops(5e5)
        clock.now += 2
        told.end_step(step, Result(FIGURES), lr=1.0, queue_depth=0)
    told.end_step(3, Result(FIGURES), lr=1.0, queue_depth=0)
    values = watcher.metrics()
    assert [values[step]["train.mfu"] for step in (1, 2)] == [0.75, 0.75]
    assert values[1]["train.flops_per_s"] == 7.5e5
    assert "train.mfu" not in values[3]


def test_what_was_skipped_is_counted_and_said(watcher: Watcher) -> None:
    stream = io.StringIO()
    told = journal(stream, counters={"tokens": 1000, "rows_without_loss": 1})
    told.end_step(
        1,
        Result({**FIGURES, "nonfinite_micro_batches": 2.0, "rows_without_loss": 1.0}),
        lr=1.0,
        queue_depth=0,
    )
    told.end_step(2, Result({**FIGURES, "weight_sum": 0.0, "grad_norm": math.nan}), lr=1.0, queue_depth=0)
    told.end_step(3, Result(FIGURES), lr=1.0, queue_depth=0)
    assert " · so far 2 non-finite rows, 2 rows without loss, 1 skipped steps · " in stream.getvalue()
    assert told.counters == {
        "tokens": 1300,
        "micro_batches": 6,
        "nonfinite_micro_batches": 2,
        "rows_without_loss": 2,
        "skipped_steps": 1,
    }
    assert told.counters.keys() == set(COUNTERS)
    assert watcher.metrics()[2]["train.grad_norm"] == "nan"


def test_counters_asked_between_records_change_no_record(watcher: Watcher) -> None:
    told = journal()
    told.end_step(1, Result(FIGURES), lr=1.0, queue_depth=0)
    assert told.counters["tokens"] == 100
    told.end_step(2, Result(FIGURES), lr=1.0, queue_depth=0)
    values = watcher.metrics()[2]
    assert (values["train.tokens"], values["train.loss"]) == (200, 2.0)


def test_validations_are_told_and_stay_on_a_terminal_above_the_line(watcher: Watcher) -> None:
    stream = Terminal()
    told = journal(stream, every=1)
    told.end_step(1, Result(FIGURES), lr=1.0, queue_depth=0)
    told.end_step(2, Result(FIGURES), lr=1.0, queue_depth=0)
    told.end_validation(2, {"loss": 0.5, "avg_streak": 2.25, "acceptance.1": 0.75})
    told.end_step(3, Result(FIGURES), lr=1.0, queue_depth=0)
    told.close()
    lines = stream.getvalue().split("\n")
    assert lines[0].startswith("\rstep 1/10 · ")
    assert lines[0].count("\r") == 2
    assert lines[1] == "step 2 held out · loss 0.5000 · avg_streak 2.2500"
    assert lines[2].startswith("\rstep 3/10 · ")
    assert lines[3:] == [""]
    assert watcher.metrics()[2].items() >= {"held_out.loss": 0.5, "held_out.acceptance.1": 0.75}.items()


def test_a_training_that_continues_hides_what_was_told_of_lost_steps(tmp_path: Path) -> None:
    first = journal(tensorboard=tmp_path)
    for step in (2, 4, 6):
        first.end_step(step, Result(FIGURES), lr=1.0, queue_depth=0)
    first.close()
    second = journal(tensorboard=tmp_path, steps_done=3)
    second.end_step(4, Result(FIGURES), lr=9.0, queue_depth=0)
    second.close()
    assert scalars(tmp_path)["train/lr"] == [(2, 1.0), (4, 9.0)]


def test_without_tensorboard_the_rest_is_told(
    watcher: Watcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.warns(DFlashWarning, match="tensorboard: it is not installed here"):
        told = journal(tensorboard=tmp_path)
    told.end_step(2, Result(FIGURES), lr=1.0, queue_depth=0)
    told.close()
    assert watcher.metrics()[2]["train.loss"] == 2.0


def test_counted_work_is_that_of_the_forwards_own_blocks() -> None:
    case = Case(layer_types=(SLIDING, FULL), lengths=(13, 9), padding=4, max_anchors=5)
    drafter, mask_1S = fresh_drafter(case), torch.ones(1, case.row_length, dtype=torch.bool)
    packing = pack(case.lengths, case.row_length)
    anchors = draw_anchors(packing, mask_1S[0], max_anchors=5, seed=7)
    blocks = lay_out(packing, mask_1S[0], anchors, block_size=case.block_size)
    counts = flops.count_row(blocks, drafter.config, context_tokens=case.row_length)
    expected = flops.count_flops(drafter.config, counts, target_layers=len(case.target_layer_ids))
    counted = flops.count_micro_batch(drafter, loss_mask_1S=mask_1S, lengths=case.lengths, seed=7)
    assert counted == expected
    assert counted.backward > counted.forward > 0
    nothing = flops.count_micro_batch(drafter, loss_mask_1S=0 * mask_1S, lengths=case.lengths, seed=7)
    assert nothing.both == 0


def test_peaks_are_known_by_a_cards_full_name() -> None:
    assert flops.peak_of_card("NVIDIA H200") == 989e12
    assert flops.peak_of_card("NVIDIA H100 PCIe") is None
    assert flops.peak_flops_per_s(torch.device("cpu")) is None
    assert flops.PEAK_FLOPS_PER_S.keys() <= CARDS.keys()
