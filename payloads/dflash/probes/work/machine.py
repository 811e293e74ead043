"""The device of a probe: opened, described, kept to a limit, timed, and freed again.

Knows how time and peak memory are taken. On the CPU the peak is that of the process so far.
"""

import gc
import resource
import time
from dataclasses import dataclass

import torch

from dflash.events import emit_phase
from dflash.platforms import simulation
from dflash.probes.program import LimitTooLarge, NoSuchDevice

GIB = 2**30
KIB_PER_GIB = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """One device that is there."""

    device: torch.device

    @property
    def is_cuda(self) -> bool:
        """Whether the device is a GPU, whose work goes on while the host continues."""
        return self.device.type == "cuda"

    def begin_phase(self, name: str) -> None:
        """Tell whoever watches that a phase begins."""
        emit_phase(name)

    def now_s(self) -> float:
        """Return the time when all that was asked of the device is done."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def forget_peaks(self) -> None:
        """Let peaks count from here, where the device can."""
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats(self.device)

    def peaks_gib(self) -> dict[str, float]:
        """Return peak memory by the name of its metric."""
        if self.is_cuda:
            return {
                "peak_allocated_gib": torch.cuda.max_memory_allocated(self.device) / GIB,
                "peak_reserved_gib": torch.cuda.max_memory_reserved(self.device) / GIB,
            }
        return {"peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / KIB_PER_GIB}

    def release(self) -> None:
        """Give back what nobody refers to any more, so that the next case starts as the first one did."""
        gc.collect()
        if self.is_cuda:
            torch.cuda.empty_cache()
        self.forget_peaks()

    def describe(self) -> str:
        """Return the device in words."""
        if not self.is_cuda:
            return f"cpu, {torch.get_num_threads()} threads"
        card = torch.cuda.get_device_properties(self.device)
        return (
            f"{self.device} {card.name}, {card.total_memory / GIB:.2f} GiB, sm_{card.major}{card.minor}, "
            f"CUDA {torch.version.cuda}"
        )

    def limit_memory(self, limit_gib: float) -> str:
        """Cap the allocator so that it and all else on the card stay within the limit; return what to tell.

        Raises:
            LimitTooLarge: the simulated card is larger than the real one, or smaller than what is in use.
        """
        free, total = torch.cuda.mem_get_info(self.device)
        outside = total - free - torch.cuda.memory_reserved(self.device)
        allowed = limit_gib * GIB - outside
        if limit_gib * GIB > total or allowed <= 0:
            raise LimitTooLarge(
                f"memory_limit_gib {limit_gib} cannot be simulated: the card has {total / GIB:.2f} GiB, "
                f"{outside / GIB:.2f} GiB of them in use outside the allocator"
            )
        torch.cuda.set_per_process_memory_fraction(allowed / total, self.device)
        return (
            f"simulated card of {limit_gib} GiB: the allocator may take {allowed / GIB:.2f} GiB, "
            f"{outside / GIB:.2f} GiB are the CUDA context and others; messages show the real capacity"
        )


def open_machine(name: str) -> Machine:
    """Return the device of that name, cpu, cuda or cuda:N; within a simulation the simulated card.

    Raises:
        NoSuchDevice: before anything is allocated.
    """
    simulated = simulation()
    if simulated is not None:
        from dflash.memory.machine import open_simulated  # noqa: PLC0415  it imports this module

        return open_simulated(simulated)
    device = torch.device(name)
    if device.type == "cpu":
        return Machine(device=device)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = device.index or 0
    if index >= count:
        raise NoSuchDevice(
            f"device {name} is not there: torch {torch.__version__} sees {count} CUDA devices; "
            "use --set device=cpu with a smaller size"
        )
    torch.cuda.set_device(index)
    return Machine(device=torch.device("cuda", index))


def memory_text(values: dict[str, float]) -> str:
    """Return the peaks among the values in words."""
    peaks = {name: value for name, value in values.items() if name.startswith("peak_")}
    return ", ".join(
        f"{name.removesuffix('_gib').replace('_', ' ')} {value:.2f} GiB" for name, value in peaks.items()
    )
