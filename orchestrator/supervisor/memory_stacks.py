"""Where something was allocated: torch's Python frames → line, phase, module, and what functions say (pure).

Frames are ``{"filename", "line", "name"}``, innermost first, as the allocator's history keeps them.
"""

import os
import re
from typing import Any, List, Mapping, Optional, Sequence, Tuple

FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"
MOST_LINES = 16
_MOST_CHARACTERS = 100  # of a file's or a function's name
_STARTER = re.compile(r"^<frozen runpy>$|/supervisor/(?:instrument|memory_watch)\.py$")
_FOREIGN = re.compile(
    "^<frozen "
    r"|/lib/python3\.[0-9]+/(?!(?:site|dist)-packages/)"
    "|/(?:site|dist)-packages/(?:torch|triton|functorch)/"
    "|torchinductor_"
)

Sites = Mapping[Tuple[str, str], Sequence[Tuple[int, Sequence[str]]]]
"""Functions of modules by file and name: first line, and the names of the modules that have it."""

_Frame = Tuple[str, int, str]


class Stack:
    """The frames of one allocation, without those that started the program.

    Files below ``torch_folder`` are torch's, wherever it is installed.
    """

    def __init__(
        self, frames: Sequence[Mapping[str, Any]], sites: Sites, torch_folder: Optional[str] = None
    ) -> None:
        named = ((str(f["filename"]), int(f["line"]), str(f["name"])) for f in frames)
        self._frames = [frame for frame in named if not _STARTER.search(frame[0])]
        torch = None if torch_folder is None else torch_folder + os.sep
        self._own = [
            frame
            for frame in self._frames
            if not (_FOREIGN.search(frame[0]) or (torch and frame[0].startswith(torch)))
        ]
        self.phase = _phase(self._frames)
        self.module = _module(self._frames, sites)

    @property
    def where(self) -> Optional[str]:
        """The innermost line of the payload's, or where there is none of anybody's."""
        frames = self._own or self._frames
        return _spelt(frames[0]) if frames else None

    @property
    def lines(self) -> List[str]:
        """The payload's lines before those of others, each innermost first."""
        others = [frame for frame in self._frames if frame not in self._own]
        return [_spelt(frame) for frame in [*self._own, *others][:MOST_LINES]]

    @property
    def is_in_module(self) -> bool:
        """A module was being called."""
        return any(
            name in ("_call_impl", "_wrapped_call_impl") or "/torch/_dynamo/" in file
            for file, _, name in self._frames
        )

    @property
    def is_making_module(self) -> bool:
        """A module was being made or moved."""
        makers = ("_apply", "convert", "__init__", "reset_parameters")
        return any("/torch/nn/" in file and name in makers for file, _, name in self._frames)

    @property
    def is_making_state(self) -> bool:
        """An optimizer was making what it keeps."""
        return any("/torch/optim/" in file and name == "_init_group" for file, _, name in self._frames)

    def says(self, words: "re.Pattern[str]") -> bool:
        """Tells whether the payload's innermost function, its place, or what it calls has such a name."""
        place = "/".join(self._own[0][0].split(os.sep)[-2:]) if self._own else ""
        return bool(words.search(place)) or self.is_called(words) or self.calls(words)

    def calls(self, words: "re.Pattern[str]") -> bool:
        """Tells whether something that the payload's innermost function called has such a name."""
        inner = self._frames[: self._frames.index(self._own[0])] if self._own else self._frames
        return any(words.search(name) for _, _, name in inner)

    def is_called(self, words: "re.Pattern[str]") -> bool:
        """Tells whether the payload's innermost function has such a name."""
        return bool(self._own and words.search(self._own[0][2]))


def pattern(names: Sequence[str]) -> Optional[str]:
    """Returns one name for modules that differ in some of their parts: ``layers.*.mlp``.

    None for the outermost module alone, and for modules that have nothing in common.
    """
    parts = [name.split(".") for name in names]
    columns = list(zip(*parts))
    common = [column[0] if len(set(column)) == 1 else "*" for column in columns]
    if len({len(each) for each in parts}) > 1:
        common.append("*")
    return None if set(common) <= {"*", ""} else ".".join(common)


def _phase(frames: Sequence[_Frame]) -> str:
    """Tells what a thread did; autograd's threads run no Python but what backward itself calls."""
    if any("/torch/optim/" in file for file, _, _ in frames):
        return OPTIMIZER
    if not frames or re.search("/torch/(?:autograd|_functorch|utils/checkpoint)", frames[-1][0]):
        return BACKWARD
    calls = ("backward", "grad", "_engine_run_backward")
    is_called = any(name in calls and "/torch/autograd/" in file for file, _, name in frames)
    return BACKWARD if is_called else FORWARD


def _module(frames: Sequence[_Frame], sites: Sites) -> Optional[str]:
    """Follows the calls inward: each function of modules leaves those that lie in the ones before."""
    names: Optional[Sequence[str]] = None
    for file, line, function in reversed(frames):
        candidates: Sequence[str] = ()
        for first_line, having in sites.get((file, function), ()):
            if first_line <= line:
                candidates = having
        if names is not None:
            candidates = [name for name in candidates if any(_lies_in(name, outer) for outer in names)]
        names = candidates or names
    return None if names is None else pattern(names)


def _lies_in(name: str, outer: str) -> bool:
    return not outer or name == outer or name.startswith(outer + ".")


def _spelt(frame: _Frame) -> str:
    file, line, function = frame
    return "%s:%d %s" % (os.path.basename(file)[:_MOST_CHARACTERS], line, function[:_MOST_CHARACTERS])
