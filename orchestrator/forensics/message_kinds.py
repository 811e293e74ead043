"""Everything that is called out of memory, and which memory each of it is about (pure).

torch's device allocator says most, and `messages` reads its numbers. The rest fails beside it: libraries that
take their own memory on the card, the host's memory, a container's limit, and kernels that want more of a
multiprocessor's shared memory than there is, which is no lack of memory at all.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from orchestrator.forensics.asked import UNITS

DEVICE_ALLOCATOR = "device allocator"
OUTSIDE = "outside the allocator"
HOST = "host memory"
CONTAINER = "container limit"
KERNEL_SHARED = "shared memory of a kernel"

PREEMPTIVE = "preemptively rejected"
ASYNC = "cudaMallocAsync"
RECOVERABLE = "an attempt that failed before the cache was flushed"
PINNED = "pinned memory"
DRIVER = "the CUDA driver"
DEV_SHM = "/dev/shm"  # noqa: S108  (named in a message, not used)
KILLED = "killed by the kernel"

_BEFORE_WORD, _AFTER_WORD = 160, 320
_LINE = r"(?:^|\| |\]:? ?)"  # where a line begins, behind whatever prefix
_GAP = r"(?:\s+|\s*\n[^\n]{0,160}?(?:\| |: ))"  # between two words, the line may be broken and prefixed again
_CUDA = rf"(?:CUDA|HIP|XPU){_GAP}out{_GAP}of{_GAP}memory"
# The words alone may stand in code or in advice: an error has its type before them, or what it tried behind.
_CUDA_ERROR = rf"(?:(?<=Error: ){_CUDA}|{_CUDA}\.(?:{_GAP}|\\[nrt])?Tri)"


@dataclass(frozen=True, slots=True)
class _Sign:
    """How one program says it.

    One of ``words`` is in what ``pattern`` matches, or close behind, or begins it where it ``is_first``: to
    look for words first is a hundred times as fast. Where ``near`` is given it matches at the word. A group
    ``bytes`` is a number of bytes that were asked for, ``size`` one with its unit.
    """

    kind: str
    detail: str | None
    words: tuple[str, ...]
    pattern: re.Pattern[str]
    near: re.Pattern[str] | None = None
    is_first: bool = False


def _sign(
    kind: str,
    detail: str | None,
    words: tuple[str, ...],
    pattern: str,
    *,
    near: str | None = None,
    is_first: bool = False,
) -> _Sign:
    at_word = None if near is None else re.compile(near, re.MULTILINE)
    return _Sign(kind, detail, words, re.compile(pattern, re.MULTILINE), at_word, is_first)


_SIGNS = (
    _sign(
        DEVICE_ALLOCATOR,
        None,
        ("CUDA", "HIP", "XPU"),
        _CUDA_ERROR,
        is_first=True,
    ),
    _sign(
        DEVICE_ALLOCATOR,
        ASYNC,
        ("would exceed",),
        r"Allocation\s+on\s+device\s+\S{1,8}\s+would\s+exceed\s+allowed\s+memory",
    ),
    _sign(DEVICE_ALLOCATOR, PREEMPTIVE, ("preemptively",), r"preemptively\s+rejected"),
    _sign(
        DEVICE_ALLOCATOR,
        RECOVERABLE,
        ("with OOM on device",),
        r"memory allocation failed with OOM on device \d+ while trying to allocate (?P<bytes>\d{1,18}) bytes",
    ),
    _sign(OUTSIDE, "cuBLAS", ("BLAS_STATUS_ALLOC",), r"(?:CU|HIP)BLAS_STATUS_ALLOC_FAILED"),
    _sign(OUTSIDE, "cuDNN", ("CUDNN_STATUS_",), r"CUDNN_STATUS_(?:ALLOC_FAILED|INTERNAL_ERROR_\w*ALLOC\w*)"),
    _sign(OUTSIDE, "cuSOLVER", ("OLVER_STATUS_ALLOC",), r"CUSOLVER_STATUS_ALLOC_FAILED"),
    _sign(OUTSIDE, "cuSPARSE", ("SPARSE_STATUS_ALLOC",), r"CUSPARSE_STATUS_ALLOC_FAILED"),
    _sign(OUTSIDE, "cuFFT", ("CUFFT_ALLOC",), r"CUFFT_ALLOC_FAILED"),
    _sign(OUTSIDE, "NCCL", ("Cuda failure",), r"Cuda failure (?:\d+ )?'out of memory'"),
    _sign(OUTSIDE, "NCCL", ("CUDA calloc",), r"Failed to CUDA calloc"),
    _sign(
        OUTSIDE,
        DRIVER,
        ("error: out of memory", "cudaErrorMemoryAllocation", "CUDA_ERROR_OUT", "hipErrorOutOf"),
        r"CUDA (?:driver )?error: out of memory|cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY"
        r"|hipErrorOutOfMemory",
    ),
    _sign(
        KERNEL_SHARED,
        "Triton",
        ("out of resource",),
        r"out of resources?: (?:shared memory|tensor memory)(?:,\s+Required:\s+(?P<bytes>\d{1,18}))?",
    ),
    _sign(CONTAINER, KILLED, ("cgroup out of",), r"Memory cgroup out of memory: Killed process \d+"),
    _sign(
        CONTAINER,
        DEV_SHM,
        ("(shm)", "shared memory object", "/dev/shm"),  # noqa: S108  (as a message names it)
        r"insufficient shared memory \(shm\)|unable to (?:open|write to|allocate) shared memory object"
        r"|No space left on device[^\n]{0,40}/dev/shm|/dev/shm[^\n]{0,80}No space left on device",
    ),
    _sign(
        HOST,
        "torch's CPU allocator",
        ("DefaultCPUAllocator",),
        r"DefaultCPUAllocator:\s+(?:can't\s+allocate|not\s+enough)\s+memory"
        r"(?::\s+you\s+tried\s+to\s+allocate\s+(?P<bytes>\d{1,18})\s+bytes)?",
        is_first=True,
    ),
    _sign(
        HOST,
        "NumPy",
        ("Unable to allocate",),
        r"Unable to allocate (?P<size>\d{1,18}(?:\.\d{1,12})? (?:bytes|[KMGT]iB)) for an array",
    ),
    _sign(
        HOST,
        PINNED,
        ("cudaHost",),
        r"cudaHost(?:Alloc|Register)[^\n]{0,80}(?:fail|error)",
        is_first=True,
    ),
    _sign(HOST, KILLED, ("Killed process",), r"Out of memory: Killed process \d+"),
    _sign(HOST, KILLED, ("by signal: Killed",), r"DataLoader worker[^\n]{0,60} is killed by signal: Killed"),
    _sign(
        HOST,
        KILLED,
        ("Killed",),
        _LINE + r"(?:[^\n:]{1,60}: line \d+: +\d+ )?Killed(?= *$| {2,}\S)",
        near=r"Killed(?: *$| {2,}\S)",
    ),
    _sign(
        HOST,
        "Python",
        ("MemoryError",),
        _LINE + r"(?:builtins\.)?MemoryError(?=:|\s*$)",
        near=r"MemoryError(?::|\s{0,80}$)",
    ),
    _sign(
        HOST,
        None,
        ("[Errno 12]",),
        r"(?<=Error: )\[Errno 12\](?: Cannot allocate memory)?|\[Errno 12\] Cannot allocate memory",
        is_first=True,
    ),
    _sign(
        HOST,
        None,
        ("Cannot allocate memory",),
        r"(?<=[\w)\]]: )Cannot allocate memory",
        is_first=True,
    ),
    _sign(
        HOST,
        None,
        ("std::bad_alloc",),
        r"(?:(?<=Error: )|(?<=Exception: )|(?<=instance of ')|(?<=what\(\):  ))std::bad_alloc",
        is_first=True,
    ),
)
_SIGNS_OF: dict[str, tuple[_Sign, ...]] = {
    word: tuple(sign for sign in _SIGNS if word in sign.words) for sign in _SIGNS for word in sign.words
}

NEXT_MESSAGE = re.compile(
    _CUDA_ERROR + r"|Allocation\s+on\s+device\s+\S{1,8}\s+would\s+exceed"
    r"|with OOM on device"
)
"""Where the device allocator's next message begins, and one before it ends."""

_PINNED_BEFORE = re.compile(r"pin_memory|cudaHostAlloc|CachingHostAllocator")


@dataclass(frozen=True, kw_only=True, slots=True)
class Anchor:
    """A place where a message begins, and what kind it is of; ``asked_bytes`` where the words say it."""

    begin: int
    end: int
    kind: str
    detail: str | None
    asked_bytes: int | None


class Anchors:
    """Finds, one after the other, where messages begin in a text."""

    def __init__(self, text: str, at: int) -> None:
        self._text = text
        self.at = at  # what is before is searched
        self._next = {word: text.find(word, at) for word in _SIGNS_OF}

    def next(self) -> Anchor | None:
        """Returns the next one, None where there is none."""
        while (near := self._nearest()) is not None:
            word, place = near
            found = self._around(word, place)
            if found is not None:
                self.at = max(found.end, self.at + 1)
                return found
            self._next[word] = self._text.find(word, place + 1)
        return None

    def skip(self, to: int) -> None:
        """Goes on behind ``to``."""
        self.at = max(self.at, to)

    def _nearest(self) -> tuple[str, int] | None:
        for word, place in self._next.items():
            if 0 <= place < self.at:
                self._next[word] = self._text.find(word, self.at)
        places = [(place, word) for word, place in self._next.items() if place >= 0]
        if not places:
            return None
        place, word = min(places)
        return word, place

    def _around(self, word: str, place: int) -> Anchor | None:
        begin = max(self.at, place - _BEFORE_WORD)
        end = self._text.find("\n", place + _AFTER_WORD)
        found = [
            (match.start(), match, sign)
            for sign in _SIGNS_OF[word]
            if (match := self._match(sign, place, begin, len(self._text) if end < 0 else end))
            and match.start() <= place
        ]
        if not found:
            return None
        _, match, sign = min(found, key=lambda entry: entry[0])
        kind, detail = sign.kind, sign.detail
        if detail == DRIVER and _PINNED_BEFORE.search(
            self._text, max(0, match.start() - 2048), match.start()
        ):
            kind, detail = HOST, PINNED
        return Anchor(
            begin=match.start(), end=match.end(), kind=kind, detail=detail, asked_bytes=_asked(match)
        )

    def _match(self, sign: _Sign, place: int, begin: int, end: int) -> re.Match[str] | None:
        if sign.is_first:
            return sign.pattern.match(self._text, place)
        if sign.near is not None and sign.near.match(self._text, place) is None:
            return None
        return sign.pattern.search(self._text, begin, end)


def _asked(match: re.Match[str]) -> int | None:
    groups = match.groupdict()
    if (count := groups.get("bytes")) is not None:
        return int(count)
    if (size := groups.get("size")) is not None:
        number, unit = size.split()
        return round(float(number) * UNITS[unit])
    return None
