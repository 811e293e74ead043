"""Why memory was out: one class of cause, with the numbers that say so (pure).

A cause is found from the balance of the card, from what grew before, and from the kind of the message. What
the numbers do not tell is not named: then the allocation was too large for what was left.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.forensics import message_kinds as kinds
from orchestrator.forensics.growth import Growth
from orchestrator.forensics.messages import OomMessage
from orchestrator.forensics.numbers import Balance
from orchestrator.text import sized

TOO_LARGE = "too large"
FRAGMENTATION = "fragmentation"
OTHER_PROCESS = "taken by another process"
LEAK = "leak across iterations"
LIMIT = "memory limit"
OUTSIDE = kinds.OUTSIDE
HOST = kinds.HOST
CONTAINER = kinds.CONTAINER
KERNEL_SHARED = kinds.KERNEL_SHARED
UNKNOWN = "unknown"

_WORTH_NAMING_BYTES = 2**30
_MOST_LIBRARIES_BYTES = 4 * 2**30
_LEAST_OF_HELD, _MOST_OF_HELD = 0.7, 1.3  # where what grew is what torch held
_DRIVERS_OWN_BYTES = 64 * 2**20  # of what a full card reports as free
_LEAST_UNUSED_SHARE = 0.04  # of what torch may take, to be why it is full
_FAR_ABOVE = 4  # times what is unused: then what took that much was why
_EXPANDABLE = "allocator setting: alloc_conf: expandable_segments:True, so that pieces can be joined"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cause:
    """A class of cause: ``sentence`` answers, ``evidence`` are its numbers, ``advice`` what to do next."""

    name: str
    sentence: str
    evidence: tuple[str, ...] = ()
    advice: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Surroundings:
    """What else is known of a run: ``killed_in`` is where the kernel killed for memory (cgroup, host),
    ``peak_reserved_bytes`` the most that torch kept on a card of ``card_bytes``, ``strangers`` processes that
    appeared on its cards, ``settings`` what torch's allocator took.
    """

    killed_in: str | None = None
    peak_rss_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    card_bytes: int | None = None
    growths: tuple[Growth, ...] = ()
    strangers: tuple[str, ...] = ()
    settings: Mapping[str, Any] | None = None
    is_limited: bool = False

    @property
    def is_expandable(self) -> bool:
        """Torch's segments grow, so that free memory is seldom in pieces."""
        return str((self.settings or {}).get("expandable_segments")).lower() == "true"


def cause_of(message: OomMessage | None, balance: Balance, around: Surroundings) -> Cause:
    """Returns the cause that the numbers show."""
    kind = None if message is None else message.kind
    if around.killed_in is not None and kind not in (kinds.DEVICE_ALLOCATOR, kinds.OUTSIDE):
        return _killed(around)
    if message is not None and kind in _BY_KIND:
        return _BY_KIND[kind](message, balance, around)
    if balance.asked_bytes is None:
        return Cause(name=UNKNOWN, sentence="the message does not say how much was asked for")
    return _device_cause(balance, around)


def contributing(main: Cause, balance: Balance, around: Surroundings) -> Iterator[str]:
    """Yields what else took memory away, besides the main cause."""
    if main.name != LEAK:
        yield from (_growth_text(growth) for growth in around.growths)
    if main.name not in (OTHER_PROCESS, LIMIT) and balance.others_bytes >= _WORTH_NAMING_BYTES:
        yield f"other processes hold {sized(balance.others_bytes)} of the card"
    if main.name != OTHER_PROCESS:
        yield from around.strangers
        if (balance.unseen_bytes or 0) >= _WORTH_NAMING_BYTES:
            yield _unseen_text(balance)
    if (balance.private_pools_bytes or 0) >= _WORTH_NAMING_BYTES:
        yield f"{sized(balance.private_pools_bytes or 0)} are kept for CUDA graphs and free for nothing else"
    if main.name != OUTSIDE and (balance.outside_bytes or 0) >= 2 * _WORTH_NAMING_BYTES:
        outside = sized(balance.outside_bytes or 0)
        yield f"this process holds {outside} beside torch's allocator: its context, NCCL, other libraries"


# The device allocator


def _device_cause(balance: Balance, around: Surroundings) -> Cause:
    asked = balance.asked_bytes or 0
    leak = _leak(balance, around)
    if _is_fragmented(balance) and not _is_outweighed(balance, leak, around):
        return _fragmentation(balance, around)
    if balance.room_bytes is not None and balance.free_bytes is not None:
        if balance.free_bytes >= asked and not _is_full(balance):
            return leak or _limited(balance, around)
        if _is_taken(balance, asked):
            return leak if leak is not None and balance.others_bytes < asked else _taken(balance, around)
    return leak or _too_large(balance, around)


def _is_fragmented(balance: Balance) -> bool:
    """Enough is kept and unused, and no single piece of it is large enough."""
    asked, unused = balance.asked_bytes or 0, balance.unallocated_bytes
    whole = balance.limit_bytes or balance.capacity_bytes or balance.reserved_bytes or 0
    if unused is None or unused < max(asked, _LEAST_UNUSED_SHARE * whole):
        return False
    return not _has_fitting_piece(balance)


def _is_outweighed(balance: Balance, leak: Cause | None, around: Surroundings) -> bool:
    """Others, or a leak, took far more than what is in pieces."""
    asked, unused = balance.asked_bytes or 0, balance.unallocated_bytes or 0
    foreign = balance.others_bytes + _foreign_unseen(balance) if _is_taken(balance, asked) else 0
    risen = max(growth.rise_bytes for growth in around.growths) if leak is not None else 0
    return max(foreign, risen) >= _FAR_ABOVE * unused


def _has_fitting_piece(balance: Balance) -> bool:
    return balance.largest_free_bytes is not None and balance.largest_free_bytes >= (balance.asked_bytes or 0)


def _fragmentation(balance: Balance, around: Surroundings) -> Cause:
    unused, asked = balance.unallocated_bytes or 0, balance.asked_bytes or 0
    evidence = [
        f"{sized(unused)} are reserved by torch and unused, {sized(asked)} were asked for in one piece"
    ]
    if balance.largest_free_bytes is not None:
        evidence.append(f"the largest unused piece is {sized(balance.largest_free_bytes)}")
    if around.is_expandable:
        advice = (
            "segments are expandable already: make sizes vary less from step to step (pad batches to a few "
            "lengths), or let go of what is cached with torch.cuda.empty_cache() between phases"
        )
    else:
        advice = _EXPANDABLE
    return Cause(
        name=FRAGMENTATION,
        sentence=(
            f"fragmentation: enough memory is reserved and unused ({sized(unused)}), in pieces too small"
        ),
        evidence=tuple(evidence),
        advice=advice,
    )


def _limited(balance: Balance, around: Surroundings) -> Cause:
    free, asked = balance.free_bytes or 0, balance.asked_bytes or 0
    evidence = [f"the driver had {sized(free)} free, more than the {sized(asked)} that were asked for"]
    if balance.limit_bytes is not None:
        held = "" if balance.reserved_bytes is None else f", and it holds {sized(balance.reserved_bytes)}"
        evidence.append(f"torch may take {sized(balance.limit_bytes)} of this card{held}")
    if around.is_limited:
        sentence = "the run's memory limit, which makes the card look smaller than it is"
        advice: str | None = None
    elif balance.limit_bytes is not None:
        sentence = "a limit on torch's share of the card, not the card"
        advice = (
            "look for set_per_process_memory_fraction, or for per_process_memory_fraction in the allocator's "
            "settings"
        )
    else:
        sentence = (
            "not the card, which had enough free: a limit on torch's share of it, as far as can be seen"
        )
        advice = (
            "look for set_per_process_memory_fraction: older versions of torch do not show it in the message"
        )
    return Cause(name=LIMIT, sentence=sentence, evidence=tuple(evidence), advice=advice)


def _is_full(balance: Balance) -> bool:
    """Nobody named a limit, and what is free is the driver's reserve."""
    return balance.limit_bytes is None and (balance.free_bytes or 0) < _DRIVERS_OWN_BYTES


def _is_taken(balance: Balance, asked: int) -> bool:
    """It would have fitted without the others."""
    foreign = balance.others_bytes + _foreign_unseen(balance)
    return foreign >= _WORTH_NAMING_BYTES and asked <= (balance.room_bytes or 0) + foreign


def _foreign_unseen(balance: Balance) -> int:
    """Returns what of the unseen memory is others' for sure, or is more than a process's libraries take."""
    unseen = balance.unseen_bytes or 0
    return 0 if balance.outside_bytes is None and unseen < _MOST_LIBRARIES_BYTES else unseen


def _unseen_text(balance: Balance) -> str:
    unseen = sized(balance.unseen_bytes or 0)
    if balance.outside_bytes is None:
        return f"{unseen} are not torch's: other processes hold them, or libraries of this one"
    return f"{unseen} are held by processes that this one cannot see"


def _taken(balance: Balance, around: Surroundings) -> Cause:
    who = [f"{name} holds {sized(size)}" for name, size in balance.others[:5]]
    unseen = _foreign_unseen(balance)
    if unseen >= _WORTH_NAMING_BYTES:
        who.append(_unseen_text(balance))
    foreign = sized(balance.others_bytes + unseen)
    return Cause(
        name=OTHER_PROCESS,
        sentence=f"others hold {foreign} of this card; without them it would have fitted",
        evidence=(*who, *around.strangers),
        advice=(
            "end them, choose another card, or let the run wait for an empty one: "
            "devices: {count: 1, free_memory: SIZE} without --share"
        ),
    )


def _leak(balance: Balance, around: Surroundings) -> Cause | None:
    growth = max(around.growths, key=lambda found: found.rise_bytes, default=None)
    if growth is None or not _is_of_card(growth, balance):
        return None
    if growth.rise_bytes < (balance.asked_bytes or 0) // 2:
        return None
    return Cause(
        name=LEAK,
        sentence=(
            "something may keep memory from step to step: it grew until it was out, by "
            f"{sized(growth.per_step_bytes)} each time"
        ),
        evidence=(_growth_text(growth),),
        advice=(
            "look for tensors that are kept from one iteration to the next: losses or metrics kept with "
            "their graph (.detach() or .item() them), a list of outputs, a graph that is retained; rows that "
            "become longer on purpose look the same"
        ),
    )


def _is_of_card(growth: Growth, balance: Balance) -> bool:
    """Tells whether what grew ended near what torch held: else it is of something else by its name alone."""
    allocated, reserved = balance.allocated_bytes, balance.reserved_bytes
    if allocated is None and reserved is None:
        return True
    least = (reserved or 0) if allocated is None else allocated
    most = max(least, reserved or 0)
    ended_bytes = growth.last_bytes - (balance.others_bytes if growth.is_of_all else 0)
    return _LEAST_OF_HELD * least <= ended_bytes <= _MOST_OF_HELD * most + _MOST_LIBRARIES_BYTES


def _growth_text(growth: Growth) -> str:
    sizes = f"from {sized(growth.first_bytes)} to {sized(growth.last_bytes)}"
    return f"{growth.name} went {sizes} in {growth.steps} steps"


def _too_large(balance: Balance, around: Surroundings) -> Cause:
    if balance.room_bytes is None:
        return Cause(name=TOO_LARGE, sentence="more was asked for than was left")
    is_full, asked = _is_full(balance), balance.asked_bytes or 0
    room = 0 if is_full else balance.room_bytes
    evidence = [f"{sized(asked - room)} more than there was room for"]
    if is_full and balance.free_bytes:
        evidence.append(f"the {sized(balance.free_bytes)} that are called free are the driver's reserve")
    if around.is_limited and balance.limit_bytes is not None:
        evidence.append(
            f"within the run's memory limit, of which torch may take {sized(balance.limit_bytes)}"
        )
    if balance.capacity_bytes and balance.allocated_bytes is not None:
        share = balance.allocated_bytes / balance.capacity_bytes
        evidence.append(f"{share:.0%} of the card is allocated by this process")
    unused = balance.unallocated_bytes or 0
    advice: str | None = None
    if _has_fitting_piece(balance):
        evidence.append(
            f"a free block of {sized(balance.largest_free_bytes or 0)} is not for this request: it is of "
            "another stream, of a CUDA graph's pool or of the pool of small blocks"
        )
    elif not around.is_expandable and asked <= room + unused:
        evidence.append(f"torch keeps {sized(unused)} more, unused and in pieces: with it there was enough")
        advice = _EXPANDABLE
    return Cause(
        name=TOO_LARGE,
        sentence=_full_text(balance) if is_full else f"too large for the {sized(room)} that were left",
        evidence=tuple(evidence),
        advice=advice,
    )


def _full_text(balance: Balance) -> str:
    of = "" if balance.capacity_bytes is None else f" of {sized(balance.capacity_bytes)}"
    holds = f": torch holds {sized(balance.reserved_bytes)}{of}" if balance.reserved_bytes else ""
    return f"the card is full{holds}"


# Everything else


def _outside(message: OomMessage, _balance: Balance, around: Surroundings) -> Cause:
    who = message.detail or "a library"
    told = [_growth_text(growth) for growth in around.growths]
    if around.peak_reserved_bytes is not None:
        of = "" if around.card_bytes is None else f" of the card's {sized(around.card_bytes)}"
        told.insert(0, f"torch kept up to {sized(around.peak_reserved_bytes)}{of}, which others cannot use")
    return Cause(
        name=OUTSIDE,
        sentence=f"{who} got no memory on the card beside torch's allocator",
        evidence=(*told, *around.strangers),
        advice=(
            "leave room beside the allocator: a memory limit below the card's size (memory_limit:), and set "
            "up communication and libraries before torch's cache has grown"
        ),
    )


def _host(message: OomMessage, _balance: Balance, around: Surroundings) -> Cause:
    what = {
        kinds.PINNED: "pinned (page-locked) memory of the host",
        kinds.KILLED: "the host's memory: the kernel killed a process",
    }.get(message.detail or "", "the host's memory, not the card's")
    asked = "" if message.asked_bytes is None else f": {sized(message.asked_bytes)} were asked for"
    return Cause(
        name=HOST,
        sentence=f"{what}{asked}",
        evidence=_rss(around),
        advice="fewer data-loader workers, smaller prefetch or shards, or a machine with more memory",
    )


def _container(message: OomMessage, _balance: Balance, around: Surroundings) -> Cause:
    if message.detail == kinds.DEV_SHM and "Too many open files" in (message.text or ""):
        return Cause(
            name=CONTAINER,
            sentence="no lack of memory: the process has too many files open, each shared tensor is one",
            advice=(
                "a higher limit (ulimit -n), fewer workers, or "
                "torch.multiprocessing.set_sharing_strategy('file_system')"
            ),
        )
    if message.detail == kinds.DEV_SHM:
        return Cause(
            name=CONTAINER,
            sentence="the container's shared memory (/dev/shm) is full, not the card",
            advice="a larger /dev/shm (docker: --shm-size, Proxmox: a mount point), or fewer workers",
        )
    return _killed(Surroundings(killed_in="cgroup", peak_rss_bytes=around.peak_rss_bytes))


def _kernel_shared(message: OomMessage, _balance: Balance, _around: Surroundings) -> Cause:
    asked = "" if message.asked_bytes is None else f" ({message.asked_bytes} bytes)"
    return Cause(
        name=KERNEL_SHARED,
        sentence=f"no lack of memory: a Triton kernel wants more shared memory{asked} than the card's "
        "multiprocessors have",
        advice="smaller blocks or fewer stages for this kernel: it was tuned on a card that has more",
    )


def _killed(around: Surroundings) -> Cause:
    if around.killed_in == "cgroup":
        return Cause(
            name=CONTAINER,
            sentence="the container's memory limit: the kernel killed for memory within this cgroup",
            evidence=_rss(around),
            advice="raise the container's memory, or hold less on the host: fewer workers, less prefetch",
        )
    return Cause(
        name=HOST,
        sentence="the host's memory: the kernel killed for memory while the run went on",
        evidence=_rss(around),
        advice="hold less on the host: fewer data-loader workers, smaller prefetch or shards",
    )


def _rss(around: Surroundings) -> tuple[str, ...]:
    peak = around.peak_rss_bytes
    return () if peak is None else (f"the run's largest process had {sized(peak)} of the host's memory",)


_BY_KIND = {
    kinds.OUTSIDE: _outside,
    kinds.HOST: _host,
    kinds.CONTAINER: _container,
    kinds.KERNEL_SHARED: _kernel_shared,
}
