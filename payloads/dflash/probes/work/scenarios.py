"""Three scenarios, measured in turn: a warm-up, timed steps on the same row, and a packed row."""

from dataclasses import dataclass

from dflash.drafter import DFlashDrafter
from dflash.events import emit_metric
from dflash.execution import ways_text
from dflash.platforms import simulation
from dflash.probes.size import TwoRows
from dflash.probes.work import tables
from dflash.probes.work.machine import Machine, memory_text
from dflash.probes.work.workload import (
    Arguments,
    Step,
    TrainingStep,
    build_drafter,
    execution_of,
    open_workplace,
    random_row,
    step_name,
    steps_to_take,
)

REPORTED_METRICS = ("accuracy", "teacher_accuracy", "avg_streak", "teacher_avg_streak", "grad_norm")


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """A row's documents, and how many steps are taken on it; warm-ups are not told of."""

    name: str
    lengths: tuple[int, ...]
    iterations: int
    warmups: int = 0


def run(params: TwoRows, step: Step, *, title: str, optimizer: str = "none", is_brief: bool = False) -> None:
    """Run all scenarios, printing each as it ends; with an optimizer every step is one of training.

    `is_brief` leaves out the first one, which differs from the second in its times.

    Raises:
        CannotStart: before anything is allocated.
        torch.OutOfMemoryError: after saying which scenario it was and what had finished.
    """
    machine = open_workplace(params, title=title)
    drafter = build_drafter(params, machine, max_anchors=params.max_anchors)
    print(f"[build] attention {ways_text(execution_of(drafter.config, machine, step))}")
    if optimizer == "adamw":
        step = TrainingStep(drafter)
        print("[build] optimizer adamw, float32 masters", flush=True)
    finished: list[str] = []
    for scenario in _scenarios(params, is_brief=is_brief):
        machine.begin_phase(scenario.name)
        try:
            _measure(scenario, drafter, step, params, machine)
        except RuntimeError as error:
            ended = f"{type(error).__name__} after {memory_text(machine.peaks_gib())}"
            before = ", ".join(finished) or "nothing"
            print(f"[{scenario.name}] {ended}; finished before: {before}", flush=True)
            raise
        finished.append(scenario.name)


def _scenarios(params: TwoRows, *, is_brief: bool) -> list[Scenario]:
    one = (params.seq_len,)
    found = [] if is_brief else [Scenario(name="warmup", lengths=one, iterations=1)]
    return [
        *found,
        Scenario(name="timed", lengths=one, iterations=params.iterations),
        # Kernels are compiled for its length in the first step, but not in a simulation.
        Scenario(
            name="packed", lengths=params.packed_lengths, iterations=1, warmups=0 if simulation() else 1
        ),
    ]


def _measure(
    scenario: Scenario, drafter: DFlashDrafter, step: Step, params: TwoRows, machine: Machine
) -> None:
    row = random_row(params, scenario.lengths, machine.device)
    print(f"[{scenario.name}] {sum(scenario.lengths)} tokens in {len(scenario.lengths)} document(s)")
    machine.forget_peaks()
    for number in range(scenario.warmups):
        _timed(step, drafter, row, machine, seed=params.seed + number)
    durations_ms: list[float] = []
    for number in steps_to_take(drafter, row, params.seed, range(scenario.iterations)):
        values, duration_ms = _timed(step, drafter, row, machine, seed=params.seed + number)
        durations_ms.append(duration_ms)
        emit_metric(f"{scenario.name}.iteration_ms", duration_ms, step=number)
        print(f"[{scenario.name}] step {number}: {step_name(step)} {duration_ms:.1f} ms", flush=True)
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
    reported = {name: metrics[name].item() for name in REPORTED_METRICS if name in metrics}
    return {"loss": loss.item()} | reported, duration_ms


def _report(scenario: str, values: dict[str, float]) -> None:
    tables.emit(scenario, values)
    names = [name for name in ("loss", *REPORTED_METRICS) if name in values]
    quality = ", ".join(f"{name} {values[name]:.4f}" for name in names)
    print(f"[{scenario}] {quality}")
    print(f"[{scenario}] mean {values['mean_ms']:.1f} ms, {memory_text(values)}", flush=True)
