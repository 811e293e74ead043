"""Three scenarios, measured in turn: a warm-up, timed steps on the same row, and a packed row."""

from dataclasses import dataclass

from dflash.drafter import DFlashDrafter
from dflash.events import emit_metric, emit_phase
from dflash.probes.size import TwoRows
from dflash.probes.work import tables
from dflash.probes.work.machine import Machine, memory_text
from dflash.probes.work.workload import (
    STEP_NAMES,
    Arguments,
    Step,
    build_drafter,
    execution_of,
    open_workplace,
    random_row,
    ways_text,
)

REPORTED_METRICS = ("accuracy", "teacher_accuracy", "avg_streak", "teacher_avg_streak")


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """A row's documents, and how many steps are taken on it; warm-ups are not told of."""

    name: str
    lengths: tuple[int, ...]
    iterations: int
    warmups: int = 0


def run(params: TwoRows, step: Step, *, title: str) -> None:
    """Run all scenarios, printing each as it ends.

    Raises:
        CannotStart: before anything is allocated.
        torch.OutOfMemoryError: after saying which scenario it was and what had finished.
    """
    machine = open_workplace(params, title=title)
    drafter = build_drafter(params, machine, max_anchors=params.max_anchors)
    print(f"[build] attention {ways_text(execution_of(drafter.config, machine, step))}")
    finished: list[str] = []
    for scenario in (
        Scenario(name="warmup", lengths=(params.seq_len,), iterations=1),
        Scenario(name="timed", lengths=(params.seq_len,), iterations=params.iterations),
        # Kernels are compiled for its length in the first step.
        Scenario(name="packed", lengths=params.packed_lengths, iterations=1, warmups=1),
    ):
        emit_phase(scenario.name)
        try:
            _measure(scenario, drafter, step, params, machine)
        except RuntimeError as error:
            ended = f"{type(error).__name__} after {memory_text(machine.peaks_gib())}"
            before = ", ".join(finished) or "nothing"
            print(f"[{scenario.name}] {ended}; finished before: {before}", flush=True)
            raise
        finished.append(scenario.name)


def _measure(
    scenario: Scenario, drafter: DFlashDrafter, step: Step, params: TwoRows, machine: Machine
) -> None:
    row = random_row(params, scenario.lengths, machine.device)
    print(f"[{scenario.name}] {sum(scenario.lengths)} tokens in {len(scenario.lengths)} document(s)")
    machine.forget_peaks()
    for number in range(scenario.warmups):
        _timed(step, drafter, row, machine, seed=params.seed + number)
    durations_ms: list[float] = []
    for number in range(scenario.iterations):
        values, duration_ms = _timed(step, drafter, row, machine, seed=params.seed + number)
        durations_ms.append(duration_ms)
        emit_metric(f"{scenario.name}.iteration_ms", duration_ms, step=number)
        print(f"[{scenario.name}] step {number}: {STEP_NAMES[step]} {duration_ms:.1f} ms", flush=True)
    mean_ms = sum(durations_ms) / len(durations_ms)
    _report(scenario.name, values | {"mean_ms": mean_ms} | machine.peaks_gib())


def _timed(
    step: Step, drafter: DFlashDrafter, row: Arguments, machine: Machine, *, seed: int
) -> tuple[dict[str, float], float]:
    """Take one step; return loss and metrics, and the milliseconds it took."""
    started_s = machine.now_s()
    loss, metrics = step(drafter, row, seed=seed)
    duration_ms = (machine.now_s() - started_s) * 1e3
    drafter.zero_grad(set_to_none=True)
    return {"loss": loss.item()} | {name: metrics[name].item() for name in REPORTED_METRICS}, duration_ms


def _report(scenario: str, values: dict[str, float]) -> None:
    tables.emit(scenario, values)
    quality = ", ".join(f"{name} {values[name]:.4f}" for name in ("loss", *REPORTED_METRICS))
    print(f"[{scenario}] {quality}")
    print(f"[{scenario}] mean {values['mean_ms']:.1f} ms, {memory_text(values)}", flush=True)
