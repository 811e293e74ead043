"""What kind of machine a device is, asked by everything that decides from it how to compute.

A real device is asked as torch asks it. Within a simulation (`dflash.memory.trace`) the device `cpu:0`, on
which no real tensor is, stands for a card that is not there: it answers with that card's numbers, and what
would be compiled or launched on it is the simulation's part.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from dflash.cards import Card

if TYPE_CHECKING:  # it loads much that who computes a loss does not need
    from torch.nn.attention.flex_attention import BlockMask

SIMULATED = torch.device("cpu", 0)


class Simulation(Protocol):
    """What stands in for a card's compilers and for the machine around it."""

    @property
    def card(self) -> Card:
        """The card."""

    @property
    def is_compiling(self) -> bool:
        """Whether the code that asks is part of what would be compiled."""

    def call_compiled(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """Return what the compiled function would, which makes nothing but its results."""

    def attend(
        self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, *, enable_gqa: bool
    ) -> Tensor:
        """Return scaled_dot_product_attention's result, by the kernel that torch takes on the card."""

    def attend_flex(self, queries: Tensor, keys: Tensor, values: Tensor, mask: "BlockMask") -> Tensor:
        """Return flex attention's result, compiled or not, as the code around it is."""

    def begin_phase(self, name: str) -> None:
        """Note that a phase begins."""

    def empty_cache(self) -> None:
        """Note that the allocator gives back what it does not use."""


@dataclass(frozen=True, slots=True)
class Platform:
    """One device, and the simulation behind it if it is not real."""

    device: torch.device
    simulation: Simulation | None = None

    @property
    def is_cuda(self) -> bool:
        """Whether CUDA's kernels compute there."""
        return self.simulation is not None or self.device.type == "cuda"

    @property
    def capability(self) -> tuple[int, int]:
        """The card's architecture; only where `is_cuda`."""
        if self.simulation is not None:
            return self.simulation.card.capability
        return torch.cuda.get_device_capability(self.device)


def platform_of(device: torch.device) -> Platform:
    """Return the platform of a device."""
    return Platform(device, simulation() if device == SIMULATED else None)


def simulation() -> Simulation | None:
    """Return the simulation that this thread is in."""
    return _simulation.get()


@contextmanager
def simulated(by: Simulation) -> Iterator[None]:
    """Let `cpu:0` be that simulation's card."""
    token = _simulation.set(by)
    try:
        yield
    finally:
        _simulation.reset(token)


_simulation: ContextVar[Simulation | None] = ContextVar("simulation", default=None)
