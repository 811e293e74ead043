"""What the device could do at best: matrix products in the drafter's type, and copies within its memory.

Random data: a card's clock depends on what it multiplies, and zeros are fast. Sizes are a GPU's, and small
ones elsewhere.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

from dflash.platforms import platform_of
from dflash.probes.work.machine import GIB, Machine

REPETITIONS = 8
SQUARE_ROWS = {True: 8192, False: 256}  # by whether it is a GPU
COPIED_BYTES = {True: 4 * GIB, False: 2**24}


@dataclass(frozen=True, kw_only=True, slots=True)
class Ceilings:
    """Operations per second in a large square product and in the drafter's own; bytes per second in a copy.

    A copy reads and writes, and both count.
    """

    square_flops: float
    own_flops: float
    copy_bytes: float

    @property
    def flops(self) -> float:
        """The better of the two products."""
        return max(self.square_flops, self.own_flops)


def measure_ceilings(
    machine: Machine, dtype: torch.dtype, *, slots: int, hidden: int, intermediate: int
) -> Ceilings:
    """Measure; `slots` × `hidden` × `intermediate` is the drafter's largest product."""
    side = SQUARE_ROWS[platform_of(machine.device).is_cuda]
    return Ceilings(
        square_flops=_product(machine, dtype, side, side, side),
        own_flops=_product(machine, dtype, slots, hidden, intermediate),
        copy_bytes=_copy(machine),
    )


def _product(machine: Machine, dtype: torch.dtype, rows: int, inner: int, columns: int) -> float:
    left = torch.randn(rows, inner, dtype=dtype, device=machine.device)
    right = torch.randn(inner, columns, dtype=dtype, device=machine.device)
    result = torch.empty(rows, columns, dtype=dtype, device=machine.device)
    return 2 * rows * inner * columns / _median_s(machine, lambda: torch.mm(left, right, out=result))


def _copy(machine: Machine) -> float:
    size = COPIED_BYTES[platform_of(machine.device).is_cuda]
    source = torch.empty(size, dtype=torch.uint8, device=machine.device).random_()
    target = torch.empty_like(source)
    return 2 * size / _median_s(machine, lambda: target.copy_(source))


def _median_s(machine: Machine, action: Callable[[], object]) -> float:
    for _ in range(2):
        action()
    timed = _timed_by_events if machine.is_cuda else _timed_by_clock
    return statistics.median(timed(machine, action) for _ in range(REPETITIONS))


def _timed_by_events(machine: Machine, action: Callable[[], object]) -> float:
    with torch.cuda.device(machine.device):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        action()
        end.record()
        end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def _timed_by_clock(machine: Machine, action: Callable[[], object]) -> float:
    started_s = machine.now_s()
    action()
    return machine.now_s() - started_s
