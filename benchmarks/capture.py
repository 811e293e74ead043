"""What it costs a training step that the allocator keeps its history, as `orch run` lets it by default.

``PYTHONPATH=payloads:. python -m benchmarks.capture [--json FILE]``, on a machine with a card on which
nothing else runs. The reference drafter's step, compiled, and a small one that the host can hardly keep up
with: steps with the history and without take turns in one process, and the figure is the median of their
ratios. The bar is for the reference. Exits with 1 when it is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from dflash.probes.oom import OomProbeParams
from dflash.probes.work import workload
from dflash.values import build

from benchmarks.results import Figure, table
from orchestrator.supervisor.memory_watch import keep_history

MOST = 1.02
ROUNDS, STEPS, WARMUPS = 9, 3, 4
REFERENCE: dict[str, Any] = {"recompute": "none"}
SMALL: dict[str, Any] = {
    "recompute": "none",
    "hidden_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 3072,
    "vocab_size": 32768,
    "mask_token_id": 32767,
    "seq_len": 2000,
    "max_anchors": 128,
    "block_size": 16,
}


class Steps:
    """One drafter's steps on one row."""

    def __init__(self, changes: dict[str, Any]) -> None:
        self._size = build(OomProbeParams, changes, what="parameter")
        machine = workload.open_workplace(self._size, title="cost of the history")
        self._drafter = workload.build_drafter(self._size, machine, max_anchors=self._size.max_anchors)
        self._row = workload.random_row(self._size, (self._size.seq_len,), machine.device)
        for _ in range(WARMUPS):
            self.take_ms()

    def take_ms(self) -> float:
        """Takes a few steps and returns how long each took."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for number in range(STEPS):
            workload.forward_backward(self._drafter, self._row, seed=number)
            self._drafter.zero_grad(set_to_none=True)
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / STEPS


def measure(name: str, changes: dict[str, Any]) -> Figure:
    """Returns the ratio of steps with and without the history."""
    steps = Steps(changes)
    pairs = []
    for _ in range(ROUNDS):
        keep_history(torch)
        watched_ms = steps.take_ms()
        events = len(torch.cuda.memory._snapshot()["device_traces"][0])  # noqa: SLF001
        torch.cuda.memory._record_memory_history(None)  # noqa: SLF001
        pairs.append((watched_ms, steps.take_ms()))
    value = statistics.median(watched / plain for watched, plain in pairs)
    beside = {
        "step_ms": statistics.median(plain for _, plain in pairs),
        "least_ratio": min(watched / plain for watched, plain in pairs),
        "most_ratio": max(watched / plain for watched, plain in pairs),
        "events_a_step": events / STEPS,
    }
    figure = Figure(name=f"{name} step with the history", value=value, unit="times", beside=beside)
    has_bar = name == "reference"
    return replace(figure, bar=f"<= {MOST}", is_met=value <= MOST) if has_bar else figure


def main() -> int:
    """Measures both."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.capture", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    found = [measure("reference", REFERENCE), measure("small", SMALL)]
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(figure) for figure in found], indent=2))
    print(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}")
    print(table(found))
    for figure in found:
        print(figure.name, {name: round(value, 3) for name, value in figure.beside.items()})
    return int(any(figure.is_met is False for figure in found))


if __name__ == "__main__":
    sys.exit(main())
