"""The same drafter and row with more and more anchors: peaks, times, and what 1,000 anchors cost."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from dflash.drafter import DFlashDrafter
from dflash.events import emit_metric
from dflash.loss import Teacher, score_rows
from dflash.probes.work import tables, workload
from dflash.probes.work.machine import Machine
from dflash.probes.work.trials import Failure, try_case

if TYPE_CHECKING:  # that module is __main__ while this one runs
    from dflash.probes.anchors import AnchorSweepParams

Values = dict[str, float]


def run(params: "AnchorSweepParams") -> int:
    """Try all numbers of anchors; return 0 when at least one fits."""
    machine = workload.open_workplace(params, title="anchor sweep")
    results = {count: _try(count, params, machine) for count in params.anchor_counts}
    peaks = list(machine.peaks_gib())
    titles = ("anchors", "mean ms", "loss ms", *map(tables.title, peaks), "result")
    tables.print_table(titles, [_cells(count, result, peaks) for count, result in results.items()])
    fitting = {count: result for count, result in results.items() if not isinstance(result, Failure)}
    if len(fitting) > 1:
        for name in peaks:
            slope = 1000 * slope_of({count: values[name] for count, values in fitting.items()})
            emit_metric(f"slope.{name}_per_1000_anchors", slope)
            print(f"{tables.title(name)} per 1,000 anchors: {slope:+.3f}")
    return 0 if fitting else 1


def slope_of(points: Mapping[int, float]) -> float:
    """Return the slope of the line of least squares; two points at least."""
    x_mean, y_mean = sum(points) / len(points), sum(points.values()) / len(points)
    covariance = sum((x - x_mean) * (y - y_mean) for x, y in points.items())
    return covariance / sum((x - x_mean) ** 2 for x in points)


def _try(count: int, params: "AnchorSweepParams", machine: Machine) -> Values | Failure:
    case = f"anchors_{count}"
    machine.begin_phase(case)
    result = try_case(machine, lambda: _measure(count, params, machine))
    tables.emit(case, {"fits": 0} if isinstance(result, Failure) else {"fits": 1, **result})
    told = str(result) if isinstance(result, Failure) else f"mean {result['mean_ms']:.1f} ms"
    print(f"[{case}] {told}", flush=True)
    return result


def _measure(count: int, params: "AnchorSweepParams", machine: Machine) -> Values:
    drafter = workload.build_drafter(params, machine, max_anchors=count)
    row = workload.random_row(params, (params.seq_len,), machine.device)
    durations = workload.time_steps(
        machine,
        drafter,
        row,
        workload.forward_backward,
        seed=params.seed,
        warmups=1,
        iterations=params.iterations,
    )
    peaks = machine.peaks_gib()
    return {
        "mean_ms": durations.mean_ms,
        "loss_ms": _time_loss(drafter, row, count, params, machine),
        **peaks,
    }


def _time_loss(
    drafter: DFlashDrafter,
    row: workload.Arguments,
    count: int,
    params: "AnchorSweepParams",
    machine: Machine,
) -> float:
    """Return the milliseconds of the loss and of its gradient, on random states of the drafter's size."""
    blocks = workload.blocks_of(params, (params.seq_len,), max_anchors=count)
    states_RH = torch.randn(len(blocks.slots_R), params.hidden_size, device=machine.device)
    states_RH.requires_grad_()
    labels_R = row["input_ids"][0][blocks.labels_R.to(machine.device)]
    teacher = Teacher(
        states_SH=row["verifier_last_hidden"][0], tokens_R=blocks.teachers_R, kl_weight=params.kl_weight
    )
    execution = workload.execution_of(drafter.config, machine, workload.forward_backward)

    def one(_number: int) -> None:
        scores = score_rows(
            states_RH,
            drafter.lm_head.weight,
            labels_R,
            teacher=teacher,
            chunk_rows=params.loss_chunk_rows,
            is_compiled=execution.is_compiled,
        )
        torch.autograd.grad(scores.losses_R.sum(), states_RH)

    return workload.time_repeated(machine, one, warmups=1, iterations=params.iterations).mean_ms


def _cells(count: int, result: Values | Failure, peaks: list[str]) -> list[str]:
    if isinstance(result, Failure):
        return [str(count), "-", "-", *("-" for _ in peaks), str(result)]
    return [
        str(count),
        tables.shown(result, "mean_ms", 1),
        tables.shown(result, "loss_ms", 1),
        *(tables.shown(result, name) for name in peaks),
        "fits",
    ]
