"""What a training tells while it runs: metric records, TensorBoard's files and a progress line, side by side.

    train.loss, .accuracy, .avg_streak, .teacher_…    means over the steps since the last record
    train.lr, .grad_norm, .queue_depth                of the step itself
    train.tokens_per_s, .step_ms                      since the last record, without what `aside` leaves out
    train.flops_per_s, .mfu                           of counted work (`dflash.flops`), nothing twice
    train.tokens, .nonfinite_micro_batches, …         since the training began, over interruptions
    train.peak_allocated_gib, .peak_reserved_gib      of the process so far; with several cards also by card

Whoever steps does not wait for the device: a step's figures are read when the next record is due, or when
counters are asked for.
"""

import contextlib
import math
import resource
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Protocol

import torch

from dflash.events import emit_metric
from dflash.training.progress_line import ProgressLine, progress_text
from dflash.training.summaries import Summaries

GIB = 2**30
KIB_PER_GIB = 2**20
MEANS = {
    "loss": ("loss_sum", "weight_sum"),
    "accuracy": ("correct_slots", "valid_slots"),
    "avg_streak": ("streak_sum", "blocks"),
    "teacher_accuracy": ("teacher_correct_slots", "valid_slots"),
    "teacher_avg_streak": ("teacher_streak_sum", "blocks"),
}
COUNTERS = ("tokens", "micro_batches", "nonfinite_micro_batches", "rows_without_loss", "skipped_steps")


class StepResult(Protocol):
    """A step's figures over all drafters, perhaps still on the device."""

    def read(self) -> Mapping[str, float]:
        """Return the sums that `MEANS` and `COUNTERS` name, as far as there are some, and "grad_norm"."""


class Journal:
    """The telling of one process; of several processes one has a journal.

    Time counts from when it is made. `peak_flops_per_s` is that of all drafters of this process together,
    None where a card is unknown; `steps_done` and `counters` are those of a training that continues.
    """

    def __init__(
        self,
        *,
        every: int,
        total_steps: int,
        steps_done: int = 0,
        counters: Mapping[str, int] | None = None,
        devices: Sequence[torch.device] = (),
        peak_flops_per_s: float | None = None,
        tensorboard: Path | None = None,
        line: ProgressLine | None = None,
    ) -> None:
        self._every, self._total_steps = every, total_steps
        self._devices = [device for device in dict.fromkeys(devices) if device.type == "cuda"]
        self._peak_flops_per_s = peak_flops_per_s
        self._summaries = Summaries(tensorboard, steps_done=steps_done)
        self._line = ProgressLine() if line is None else line
        self._lock = threading.Lock()
        self._flops = 0.0
        self._counters = {name: (counters or {}).get(name, 0) for name in COUNTERS}
        self._unread: list[StepResult] = []
        self._begin_interval()

    @property
    def counters(self) -> dict[str, int]:
        """What was counted since the training began; the host waits for the device."""
        self._read()
        return dict(self._counters)

    def add_flops(self, flops: float) -> None:
        """Count the operations of a micro-batch; of whichever thread."""
        with self._lock:
            self._flops += flops

    def end_step(self, steps_done: int, result: StepResult, *, lr: float, queue_depth: int) -> None:
        """Take a step's result; tell of the steps since the last record when one is due."""
        self._unread.append(result)
        self._steps += 1
        if steps_done % self._every == 0 or steps_done >= self._total_steps:
            self._read()
            values = self._interval_values() | {"train.lr": lr, "train.queue_depth": float(queue_depth)}
            self.tell(steps_done, values)
            self._line.show(progress_text(steps_done, self._total_steps, values))
            self._begin_interval()

    def end_validation(self, steps_done: int, figures: Mapping[str, float]) -> None:
        """Tell figures of held-out documents."""
        self.tell(steps_done, {f"held_out.{name}": value for name, value in figures.items()})
        shown = ("loss", "accuracy", "avg_streak", "teacher_accuracy", "teacher_avg_streak")
        parts = [f"{name} {figures[name]:.4f}" for name in shown if name in figures]
        self._line.say(f"step {steps_done} held out · {' · '.join(parts)}")

    def tell(self, steps_done: int, values: Mapping[str, float]) -> None:
        """Tell any numbers under dotted names."""
        for name, value in values.items():
            emit_metric(name, value, step=steps_done)
        self._summaries.add(steps_done, values)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Leave a validation or a save out of the rates."""
        began = perf_counter()
        try:
            yield
        finally:
            self._began += perf_counter() - began

    def close(self) -> None:
        """Leave the progress line and close the files."""
        self._line.end()
        self._summaries.close()

    def _begin_interval(self) -> None:
        self._began, self._steps = perf_counter(), 0
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._grad_norm = math.nan
        with self._lock:
            self._flops = 0.0

    def _read(self) -> None:
        for result in self._unread:
            figures = result.read()
            self._grad_norm = figures["grad_norm"]
            for name in {*COUNTERS, *(part for ratio in MEANS.values() for part in ratio)} & figures.keys():
                self._sums[name] += figures[name]
            for name in COUNTERS:
                self._counters[name] += round(figures.get(name, 0))
            self._counters["skipped_steps"] += not math.isfinite(self._grad_norm)
        self._unread.clear()

    def _interval_values(self) -> dict[str, float]:
        duration_s = max(perf_counter() - self._began, 1e-9)
        values = {
            f"train.{name}": self._sums[part] / self._sums[whole]
            for name, (part, whole) in MEANS.items()
            if self._sums[whole] and part in self._sums
        }
        values["train.grad_norm"] = self._grad_norm
        values["train.tokens_per_s"] = self._sums["tokens"] / duration_s
        values["train.step_ms"] = 1e3 * duration_s / self._steps
        if self._flops:
            values["train.flops_per_s"] = self._flops / duration_s
            if self._peak_flops_per_s:
                values["train.mfu"] = self._flops / duration_s / self._peak_flops_per_s
        values |= {f"train.{name}": float(self._counters[name]) for name in COUNTERS}
        return values | self._peaks_gib()

    def _peaks_gib(self) -> dict[str, float]:
        if not self._devices:
            peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            return {"train.peak_rss_gib": peak_kib / KIB_PER_GIB}
        by_kind = {
            "allocated": [torch.cuda.max_memory_allocated(device) / GIB for device in self._devices],
            "reserved": [torch.cuda.max_memory_reserved(device) / GIB for device in self._devices],
        }
        peaks = {f"train.peak_{kind}_gib": max(gib) for kind, gib in by_kind.items()}
        if len(self._devices) > 1:
            for kind, each in by_kind.items():
                for device, gib in zip(self._devices, each, strict=True):
                    peaks[f"train.cuda{device.index or 0}.peak_{kind}_gib"] = gib
        return peaks
