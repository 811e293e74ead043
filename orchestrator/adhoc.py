"""A script or a command given on the command line as an experiment that stands in no file (pure).

Knows how options are read and what is expected of such a run. A script inside ``payloads/NAME/`` belongs to
that payload, any other is shipped alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.allocator import parse_alloc_conf, render_alloc_conf
from orchestrator.errors import UsageError
from orchestrator.experiment import GRACE_S, Expectation, Experiment
from orchestrator.fields import (
    Devices,
    check_free_of_ranks,
    check_variable,
    parse_devices,
    parse_duration,
    parse_grace,
    parse_memory,
    parse_processes,
)
from orchestrator.text import quoted

__all__ = ["ProgramOptions", "command_experiment", "script_experiment"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramOptions:
    """The options as they were typed; None and empty where they were not. A command has the first five."""

    devices: str | None = None
    alloc_conf: str | None = None
    env: tuple[str, ...] = ()
    timeout: str | None = None
    grace: str | None = None
    processes: str | None = None
    memory_limit: str | None = None

    def given(self) -> list[tuple[str, str]]:
        """Returns each option that was typed, and the key of an experiment that says the same."""
        values = {
            "--devices": self.devices,
            "--alloc-conf": self.alloc_conf,
            "--env": self.env or None,
            "--timeout": self.timeout,
            "--grace": self.grace,
            "--processes": self.processes,
            "--memory-limit": self.memory_limit,
        }
        return [(name, name[2:].replace("-", "_")) for name, value in values.items() if value is not None]


def script_experiment(
    script: Path, args: Sequence[str], options: ProgramOptions, *, project: Path
) -> Experiment:
    """Returns what runs ``script`` as ``python script.py ARGS…`` would.

    Raises:
        UsageError: there is no such file, or an option cannot be read.
    """
    if not script.is_file():
        raise UsageError(f"{quoted(str(script))} is no file")
    payload, inside = None, script.name
    payloads = (project / "payloads").resolve()
    place = script.resolve()
    if place.is_relative_to(payloads) and len(place.relative_to(payloads).parts) > 1:
        inside = place.relative_to(payloads).as_posix()
        payload = inside.partition("/")[0]
    return Experiment(
        name=_name(script.stem),
        path=script.absolute(),
        payload=payload,
        script=inside,
        args=_arguments(args),
        **_settings(options),
    )


def command_experiment(argv: Sequence[str], options: ProgramOptions) -> Experiment:
    """Returns what runs ``argv`` as it is.

    A command tells nothing from inside, so of settings that were asked for nothing is proven, and that is
    expected.

    Raises:
        UsageError: an option cannot be read.
    """
    settings = _settings(options)
    is_proof_missing = bool(settings["devices"] or settings["alloc_conf"])
    verdicts = ("ok", "unverified") if is_proof_missing else ("ok",)
    return Experiment(
        name=_name(argv[0].rpartition("/")[2]),
        path=Path(argv[0]),
        command=_arguments(argv),
        expect=Expectation(verdicts=verdicts),
        **settings,
    )


def _settings(options: ProgramOptions) -> dict[str, Any]:
    env = dict(map(_variable, options.env))
    processes = _read("--processes", parse_processes, options.processes or 1)
    limit = options.memory_limit
    _read("--env", lambda names: check_free_of_ranks(names, processes), env)
    return {
        "env": env,
        "processes": processes,
        "memory_limit_bytes": None if limit is None else _read("--memory-limit", parse_memory, limit),
        "alloc_conf": _read("--alloc-conf", _alloc_conf, options.alloc_conf or ""),
        "devices": _read("--devices", _devices, options.devices or "none"),
        "timeout_s": None if options.timeout is None else _read("--timeout", parse_duration, options.timeout),
        "grace_s": GRACE_S if options.grace is None else _read("--grace", parse_grace, options.grace),
    }


def _read(option: str, parse: Callable[[Any], Any], text: Any) -> Any:
    """Reads one option; an error names it."""
    try:
        return parse(text)
    except UsageError as error:
        raise UsageError(f"{option}: {error}") from None


def _alloc_conf(text: str) -> str | None:
    return render_alloc_conf(parse_alloc_conf(text)) or None


def _devices(text: str) -> Devices:
    """Reads ``none``, ``0,1``, or ``count=2,free_memory=90GiB``."""
    parts = text.split(",")
    if text == "none" or "=" not in text:
        return parse_devices(text if text == "none" else parts)
    named = {name: value for name, _, value in (part.partition("=") for part in parts)}
    if len(named) < len(parts):
        raise UsageError(f"{quoted(text)} says one thing twice")
    count = named.get("count", "")
    return parse_devices({**named, "count": int(count) if count.isdecimal() else count})


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"--env {quoted(name)} must be NAME=VALUE")
    try:
        return name, check_variable(name, value)
    except UsageError as error:
        raise UsageError(f"--env {quoted(name)}: {error}") from None


def _arguments(argv: Sequence[str]) -> tuple[str, ...]:
    for argument in argv:
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise UsageError(f"the argument {quoted(argument)} is not UTF-8, which no job can hold") from None
    return tuple(argv)


def _name(text: str) -> str:
    """Returns the nearest name that an experiment may have."""
    name = re.sub(r"[^A-Za-z0-9._-]", "_", text).lstrip("._-")[:64]
    return name or "program"
