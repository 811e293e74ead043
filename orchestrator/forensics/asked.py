"""A size that was asked for, as a message or a capture tells it, and which sizes of a tensor that admits.

torch prints sizes with two decimals of the largest unit, and prints the *segment* that its allocator wanted
for a tensor, which is larger: a request of at most 1 MiB prints 2 MiB, one below 10 MiB prints 20 MiB, and
any other is rounded up to 2 MiB (`get_allocation_size`, `format_size` in torch's CUDACachingAllocator.cpp).
cudaMallocAsync prints the tensor's own size. A message need not say which allocator it was, so a size may be
either.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import lru_cache

from orchestrator.errors import UsageError
from orchestrator.text import quoted

__all__ = [
    "MOST_ASKED_BYTES",
    "UNITS",
    "AskedSize",
    "asked_exactly",
    "asked_from_message",
    "asked_from_text",
    "size_as_torch",
]

KIB, MIB, GIB, TIB = 1024, 1024**2, 1024**3, 1024**4
_BLOCK = 512  # every request is rounded up to it
_SMALL_REQUEST, _SMALL_SEGMENT = MIB, 2 * MIB
_LARGE_REQUEST, _LARGE_SEGMENT = 10 * MIB, 20 * MIB
UNITS = {"bytes": 1, "B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB}
_SPELT = re.compile(r"\s*(\d{1,18})(?:\.(\d{1,12}))?\s*(bytes|B|KiB|MiB|GiB|TiB)\s*")
MOST_ASKED_BYTES = 2**44  # more than any card has is nobody's word for a size
# Tensors lie between these: what a size that is met by chance is measured against.
_LEAST_EXPECTED, _MOST_EXPECTED = 512, 128 * GIB
# A power of two MiB, or a small multiple of one.
_ROUND = sorted(
    {times * MIB << power for times in (1, 3, 5, 7) for power in range(18) if times << power <= 2**17}
)
_ROUND_SHARE = 0.25


@dataclass(frozen=True, kw_only=True, slots=True)
class AskedSize:
    """A size as it was told (``text``), and the bytes that it may have been, both ends included."""

    text: str
    least_bytes: int
    most_bytes: int

    @property
    def intervals(self) -> tuple[tuple[int, int], ...]:
        """The sizes of a tensor that would be told so, rising, ends included, none touching another."""
        return _intervals(self.least_bytes, self.most_bytes)

    @property
    def asked_for(self) -> str | None:
        """For which small requests torch asks for this very size; None where it tells of a tensor."""
        if self.least_bytes <= _SMALL_SEGMENT <= self.most_bytes:
            return "anything up to 1 MiB"
        if self.least_bytes <= _LARGE_SEGMENT <= self.most_bytes:
            return "anything from 1 to 10 MiB"
        return None

    def admits(self, size_bytes: int) -> bool:
        """Returns whether a tensor of that size would be told so."""
        return any(least <= size_bytes <= most for least, most in self.intervals)

    @property
    def chance(self) -> float:
        """The share of all tensors, of sizes spread evenly over their logarithm, that would be told so."""
        width = 0.0
        for least, most in self.intervals:
            first, last = max(least - 1, _LEAST_EXPECTED), min(most, _MOST_EXPECTED)
            width += math.log(last / first) if first < last else 0.0
        return width / math.log(_MOST_EXPECTED / _LEAST_EXPECTED)

    @property
    def round_chance(self) -> float:
        """What is to be added for a round number of MiB: buffers are made so, and so are tensors all of whose
        dimensions are round.
        """
        is_round = any(self.least_bytes <= size_bytes <= self.most_bytes for size_bytes in _ROUND)
        return _ROUND_SHARE / len(_ROUND) if is_round else 0.0


def asked_from_text(text: str) -> AskedSize:
    """Returns the size that a text such as ``15.09 GiB`` tells; fewer decimals admit more.

    Raises:
        UsageError: it is no size as torch prints them.
    """
    match = _SPELT.fullmatch(text)
    if match is None:
        raise UsageError(f"{quoted(text)} is no size as torch prints it, such as 15.09 GiB or 512 bytes")
    whole, decimals, unit = match[1], match[2] or "", UNITS[match[3]]
    scale = 10 ** len(decimals)
    twice = 2 * int(whole + decimals)
    if unit == 1 and not decimals:
        return AskedSize(text=text.strip(), least_bytes=int(whole), most_bytes=int(whole))
    least, most = ((twice + side) * unit / (2 * scale) for side in (-1, 1))
    return AskedSize(text=text.strip(), least_bytes=max(1, math.ceil(least)), most_bytes=math.floor(most))


def asked_from_message(asked_bytes: int) -> AskedSize:
    """Returns what a message told whose size was read as so many bytes: with its two decimals again."""
    return asked_from_text(size_as_torch(asked_bytes))


def asked_exactly(size_bytes: int) -> AskedSize:
    """Returns a size that was captured as a number: of the tensor, of its block, or of its segment."""
    return AskedSize(text=size_as_torch(size_bytes), least_bytes=size_bytes, most_bytes=size_bytes)


def size_as_torch(size_bytes: int) -> str:
    """Returns a size as torch's messages print it."""
    if size_bytes <= KIB:
        return f"{size_bytes} bytes"
    for unit, name in ((MIB, "KiB"), (GIB, "MiB")):
        if size_bytes <= unit:
            return f"{size_bytes / (unit // KIB):.2f} {name}"
    return f"{size_bytes / GIB:.2f} GiB"


@lru_cache(maxsize=64)  # asked again for every tensor of every configuration
def _intervals(least: int, most: int) -> tuple[tuple[int, int], ...]:
    found = [(max(1, least - _BLOCK + 1), most)]
    if least <= _SMALL_SEGMENT <= most:
        found.append((1, _SMALL_REQUEST))
    if least <= _LARGE_SEGMENT <= most:
        found.append((_SMALL_REQUEST + 1, _LARGE_REQUEST - 1))
    first, last = -(-least // _SMALL_SEGMENT), most // _SMALL_SEGMENT
    if first <= last and last * _SMALL_SEGMENT >= _LARGE_REQUEST:
        found.append((max(_LARGE_REQUEST, (first - 1) * _SMALL_SEGMENT + 1), last * _SMALL_SEGMENT))
    return _joined(found)


def _joined(intervals: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    joined: list[tuple[int, int]] = []
    for least, most in sorted(intervals):
        if joined and least <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(most, joined[-1][1]))
        elif least <= most:
            joined.append((least, most))
    return tuple(joined)
