"""Takes secrets out of what a run's records say: each one goes as ``***``.

Every byte that belongs to an occurrence of a secret is masked, and occurrences that overlap go as one
``***``; everything else stays byte for byte. A secret is looked for as it is and as JSON and Python spell it
between quotes, and in no other disguise: not as base64, not cut in two by the payload, not as a number of
JSON. Knows nothing of streams, records or where secrets come from.
"""

import json
from typing import Any, Dict, Iterable, List, Tuple

MASK = b"***"
OWN_WORDS = ("outcome", "proc")
"""Fields of a record whose words are the supervisor's own."""


class StreamMask:
    """Masks one stream, whose chunks may cut a secret anywhere.

    A tail that may be the beginning of a secret waits for the next chunk: less than the longest secret, and
    never past a line feed, since no secret holds one.
    """

    def __init__(self, needles: List[bytes]) -> None:
        self._needles = needles
        self._held = b""
        self._covered = 0  # so many bytes of what is held belong to a mask that is out already

    def feed(self, data: bytes) -> bytes:
        """Returns what can be told so far; the chunks returned and `flush` joined are the masked stream."""
        data = self._held + data
        return self._emit(data, len(data) - _unfinished(data, self._needles))

    def flush(self) -> bytes:
        """Returns what waited, at the end of the stream."""
        return self._emit(self._held, len(self._held))

    def _emit(self, data: bytes, end: int) -> bytes:
        """Masks ``data`` up to ``end`` and holds the rest."""
        out: List[bytes] = []
        done = self._covered
        for start, stop in _occurrences(data, self._needles):
            if start >= end:
                break
            if start >= done:
                out += (data[done:start], MASK)
            done = max(done, stop)
        if done < end:
            out.append(data[done:end])
        self._held = data[end:]
        self._covered = max(0, done - end)
        return b"".join(out)


class Masks:
    """The secrets of one run; false when there are none."""

    def __init__(self, secrets: Iterable[str]) -> None:
        self._needles = sorted({spelling for secret in secrets for spelling in _spellings(secret)})

    def __bool__(self) -> bool:
        return bool(self._needles)

    def stream(self) -> StreamMask:
        """Returns a mask for one stream from its beginning."""
        return StreamMask(self._needles)

    def data(self, data: bytes) -> bytes:
        """Returns bytes that are whole, masked."""
        stream = self.stream()
        return stream.feed(data) + stream.flush()

    def text(self, text: str, *, is_cut: bool = False) -> str:
        """Returns a text masked; when it ``is_cut`` off, what may begin a secret at its end is masked too."""
        data = text.encode("utf-8", "surrogatepass")
        stream = self.stream()
        told = stream.feed(data)
        rest = stream.flush()
        return (told + (MASK if is_cut and rest else rest)).decode("utf-8", "surrogatepass")

    def value(self, value: Any) -> Any:
        """Returns plain JSON values with every text in them masked, keys too."""
        if not self._needles:
            return value
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.text(key): self.value(inner) for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.value(inner) for inner in value]
        return value

    def record(self, fields: Dict[str, Any]) -> Dict[str, Any]:
        """Returns a record's fields masked, but for `OWN_WORDS`."""
        if not self._needles:
            return fields
        return {name: value if name in OWN_WORDS else self.value(value) for name, value in fields.items()}


def _spellings(secret: str) -> List[bytes]:
    texts = (
        secret,
        json.dumps(secret)[1:-1],
        json.dumps(secret, ensure_ascii=False)[1:-1],
        repr(secret)[1:-1],
    )
    return [text.encode("utf-8") for text in texts]


def _occurrences(data: bytes, needles: List[bytes]) -> List[Tuple[int, int]]:
    """Returns where needles begin and end, by their beginnings.

    Of a needle's occurrences that overlap one, only the last is told: those between lie inside the two.
    """
    found = []
    for needle in needles:
        size = len(needle)
        at = data.find(needle)
        while at >= 0:
            found.append((at, at + size))
            last = data.rfind(needle, at + 1, at + 2 * size - 1)
            at = last if last >= 0 else data.find(needle, at + size)
    found.sort()
    return found


def _unfinished(data: bytes, needles: List[bytes]) -> int:
    """Returns the length of the longest tail of ``data`` with which a needle that goes on begins."""
    longest = 0
    for needle in needles:
        at = max(0, len(data) - len(needle) + 1)
        while True:
            at = data.find(needle[:1], at, len(data) - longest)
            if at < 0:
                break
            if needle.startswith(data[at:]):
                longest = len(data) - at
                break
            at += 1
    return longest
