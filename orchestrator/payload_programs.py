"""Runs what a payload ships for us: ``estimate``, what a run will hold, and ``shapes``, what it can make.

Found by their names: an experiment whose module is ``PKG.….NAME`` may have ``PKG/estimate.py`` and
``PKG/shapes.py`` in its bundle (docs/decisions/0017). They run on this machine, from the bundle's own files,
in the interpreter that the inventory names or in ours, by argument vector, with a bare environment that shows
them no card, for a bounded time and output. What they answer is `payload_answers`'; answers are kept by
bundle, arguments, interpreter and its torch.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from threading import Event
from typing import Any, TypeVar

from orchestrator.apart import bare_environment, execute
from orchestrator.bundle import Bundle
from orchestrator.errors import NeedsTorch, ProgramFailed, UsageError
from orchestrator.inventory import Host
from orchestrator.payload_answers import Estimate, Malformed, read_estimate, read_shapes
from orchestrator.program_folder import MOST_ANSWER_BYTES, ProgramFolder
from orchestrator.text import printable
from orchestrator.workspace import Workspace

__all__ = [
    "CANNOT",
    "ESTIMATE",
    "REFUSED",
    "SHAPES",
    "Question",
    "answer_key",
    "estimate",
    "has_program",
    "keep_on",
    "kept_on",
    "last_line",
    "shapes",
]

ESTIMATE, SHAPES = "estimate", "shapes"
ESTIMATE_LIMIT_S = 120.0
SHAPES_LIMIT_S = 20.0
ABOUT_LIMIT_S = 10.0
SETTING = "estimate: {python: PATH} in inventory.yaml"
NEXT = f"name one that can, by {SETTING}, or a host that can: orch estimate --on-host NAME"
MOST_SHOWN = 300
KEPT_ON_HOST_S = 86400.0
REFUSED, CANNOT = 2, 3  # exit codes of the programs
_ABOUT = """
import json, sys
from importlib.metadata import PackageNotFoundError, version
try:
    torch = version("torch")
except PackageNotFoundError:
    torch = None
print(json.dumps([sys.executable, sys.version.split()[0], torch]))
"""


_Answer = TypeVar("_Answer")


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What an estimate is asked for: ``entry`` is the module that would run, ``card`` as the program takes it
    (None: no verdict).
    """

    entry: str
    params: Mapping[str, Any] = field(default_factory=dict)
    card: str | None = None
    alloc_conf: str | None = None
    memory_limit_bytes: int | None = None
    has_alternatives: bool = False

    def words(self) -> list[str]:
        """Returns the arguments, but for the parameters."""
        words = ["--entry", self.entry, "--json"]
        words += [] if self.card is None else ["--card", self.card]
        words += [] if self.alloc_conf is None else ["--alloc-conf", self.alloc_conf]
        limit = self.memory_limit_bytes
        words += [] if limit is None else ["--memory-limit-bytes", str(limit)]
        return [*words, "--alternatives"] if self.has_alternatives else words


def last_line(told: bytes, program: str) -> str:
    """Returns the last line of what a program said to standard error, without its own name before it."""
    lines = told.decode("utf-8", "replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return printable(last.removeprefix(f"{program}: "))[:MOST_SHOWN]


def has_program(bundle: Bundle, module: str | None, name: str) -> bool:
    """Tells whether a bundle has the program ``name`` for runs of ``module``."""
    return module is not None and any(
        entry.path == f"{_package(module)}/{name}.py" for entry in bundle.entries
    )


def estimate(
    workspace: Workspace, bundle: Bundle, question: Question, stopping: Event | None = None
) -> Estimate:
    """Returns what a run would hold, kept from an earlier time or estimated now, in seconds.

    Raises:
        UsageError: a parameter is refused.
        NeedsTorch: the interpreter here cannot do it.
        ProgramFailed: it failed, took too long, or answered in another form.
        StorageError: this disk does not take the code.
        Stopped: ``stopping`` was set meanwhile.
    """
    interpreter = _interpreter(workspace)
    key = answer_key(question, _about(interpreter))
    with ProgramFolder.open(workspace.home, bundle, workspace.store) as folder:
        if (kept := _kept(folder, key)) is not None:
            return kept
        program = f"{_package(question.entry)}.{ESTIMATE}"
        run = _Run(program, interpreter, folder, ESTIMATE_LIMIT_S, stopping)
        answer = run.answer(question.words(), [question.params])
        found = _checked(program, lambda: read_estimate(answer))
        folder.keep(key, answer)
        return found


def kept_on(workspace: Workspace, bundle: Bundle, question: Question, host: Host) -> Estimate | None:
    """Returns what ``host`` estimated in a run of its own, if that is not long ago: it may have another torch
    since.
    """
    with ProgramFolder.open(workspace.home, bundle, workspace.store) as folder:
        return _kept(folder, answer_key(question, _about_host(host)), KEPT_ON_HOST_S)


def keep_on(workspace: Workspace, bundle: Bundle, question: Question, host: Host, answer: bytes) -> Estimate:
    """Checks and keeps what ``host`` answered.

    Raises:
        ProgramFailed: it has another form.
    """
    program = f"{_package(question.entry)}.{ESTIMATE}"
    found = _checked(program, lambda: read_estimate(answer), f"{host.name}: ")
    with ProgramFolder.open(workspace.home, bundle, workspace.store) as folder:
        folder.keep(answer_key(question, _about_host(host)), answer)
    return found


def shapes(
    workspace: Workspace, bundle: Bundle, module: str, params: Sequence[Mapping[str, Any]]
) -> list[Any]:
    """Returns the large tensors that the payload makes with each set of parameters, in order, as it says
    them: `forensics.shapes` reads that.

    Raises:
        UsageError, ProgramFailed, StorageError: as `estimate`.
    """
    interpreter, program = _interpreter(workspace), f"{_package(module)}.{SHAPES}"
    key = f"{SHAPES}-{_digest([program, interpreter, list(params)])}"
    with ProgramFolder.open(workspace.home, bundle, workspace.store) as folder:
        if (kept := folder.answer(key)) is not None:
            try:
                return read_shapes(kept, len(params))
            except Malformed:
                pass  # it is asked again
        run = _Run(program, interpreter, folder, SHAPES_LIMIT_S, None)
        answer = run.answer([], params)
        found = _checked(program, lambda: read_shapes(answer, len(params)))
        folder.keep(key, answer)
        return found


def answer_key(question: Question, about: Any) -> str:
    """Returns the name under which an answer is kept; ``about`` says what gives it."""
    asked = [question.words(), question.params, about]
    return f"{ESTIMATE}-{_digest(asked)}"


def _package(module: str) -> str:
    return module.partition(".")[0]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _about_host(host: Host) -> list[str | None]:
    return ["host", host.name, host.python, host.venv]


def _kept(folder: ProgramFolder, key: str, most_s: float | None = None) -> Estimate | None:
    answer = folder.answer(key, most_s)
    try:
        return None if answer is None else read_estimate(answer)
    except Malformed:
        return None  # it is asked again


def _checked(program: str, read: Callable[[], _Answer], where: str = "") -> _Answer:
    try:
        return read()
    except Malformed as error:
        said = f"{where}{program}: its answer is not in the form that orch knows: {error}"
        raise ProgramFailed(f"{said}; {_by_hand(program)}") from None


def _interpreter(workspace: Workspace) -> str:
    named = workspace.inventory.estimate_python
    return sys.executable if named is None else str(Path(named).expanduser()) if "/" in named else named


@cache
def _about(interpreter: str) -> tuple[str, ...]:
    """Returns what tells an interpreter from another: its path, its version and its torch's."""
    try:
        code, out, told = execute(
            [interpreter, "-c", _ABOUT],
            name=interpreter,
            cwd=Path("/"),
            env=bare_environment(),
            limit_s=ABOUT_LIMIT_S,
            most_bytes=MOST_ANSWER_BYTES,
        )
    except ProgramFailed as error:
        raise ProgramFailed(f"{error}; see {SETTING}") from error
    try:
        said = json.loads(out)
    except (ValueError, RecursionError):
        said = None
    if not _is_about(said):
        ended = f"cannot tell its version (exit code {code}){_last_line(told)}"
        raise ProgramFailed(f"{printable(interpreter)}: {ended}; see {SETTING}")
    return tuple(map(str, said))


def _is_about(said: Any) -> bool:
    if not isinstance(said, list) or len(said) != 3:
        return False
    path, version, torch = said
    return isinstance(path, str) and isinstance(version, str) and isinstance(torch, str | None)


class _Run:
    """One run of a program: ``python -m PROGRAM …`` in the folder of the bundle's code."""

    def __init__(
        self, program: str, interpreter: str, folder: ProgramFolder, limit_s: float, stopping: Event | None
    ) -> None:
        self._program = program
        self._interpreter = interpreter
        self._folder = folder
        self._limit_s = limit_s
        self._stopping = stopping

    def answer(self, words: Sequence[str], params: Sequence[Mapping[str, Any]]) -> bytes:
        """Returns what the program printed; each set of parameters becomes a file.

        Raises:
            UsageError, NeedsTorch, ProgramFailed: it printed no answer.
        """
        with self._folder.scratch() as scratch:
            argv = [self._interpreter, "-m", self._program, *words]
            names = {}
            for number, each in enumerate(params):
                file = scratch / f"params{number}.json"
                file.touch(0o600)
                file.write_text(json.dumps(each), encoding="utf-8")
                argv += ["--params", str(file)]
                names[str(file)] = "the parameters" if len(params) == 1 else f"parameters {number + 1}"
            try:
                code, out, told = execute(
                    argv,
                    name=self._program,
                    cwd=self._folder.code,
                    env=bare_environment(scratch),
                    limit_s=self._limit_s,
                    most_bytes=MOST_ANSWER_BYTES,
                    stopping=self._stopping,
                )
            except ProgramFailed as error:
                raise ProgramFailed(f"{error}; {_by_hand(self._program)}") from error
        if code != 0:
            for path, name in names.items():
                told = told.replace(path.encode(), name.encode())  # nobody else knows that file
            raise self._failure(code, told)
        return out

    def _failure(self, code: int, told: bytes) -> UsageError | ProgramFailed:
        said = f"{self._program}{_last_line(told, self._program) or ': it does not say why'}"
        if code == REFUSED:
            return UsageError(said)
        lacks_torch = b"No module named 'torch'" in told
        if code == CANNOT or lacks_torch:
            python = printable(self._interpreter)
            why = f"{python} has no torch" if lacks_torch else f"{said} ({python})"
            return NeedsTorch(f"{why}: {NEXT}")
        ended = f"signal {-code}" if code < 0 else f"exit code {code}"
        return ProgramFailed(f"{said} ({ended}); {_by_hand(self._program)}")


def _by_hand(program: str) -> str:
    """Returns what shows more of a failure than its last line."""
    return f"run it by hand: python -m {program} … in payloads/"


def _last_line(told: bytes, program: str = "") -> str:
    """Returns the last line of what a program said, as the end of a sentence."""
    last = last_line(told, program)
    return f": {last}" if last else ""
