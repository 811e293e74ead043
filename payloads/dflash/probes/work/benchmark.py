"""The performance table: ceilings, masks, a forward alone, and each policy's forward and backward."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from dflash.attention import prepare_attention
from dflash.drafter import DFlashDrafter
from dflash.execution import ways_text
from dflash.flops import count_flops, count_row
from dflash.probes.work import kernel_times, tables, workload
from dflash.probes.work.ceilings import Ceilings, measure_ceilings
from dflash.probes.work.machine import Machine
from dflash.probes.work.trials import Failure, try_case
from dflash.visibility import visibilities

if TYPE_CHECKING:  # that module is __main__ while this one runs
    from dflash.probes.bench import BenchParams

MASK_REPETITIONS = 20
Values = dict[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One line of the table."""

    name: str
    policy: str
    step: workload.Step
    lengths: tuple[int, ...]


def run(params: "BenchParams") -> int:
    """Measure everything that fits and print the table; return 0 when at least one case fits."""
    machine = workload.open_workplace(params, title="benchmark")
    execution = workload.execution_of(params.drafter_config(), machine, workload.forward_backward)
    print(f"[build] attention {ways_text(execution)}")
    ceilings = try_case(machine, lambda: _ceilings(params, machine))
    _tell("ceilings", ceilings if isinstance(ceilings, Failure) else _told(ceilings))
    _tell("mask", try_case(machine, lambda: _time_masks(params, machine)))
    results = {case.name: _try(case, params, machine, ceilings) for case in cases(params)}
    _print_table(results, peaks=list(machine.peaks_gib()))
    if params.profile:
        profiled = try_case(machine, lambda: _profile(params, machine))
        if isinstance(profiled, Failure):
            _tell("profile", profiled)
    return 0 if any(not isinstance(result, Failure) for result in results.values()) else 1


def cases(params: "BenchParams") -> list[Case]:
    """Return the forward alone, then each policy on both rows."""
    one, packed = (params.seq_len,), params.packed_lengths
    both = workload.forward_backward
    found = [Case(name="forward", policy=params.policies[0], step=workload.forward_only, lengths=one)]
    for policy in params.policies:
        found.append(Case(name=policy, policy=policy, step=both, lengths=one))
        found.append(Case(name=f"{policy}_packed", policy=policy, step=both, lengths=packed))
    return found


def _ceilings(params: "BenchParams", machine: Machine) -> Ceilings:
    return measure_ceilings(
        machine,
        getattr(torch, params.dtype),
        slots=params.max_anchors * params.block_size,
        hidden=params.hidden_size,
        intermediate=params.intermediate_size,
    )


def _told(ceilings: Ceilings) -> Values:
    return {
        "square_tflop_per_s": ceilings.square_flops / 1e12,
        "own_tflop_per_s": ceilings.own_flops / 1e12,
        "copy_tb_per_s": ceilings.copy_bytes / 1e12,
    }


def _time_masks(params: "BenchParams", machine: Machine) -> Values:
    """Return the median time in which both kinds of layer get their masks, once kernels are there."""
    config = params.drafter_config()
    execution = workload.execution_of(config, machine, workload.forward_backward)
    blocks = workload.blocks_of(params, (params.seq_len,), max_anchors=params.max_anchors)

    def one(_number: int) -> None:
        seen = visibilities(config, blocks, context_length=params.seq_len, device=machine.device)
        prepare_attention(execution, seen)

    durations = workload.time_repeated(machine, one, warmups=params.warmups, iterations=MASK_REPETITIONS)
    return {"median_ms": durations.median_ms}


def _try(
    case: Case, params: "BenchParams", machine: Machine, ceilings: Ceilings | Failure
) -> Values | Failure:
    machine.begin_phase(case.name)
    result = try_case(machine, lambda: _measure(case, params, machine, ceilings))
    _tell(case.name, result)
    return result


def _measure(case: Case, params: "BenchParams", machine: Machine, ceilings: Ceilings | Failure) -> Values:
    drafter = _drafter(case.policy, params, machine)
    durations = workload.time_steps(
        machine,
        drafter,
        workload.random_row(params, case.lengths, machine.device),
        case.step,
        seed=params.seed,
        warmups=params.warmups,
        iterations=params.iterations,
    )
    values = {
        "median_ms": durations.median_ms,
        "least_ms": min(durations.each_ms),
        "most_ms": max(durations.each_ms),
        **machine.peaks_gib(),
    }
    flops = _flops(case, params, drafter)
    return values | _compared(flops, durations.median_ms / 1e3, ceilings)


def _drafter(policy: str, params: "BenchParams", machine: Machine) -> DFlashDrafter:
    return workload.build_drafter(params, machine, max_anchors=params.max_anchors, recompute=policy)


def _flops(case: Case, params: "BenchParams", drafter: DFlashDrafter) -> float:
    blocks = workload.blocks_of(params, case.lengths, max_anchors=params.max_anchors)
    counts = count_row(blocks, drafter.config, context_tokens=sum(case.lengths))
    flops = count_flops(drafter.config, counts, target_layers=len(params.target_layer_ids))
    return flops.forward if case.step is workload.forward_only else flops.both


def _compared(flops: float, median_s: float, ceilings: Ceilings | Failure) -> Values:
    reached = {"tflop": flops / 1e12, "tflop_per_s": flops / median_s / 1e12}
    if isinstance(ceilings, Failure):
        return reached
    reference_s = flops / ceilings.flops
    return reached | {"reference_ms": reference_s * 1e3, "ratio": median_s / reference_s}


def _tell(case: str, result: Values | Failure) -> None:
    if isinstance(result, Failure):
        tables.emit(case, {"fits": 0})
        print(f"[{case}] {result}", flush=True)
    else:
        tables.emit(case, {"fits": 1, **result})
        print(f"[{case}] " + ", ".join(f"{name} {value:.3f}" for name, value in result.items()), flush=True)


def _print_table(results: Mapping[str, Values | Failure], *, peaks: Sequence[str]) -> None:
    columns = ["median_ms", "least_ms", "most_ms", "reference_ms", "ratio", "tflop_per_s", *peaks]
    rows = []
    for case, result in results.items():
        if isinstance(result, Failure):
            rows.append([case, *("-" for _ in columns), str(result)])
        else:
            rows.append([case, *(tables.shown(result, name) for name in columns), "fits"])
    tables.print_table(["case", *map(tables.title, columns), "result"], rows)


def _profile(params: "BenchParams", machine: Machine) -> None:
    drafter = _drafter(params.policies[0], params, machine)
    row = workload.random_row(params, (params.seq_len,), machine.device)

    def one(number: int = 0) -> None:
        drafter.zero_grad(set_to_none=True)
        workload.forward_backward(drafter, row, seed=params.seed + number)

    workload.time_repeated(machine, one, warmups=1 + params.warmups, iterations=1)
    kernel_times.print_profile(machine, one)
