"""Names of artifacts: which of a host's are safe to write here, and patterns that choose among them (pure).

A pattern is a path below the artifacts folder in which ``*``, ``?`` and ``[…]`` stand for characters of one
name, leading dots included, and ``**`` for any number of folders. What the supervisor's own instrument keeps
of memory that ran out is meant only by patterns that begin with its folder's name. Refusals are `UsageError`
about the text alone.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from functools import cache

from orchestrator.errors import UsageError
from orchestrator.supervisor.memory_files import FOLDER
from orchestrator.text import check_text, printable, quoted

__all__ = ["PARTS", "check_path", "is_asked_by_name", "is_chosen", "parse_pattern", "parse_patterns"]

PARTS = ".part"  # the folder of what has not arrived whole
MOST_PATH_BYTES = 2048
MOST_NAME_BYTES = 255
MOST_PATTERNS = 100


def check_path(path: str) -> tuple[str, ...]:
    """Returns the names that lead to a file below a folder; nothing else can come of them.

    Raises:
        UsageError: it is absolute, leads upward, cannot be shown as it is, or is too long.
    """
    if printable(path) != path:
        raise UsageError("its name holds control characters, or bytes that are not UTF-8")
    if path.startswith("/"):
        raise UsageError("its name is absolute")
    names = tuple(path.split("/"))
    if any(name in ("", ".", "..") for name in names):
        raise UsageError("its name has a part that is empty, '.' or '..'")
    if len(path.encode()) > MOST_PATH_BYTES or any(len(name.encode()) > MOST_NAME_BYTES for name in names):
        raise UsageError(f"its name is longer than {MOST_PATH_BYTES} bytes, or a part of it than 255")
    if names[0].casefold() == PARTS:
        raise UsageError(f"its name begins with {PARTS}, where files are kept that are not whole yet")
    return names


def parse_patterns(value: object) -> tuple[str, ...]:
    """Returns the patterns of a list, in its order.

    Raises:
        UsageError: it is no list of at most `MOST_PATTERNS`, or as `parse_pattern`.
    """
    if not isinstance(value, list | tuple) or len(value) > MOST_PATTERNS:
        raise UsageError(f"must be a list of at most {MOST_PATTERNS} patterns such as results/*.json")
    return tuple(map(parse_pattern, value))


def parse_pattern(value: object) -> str:
    """Returns one pattern; one that ends with a slash means all that is below.

    Raises:
        UsageError: it is no text, absolute, leads upward, or has ``**`` beside other characters.
    """
    if not isinstance(value, str):
        raise UsageError(f"{quoted(value)} is no pattern: quote it, as in '*.json'")
    text = check_text("a pattern", value)
    names = text.removesuffix("/").split("/")
    if text.startswith("/") or any(name in ("", ".", "..") for name in names):
        raise UsageError(
            f"{quoted(text)} must be a path below the run's artifacts folder, without '.' and '..'"
        )
    if any("**" in name and name != "**" for name in names):
        raise UsageError(f"{quoted(text)}: '**' stands for whole folders: write a slash on either side of it")
    if len(text) > MOST_PATH_BYTES:
        raise UsageError(f"{quoted(text)} is longer than {MOST_PATH_BYTES} characters")
    return text


def is_chosen(path: str, patterns: Sequence[str]) -> bool:
    """Tells whether one of the patterns means the path."""
    names = path.split("/")
    if is_asked_by_name(path):
        patterns = [pattern for pattern in patterns if pattern.split("/")[0] == FOLDER]
    return any(_matches(names, _compiled(pattern)) for pattern in patterns)


def is_asked_by_name(path: str) -> bool:
    """Tells whether the path is of the folder that no general pattern means, and no lack of patterns."""
    return path.startswith(f"{FOLDER}/")


_Step = re.Pattern[str] | None  # None stands for any number of folders


@cache
def _compiled(pattern: str) -> tuple[_Step, ...]:
    names = (f"{pattern}**" if pattern.endswith("/") else pattern).split("/")
    if names[-1] == "**":
        names.append("*")
    return tuple(None if name == "**" else re.compile(fnmatch.translate(name)) for name in names)


def _matches(names: Sequence[str], steps: Sequence[_Step]) -> bool:
    """Follows all ways through the steps side by side: a hostile name costs no more than any other."""
    reached = _skipped({0}, steps)
    for name in names:
        following = set()
        for at in reached - {len(steps)}:
            step = steps[at]
            if step is None:
                following.add(at)
            elif step.match(name):
                following.add(at + 1)
        reached = _skipped(following, steps)
    return len(steps) in reached


def _skipped(reached: set[int], steps: Sequence[_Step]) -> set[int]:
    """Adds what lies behind steps that stand for no folder at all."""
    found = set(reached)
    for at, step in enumerate(steps):
        if step is None and at in found:
            found.add(at + 1)
    return found
