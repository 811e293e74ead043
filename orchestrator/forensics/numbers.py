"""How much was asked for, free and held when memory ran out: a message and a capture as one balance (pure).

What the process itself captured is exact and goes before what the message printed with two decimals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.forensics.asked import MOST_ASKED_BYTES
from orchestrator.forensics.captures import Capture
from orchestrator.forensics.messages import OomMessage
from orchestrator.text import sized

CONTEXT_BYTES = 2 * 2**30  # at most, of one process: beyond it a process holds more than torch knows of
_NOISE_BYTES = 64 * 2**20  # two decimals of several numbers in GiB


@dataclass(frozen=True, kw_only=True, slots=True)
class Balance:
    """A card at the moment of failure; None is what nobody told.

    ``limit_bytes`` is what torch may take where that is less than the card. ``others`` are processes that are
    not this one, each with what it uses. ``outside_bytes`` is what this process has beside torch's allocator,
    ``unseen_bytes`` what nobody that is known holds: other processes, and where ``outside_bytes`` is None
    also this one's libraries.
    """

    asked_bytes: int | None
    asked_text: str | None
    capacity_bytes: int | None
    free_bytes: int | None
    limit_bytes: int | None
    allocated_bytes: int | None
    reserved_bytes: int | None
    private_pools_bytes: int | None
    largest_free_bytes: int | None
    others: tuple[tuple[str, int], ...]
    outside_bytes: int | None
    unseen_bytes: int | None

    @property
    def unallocated_bytes(self) -> int | None:
        """What torch keeps and does not use."""
        if self.reserved_bytes is None or self.allocated_bytes is None:
            return None
        return max(0, self.reserved_bytes - self.allocated_bytes)

    @property
    def others_bytes(self) -> int:
        """What other processes hold, as far as it is known."""
        return sum(size for _, size in self.others)

    @property
    def free_text(self) -> str | None:
        """What was free by the driver, in words."""
        if self.free_bytes is None:
            return None
        of = "" if self.capacity_bytes is None else f" of {sized(self.capacity_bytes)}"
        return f"{sized(self.free_bytes)}{of} free by the driver"

    @property
    def room_bytes(self) -> int | None:
        """What torch could still have got from the driver: free, and within its limit."""
        if self.free_bytes is None:
            return None
        if self.limit_bytes is None or self.reserved_bytes is None:
            return self.free_bytes
        return max(0, min(self.free_bytes, self.limit_bytes - self.reserved_bytes))


def balance_of(
    message: OomMessage | None, capture: Capture | None, *, limit_bytes: int | None = None
) -> Balance:
    """Returns what a message and a capture of the same failure say together.

    ``limit_bytes``: what torch's allocator was held to, where the run's records say it.
    """
    told = message or OomMessage()
    capacity = told.capacity_bytes
    if capacity is None and capture is not None and limit_bytes is None:
        capacity = capture.limit_bytes  # the observer is told the card where there is no limit
    limit = _first(told.allowed_bytes, None if capture is None else capture.limit_bytes, limit_bytes)
    if limit is not None and capacity is not None and limit >= capacity - _NOISE_BYTES:
        limit = None
    reserved = _first(None if capture is None else capture.reserved_bytes, told.reserved_bytes)
    allocated = _first(None if capture is None else capture.allocated_bytes, told.allocated_bytes)
    free = _first(None if capture is None else capture.free_bytes, told.free_bytes)
    own, others = _processes(told, capture, reserved)
    sizes = (None if capture is None else capture.asked_bytes, told.asked_bytes)
    asked = next((size for size in sizes if size is not None and 0 < size <= MOST_ASKED_BYTES), None)
    return Balance(
        asked_bytes=asked,
        asked_text=None if asked is None else told.asked_text,
        capacity_bytes=capacity,
        free_bytes=free,
        limit_bytes=limit,
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        private_pools_bytes=told.private_pools_bytes,
        largest_free_bytes=None if capture is None else capture.largest_free_bytes,
        others=others,
        outside_bytes=None if own is None or reserved is None else max(0, own - reserved),
        unseen_bytes=_unseen(capacity, free, own, reserved, others),
    )


def _processes(
    told: OomMessage, capture: Capture | None, reserved: int | None
) -> tuple[int | None, tuple[tuple[str, int], ...]]:
    """Returns what this process has on the card, and the others.

    In a container the driver's process ids are not ours: a process of a message that holds just what torch
    holds here, and the context, is this one.
    """
    if capture is not None and capture.processes:
        own = [process.used_bytes for process in capture.processes if process.is_own]
        others = [
            (f"process {process.pid}{f' ({process.name})' if process.name else ''}", process.used_bytes)
            for process in capture.processes
            if not process.is_own and process.used_bytes
        ]
        if own:
            return _first(*own, told.own_bytes), tuple(_by_size(others))
    others = [(f"process {pid}", size) for pid, size in told.others if size]
    own_bytes = told.own_bytes
    if own_bytes is None and reserved is not None:
        ours = next(
            (entry for entry in others if reserved <= entry[1] + _NOISE_BYTES <= reserved + CONTEXT_BYTES),
            None,
        )
        if ours is not None:
            others.remove(ours)
            own_bytes = ours[1]
    return own_bytes, tuple(_by_size(others))


def _unseen(
    capacity: int | None,
    free: int | None,
    own: int | None,
    reserved: int | None,
    others: Sequence[tuple[str, int]],
) -> int | None:
    """Returns what is in use on the card and held by nobody who is known; a context alone is nobody."""
    if capacity is None or free is None or (own is None and reserved is None):
        return None
    known = (own if own is not None else (reserved or 0) + CONTEXT_BYTES) + sum(size for _, size in others)
    return max(0, capacity - free - known)


def _by_size(others: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    return sorted(others, key=lambda entry: -entry[1])


def _first(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)
