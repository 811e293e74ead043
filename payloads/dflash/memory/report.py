"""Where a simulated run's memory peaks, of what the peak is made, and whether a card has that much.

A run is replayed through the model of torch's allocator. Loads without torch.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from dflash.memory.allocator import LEAST_BLOCK, CachingAllocator, OutOfMemory
from dflash.memory.allocator_settings import AllocatorSettings
from dflash.memory.log import Block, Born, Died, Trace

Verdict = Literal["fits", "within the error", "does not fit", "no card"]
VERDICTS: tuple[Verdict, ...] = ("fits", "within the error", "does not fit")  # from good to bad
SETUP = "setup"  # what comes before a run names its first phase


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """What there is for the allocator: the card's memory, and the process's share of it; None is without end.

    Both are less what is in use outside the allocator.
    """

    card_bytes: int | None = None
    limit_bytes: int | None = None

    @property
    def capacity_bytes(self) -> int | None:
        """The most that the allocator may reserve."""
        return min((size for size in (self.card_bytes, self.limit_bytes) if size is not None), default=None)

    def times(self, factor: float) -> "Room":
        """Return a room that much larger."""
        sizes = (None if size is None else int(size * factor) for size in (self.card_bytes, self.limit_bytes))
        card_bytes, limit_bytes = sizes
        return Room(card_bytes=card_bytes, limit_bytes=limit_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """A block that lives at a phase's peak, and the bytes that the allocator counts for it."""

    block: Block
    allocated_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PhasePeaks:
    """One phase's peaks; `held` is what the peak of allocated bytes adds up to, largest first."""

    name: str
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    held: tuple[Held, ...]

    def by_category(self) -> dict[str, int]:
        """Return the peak's bytes by category, largest first.

        What blocks have beyond their own requests is "unsplit": rounding and what was not split off.
        """
        sums: Counter[str] = Counter()
        for held in self.held:
            asked_bytes = -(-held.block.bytes // LEAST_BLOCK) * LEAST_BLOCK
            sums[held.block.category] += asked_bytes
            sums["unsplit"] += held.allocated_bytes - asked_bytes
        return {category: size for category, size in sums.most_common() if size}


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """The allocation that a card refuses, and torch's numbers at that moment."""

    phase: str
    block: Block
    error: OutOfMemory


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What a run needs and whether it is there; `verdicts` by phase, in the phases' order.

    Where the run fits, peaks are those of a run on that card, which gives cached memory back before it
    fails; else they are what it would need on a card without end.
    """

    phases: tuple[PhasePeaks, ...]
    verdicts: Mapping[str, Verdict]
    failure: Failure | None

    @property
    def verdict(self) -> Verdict:
        """The worst of all phases."""
        known = [verdict for verdict in reversed(VERDICTS) if verdict in self.verdicts.values()]
        return known[0] if known else "no card"

    @property
    def peak_allocated_bytes(self) -> int:
        """The largest of all phases."""
        return max((phase.peak_allocated_bytes for phase in self.phases), default=0)

    @property
    def peak_reserved_bytes(self) -> int:
        """The largest of all phases."""
        return max((phase.peak_reserved_bytes for phase in self.phases), default=0)


def report(trace: Trace, settings: AllocatorSettings, *, room: Room, error_share: float) -> Report:
    """Return the peaks of every phase, and for each whether it fits.

    What has to fit is what the allocator cannot do without, which is less than it reserves where there is
    more: it returns what it only caches before it fails. So the run is replayed on a card that is smaller by
    the error, and fits when nothing fails there; on one that is larger by it, and does not fit when something
    fails even there. In between the estimate does not know.
    """
    if room.capacity_bytes is None:
        return Report(phases=_replay(trace, settings, Room()).phases, verdicts={}, failure=None)
    rooms = (room.times(1 / (1 + error_share)), room, room.times(1 / (1 - error_share)), Room())
    tight, here, wide, free = _replays(trace, settings, rooms)
    verdicts: dict[str, Verdict] = {
        phase.name: "does not fit"
        if phase.name in wide.failures
        else "within the error"
        if phase.name in {*tight.failures, *here.failures}
        else "fits"
        for phase in free.phases
    }
    failure = next(iter(here.failures.values()), None)
    return Report(phases=free.phases if here.failures else here.phases, verdicts=verdicts, failure=failure)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Replay:
    phases: tuple[PhasePeaks, ...]
    failures: Mapping[str, Failure]
    has_met_bounds: bool


class _Phase:
    """A phase while it is replayed: its peaks so far, from where it began, and the event of the first one."""

    def __init__(self, name: str, model: CachingAllocator, event: int) -> None:
        model.forget_peaks()
        self.name = name
        self.births = 0
        self.peak_allocated_bytes, self.peak_event = model.allocated_bytes, event
        self.peak_reserved_bytes = model.reserved_bytes


def _replays(trace: Trace, settings: AllocatorSettings, rooms: Sequence[Room]) -> list[_Replay]:
    """Return a replay in each room, from the smallest to the largest, one for all that make no difference."""
    found: list[_Replay] = []
    for room in rooms:
        is_same = bool(found) and not found[-1].has_met_bounds
        found.append(found[-1] if is_same else _replay(trace, settings, room))
    return found


def _replay(trace: Trace, settings: AllocatorSettings, room: Room) -> _Replay:
    """Give every block to a model of the allocator; after its first failure a phase gets nothing more.

    Where a program forgets peaks makes no difference: what it does before it measures (a row is made, a step
    is taken to warm up) takes no more than what it measures.
    """
    model = CachingAllocator(settings, card_bytes=room.card_bytes, limit_bytes=room.limit_bytes)
    phases, failures = [_Phase(SETUP, model, 0)], dict[str, Failure]()
    granted: dict[int, int] = {}
    for event, what in enumerate(trace.events):
        phase = phases[-1]
        if isinstance(what, Born):
            if phase.name in failures:
                continue
            try:
                granted[what.block] = model.allocate(what.block, trace.blocks[what.block].bytes)
            except OutOfMemory as error:
                failures[phase.name] = Failure(phase=phase.name, block=trace.blocks[what.block], error=error)
                continue
            phase.births += 1
            if model.allocated_bytes > phase.peak_allocated_bytes:
                phase.peak_allocated_bytes, phase.peak_event = model.allocated_bytes, event
            phase.peak_reserved_bytes = model.peak_reserved_bytes
        elif isinstance(what, Died):
            model.free(what.block)
        elif what.kind == "empty_cache":
            model.empty_cache()
        elif what.kind == "phase":
            phases.append(_Phase(what.name, model, event))
    seen = [phase for phase in phases if phase.births or phase.name in failures]
    held = _held_at(trace, granted, [phase.peak_event for phase in seen])
    return _Replay(
        phases=tuple(
            PhasePeaks(
                name=phase.name,
                peak_allocated_bytes=phase.peak_allocated_bytes,
                peak_reserved_bytes=phase.peak_reserved_bytes,
                held=blocks,
            )
            for phase, blocks in zip(seen, held, strict=True)
        ),
        failures=failures,
        has_met_bounds=model.has_met_bounds,
    )


def _held_at(trace: Trace, granted: Mapping[int, int], moments: Sequence[int]) -> list[tuple[Held, ...]]:
    """Return what lives right after each of these events, in ascending order, largest first."""
    found: list[tuple[Held, ...]] = []
    live: dict[int, int] = {}
    waiting = iter([*moments, len(trace.events)])
    moment = next(waiting)
    for event, what in enumerate(trace.events):
        if isinstance(what, Born):
            if what.block in granted:
                live[what.block] = granted[what.block]
        elif isinstance(what, Died):
            live.pop(what.block, None)
        if event == moment:
            ordered = sorted(live.items(), key=lambda item: -item[1])
            found.append(
                tuple(Held(block=trace.blocks[name], allocated_bytes=size) for name, size in ordered)
            )
            moment = next(waiting)
    return found
