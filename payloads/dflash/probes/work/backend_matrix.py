"""Every backend on the same row, each with a drafter of its own, and one table."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflash.execution import Execution, ways_text
from dflash.probes.work import tables, workload
from dflash.probes.work.machine import Machine, memory_text
from dflash.probes.work.trials import Failure, try_case

if TYPE_CHECKING:  # that module is __main__ while this one runs
    from dflash.probes.backends import BackendMatrixParams


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A backend that fits: how it really ran, its times and peaks by the names of their metrics."""

    execution: Execution
    values: dict[str, float]


def run(params: "BackendMatrixParams") -> int:
    """Try all backends; return 0 when at least one fits."""
    machine = workload.open_workplace(params, title="backend matrix")
    results = {backend: _try(backend, params, machine) for backend in params.backends}
    peaks = list(machine.peaks_gib())
    titles = ("backend", "ran", "mean ms", *map(tables.title, peaks), "result")
    tables.print_table(titles, [_cells(backend, result, peaks) for backend, result in results.items()])
    return 0 if any(isinstance(result, Measured) for result in results.values()) else 1


def _try(backend: str, params: "BackendMatrixParams", machine: Machine) -> Measured | Failure:
    machine.begin_phase(backend)
    result = try_case(machine, lambda: _measure(backend, params, machine))
    if isinstance(result, Failure):
        tables.emit(backend, {"fits": 0})
        print(f"[{backend}] {result}", flush=True)
    else:
        is_itself = result.execution.attention == backend
        tables.emit(backend, {"fits": 1, "ran_itself": int(is_itself), **result.values})
        print(f"[{backend}] mean {result.values['mean_ms']:.1f} ms, {memory_text(result.values)}", flush=True)
    return result


def _measure(backend: str, params: "BackendMatrixParams", machine: Machine) -> Measured:
    drafter = workload.build_drafter(params, machine, max_anchors=params.max_anchors, attention=backend)
    execution = workload.execution_of(drafter.config, machine, workload.forward_backward)
    durations = workload.time_steps(
        machine,
        drafter,
        workload.random_row(params, (params.seq_len,), machine.device),
        workload.forward_backward,
        seed=params.seed,
        warmups=1,
        iterations=params.iterations,
    )
    return Measured(execution=execution, values={"mean_ms": durations.mean_ms, **machine.peaks_gib()})


def _cells(backend: str, result: Measured | Failure, peaks: Sequence[str]) -> list[str]:
    if isinstance(result, Failure):
        return [backend, "-", "-", *("-" for _ in peaks), str(result)]
    fallback = "" if result.execution.attention == backend else f", {backend} cannot run here"
    return [
        backend,
        ways_text(result.execution),
        tables.shown(result.values, "mean_ms", 1),
        *(tables.shown(result.values, name) for name in peaks),
        f"fits{fallback}",
    ]
