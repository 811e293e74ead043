"""A raw snapshot of torch's CUDA allocator that was fetched from a host: read as plain values, and summed up.

The file is the host's word (``orch-memory/*.pickle`` of a run's artifacts, or one of torch's
``_dump_snapshot``): nothing in it is looked up or called, and its form is checked before anything is made of
it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.errors import UsageError
from orchestrator.forensics import plain_pickle
from orchestrator.supervisor import memory_blocks
from orchestrator.supervisor.memory_files import MOST_SNAPSHOT_BYTES
from orchestrator.supervisor.memory_names import Described, Known, describe, sums_by_category
from orchestrator.text import printable, quoted

MOST_LARGEST = 25


@dataclass(frozen=True, kw_only=True, slots=True)
class Holding:
    """What was allocated at one moment, in bytes by category and block by block, the largest first."""

    allocated_bytes: int
    by_category: Mapping[str, int]
    largest: tuple[Described, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class CardSummary:
    """One card's memory when the snapshot was taken, and when most was allocated within its history."""

    device: int
    reserved_bytes: int
    largest_free_bytes: int
    now: Holding
    peak: Holding


def read_snapshot(path: Path) -> dict[str, Any]:
    """Returns a snapshot of at most 128 MiB.

    Raises:
        UsageError: it cannot be read, is too large, is no pickle of plain containers, or has another form.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MOST_SNAPSHOT_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
    if len(data) > MOST_SNAPSHOT_BYTES:
        size_mib = MOST_SNAPSHOT_BYTES // 2**20
        raise UsageError(f"{path}: has more than {size_mib} MiB; look at it with pytorch.org/memory_viz")
    try:
        snapshot = plain_pickle.read(data)
        _check(snapshot)
    except (plain_pickle.PickleRefused, _Odd) as error:
        what = printable(f"{path}: is no memory snapshot that can be read: {error}")
        raise UsageError(f"{what}; fetch it again, or look at it with pytorch.org/memory_viz") from None
    checked: dict[str, Any] = snapshot
    return checked


def summarise(snapshot: Mapping[str, Any]) -> tuple[CardSummary, ...]:
    """Returns each card that has something reserved or a history.

    Categories are told by where blocks were born: names of parameters are not in a snapshot.
    """
    devices = {segment.get("device", 0) for segment in snapshot["segments"]}
    devices |= {index for index, trace in enumerate(snapshot.get("device_traces", ())) if trace}
    return tuple(_card(snapshot, device) for device in sorted(devices))


def _card(snapshot: Mapping[str, Any], device: int) -> CardSummary:
    return CardSummary(
        device=device,
        reserved_bytes=memory_blocks.reserved(snapshot, device),
        largest_free_bytes=memory_blocks.largest_free(snapshot, device),
        now=_holding(memory_blocks.live(snapshot, device)),
        peak=_holding(memory_blocks.peak(snapshot, device).blocks),
    )


def _holding(blocks: list[memory_blocks.Block]) -> Holding:
    described = describe(blocks, Known())
    return Holding(
        allocated_bytes=sum(block.bytes for block in described),
        by_category={row["category"]: row["bytes"] for row in sums_by_category(described)},
        largest=tuple(described[:MOST_LARGEST]),
    )


class _Odd(Exception):
    """Something stands where a snapshot has something else."""


def _check(snapshot: Any) -> None:
    """Checks all that `memory_blocks` and `memory_names` read; frames once, since a history shares them."""
    if type(snapshot) is not dict:
        raise _Odd("it is no dictionary")
    seen: set[int] = set()
    for segment in _dicts(snapshot, "segments"):
        _check_integers(segment, "a segment", ("address", "total_size"), ("device",))
        for block in _dicts(segment, "blocks"):
            _check_integers(block, "a block", ("size",), ("address", "requested_size"))
            _check_texts(block, "a block", "state")
            for entry in (block, *_dicts(block, "history", [])):
                _check_integers(entry, "a block's history", (), ("real_size",))
                _check_frames(entry, seen)
    for trace in _list(snapshot, "device_traces", []):
        for event in _dicts({"device_traces": trace}, "device_traces"):
            _check_texts(event, "an event", "action")
            is_at_a_place = event["action"] in ("alloc", "free_requested", "free_completed")
            _check_integers(event, "an event", ("size", "addr") if is_at_a_place else (), ("size",))
            _check_frames(event, seen)


def _check_frames(holder: dict[str, Any], seen: set[int]) -> None:
    if id(holder.get("frames")) not in seen:
        for frame in _dicts(holder, "frames", []):
            _check_integers(frame, "a frame", ("line",))
            _check_texts(frame, "a frame", "filename", "name")
        seen.add(id(holder.get("frames")))


def _check_integers(
    holder: dict[str, Any], what: str, needed: tuple[str, ...], others: tuple[str, ...] = ()
) -> None:
    for name in (*needed, *(other for other in others if other in holder)):
        if type(holder.get(name)) is not int or holder[name] < 0:
            raise _Odd(f"{what} has {quoted(holder.get(name))} as its {name}")


def _check_texts(holder: dict[str, Any], what: str, *names: str) -> None:
    for name in names:
        if type(holder.get(name)) is not str:
            raise _Odd(f"{what} has {quoted(holder.get(name))} as its {name}")


def _dicts(holder: dict[str, Any], name: str, otherwise: Any = None) -> list[dict[str, Any]]:
    found = _list(holder, name, otherwise)
    if any(type(each) is not dict for each in found):
        raise _Odd(f"{name} holds something else than dictionaries")
    return found


def _list(holder: dict[str, Any], name: str, otherwise: Any = None) -> list[Any]:
    found = holder.get(name, otherwise)
    if type(found) is not list:
        raise _Odd(f"{name} is no list")
    return found
