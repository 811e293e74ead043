"""What a process told from inside when memory ran out, as checked values (pure).

The events come from a payload's process over its host and are believed only as far as their types go: what is
not of the right type is left out, lists are cut, texts are made printable.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.text import printable
from orchestrator.told_values import items, mappings, size

MOST_ENTRIES = 64
MOST_SAMPLE_BYTES = 2**40  # no card has more
MOST_STRIDE = 2**20
OPTIMIZER = "optimizer"
_MOST_CHARACTERS = 300


@dataclass(frozen=True, kw_only=True, slots=True)
class Owner:
    """All live memory of one category."""

    category: str
    size_bytes: int
    blocks: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """One live block; ``where`` is the line that asked for it."""

    size_bytes: int
    category: str
    name: str | None
    shape: tuple[int, ...] | None
    dtype: str | None
    module: str | None
    where: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """A process on the card, by the driver; ``used_bytes`` is None where the driver does not tell."""

    pid: int
    name: str | None
    used_bytes: int | None
    is_own: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Capture:
    """The state of one card in one process at the moment when an allocation failed.

    ``asked_bytes`` is the segment that torch wanted, ``requested_bytes`` what the tensor itself needs, both
    exact; ``stack`` is innermost first.
    ``largest_free_bytes`` is the largest unused block that torch kept. ``after_backwards`` is what was
    allocated after one in ``stride`` backward passes. ``snapshot`` is the file that has all of it, among the
    run's artifacts.
    """

    proc: str
    device: int | None
    asked_bytes: int | None
    requested_bytes: int | None
    limit_bytes: int | None
    free_bytes: int | None
    allocated_bytes: int | None
    reserved_bytes: int | None
    largest_free_bytes: int | None
    stack: tuple[str, ...]
    module: str | None
    autograd_node: str | None
    phase: str | None
    owners: tuple[Owner, ...]
    modules: tuple[tuple[str, int], ...]
    largest: tuple[Block, ...]
    processes: tuple[Process, ...]
    after_backwards: tuple[int, ...]
    stride: int
    snapshot: str | None

    @property
    def is_in_first_step(self) -> bool:
        """Whether the optimizer failed before it had any state."""
        return self.phase == OPTIMIZER and all(owner.category != "optimizer_state" for owner in self.owners)


def read_capture(event: Mapping[str, Any], *, proc: str) -> Capture:
    """Returns what an ``oom`` event says."""
    told = event.get("after_backwards")
    samples: Mapping[str, Any] = told if isinstance(told, Mapping) else {}
    return Capture(
        proc=proc,
        **{name: size(event.get(name)) for name in _SIZES},
        device=size(event.get("device")),
        stack=tuple(filter(None, map(_text, items(event.get("stack"), MOST_ENTRIES)))),
        module=_text(event.get("module")),
        autograd_node=_text(event.get("autograd_node")),
        phase=_text(event.get("phase")),
        owners=_sorted(map(_owner, _mappings(event.get("owners")))),
        modules=tuple(
            (name, size_bytes)
            for item in _mappings(event.get("modules"))
            if (name := _text(item.get("module"))) and (size_bytes := size(item.get("bytes"))) is not None
        ),
        largest=tuple(map(_block, _mappings(event.get("largest")))),
        processes=tuple(map(_process, _mappings(event.get("processes")))),
        after_backwards=tuple(
            sample
            for item in items(samples.get("bytes"), MOST_ENTRIES)
            if (sample := size(item)) is not None and sample <= MOST_SAMPLE_BYTES
        ),
        stride=min(max(1, size(samples.get("stride")) or 1), MOST_STRIDE),
        snapshot=_text(event.get("snapshot")),
    )


_SIZES = (
    "asked_bytes",
    "requested_bytes",
    "limit_bytes",
    "free_bytes",
    "allocated_bytes",
    "reserved_bytes",
    "largest_free_bytes",
)


def _sorted(owners: Any) -> tuple[Owner, ...]:
    return tuple(sorted(owners, key=lambda owner: -owner.size_bytes))


def _owner(item: Mapping[str, Any]) -> Owner:
    return Owner(
        category=_text(item.get("category")) or "unnamed",
        size_bytes=size(item.get("bytes")) or 0,
        blocks=size(item.get("blocks")),
    )


def _block(item: Mapping[str, Any]) -> Block:
    shape = item.get("shape")
    sizes = [size(value) for value in items(shape, 16)] if isinstance(shape, list) else [None]
    return Block(
        size_bytes=size(item.get("bytes")) or 0,
        category=_text(item.get("category")) or "unnamed",
        name=_text(item.get("name")),
        shape=tuple(each for each in sizes if each is not None) if None not in sizes else None,
        dtype=_text(item.get("dtype")),
        module=_text(item.get("module")),
        where=_text(item.get("where")),
    )


def _process(item: Mapping[str, Any]) -> Process:
    return Process(
        pid=size(item.get("pid")) or 0,
        name=_text(item.get("name")),
        used_bytes=size(item.get("used_bytes")),
        is_own=item.get("is_own") is True,
    )


def _mappings(value: Any) -> list[Mapping[str, Any]]:
    return mappings(value, MOST_ENTRIES)


def _text(value: Any) -> str | None:
    return printable(value[:_MOST_CHARACTERS]) if isinstance(value, str) and value else None
