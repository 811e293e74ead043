"""What shows of a line: of carriage return updates the last one, of a long line its beginning."""

from __future__ import annotations

import codecs
from dataclasses import dataclass, field
from typing import Self

LINE_LIMIT_BYTES = 16 * 1024


@dataclass(slots=True)
class LineText:
    """What shows of a part of a line; joining the parts in order gives what shows of the whole.

    ``is_fresh``: a carriage return stands before ``kept``, so nothing earlier shows. ``has_returned``: one
    stands after it, so nothing of it shows once more text follows; before a line feed it is only half of a
    CRLF.
    """

    kept: bytearray = field(default_factory=bytearray)
    left_out: int = 0
    is_fresh: bool = False
    has_returned: bool = False

    @classmethod
    def of(cls, part: bytes) -> Self:
        """Returns what shows of a part that holds no line feed."""
        body = part.rstrip(b"\r")
        start = body.rfind(b"\r") + 1
        end = min(len(body), start + LINE_LIMIT_BYTES)
        return cls(bytearray(body[start:end]), len(body) - end, start > 0, len(body) < len(part))

    def extend(self, later: Self) -> None:
        """Joins what follows to this one."""
        has_returned = later.has_returned or (self.has_returned and not later.kept)
        if later.is_fresh or (self.has_returned and later.kept):
            self.kept, self.left_out, self.is_fresh = later.kept, later.left_out, True
        else:
            room = LINE_LIMIT_BYTES - len(self.kept)
            self.kept += later.kept[:room]
            self.left_out += max(0, len(later.kept) - room) + later.left_out
        self.has_returned = has_returned

    def decoded(self) -> tuple[str, int]:
        """Returns the text and the bytes left out, among them a character that the limit cut in two."""
        if not self.left_out:
            return self.kept.decode("utf-8", "backslashreplace"), 0
        decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        text = decoder.decode(self.kept)
        return text, self.left_out + len(decoder.getstate()[0])


def plain_parts(text: str) -> list[str] | None:
    """Splits a text at its line feeds; None where the parts might not show as they are."""
    if "\r" in text:
        return None
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            return None
    parts = text.split("\n")
    most_bytes = 4 * max(map(len, parts))
    return parts if most_bytes <= LINE_LIMIT_BYTES else None
