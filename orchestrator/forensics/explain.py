"""Out of memory, explained: what it was, who held the rest, and what would make it fit (pure).

Facts come in as values, from a run's records or from a pasted message; nothing is read or run here. Every
sentence of an explanation comes from a number that stands in the facts; where there is none it says what is
missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from orchestrator.forensics.asked import (
    MOST_ASKED_BYTES,
    AskedSize,
    asked_exactly,
    asked_from_message,
    asked_from_text,
)
from orchestrator.forensics.captures import Capture
from orchestrator.forensics.causes import (
    FRAGMENTATION,
    KERNEL_SHARED,
    LEAK,
    LIMIT,
    OTHER_PROCESS,
    TOO_LARGE,
    Cause,
    Surroundings,
    cause_of,
    contributing,
)
from orchestrator.forensics.making import being_made
from orchestrator.forensics.message_kinds import DEVICE_ALLOCATOR, RECOVERABLE
from orchestrator.forensics.messages import Found, OomMessage
from orchestrator.forensics.naming import LIKELY, Candidate, Naming
from orchestrator.forensics.numbers import Balance, balance_of
from orchestrator.forensics.outlook import Outlook, Remedy, foreseen, remedies_of
from orchestrator.text import sized

__all__ = ["Explanation", "Facts", "asked_size", "device_of", "explain", "failure_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """All that is known of a failure.

    ``ended_by`` is the message of the exception that ended the run, ``found`` are those in its output.
    ``naming`` is of the size that was asked for, ``first_naming`` of the first message where that is another
    one; ``unnamed_why`` says why there is none, ``shapes_notes`` what the payload says of the parameters,
    ``caution`` what is to be said of them before all else.
    ``allocator_bytes`` is what torch was held to. ``proc`` is the rank that it was, None where there is one
    process. ``went_on`` is how a run ended that went on after its messages.
    """

    proc: str | None = None
    ended_by: OomMessage | None = None
    found: Found = field(default_factory=Found)
    captures: tuple[Capture, ...] = ()
    around: Surroundings = field(default_factory=Surroundings)
    allocator_bytes: int | None = None
    naming: Naming | None = None
    first_naming: Naming | None = None
    unnamed_why: str | None = None
    shapes_notes: tuple[str, ...] = ()
    caution: str | None = None
    outlook: Outlook | None = None
    went_on: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """What it was: ``answer`` is one line, the rest says why.

    ``asked``, ``held`` and ``tensor`` are lines, ``of_params`` what the payload says of the parameters;
    ``remedies`` begin with those that fit; ``foreseen`` is what was predicted of this configuration, and how
    that agrees; ``notes`` are what else was seen.
    """

    answer: str
    cause: Cause
    balance: Balance
    message: OomMessage | None
    capture: Capture | None
    naming: Naming | None
    of_params: tuple[str, ...]
    asked: tuple[str, ...]
    held: tuple[str, ...]
    tensor: tuple[str, ...]
    remedies: tuple[Remedy, ...]
    outlook: Outlook | None
    foreseen: tuple[str, ...]
    notes: tuple[str, ...]


def failure_of(facts: Facts) -> tuple[OomMessage | None, Capture | None]:
    """Returns the message and the capture of the failure that counts.

    That is what ended the run, or else the last one of the output that tells more than a failed attempt; of
    the captures the last one of that size.
    """
    real = [message for message in facts.found.messages if message.detail != RECOVERABLE]
    told = real or list(facts.found.messages)
    message = facts.ended_by or (told[-1] if told else None)
    if message is not None and message.kind != DEVICE_ALLOCATOR:
        return message, None
    fitting = [capture for capture in facts.captures if message is None or _is_same(message, capture)]
    return message, (fitting[-1] if fitting else None)


def asked_size(message: OomMessage | None, capture: Capture | None) -> AskedSize | None:
    """Returns the size that is to be named: the exact one where it was captured.

    None where no size is said, or none that a card could have.
    """
    size = _told_size(message, capture)
    return size if size is not None and 0 < size.most_bytes <= MOST_ASKED_BYTES else None


def _told_size(message: OomMessage | None, capture: Capture | None) -> AskedSize | None:
    exact = None if capture is None else capture.requested_bytes or capture.asked_bytes
    if exact:
        return asked_exactly(exact)
    if message is None or message.kind != DEVICE_ALLOCATOR:
        return None
    if message.asked_text is not None:
        return asked_from_text(message.asked_text)
    return asked_from_message(message.asked_bytes) if message.asked_bytes else None


def device_of(message: OomMessage | None, capture: Capture | None) -> int | None:
    """Returns the card's number inside the process, None where neither tells it."""
    captured = None if capture is None else capture.device
    told = None if message is None else message.device
    return told if captured is None else captured


def explain(facts: Facts) -> Explanation | None:
    """Returns what is known of a failure, None where nothing says that memory was out."""
    message, capture = failure_of(facts)
    if message is None and capture is None and facts.around.killed_in is None:
        return None
    balance = balance_of(message, capture, limit_bytes=facts.allocator_bytes)
    cause = cause_of(message, balance, facts.around)
    naming = facts.naming
    return Explanation(
        answer=_before(facts) + _answer(cause, balance, naming, capture) + _after(facts),
        cause=cause,
        balance=balance,
        message=message,
        capture=capture,
        naming=naming,
        of_params=facts.shapes_notes,
        asked=tuple(_asked(facts, message, balance, capture)),
        held=tuple(_held(balance, capture)),
        tensor=tuple(_tensor(naming, capture, facts.unnamed_why)),
        remedies=tuple(remedies_of(facts.outlook, _declared_remedy(naming), balance)),
        outlook=facts.outlook,
        foreseen=tuple(foreseen(facts.outlook, balance)),
        notes=(*contributing(cause, balance, facts.around), *_notes(facts, message)),
    )


def _is_same(message: OomMessage, capture: Capture) -> bool:
    """Tells whether both may be of one failure: of one card and size, as far as both tell them."""
    printed, exact = message.asked_bytes, capture.asked_bytes
    if None not in (message.device, capture.device) and message.device != capture.device:
        return False
    return printed is None or exact is None or abs(printed - exact) <= 0.006 * max(exact, 2**20)


# The first line


def _answer(cause: Cause, balance: Balance, naming: Naming | None, capture: Capture | None) -> str:
    if naming is not None and naming.not_this_run:
        return f"this log may not be this configuration's: {naming.summary}"
    best = _best(naming)
    if best is not None and balance.asked_bytes is not None:
        what = f"{best.doubt}{best.text}, {_asked_text(balance)} asked"
        return f"out of memory: {what}; {cause.sentence}"
    if balance.asked_bytes is not None and cause.name in _OF_ASKED:
        where = "" if capture is None else _for_what(capture) + _where(capture)
        return f"out of memory: {_asked_text(balance)} asked{where}{_of_nothing(naming)}; {cause.sentence}"
    return f"out of memory: {cause.sentence}" if cause.name not in _SELF_SPEAKING else cause.sentence


def _before(facts: Facts) -> str:
    return "" if facts.caution is None else f"{facts.caution}; "


def _of_nothing(naming: Naming | None) -> str:
    if naming is None or naming.candidates:
        return ""
    small = naming.asked.asked_for
    return ", the size of nothing that these parameters make" if small is None else f", for {small}"


def _after(facts: Facts) -> str:
    return "" if facts.went_on is None else f"; but the run went on after it, and {facts.went_on}"


_OF_ASKED = frozenset({TOO_LARGE, FRAGMENTATION, OTHER_PROCESS, LEAK, LIMIT})
_SELF_SPEAKING = frozenset({KERNEL_SHARED})


def _best(naming: Naming | None) -> Candidate | None:
    if naming is None or not naming.candidates or naming.candidates[0].confidence < LIKELY:
        return None
    return naming.candidates[0]


def _declared_remedy(naming: Naming | None) -> Mapping[str, Any] | None:
    """Returns the parameters that the payload names to avoid the tensor; another run's help nobody."""
    best = _best(naming)
    return None if best is None or not best.is_this_run else best.tensor.remedy


def _asked_text(balance: Balance) -> str:
    return balance.asked_text or sized(balance.asked_bytes or 0)


def _for_what(capture: Capture) -> str:
    made = being_made(capture)
    return "" if made is None else f" for {made}"


def _where(capture: Capture) -> str:
    place = capture.stack[0] if capture.stack else capture.autograd_node
    module = f" in {capture.module}" if capture.module else ""
    return f"{module}{f' at {place}' if place else ''}"


# What was asked, and who held the rest


def _asked(
    facts: Facts, message: OomMessage | None, balance: Balance, capture: Capture | None
) -> Iterator[str]:
    if balance.asked_bytes is not None:
        device = device_of(message, capture)
        card = "" if device is None else f" on GPU {device}"
        phase = f", in {capture.phase}" if capture is not None and capture.phase else ""
        rank = "" if facts.proc is None else f", by {facts.proc}"
        yield f"{_asked_text(balance)}{card}{phase}{rank}"
    if balance.free_text is not None:
        yield balance.free_text
    if balance.limit_bytes is not None:
        yield f"torch may take {sized(balance.limit_bytes)} of it"
    if capture is not None:
        if capture.module:
            yield f"module {capture.module}"
        if capture.autograd_node:
            yield f"autograd node {capture.autograd_node}"
        yield from (f"at {frame}" for frame in capture.stack[:4])


def _held(balance: Balance, capture: Capture | None) -> Iterator[str]:
    if balance.allocated_bytes is not None:
        unused = balance.unallocated_bytes
        kept = "" if unused is None else f", {sized(unused)} reserved and unused"
        pools = balance.private_pools_bytes
        graphs = "" if not pools else f" (of it {sized(pools)} for CUDA graphs)"
        yield f"torch: {sized(balance.allocated_bytes)} allocated{graphs}{kept}"
    if capture is not None:
        for owner in capture.owners:
            blocks = "" if owner.blocks is None else f" in {owner.blocks} blocks"
            yield f"  {owner.category}: {sized(owner.size_bytes)}{blocks}"
        yield from (f"  made in module {name}: {sized(size)}" for name, size in capture.modules[:5])
        for block in capture.largest[:5]:
            shape = "" if block.shape is None else f" {list(block.shape)} {block.dtype or ''}".rstrip()
            whose = block.name or block.module or block.category
            place = f", {block.where}" if block.where else ""
            yield f"  {sized(block.size_bytes)}: {whose}{shape}{place}"
    if balance.outside_bytes is not None:
        yield f"this process beside torch's allocator: {sized(balance.outside_bytes)}"
    yield from (f"{name}: {sized(size)}" for name, size in balance.others[:8])


# Which tensor


def _tensor(naming: Naming | None, capture: Capture | None, unnamed_why: str | None) -> Iterator[str]:
    if naming is None:
        if unnamed_why is not None:
            yield unnamed_why
        return
    if not naming.candidates:
        yield naming.summary
        yield from () if naming.asked.asked_for is not None else naming.ruled_out
        return
    best, *others = naming.candidates
    also = f", also of {', '.join(best.also[:3])}" if best.also else ""
    yield f"{best.text} (confidence {best.confidence:.2f}{also})"
    yield from (f"  {reason}" for reason in best.evidence)
    born = best.tensor.born
    is_seen = capture is not None and bool(capture.stack)
    if born and not is_seen:
        yield f"  made in {born}"
    yield from (f"  {reason}" for reason in naming.ruled_out)
    for other in others[:4]:
        yield f"or {other.text} (confidence {other.confidence:.2f}): {other.why_fits}"
    if naming.unknown >= 0.1:
        yield f"or none that the payload declares (confidence {naming.unknown:.2f})"


# What else there is to say


def _notes(facts: Facts, message: OomMessage | None) -> Iterator[str]:
    first = facts.found.first
    if first is not None and message is not None and _differs(first, message):
        line = "" if first.line is None else f" (line {first.line})"
        asked = first.asked_text or (None if first.asked_bytes is None else sized(first.asked_bytes))
        what = f"{asked} asked, {first.kind}" if asked else f"{first.kind}"
        yield f"the first of {facts.found.count} messages{line} is another one: {what}: {first.text}"
        if facts.first_naming is not None and facts.first_naming.candidates:
            yield f"there: {facts.first_naming.summary}"


def _differs(first: OomMessage, other: OomMessage) -> bool:
    return (first.kind, first.asked_bytes, first.asked_text) != (
        other.kind,
        other.asked_bytes,
        other.asked_text,
    )
