r"""The text around a memory message as people paste it: prefixes, colours, escapes, broken lines (pure).

Knows how a log's text is brought back to what the program wrote. Which messages there are is `messages`'
business.
"""

from __future__ import annotations

import re

from orchestrator.forensics.asked import UNITS

SIZE = r"(?P<{name}>\d{{1,18}}(?:\.\d{{1,12}})?(?:bytes|[KMGT]iB))"
_NONE_FROM = 2**63  # a limit that is none is printed as what is left of it

_COLOURS = re.compile(r"(?:\x1b|\\x1b|\\u001b|\\033|\\e)\[[0-9;?]*[A-Za-z]")
_ESCAPED_SPACE = re.compile(r"\\[nrt](?=\W|[A-Z])")
_PREFIX = re.compile(
    r"(?m)^[ \t]*(?:"
    r"[^\n|]{1,160}/[\w-]+\.std(?:out|err):\d+(?: pid \d+ \S{1,40})? \| ?"  # `orch logs`
    r"|\[?rank[ _]?\d+\]?:[ \t]?"  # torchrun, and torch itself
    r"|\[[\w./ -]{1,40}\]:[ \t]"  # torchrun --tee: [default0]:
    r"|\([\w. ]{1,60}pid=\d+[^)\n]{0,60}\)[ \t]?"  # ray
    r"|\d+:[ \t]"  # srun --label
    r"|\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[.,\d]*(?:Z|[+-]\d\d:?\d\d)?\]?[ \t]?"  # time stamps
    r"|[\w-]{1,60}[ \t]+\|[ \t]"  # docker compose
    r")"
)
_MOST_PREFIXES = 4  # `orch logs` over torchrun over a time stamp


def plain(text: str) -> str:
    """Returns ``text`` without colours and line prefixes, with written-out line feeds as spaces."""
    text = _ESCAPED_SPACE.sub(" ", _COLOURS.sub("", text))
    for _ in range(_MOST_PREFIXES):
        shorter = _PREFIX.sub("", text)
        if shorter == text:
            break
        text = shorter
    return text


def squeezed(text: str) -> str:
    """Returns ``text`` without any white space: a line may be broken anywhere, also within a word."""
    return "".join(text.split())


def size_bytes(text: str | None) -> int | None:
    """Returns a size as torch prints it ("15.09GiB"), None for what stands for no limit."""
    if text is None:
        return None
    unit = text.lstrip("0123456789.")
    size = round(float(text.removesuffix(unit)) * UNITS[unit])
    return size if size < _NONE_FROM else None


def spelt(text: str | None) -> str | None:
    """Returns a squeezed size as people write it: "15.09 GiB"."""
    if text is None:
        return None
    unit = text.lstrip("0123456789.")
    return f"{text.removesuffix(unit)} {unit}"
