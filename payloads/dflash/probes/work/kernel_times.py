"""Where the time of one step goes: kernels of a GPU, operators on the CPU, by kind.

A kernel's kind is read from its name: those of the drafter's own functions, of the libraries and of the
compiler tell what they are for.
"""

import re
from collections.abc import Callable, Iterable
from typing import Any

from torch.profiler import ProfilerActivity, profile

from dflash.probes.work import tables
from dflash.probes.work.machine import Machine

# The first pattern that is found decides.
KINDS = {
    "loss": r"score_rows|summarize_teacher|_ScoredRows|logsumexp|argmax",
    "attention": r"flex|attention|fmha|flash|scaled_dot|softmax|take_query_tile|take_key_tile",
    "matrix products": r"gemm|gemv|nvjet|cutlass|xmma|cublas|splitk|::(add)?(b)?mm\b|::mm|matmul",
    "pointwise": r"triton_|elementwise|vectorized|reduce|::(mul|add|sub|sum|mean|pow|rsqrt|silu|exp)",
}
REST = "rest"
LONGEST = 15
NAME_CHARACTERS = 90


def print_profile(machine: Machine, step: Callable[[], object]) -> None:
    """Take one step under the profiler, and print its time by kind and its longest kernels."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if machine.is_cuda else [])]
    machine.now_s()
    with profile(activities=activities) as profiled:
        step()
        machine.now_s()
    times_ms = _times_ms(profiled.key_averages(), is_cuda=machine.is_cuda)
    total_ms = sum(times_ms.values()) or 1.0
    by_kind = dict.fromkeys((*KINDS, REST), 0.0)
    for name, time_ms in times_ms.items():
        by_kind[kind_of(name)] += time_ms
    tables.print_table(("kind", "ms", "share"), [_cells(kind, ms, total_ms) for kind, ms in by_kind.items()])
    longest = sorted(times_ms.items(), key=lambda item: item[1], reverse=True)[:LONGEST]
    tables.print_table(("longest", "ms", "share"), [_cells(name, ms, total_ms) for name, ms in longest])
    tables.emit("profile", {f"{kind.replace(' ', '_')}_ms": ms for kind, ms in by_kind.items()})


def kind_of(kernel: str) -> str:
    """Return the kind of a kernel or operator of that name."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, kernel)), REST)


def _times_ms(events: Iterable[Any], *, is_cuda: bool) -> dict[str, float]:
    if not is_cuda:
        return {event.key: event.self_cpu_time_total / 1e3 for event in events}
    # Operators carry the times of their kernels as well; only the kernels count.
    kernels = (
        event
        for event in events
        if event.device_type.name == "CUDA" and not getattr(event, "is_user_annotation", False)
    )
    return {event.key: event.self_device_time_total / 1e3 for event in kernels}


def _cells(name: str, time_ms: float, total_ms: float) -> tuple[str, str, str]:
    return name[:NAME_CHARACTERS], f"{time_ms:.2f}", f"{time_ms / total_ms:.1%}"
