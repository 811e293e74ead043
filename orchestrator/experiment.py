"""One experiment: a YAML file, one of its profiles and the overrides of a command line, as checked values.

Knows the file's form, how a profile and ``--set`` change it, and what may be expected of a run. Each profile
is checked when the file is loaded, chosen or not. What the parameters mean is the payload's business.

A profile changes what it names: ``params``, ``env``, ``alloc_conf`` (as a mapping) and ``expect.metrics`` key
by key, everything else as a whole. It can only change parameters that the experiment declares, as ``--set``
can: a misspelt one is an error, not a new parameter.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from pydantic import Field

from orchestrator import yaml_source
from orchestrator.allocator import AllocValue, parse_alloc_conf, parse_setting, render_alloc_conf
from orchestrator.errors import UnknownName, UsageError
from orchestrator.fields import (
    Secret,
    check_module,
    parse_device,
    parse_devices,
    parse_duration,
    parse_variable,
)
from orchestrator.text import check_name, check_text, did_you_mean
from orchestrator.yaml_source import Key, Source, StrictModel

__all__ = ["EXPECTABLE", "Bounds", "Expectation", "Experiment", "load_experiment"]

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
    """What is run; ``name`` is the file's, ``module`` lies in ``payload``, no ``devices`` means no card."""

    name: str
    path: Path
    payload: str
    module: str
    params: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str | Secret] = field(default_factory=dict, repr=False)
    alloc_conf: str | None = None
    devices: tuple[str, ...] = ()
    timeout_s: float | None = None
    expect: Expectation = field(default_factory=Expectation)
    profile: str | None = None


def load_experiment(path: Path, *, profile: str | None = None, overrides: Sequence[str] = ()) -> Experiment:
    """Reads an experiment, lays ``profile`` over it and then each ``"key=value"`` of ``overrides``.

    Raises:
        ConfigError: something in the file is wrong, with its line.
        UnknownName: there is no such profile.
        UsageError: an override is malformed, or names a parameter that is not declared.
    """
    name = check_name("experiment", path.stem)
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
            f"{name}: no profile {profile!r}; known are {known}{did_you_mean(profile, profiles)}"
        )
    chosen = base if profile is None else profiles[profile]
    return Experiment(
        name=name,
        path=path.absolute(),
        payload=document.payload,
        module=document.run,
        params=_overridden(chosen.params, overrides),
        env=chosen.env,
        alloc_conf=render_alloc_conf(chosen.alloc_conf) or None,
        devices=chosen.devices,
        timeout_s=chosen.timeout_s,
        expect=chosen.expect,
        profile=profile,
    )


# The file's form


class _Bounds(StrictModel):
    min: float | None = None
    max: float | None = None


class _Expect(StrictModel):
    verdict: Any = "ok"
    metrics: dict[str, _Bounds] = Field(default_factory=dict)


class _Overlay(StrictModel):
    params: dict[str, Any] = Field(default_factory=dict)
    env: dict[str, Any] = Field(default_factory=dict)
    alloc_conf: Any = ""
    devices: Any = "none"
    timeout: Any = None
    expect: _Expect = _Expect()


class _Document(_Overlay):
    payload: str
    run: str
    profiles: dict[str, _Overlay] = Field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Settings:
    """What an overlay says, checked; a field that it does not name has its default here."""

    params: dict[str, Any]
    env: dict[str, str | Secret]
    alloc_conf: dict[str, AllocValue]
    devices: tuple[str, ...]
    timeout_s: float | None
    expect: Expectation


def _settings(source: Source, overlay: _Overlay, here: tuple[Key, ...]) -> _Settings:
    for keys in _parameter_names(overlay.params):
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
        timeout_s=_timeout_s(source, overlay.timeout, (*here, "timeout")),
        expect=_expectation(source, overlay.expect, (*here, "expect")),
    )


def _parameter_names(params: Mapping[str, Any], prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, value in params.items():
        yield (*prefix, name)
        if isinstance(value, Mapping):
            yield from _parameter_names(value, (*prefix, name))


def _alloc_conf(source: Source, value: Any, here: tuple[Key, ...]) -> dict[str, AllocValue]:
    if not isinstance(value, str | Mapping):
        raise source.error("must be a mapping or text such as expandable_segments:True", *here)
    for key, setting in value.items() if isinstance(value, Mapping) else ():
        with source.at(*here, key):
            parse_setting(key, setting)
    with source.at(*here):
        return parse_alloc_conf(value)


def _devices(source: Source, value: Any, here: tuple[Key, ...]) -> tuple[str, ...]:
    for position, device in enumerate(value if isinstance(value, list) else ()):
        with source.at(*here, position):
            parse_device(device)
    with source.at(*here):
        return parse_devices(value)


def _timeout_s(source: Source, value: Any, here: tuple[Key, ...]) -> float | None:
    with source.at(*here):
        return None if value is None else parse_duration(value)


def _expectation(source: Source, expect: _Expect, here: tuple[Key, ...]) -> Expectation:
    is_list = isinstance(expect.verdict, list)
    given = expect.verdict if is_list else [expect.verdict]
    if not given:
        raise source.error("must name at least one verdict", *here, "verdict")
    for position, verdict in enumerate(given):
        if verdict not in EXPECTABLE:
            hint = did_you_mean(str(verdict), EXPECTABLE)
            text = f"{verdict!r} is no verdict to expect: use {', '.join(EXPECTABLE)}{hint}"
            raise source.error(text, *here, "verdict", *([position] if is_list else []))
    for name, bounds in expect.metrics.items():
        with source.at_key(*here, "metrics", name):
            check_text("a metric's name", name)
        with source.at(*here, "metrics", name):
            _check_bounds(bounds)
    metrics = {name: Bounds(min=bounds.min, max=bounds.max) for name, bounds in expect.metrics.items()}
    return Expectation(verdicts=tuple(dict.fromkeys(given)), metrics=metrics)


def _check_bounds(bounds: _Bounds) -> None:
    if bounds.min is None and bounds.max is None:
        raise UsageError("must have a min, a max or both")
    if bounds.min is not None and bounds.max is not None and bounds.min > bounds.max:
        raise UsageError(f"min {bounds.min:g} is above max {bounds.max:g}: nothing lies between")


# Profiles and overrides


def _overlaid(source: Source, base: _Settings, overlay: _Overlay, here: tuple[Key, ...]) -> _Settings:
    with source.at_key(*here):
        check_name("profile", str(here[-1]))
    own = _settings(source, overlay, here)
    for keys in _undeclared(base.params, own.params):
        hint = did_you_mean(keys[-1], _siblings(base.params, keys))
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
        params=_merged(base.params, own.params),
        env={**base.env, **own.env},
        alloc_conf=alloc_conf,
        devices=own.devices if "devices" in given else base.devices,
        timeout_s=own.timeout_s if "timeout" in given else base.timeout_s,
        expect=replace(
            base.expect,
            verdicts=own.expect.verdicts
            if "verdict" in overlay.expect.model_fields_set
            else base.expect.verdicts,
            metrics={**base.expect.metrics, **own.expect.metrics},
        ),
    )


def _merged(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """Lays ``change`` over ``base``, mapping by mapping."""
    merged = dict(base)
    for key, value in change.items():
        old = base.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            merged[key] = _merged(old, value)
        else:
            merged[key] = value
    return merged


def _undeclared(base: Mapping[str, Any], change: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yields the keys of ``change`` that ``base`` has not; what an empty mapping may hold is open."""
    for key, value in change.items():
        old = base.get(key)
        if key not in base:
            yield (key,)
        elif isinstance(old, Mapping) and old and isinstance(value, Mapping):
            yield from ((key, *rest) for rest in _undeclared(old, value))


def _siblings(params: Mapping[str, Any], keys: Sequence[str]) -> Mapping[str, Any]:
    for key in keys[:-1]:
        params = params[key]
    return params


def _overridden(params: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    result = dict(params)
    seen: set[str] = set()
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise UsageError(f"--set {override!r} must be key=value")
        if key in seen:
            raise UsageError(f"--set {key} is given twice")
        seen.add(key)
        try:
            value = yaml_source.parse_value(text)
        except UsageError as error:
            raise UsageError(f"--set {key}: {error}") from None
        result = _with_value(result, key, key.split("."), value)
    return result


def _with_value(params: Mapping[str, Any], name: str, keys: Sequence[str], value: Any) -> dict[str, Any]:
    first, *rest = keys
    if first not in params or (rest and not isinstance(params[first], Mapping)):
        hint = did_you_mean(first, params) or f"; declared are {', '.join(params) or 'none'}"
        raise UsageError(
            f"--set {name!r} names no parameter of the experiment (--set changes params alone){hint}"
        )
    return {**params, first: _with_value(params[first], name, rest, value) if rest else value}
