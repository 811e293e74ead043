"""Text that people type, and text from elsewhere that people read (stdlib only).

Knows what a name may be, which text is safe on a command line and a terminal, and how to show what is not.
A refusal is a `UsageError` about the text alone: the caller adds where it stood.
"""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Iterable

from orchestrator.errors import UsageError

__all__ = ["check_name", "check_text", "counted", "did_you_mean", "gib", "printable", "quoted", "size_text"]

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def check_name(kind: str, text: str) -> str:
    """Returns the name of a host, profile, payload, run or experiment: it may become a folder or an argument.

    Raises:
        UsageError: not 1 to 64 ASCII letters, digits, dots, dashes or underscores, a letter or digit first.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", text):
        raise UsageError(
            f"{quoted(text)} is no {kind} name: use at most 64 letters, digits, '.', '_' and '-', "
            "beginning with a letter or digit"
        )
    return text


def check_text(kind: str, text: str) -> str:
    """Returns a text that is safe on a command line and a terminal: spaces and quotes are fine inside it.

    Raises:
        UsageError: empty, blank at an end, beginning with a dash, or holding control or bidi characters.
    """
    if not text or text != text.strip():
        raise UsageError(f"{kind} must not be empty or begin or end with a space, as {quoted(text)} does")
    if text.startswith("-"):
        raise UsageError(f"{kind} must not begin with a dash, as {quoted(text)} does")
    if printable(text) != text:
        raise UsageError(f"{kind} must not hold control characters, as {quoted(text)} does")
    return text


def printable(text: str) -> str:
    r"""Returns ``text`` with control, C1, bidi and other invisible characters, and surrogates, as escapes.

    For anything that came from a host or a file; the result is one line (a newline becomes ``\n``).
    """
    return text if text.isprintable() else "".join(map(_visible, text))


def quoted(value: object) -> str:
    """Returns a value as Python spells it, cut to 98 characters: for messages that show what was given."""
    spelt = repr(value)
    return spelt if len(spelt) <= 98 else f"{spelt[:96]}…{spelt[-1]}"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns ``"; did you mean 'x'?"`` for the nearest known word, or nothing when none is near."""
    by_folded = {name.casefold(): name for name in known}
    folded = word[:100].casefold()
    near = difflib.get_close_matches(folded, by_folded)
    swapped = [name for name in near if sorted(name) == sorted(folded)]  # prot is port, not root
    return f"; did you mean {by_folded[(swapped or near)[0]]!r}?" if near else ""


def _visible(character: str) -> str:
    is_hidden = unicodedata.category(character) in {"Cc", "Cf", "Cs", "Zl", "Zp"}
    return character.encode("unicode_escape").decode("ascii") if is_hidden else character


def counted(count: int, noun: str) -> str:
    """Returns a number with its noun."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def gib(size_bytes: float) -> str:
    """Returns a size in GiB, as memory of cards is compared."""
    return f"{size_bytes / 1024**3:.2f} GiB"


def sized(size_bytes: int) -> str:
    """Returns a size in GiB, and one that would be next to nothing in GiB in its own unit."""
    return gib(size_bytes) if size_bytes >= 2**30 // 10 else size_text(size_bytes)


def size_text(size_bytes: int) -> str:
    """Returns a size in the largest unit of which there is one."""
    size, unit = float(size_bytes), 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size_bytes} B" if unit == 0 else f"{size:.1f} {_UNITS[unit]}"
