"""Runs on a simulated card, for tests: a probe's steps, what they allocate, and how much of it at once."""

import contextlib
import io
from collections.abc import Callable, Sequence
from typing import Any

from dflash.cards import Card, parse_card
from dflash.memory.log import Block, Born, Mark, Trace
from dflash.memory.trace import trace
from dflash.probes.oom import OomProbeParams
from dflash.probes.work import workload
from dflash.values import build

GIB = 2**30
H200 = parse_card("h200")


def silent(work: Callable[[], object], card: Card = H200) -> Trace:
    """Return the trace of some work, whatever it prints."""
    with contextlib.redirect_stdout(io.StringIO()):
        return trace(work, card=card)


def take_steps(
    size: OomProbeParams,
    lengths: Sequence[int],
    step: workload.Step = workload.forward_backward,
    *,
    count: int = 1,
) -> dict[str, float]:
    """Take steps as the probes do, wherever this runs; return the machine's peaks."""
    machine = workload.open_workplace(size, title="test")
    machine.begin_phase("steps")
    machine.forget_peaks()
    drafter = workload.build_drafter(size, machine, max_anchors=size.max_anchors)
    row = workload.random_row(size, lengths, machine.device)
    for _ in range(count):
        step(drafter, row, seed=0)
        drafter.zero_grad(set_to_none=True)
    return machine.peaks_gib()


def steps(
    lengths: Sequence[int],
    step: workload.Step = workload.forward_backward,
    *,
    card: Card = H200,
    count: int = 1,
    **params: Any,
) -> Trace:
    """Return the trace of such steps."""
    size = build(OomProbeParams, params, what="parameter")
    return silent(lambda: take_steps(size, lengths, step, count=count), card)


def allocated(block: Block) -> int:
    return -(-block.bytes // 512) * 512


def peaks_by_phase_gib(log: Trace) -> dict[str, float]:
    """Return the most that is allocated at once in each phase."""
    now, phase, most = 0, "", dict[str, int]()
    for event in log.events:
        if isinstance(event, Mark):
            phase = event.name if event.kind == "phase" else phase
        elif isinstance(event, Born):
            now += allocated(log.blocks[event.block])
            most[phase] = max(most.get(phase, 0), now)
        else:
            now -= allocated(log.blocks[event.block])
    return {phase: peak / GIB for phase, peak in most.items() if phase}
