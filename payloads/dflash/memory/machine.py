"""The machine of a probe within a simulation: the card that it stands for, and marks where it would measure.

Times are the host's, of no use; peaks are not known here, but to who replays the log.
"""

from dataclasses import dataclass

from dflash.platforms import SIMULATED, Simulation
from dflash.probes.work.machine import Machine


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedMachine(Machine):
    """A card that is not there."""

    simulation: Simulation

    def begin_phase(self, name: str) -> None:
        """Mark where a phase begins."""
        self.simulation.begin_phase(name)

    def forget_peaks(self) -> None:
        """Do nothing: who replays the log counts each phase's from where it begins."""

    def peaks_gib(self) -> dict[str, float]:
        """Return no peaks."""
        return {}

    def release(self) -> None:
        """Mark that the allocator gives back what it caches."""
        self.simulation.empty_cache()

    def describe(self) -> str:
        """Return the card in words."""
        return f"simulated {self.simulation.card.describe()}"

    def limit_memory(self, limit_gib: float) -> str:
        """Do nothing: the limit is for who replays the log."""
        return f"simulated card of {limit_gib} GiB"


def open_simulated(simulation: Simulation) -> SimulatedMachine:
    """Return the machine of that simulation."""
    return SimulatedMachine(device=SIMULATED, simulation=simulation)
