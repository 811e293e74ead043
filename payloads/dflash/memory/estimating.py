"""The estimate of one program at one configuration: simulated, replayed, judged.

Knows what is assumed of a card beside what its allocator holds. Loads without torch until something is
simulated; several estimates in one process are independent.
"""

import contextlib
import io
import os
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dflash.cards import Card, parse_card
from dflash.events import ENVIRONMENT_NAME
from dflash.memory.allocator_settings import parse_alloc_conf
from dflash.memory.entries import Entry
from dflash.memory.log import Trace
from dflash.memory.report import Report, Room, report
from dflash.memory.variations import Variation, variations

GIB = 2**30

# An H200 with torch 2.11, modules loaded lazily: what CUDA's start takes, by which a limit is set, and what
# is in use beside the allocator after a compiled run (docs/oom-probe.md: of 94.97 GiB the allocator may take
# 94.46; 17.18 were in use where it had reserved 16.43).
CONTEXT_BYTES = int(0.51 * GIB)
OUTSIDE_BYTES = int(0.75 * GIB)
EAGER_ERROR, COMPILED_ERROR = 0.01, 0.05
STAND_IN = "h200"  # whose kernels are taken where no card is named
ALTERNATIVES_S = 15.0  # after so many seconds of them no further alternative is begun


class CannotEstimate(Exception):
    """There is no torch, or this one cannot do it; the message says what next."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """Where a program would run; None is not known. Sizes in bytes."""

    card: Card | None = None
    alloc_conf: str = ""
    memory_limit_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Alternative:
    """The same program with one thing changed, and what it would need then."""

    variation: Variation
    report: Report


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """What a program would take of a card's memory; `trace` None where it would take none."""

    entry: Entry
    target: Target
    trace: Trace | None
    report: Report
    outside_bytes: int
    capacity_bytes: int | None
    error_share: float
    notes: tuple[str, ...]
    seconds: float
    alternatives: tuple[Alternative, ...] | None = None
    left_out: tuple[str, ...] = ()  # of the alternatives, for time


def check(entry: Entry, values: Mapping[str, object], target: Target) -> None:
    """Refuse what `estimate` would refuse, without torch (ValueError)."""
    entry.build(values)
    parse_alloc_conf(target.alloc_conf)


def estimate(
    entry: Entry, values: Mapping[str, object], target: Target, *, has_alternatives: bool = False
) -> Estimate:
    """Return the estimate; `has_alternatives` adds the alternatives.

    Raises:
        ValueError: a parameter or an allocator setting is refused.
        CannotEstimate: this torch cannot do it, or there is none.
    """
    started_s = time.perf_counter()
    params = entry.build(values)
    settings = parse_alloc_conf(target.alloc_conf)
    error_share = _error_share(params)
    why_not = _why_nothing(entry, params)
    outside_bytes, room = room_of(params, target)
    trace = None if why_not else _simulated(entry, params, target)
    found = _no_report() if trace is None else report(trace, settings, room=room, error_share=error_share)
    others, left_out = _alternatives(entry, values, target, trace) if has_alternatives and trace else ((), ())
    notes = (why_not,) if why_not else _notes(params, trace, target, outside_bytes)
    if left_out:
        notes = (*notes, f"not estimated, which would take longer: {'; '.join(left_out)}")
    return Estimate(
        entry=entry,
        target=target,
        trace=trace,
        report=found,
        outside_bytes=outside_bytes,
        capacity_bytes=room.capacity_bytes,
        error_share=error_share,
        notes=notes,
        seconds=time.perf_counter() - started_s,
        alternatives=others if has_alternatives else None,
        left_out=left_out,
    )


def room_of(params: Any, target: Target) -> tuple[int, Room]:
    """Return what is in use outside the allocator, and what that leaves to it.

    A limit, of the run or of the program itself, is set at CUDA's start: what is loaded later comes on top.
    """
    own_limit_gib = getattr(params, "memory_limit_gib", None)
    own_limit = None if own_limit_gib is None else int(own_limit_gib * GIB)
    total = None if target.card is None else target.card.total_bytes
    shares = [
        max(0, limit - CONTEXT_BYTES) for limit in (target.memory_limit_bytes, own_limit) if limit is not None
    ]
    outside = OUTSIDE_BYTES
    card_bytes = None if total is None else max(0, total - OUTSIDE_BYTES)
    if shares and (card_bytes is None or min(shares) < card_bytes):
        outside = CONTEXT_BYTES
    fraction = parse_alloc_conf(target.alloc_conf).per_process_memory_fraction
    if fraction is not None and total is not None:
        shares.append(int(fraction * total))
    return outside, Room(card_bytes=card_bytes, limit_bytes=min(shares, default=None))


def _why_nothing(entry: Entry, params: Any) -> str | None:
    if entry.work is None:
        return entry.why_not
    if params.device == "cpu":
        return "device is cpu, which takes no card's memory; --set device=cuda estimates a card's"
    return None


def _simulated(entry: Entry, params: Any, target: Target, *, is_brief: bool = False) -> Trace:
    try:
        from dflash.memory.trace import CannotSimulate, trace  # noqa: PLC0415  loads torch
    except ImportError as error:
        message = (
            f"torch cannot be loaded here ({error}); run it with a Python that has torch ≥ 2.9, on any CPU"
        )
        raise CannotEstimate(message) from error
    try:
        with _unheard():
            return trace(
                lambda: entry.run(params, is_brief=is_brief), card=target.card or parse_card(STAND_IN)
            )
    except CannotSimulate as error:
        raise CannotEstimate(str(error)) from error


@contextlib.contextmanager
def _unheard() -> Iterator[None]:
    """Keep what a simulated program prints, reports and warns of from whoever watches this one."""
    watcher = os.environ.pop(ENVIRONMENT_NAME, None)
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        if watcher is not None:
            os.environ[ENVIRONMENT_NAME] = watcher


def _no_report() -> Report:
    return Report(phases=(), verdicts={}, failure=None)


def _notes(params: Any, trace: Trace | None, target: Target, outside_bytes: int) -> tuple[str, ...]:
    assert trace is not None
    assumed = f"{outside_bytes / GIB:.2f} GiB outside the allocator (CUDA context, kernels) are assumed"
    notes = [f"{assumed}, as measured on an H200 with torch 2.11"]
    if target.card is None:
        notes.append(f"no card was named: kernels are those of {trace.card.describe()}")
    place = _place(params.device)
    if place:
        # Which cards a run sees is not known here; one that is given a single card sees cuda:0 alone.
        told = f"device is {params.device}: a run that sees fewer than {place + 1} cards fails at its start"
        notes.insert(0, told)
    return (*notes, *trace.notes)


def _place(device: str) -> int:
    """Return which of the cards that a run sees the program takes."""
    return int(device.partition(":")[2] or 0)


def _alternatives(
    entry: Entry, values: Mapping[str, object], target: Target, trace: Trace
) -> tuple[tuple[Alternative, ...], tuple[str, ...]]:
    """Return the estimates of all variations, and those for which there was no time."""
    found: list[Alternative] = []
    left_out: list[str] = []
    started_s = time.perf_counter()
    for variation in variations(entry, entry.build(values), target.alloc_conf):
        is_late = time.perf_counter() - started_s > ALTERNATIVES_S
        if variation.set and is_late:
            left_out.append(variation.label)
        else:
            found.append(_varied(entry, values, target, variation, trace))
    return tuple(found), tuple(left_out)


def _varied(
    entry: Entry, values: Mapping[str, object], target: Target, variation: Variation, trace: Trace
) -> Alternative:
    """Return the estimate of a variation; `trace` serves one that changes no parameter."""
    params = entry.build({**values, **variation.set})
    changed = target if variation.alloc_conf is None else replace(target, alloc_conf=variation.alloc_conf)
    run = _simulated(entry, params, changed, is_brief=True) if variation.set else trace
    _, room = room_of(params, changed)
    found = report(run, parse_alloc_conf(changed.alloc_conf), room=room, error_share=_error_share(params))
    return Alternative(variation=variation, report=found)


def _error_share(params: Any) -> float:
    return COMPILED_ERROR if getattr(params, "compile", False) else EAGER_ERROR
