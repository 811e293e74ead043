"""One experiment: a YAML file, one of its profiles and the overrides of a command line, as checked values.

Knows the file's form, how a profile and ``--set`` change it, and what may be expected of a run. Each profile
is checked when the file is loaded, chosen or not. What the parameters mean is the payload's business.

A profile changes what it names: ``params``, ``env``, ``alloc_conf`` (as a mapping) and ``expect.metrics`` key
by key, everything else as a whole; a metric that is null has no bounds any more. Parameters that the
experiment does not declare can be neither set nor varied. A matrix makes cases: experiments that differ in
what it varies, laid over the chosen profile.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from orchestrator import parameters, yaml_source
from orchestrator.allocator import AllocValue, parse_alloc_conf, parse_setting, render_alloc_conf
from orchestrator.artifact_names import parse_pattern, parse_patterns
from orchestrator.errors import ConfigError, UnknownName, UsageError
from orchestrator.fields import (
    Devices,
    Secret,
    check_free_of_ranks,
    check_module,
    parse_device,
    parse_devices,
    parse_duration,
    parse_grace,
    parse_memory,
    parse_processes,
    parse_size,
    parse_variable,
)
from orchestrator.matrix import Matrix, MatrixForm, Point, read_matrix
from orchestrator.setup_form import Setup, SetupForm, read_setup
from orchestrator.text import check_name, check_text, did_you_mean, quoted
from orchestrator.yaml_source import Field, Key, Source, StrictModel

__all__ = ["EXPECTABLE", "GRACE_S", "Bounds", "Expectation", "Experiment", "load_experiment"]

GRACE_S = 10.0
ON_DISK_FULL = ("wait", "stop")
LEAST_LOG_LIMIT_BYTES = 16 * 1024**2
COLLECT_LIMIT_BYTES = 1024**3

EXPECTABLE = ("ok", "unverified", "oom", "failed", "killed", "timeout", "cancelled", "refused", "mismatch")
"""The verdicts that an experiment can ask for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """The range of a metric, both ends included; None is open."""

    min: float | None = None
    max: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Expectation:
    """Which verdicts are good, and within which bounds the metrics must lie."""

    verdicts: tuple[str, ...] = ("ok",)
    metrics: Mapping[str, Bounds] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Returns the form that stands in a job."""
        metrics = {name: {"min": bounds.min, "max": bounds.max} for name, bounds in self.metrics.items()}
        return {"verdicts": list(self.verdicts), "metrics": metrics}

    @classmethod
    def from_json(cls, stated: Mapping[str, Any]) -> Self:
        """Returns what `as_json` was made from."""
        metrics = {name: Bounds(**bounds) for name, bounds in stated["metrics"].items()}
        return cls(verdicts=tuple(stated["verdicts"]), metrics=metrics)


@dataclass(frozen=True, kw_only=True, slots=True)
class Experiment:
    """What is run; ``name`` is the file's, no ``devices`` means no card.

    The program is a ``module`` of ``payload`` or a ``script`` (its path in what is shipped: the payload, or
    the one file at ``path``), each with ``args``, or a ``command``, an argument vector for which nothing is
    shipped; or it ``prepares`` what a run needs, as that run's job says it. ``setup`` is what has to be
    prepared before.
    Several ``processes`` are ranks of that program; ``memory_limit_bytes`` is what each card is to look as if
    it had. ``cardless_profiles`` are those that need no card. ``case`` is the label of the matrix's case that
    it is; while there is a ``matrix`` it stands for many.
    The command line says whether it ``waits_for_cards`` that are taken, or ``shares_cards`` with others.
    """

    name: str
    path: Path
    payload: str | None = None
    module: str | None = None
    script: str | None = None
    args: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    prepares: Mapping[str, Any] | None = None
    setup: Setup | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str | Secret] = field(default_factory=dict, repr=False)
    alloc_conf: str | None = None
    devices: Devices = ()
    waits_for_cards: bool = True
    shares_cards: bool = False
    processes: int = 1
    memory_limit_bytes: int | None = None
    timeout_s: float | None = None
    grace_s: float = GRACE_S
    on_disk_full: str = "wait"
    log_limit_bytes: int | None = None
    collect: tuple[str, ...] = ()
    collect_limit_bytes: int = COLLECT_LIMIT_BYTES
    expect: Expectation = field(default_factory=Expectation)
    profile: str | None = None
    cardless_profiles: tuple[str, ...] = ()
    matrix: Matrix | None = None
    case: str | None = None

    def cases(self) -> tuple[Experiment, ...]:
        """Returns one experiment for each point of the matrix, or itself where there is none."""
        return (self,) if self.matrix is None else tuple(map(self._at, self.matrix.points()))

    def _at(self, point: Point) -> Experiment:
        params, env, alloc_conf = self.params, self.env, self.alloc_conf
        for axis, value in point.values:
            if axis.kind == "params":
                params = parameters.with_value(params, axis.name, value)
            elif axis.kind == "env":
                env = {**env, axis.name: value}
            else:
                alloc_conf = value or None
        return replace(self, params=params, env=env, alloc_conf=alloc_conf, matrix=None, case=point.label)


def load_experiment(path: Path, *, profile: str | None = None, overrides: Sequence[str] = ()) -> Experiment:
    """Reads an experiment, lays ``profile`` over it and then each ``"key=value"`` of ``overrides``.

    Raises:
        ConfigError: something in the file is wrong, with its line.
        UnknownName: there is no such profile.
        UsageError: an override is malformed, or names a parameter that is not declared.
    """
    name = check_name("experiment", path.stem)
    if hint := file_hint(path):
        raise ConfigError(f"there is no such file{hint}", file=path)
    source = yaml_source.load(path)
    document = source.validate(_Document)
    with source.at("payload"):
        check_name("payload", document.payload)
    with source.at("run"):
        check_module(document.run, payload=document.payload)
    base = _settings(source, document, ())
    profiles = {
        key: _overlaid(source, base, overlay, ("profiles", key)) for key, overlay in document.profiles.items()
    }
    if profile is not None and profile not in profiles:
        known = ", ".join(profiles) or "none"
        raise UnknownName(
            f"{name}: no profile {quoted(profile)}; known are {known}{did_you_mean(profile, profiles)}"
        )
    _refuse_rank_variables(source, base, profiles)
    chosen = base if profile is None else profiles[profile]
    matrix = None
    if document.matrix is not None:
        matrix = read_matrix(
            source, document.matrix, params=chosen.params, env=chosen.env, alloc_conf=chosen.alloc_conf
        )
        with source.at("matrix", "env"):
            varied = [axis.name for axis in matrix.axes if axis.kind == "env"]
            check_free_of_ranks(varied, chosen.processes)
    return Experiment(
        name=name,
        path=path.absolute(),
        payload=document.payload,
        module=document.run,
        params=parameters.overridden(chosen.params, overrides, matrix.varied_params if matrix else ()),
        env=chosen.env,
        alloc_conf=render_alloc_conf(chosen.alloc_conf) or None,
        devices=chosen.devices,
        processes=chosen.processes,
        memory_limit_bytes=chosen.memory_limit_bytes,
        timeout_s=chosen.timeout_s,
        grace_s=chosen.grace_s,
        on_disk_full=chosen.on_disk_full,
        log_limit_bytes=chosen.log_limit_bytes,
        setup=chosen.setup,
        collect=chosen.collect,
        collect_limit_bytes=chosen.collect_limit_bytes,
        expect=chosen.expect,
        profile=profile,
        cardless_profiles=tuple(key for key, each in profiles.items() if not each.devices),
        matrix=matrix,
    )


def file_hint(path: Path) -> str:
    """Returns ``"; did you mean FILE?"`` for a name that is no file, where an experiment of that name is."""
    if path.exists() or path.suffix:
        return ""
    named = path.with_suffix(".yaml")
    found = [each for each in (named, named.parent / "experiments" / named.name) if each.is_file()]
    return f"; did you mean {found[0]}?" if found else ""


# The file's form


class _Bounds(StrictModel):
    min: float | None = None
    max: float | None = None


class _Expect(StrictModel):
    verdict: Any = "ok"
    metrics: dict[str, _Bounds | None] = Field(default_factory=dict)


class _Overlay(StrictModel):
    params: dict[str, Any] = Field(default_factory=dict)
    env: dict[str, Any] = Field(default_factory=dict)
    alloc_conf: Any = ""
    devices: Any = "none"
    processes: Any = 1
    memory_limit: Any = None
    timeout: Any = None
    grace: Any = GRACE_S
    on_disk_full: Any = "wait"
    log_limit: Any = None
    setup: SetupForm | None = None
    collect: Any = ()
    collect_limit: Any = None
    expect: _Expect = _Expect()


class _Document(_Overlay):
    payload: str
    run: str
    matrix: MatrixForm | None = None
    profiles: dict[str, _Overlay] = Field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Settings:
    """What an overlay says, checked; a field that it does not name has its default here."""

    params: dict[str, Any]
    env: dict[str, str | Secret]
    alloc_conf: dict[str, AllocValue]
    devices: Devices
    processes: int
    memory_limit_bytes: int | None
    timeout_s: float | None
    grace_s: float
    on_disk_full: str
    log_limit_bytes: int | None
    setup: Setup | None
    collect: tuple[str, ...]
    collect_limit_bytes: int
    expect: Expectation


def _settings(source: Source, overlay: _Overlay, here: tuple[Key, ...]) -> _Settings:
    for keys in parameters.parameter_names(overlay.params):
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_-]*", keys[-1]):
            raise source.error("use letters, digits, '_' and '-' in the name", *here, "params", *keys)
    env: dict[str, str | Secret] = {}
    for name, value in overlay.env.items():
        with source.at(*here, "env", name):
            env[name] = parse_variable(name, value, where=source.where(*here, "env", name))
    return _Settings(
        params=overlay.params,
        env=env,
        alloc_conf=_alloc_conf(source, overlay.alloc_conf, (*here, "alloc_conf")),
        devices=_devices(source, overlay.devices, (*here, "devices")),
        processes=_processes(source, overlay.processes, (*here, "processes")),
        memory_limit_bytes=_memory_limit_bytes(source, overlay.memory_limit, (*here, "memory_limit")),
        timeout_s=_timeout_s(source, overlay.timeout, (*here, "timeout")),
        grace_s=_grace_s(source, overlay.grace, (*here, "grace")),
        on_disk_full=_on_disk_full(source, overlay.on_disk_full, (*here, "on_disk_full")),
        log_limit_bytes=_log_limit_bytes(source, overlay.log_limit, (*here, "log_limit")),
        setup=read_setup(source, overlay.setup, *here, "setup"),
        collect=_collect(source, overlay.collect, (*here, "collect")),
        collect_limit_bytes=_collect_limit_bytes(source, overlay.collect_limit, (*here, "collect_limit")),
        expect=_expectation(source, overlay.expect, (*here, "expect")),
    )


def _alloc_conf(source: Source, value: Any, here: tuple[Key, ...]) -> dict[str, AllocValue]:
    if not isinstance(value, str | Mapping):
        raise source.error("must be a mapping or text such as expandable_segments:True", *here)
    for key, setting in value.items() if isinstance(value, Mapping) else ():
        with source.at(*here, key):
            parse_setting(key, setting)
    with source.at(*here):
        return parse_alloc_conf(value)


def _devices(source: Source, value: Any, here: tuple[Key, ...]) -> Devices:
    for position, device in enumerate(value if isinstance(value, list) else ()):
        with source.at(*here, position):
            parse_device(device)
    with source.at(*here):
        return parse_devices(value)


def _processes(source: Source, value: Any, here: tuple[Key, ...]) -> int:
    with source.at(*here):
        return parse_processes(value)


def _memory_limit_bytes(source: Source, value: Any, here: tuple[Key, ...]) -> int | None:
    with source.at(*here):
        return None if value is None else parse_memory(value)


def _timeout_s(source: Source, value: Any, here: tuple[Key, ...]) -> float | None:
    with source.at(*here):
        return None if value is None else parse_duration(value)


def _grace_s(source: Source, value: Any, here: tuple[Key, ...]) -> float:
    with source.at(*here):
        return parse_grace(value)


def _on_disk_full(source: Source, value: Any, here: tuple[Key, ...]) -> str:
    if value not in ON_DISK_FULL:
        hint = did_you_mean(str(value), ON_DISK_FULL)
        raise source.error(f"must be {' or '.join(ON_DISK_FULL)}, not {quoted(value)}{hint}", *here)
    return str(value)


def _log_limit_bytes(source: Source, value: Any, here: tuple[Key, ...]) -> int | None:
    with source.at(*here):
        limit = None if value is None else parse_size(value)
        if limit is not None and limit < LEAST_LOG_LIMIT_BYTES:
            raise UsageError(f"must be at least {LEAST_LOG_LIMIT_BYTES // 1024**2}MiB")
        return limit


def _refuse_rank_variables(source: Source, base: _Settings, profiles: Mapping[str, _Settings]) -> None:
    with source.at("processes"):
        check_free_of_ranks(base.env, base.processes)
    for name, settings in profiles.items():
        with source.at("profiles", name, "processes"):
            check_free_of_ranks(settings.env, settings.processes)


def _collect(source: Source, value: Any, here: tuple[Key, ...]) -> tuple[str, ...]:
    for position, pattern in enumerate(value if isinstance(value, list) else ()):
        with source.at(*here, position):
            parse_pattern(pattern)
    with source.at(*here):
        return parse_patterns(value)


def _collect_limit_bytes(source: Source, value: Any, here: tuple[Key, ...]) -> int:
    with source.at(*here):
        return COLLECT_LIMIT_BYTES if value is None else parse_size(value)


def _expectation(source: Source, expect: _Expect, here: tuple[Key, ...]) -> Expectation:
    is_list = isinstance(expect.verdict, list)
    given = expect.verdict if is_list else [expect.verdict]
    if not given:
        raise source.error("must name at least one verdict", *here, "verdict")
    for position, verdict in enumerate(given):
        if verdict not in EXPECTABLE:
            hint = did_you_mean(str(verdict), EXPECTABLE)
            text = f"{quoted(verdict)} is no verdict to expect: use {', '.join(EXPECTABLE)}{hint}"
            raise source.error(text, *here, "verdict", *([position] if is_list else []))
    metrics = {}
    for name, bounds in expect.metrics.items():
        with source.at_key(*here, "metrics", name):
            check_text("a metric's name", name)
        if bounds is not None:
            with source.at(*here, "metrics", name):
                metrics[name] = _checked_bounds(bounds)
    return Expectation(verdicts=tuple(dict.fromkeys(given)), metrics=metrics)


def _checked_bounds(bounds: _Bounds) -> Bounds:
    if bounds.min is None and bounds.max is None:
        raise UsageError("must have a min, a max or both")
    if bounds.min is not None and bounds.max is not None and bounds.min > bounds.max:
        raise UsageError(f"min {bounds.min:g} is above max {bounds.max:g}: nothing lies between")
    return Bounds(min=bounds.min, max=bounds.max)


# Profiles


def _overlaid(source: Source, base: _Settings, overlay: _Overlay, here: tuple[Key, ...]) -> _Settings:
    with source.at_key(*here):
        check_name("profile", str(here[-1]))
    own = _settings(source, overlay, here)
    for keys in parameters.undeclared(base.params, own.params):
        hint = did_you_mean(keys[-1], parameters.siblings(base.params, keys))
        raise source.error(f"is not declared in the experiment's params{hint}", *here, "params", *keys)
    given = overlay.model_fields_set
    alloc_conf = base.alloc_conf
    if "alloc_conf" in given:
        is_whole = isinstance(overlay.alloc_conf, str)
        with source.at(*here, "alloc_conf"):
            alloc_conf = parse_alloc_conf(
                own.alloc_conf if is_whole else {**base.alloc_conf, **own.alloc_conf}
            )
    return _Settings(
        params=parameters.merged(base.params, own.params),
        env={**base.env, **own.env},
        alloc_conf=alloc_conf,
        devices=own.devices if "devices" in given else base.devices,
        processes=own.processes if "processes" in given else base.processes,
        memory_limit_bytes=own.memory_limit_bytes if "memory_limit" in given else base.memory_limit_bytes,
        timeout_s=own.timeout_s if "timeout" in given else base.timeout_s,
        grace_s=own.grace_s if "grace" in given else base.grace_s,
        on_disk_full=own.on_disk_full if "on_disk_full" in given else base.on_disk_full,
        log_limit_bytes=own.log_limit_bytes if "log_limit" in given else base.log_limit_bytes,
        setup=own.setup if "setup" in given else base.setup,
        collect=own.collect if "collect" in given else base.collect,
        collect_limit_bytes=own.collect_limit_bytes if "collect_limit" in given else base.collect_limit_bytes,
        expect=replace(
            base.expect,
            verdicts=own.expect.verdicts
            if "verdict" in overlay.expect.model_fields_set
            else base.expect.verdicts,
            metrics={
                name: bounds
                for name, bounds in {**base.expect.metrics, **own.expect.metrics}.items()
                if overlay.expect.metrics.get(name, bounds) is not None
            },
        ),
    )
