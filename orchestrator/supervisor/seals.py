"""The hash chain over a run's records: how it is made, and how it is checked.

A seal covers all bytes since the previous seal, that one's line and its own up to the hash included; the
first is seeded with the run id. It looks like ``{"seq":41,"t":1764435123.481,"kind":"seal","bytes":5021,
"sha256":"…"}``, on one line. JSON escapes line feeds and quotes inside strings, so a line of this form is a
seal and nothing that a payload prints can look like one.
"""

import hashlib
import re
from typing import Iterator, List, Match, NamedTuple, Optional

SEAL_LINE = re.compile(
    rb'^(\{"seq":(\d+),"t":[0-9.]+,"kind":"seal","bytes":(\d+),)"sha256":"([0-9a-f]{64})"\}\n', re.MULTILINE
)


_SEAL_MARK = b',"kind":"seal",'


def seal_lines(data: bytes) -> Iterator[Match[bytes]]:
    """Yields the matches of `SEAL_LINE` in whole lines: looking for its words is ten times as fast."""
    at = data.find(_SEAL_MARK)
    while at >= 0:
        match = SEAL_LINE.match(data, data.rfind(b"\n", 0, at) + 1)
        if match:
            yield match
        at = data.find(_SEAL_MARK, data.index(b"\n", at))


class Seal(NamedTuple):
    """A seal that was found right; ``end`` is where its line ends in the run's bytes."""

    seq: int
    sha256: str
    end: int
    line_bytes: int


class SealBroken(Exception):
    """Bytes and seal disagree; ``at`` is the offset in the run's bytes where the sealed range begins."""

    def __init__(self, message: str, at: int) -> None:
        super().__init__(message)
        self.at = at


class SealMaker:
    """Hashes what a writer writes."""

    def __init__(self, run_id: str) -> None:
        self._hash = hashlib.sha256(run_id.encode("utf-8"))
        self.pending_bytes = 0
        self.last = ""

    def add(self, data: bytes) -> None:
        """Takes the next bytes that were written."""
        self._hash.update(data)
        self.pending_bytes += len(data)

    def close(self, head: bytes) -> str:
        """Returns the hash of all since the last call and of ``head``, the seal's line up to the hash itself.

        The seal's whole line is then the first to `add`.
        """
        self._hash.update(head)
        self.last = self._hash.hexdigest()
        self._hash = hashlib.sha256()
        self.pending_bytes = 0
        return self.last


class SealChecker:
    """Checks a run's bytes, fed in order in pieces of any size; never holds more than one unfinished line.

    ``line_bytes`` are those of that line.
    """

    def __init__(self, run_id: str, start: int = 0, resume: bool = False) -> None:
        """``resume``: the first byte fed is a seal's line, at offset ``start``, already known to be right."""
        self._hash = hashlib.sha256(b"" if resume else run_id.encode("utf-8"))
        self._skip_first = resume
        self._from = start
        self._end = start
        self._line: List[bytes] = []
        self.line_bytes = 0

    @property
    def pending_bytes(self) -> int:
        """Bytes fed that no seal covers yet."""
        return self._end - self._from

    def feed(self, data: bytes) -> List[Seal]:
        """Returns the seals that ``data`` completes.

        Raises:
            SealBroken: a seal does not match the bytes before it.
        """
        found: List[Seal] = []
        cut = data.rfind(b"\n") + 1
        self.line_bytes = len(data) - cut if cut else self.line_bytes + len(data)
        if not cut:
            self._line.append(data)
            return found
        whole = b"".join((*self._line, data[:cut]))
        self._line = [data[cut:]] if cut < len(data) else []
        view, position = memoryview(whole), 0
        for match in seal_lines(whole):
            self._take(view[position : match.start()])
            position = match.end()
            seal = self._check(match)
            if seal:
                found.append(seal)
        self._take(view[position:])
        return found

    def _take(self, data: memoryview) -> None:
        self._hash.update(data)
        self._end += len(data)

    def _check(self, match: Match[bytes]) -> Optional[Seal]:
        line, head, seq, size, sha256 = match.group(0), match.group(1), *match.group(2, 3, 4)
        start, self._end = self._end, self._end + len(line)
        if self._skip_first and start == self._from:
            self._skip_first = False
            self._hash.update(line)
            return None
        self._hash.update(head)
        if sha256.decode() != self._hash.hexdigest() or int(size) != start - self._from:
            message = "seal %d does not match the %d bytes before it" % (int(seq), start - self._from)
            raise SealBroken(message, self._from)
        self._hash = hashlib.sha256(line)
        self._from = start
        return Seal(int(seq), sha256.decode(), self._end, len(line))
