"""Parameters: how a profile, ``--set`` or a matrix changes them, and which names are theirs (pure).

A change can only name parameters that are declared: a misspelt one is an error, not a new parameter. A dotted
name goes into mappings, name by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from orchestrator import yaml_source
from orchestrator.errors import UsageError
from orchestrator.text import did_you_mean, quoted

__all__ = [
    "check_declared",
    "do_overlap",
    "merged",
    "overridden",
    "parameter_names",
    "siblings",
    "undeclared",
    "with_value",
]


def parameter_names(params: Mapping[str, Any], prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yields the path of each name, mappings and what is in them."""
    for name, value in params.items():
        yield (*prefix, name)
        if isinstance(value, Mapping):
            yield from parameter_names(value, (*prefix, name))


def merged(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """Lays ``change`` over ``base``, mapping by mapping."""
    result = dict(base)
    for key, value in change.items():
        old = base.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            result[key] = merged(old, value)
        else:
            result[key] = value
    return result


def undeclared(base: Mapping[str, Any], change: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yields the keys of ``change`` that ``base`` has not; what an empty mapping may hold is open."""
    for key, value in change.items():
        old = base.get(key)
        if key not in base:
            yield (key,)
        elif isinstance(old, Mapping) and old and isinstance(value, Mapping):
            yield from ((key, *rest) for rest in undeclared(old, value))


def siblings(params: Mapping[str, Any], keys: Sequence[str]) -> Mapping[str, Any]:
    """Returns the mapping that holds the last of ``keys``."""
    for key in keys[:-1]:
        params = params[key]
    return params


def overridden(
    params: Mapping[str, Any], overrides: Sequence[str], varied: Sequence[str] = ()
) -> dict[str, Any]:
    """Lays each ``"key=value"`` of ``overrides`` over ``params``; ``varied`` names belong to the matrix.

    Raises:
        UsageError: one is malformed, given twice, not declared, or varied.
    """
    result = dict(params)
    seen: set[str] = set()
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise UsageError(f"--set {quoted(override)} must be key=value")
        if key in seen:
            raise UsageError(f"--set {key} is given twice")
        seen.add(key)
        for name in varied:
            if do_overlap(key, name):
                raise UsageError(f"--set {key}: the matrix varies {name}; change its list in the experiment")
        try:
            value = yaml_source.parse_value(text)
        except UsageError as error:
            raise UsageError(f"--set {key}: {error}") from None
        try:
            result = with_value(result, key, value)
        except UsageError as error:
            text = f"--set {quoted(key)} names no parameter of the experiment (--set changes params alone)"
            raise UsageError(f"{text}{error}") from None
    return result


def do_overlap(first: str, second: str) -> bool:
    """Two dotted names are the same, or one lies in the other."""
    return f"{first}.".startswith(f"{second}.") or f"{second}.".startswith(f"{first}.")


def check_declared(params: Mapping[str, Any], name: str) -> str:
    """Returns the dotted ``name``, which ``params`` have.

    Raises:
        UsageError: they have not.
    """
    try:
        with_value(params, name, None)
    except UsageError as error:
        raise UsageError(f"{quoted(name)} is not declared in the experiment's params{error}") from None
    return name


def with_value(params: Mapping[str, Any], name: str, value: Any) -> dict[str, Any]:
    """Returns ``params`` with one value changed.

    Raises:
        UsageError: there is no such parameter; the message is a hint that follows on the name.
    """
    first, dot, rest = name.partition(".")
    if first not in params or (dot and not isinstance(params[first], Mapping)):
        hint = did_you_mean(first, params) or f"; declared are {', '.join(params) or 'none'}"
        raise UsageError(hint)
    return {**params, first: with_value(params[first], rest, value) if dot else value}
