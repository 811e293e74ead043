"""What programs print when memory is out, as numbers and as one of five kinds (pure).

`parse` reads one message, `find` all of a text, `Finder` a text that comes in pieces and need not fit into
memory. Covers torch 2.4 to 2.14 and older spellings, whose parts come in any order and are searched each for
itself, cudaMallocAsync, and what is called out of memory elsewhere: `message_kinds`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from orchestrator.forensics.message_kinds import (
    DEVICE_ALLOCATOR,
    NEXT_MESSAGE,
    PREEMPTIVE,
    Anchor,
    Anchors,
)
from orchestrator.forensics.message_text import SIZE, plain, size_bytes, spelt, squeezed

MOST_CHARACTERS = 4096  # of one message, with the lines that it may be broken into
_SEARCHED_CHARACTERS = 64 * 1024  # at least, at a time
_BEFORE_CHARACTERS = 2048  # what stands before it tells what was asked for the memory
_HEAD_CHARACTERS = 400
_TEXT_CHARACTERS = 600


@dataclass(frozen=True, kw_only=True, slots=True)
class OomMessage:
    """One message; None where it does not say it.

    ``asked_bytes`` is what torch's allocator wanted from the driver: a segment, rounded, and printed with two
    decimals, as ``asked_text`` has it. ``others`` are processes and what they use, as the driver counts pids.
    ``own_bytes`` is all that the process has on the card. ``reserved_unallocated_bytes`` are kept by torch
    and unused, ``private_pools_bytes`` kept for CUDA graphs, ``allowed_bytes`` the share that a setting
    leaves to torch. ``detail`` says which library or which memory it was, ``line`` counts from 1.
    """

    asked_bytes: int | None = None
    capacity_bytes: int | None = None
    free_bytes: int | None = None
    others: tuple[tuple[int, int | None], ...] = ()
    own_bytes: int | None = None
    allowed_bytes: int | None = None
    allocated_bytes: int | None = None
    private_pools_bytes: int | None = None
    reserved_unallocated_bytes: int | None = None
    device: int | None = None
    kind: str | None = None
    text: str | None = None
    asked_text: str | None = None
    detail: str | None = None
    line: int | None = None

    @property
    def reserved_bytes(self) -> int | None:
        """All that torch's allocator holds on the card."""
        if self.allocated_bytes is None or self.reserved_unallocated_bytes is None:
            return None
        return self.allocated_bytes + self.reserved_unallocated_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """The messages of a text: how many, the first, the last, and the different ones in between."""

    count: int = 0
    messages: tuple[OomMessage, ...] = ()

    @property
    def first(self) -> OomMessage | None:
        """The first one, None where there is none."""
        return self.messages[0] if self.messages else None

    @property
    def last(self) -> OomMessage | None:
        """The last one, which is usually what ended the program."""
        return self.messages[-1] if self.messages else None


def parse(text: str) -> OomMessage | None:
    """Returns the last message in ``text``, None where memory is not what it is about."""
    return find(text).last


def find(text: str) -> Found:
    """Returns the messages in ``text``."""
    return find_in([text])


def find_in(pieces: Iterable[str], *, takes_bare: bool = False) -> Found:
    """Returns the messages in a text that comes in pieces.

    ``takes_bare``: where there is none, "Tried to allocate 15.09 GiB" alone is one.
    """
    finder = Finder(takes_bare=takes_bare)
    for piece in pieces:
        finder.feed(piece)
    return finder.close()


@dataclass(slots=True)
class Finder:
    """Reads a text piece by piece and keeps what it says of memory: the first messages and the last.

    Small pieces are put together before they are searched; what is searched is let go but for a message that
    is not all there yet, and what stands before it. Numbers are read of the messages that are kept alone: the
    newest waits until it is the last, or until another one comes while there is room.
    """

    most: int = 8
    takes_bare: bool = False
    _pieces: list[str] = field(default_factory=list)
    _waiting: int = 0  # characters in the pieces
    _rest: str = ""
    _scanned: int = 0  # characters of the rest that were searched
    _line: int = 1  # of the rest's beginning
    _count: int = 0
    _kept: list[OomMessage] = field(default_factory=list)
    _newest: _Unread | None = None
    _bare: _Unread | None = None  # the last one

    def feed(self, piece: str) -> None:
        """Takes the next piece."""
        self._pieces.append(piece)
        self._waiting += len(piece)
        if self._waiting >= _SEARCHED_CHARACTERS:
            self._search(is_final=False)

    def close(self) -> Found:
        """Returns what was found in all of it."""
        self._search(is_final=True)
        if not self._count and self._bare is not None:
            self._keep(self._bare)
        self._read_newest()
        return Found(count=self._count, messages=tuple(self._kept))

    def _search(self, *, is_final: bool) -> None:
        text = self._rest = "".join((self._rest, *self._pieces))
        self._pieces, self._waiting = [], 0
        if self.takes_bare and not self._count:
            self._look_for_bare(text)
        anchors = Anchors(text, self._scanned)
        lines_until, lines = 0, self._line
        while (anchor := anchors.next()) is not None:
            begin = anchor.begin
            if begin + MOST_CHARACTERS > len(text) and not is_final:
                self._forget(begin)
                return
            window = text[begin : begin + MOST_CHARACTERS]
            if not _has_numbers(anchor):
                window = window.partition("\n")[0]
            following = NEXT_MESSAGE.search(window, anchor.end - begin)
            window = window[: following.start()] if following is not None else window
            head = text[text.rfind("\n", max(0, begin - _HEAD_CHARACTERS), begin) + 1 : begin]
            lines, lines_until = lines + text.count("\n", lines_until, begin), begin
            self._keep(_Unread(anchor, window, head[-_HEAD_CHARACTERS:], lines))
            anchors.skip(begin + _extent(window))
        self._forget(len(text) if is_final else max(anchors.at, len(text) - _LONGEST_ANCHOR))

    def _look_for_bare(self, text: str) -> None:
        """Notes the last place that says what was asked for, whatever stands around it."""
        for match in _BARE.finditer(text):
            anchor = Anchor(
                begin=match.start(), end=match.end(), kind=DEVICE_ALLOCATOR, detail=None, asked_bytes=None
            )
            self._bare = _Unread(anchor, match[0], "", self._line + text.count("\n", 0, match.start()))

    def _forget(self, searched: int) -> None:
        """Lets go of what no later message needs."""
        gone = max(0, searched - _BEFORE_CHARACTERS)
        self._line += self._rest.count("\n", 0, gone)
        self._rest, self._scanned = self._rest[gone:], searched - gone

    def _keep(self, message: _Unread) -> None:
        """Keeps the first ones, and in the last place the newest."""
        self._count += 1
        if len(self._kept) < self.most - 1 and self._newest is not None and not message.is_as(self._newest):
            self._read_newest()
        self._newest = message

    def _read_newest(self) -> None:
        """Reads the message that waits; one that repeats itself is one, where it stands last."""
        if self._newest is not None:
            message = self._newest.read()
            if self._kept and replace(self._kept[-1], line=message.line) == message:
                self._kept.pop()
            self._kept.append(message)
            self._newest = None


@dataclass(frozen=True, slots=True)
class _Unread:
    """A message as it was found: ``window`` begins with it, ``head`` stands before it in its line."""

    anchor: Anchor
    window: str
    head: str
    line: int

    def is_as(self, other: _Unread) -> bool:
        """Tells whether both are one text, as far as a message goes in its first line."""
        kind, text = (self.anchor.kind, self.anchor.detail), self.window.partition("\n")[0]
        return kind == (other.anchor.kind, other.anchor.detail) and other.window.startswith(text)

    def read(self) -> OomMessage:
        """Returns its numbers."""
        return replace(_read(self.anchor, self.window, self.head), line=self.line)


_LONGEST_ANCHOR = 512
_BARE = re.compile(r"Tried to allocate \d{1,9}(?:\.\d{1,12})? [GM]iB")


# The device allocator's own words, each part found by itself in a text without white space

_FIELDS: dict[str, tuple[str, ...]] = {
    "asked": (r"[Tt]riedtoallocate{size}", r"[Rr]equested:{size}", r"(?:allocat\w*|request\w*)of{size}"),
    "capacity": (r"totalcapaci?tyof{size}", r"{size}totalcapacity", r"Devicelimit:{size}"),
    "free": (r"ofwhich{size}isfree", r"[;,]{size}free", r"Free\(accordingtoCUDA\):{size}"),
    "own": (r"thisprocesshas{size}memoryinuse",),
    "allowed": (r"{size}allowed;", r"memoryfraction\):{size}", r"memorylimit(?:of|is|:)?{size}"),
    "allocated": (
        r"[Oo]ftheallocatedmemory{size}isallocatedbyPyTorch",
        r"{size}alreadyallocated",
        r"Currentlyallocated:{size}",
    ),
    "private": (r"with{size}allocatedinprivatepools",),
    "unallocated": (r"{size}isreservedbyPyTorchbutunallocated", r"[;,]{size}cached"),
    "reserved": (r"{size}reservedintotal",),
}
_PATTERNS = {
    name: tuple(re.compile(spelling.replace("{size}", SIZE.format(name="size"))) for spelling in spellings)
    for name, spellings in _FIELDS.items()
}
_OTHERS = re.compile(r"Process(\d{1,18})has" + SIZE.format(name="size") + "memoryinuse")
_DEVICE = re.compile(r"\bGPU\s*(\d{1,6})\b|\bon\s+device\s+(\d{1,6})|\bcuda:(\d{1,6})")


def _has_numbers(anchor: Anchor) -> bool:
    """Tells whether it is one of the device allocator's, which goes over many parts and lines."""
    return anchor.kind == DEVICE_ALLOCATOR and anchor.asked_bytes is None


def _read(anchor: Anchor, window: str, head: str) -> OomMessage:
    """``window`` begins with the message, ``head`` is what stands before it in its line."""
    if not _has_numbers(anchor):
        return OomMessage(
            kind=anchor.kind,
            detail=anchor.detail,
            asked_bytes=anchor.asked_bytes,
            text=_shown(plain(head + window.partition("\n")[0])),
        )
    text = plain(head + window if anchor.detail == PREEMPTIVE else window)  # which may follow the size
    tight = squeezed(text)
    sizes = {name: _field(name, tight) for name in _FIELDS}
    device = _DEVICE.search(text)
    return OomMessage(
        asked_bytes=size_bytes(sizes["asked"]),
        asked_text=spelt(sizes["asked"]),
        capacity_bytes=size_bytes(sizes["capacity"]),
        free_bytes=size_bytes(sizes["free"]),
        others=tuple((int(pid), size_bytes(size)) for pid, size in _OTHERS.findall(tight)),
        own_bytes=size_bytes(sizes["own"]),
        allowed_bytes=size_bytes(sizes["allowed"]),
        allocated_bytes=size_bytes(sizes["allocated"]),
        private_pools_bytes=size_bytes(sizes["private"]),
        reserved_unallocated_bytes=_unallocated(sizes),
        device=None if device is None else int(next(filter(None, device.groups()))),
        kind=anchor.kind,
        detail=PREEMPTIVE if PREEMPTIVE in " ".join(text.split()) else anchor.detail,
        text=_shown(text),
    )


def _field(name: str, tight: str) -> str | None:
    for pattern in _PATTERNS[name]:
        if (found := pattern.search(tight)) is not None:
            return found["size"]
    return None


def _unallocated(sizes: dict[str, str | None]) -> int | None:
    """Old messages tell all that is reserved, new ones what of it is not in use."""
    reserved, allocated = size_bytes(sizes["reserved"]), size_bytes(sizes["allocated"])
    if reserved is None or allocated is None:
        return size_bytes(sizes["unallocated"])
    return max(0, reserved - allocated)


_ENDS = re.compile(
    r"(?:\s*If reserved|\s*See documentation|\n\s*\n|\nTraceback|\n\s+File \"|\n\[?[WEI]?\d{4,})"
)


def _extent(window: str) -> int:
    """Returns where the message that begins a window is over for sure: within it none other begins."""
    line_end, advice = window.find("\n"), window.find("If reserved")
    return max(len(window) if line_end < 0 else line_end, advice)


def _shown(text: str) -> str:
    """Returns the message alone, as one line."""
    end = _ENDS.search(text)
    return " ".join((text if end is None else text[: end.start()]).split())[:_TEXT_CHARACTERS]
