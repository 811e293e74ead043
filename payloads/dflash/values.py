"""Loose values (JSON, keyword arguments) become frozen dataclasses here, or one clear sentence says why not.

Knows field names and types. Ranges and relations between fields are the dataclass's own business
(`__post_init__`).
"""

import dataclasses
import difflib
import math
import types
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


def build(cls: type[T], values: Mapping[str, object], *, what: str) -> T:
    """Return an instance of the dataclass `cls`; `what` names one of its fields in messages ("parameter").

    Raises:
        ValueError: a name is unknown, a value has the wrong type, or the class refuses the combination.
    """
    assert dataclasses.is_dataclass(cls)
    known = [field.name for field in dataclasses.fields(cls)]
    hints = get_type_hints(cls)
    for name in values:
        if name not in known:
            raise ValueError(unknown(what, name, known))
    return cls(**{name: typed(name, value, hints[name]) for name, value in values.items()})


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """Return the sentence that refuses a name, with the nearest known one or all of them."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
    return f"unknown {what} {name!r}; {hint}"


def require_positive(owner: object, *names: str) -> None:
    """Raise ValueError unless each named attribute of `owner` is greater than zero."""
    for name in names:
        value = getattr(owner, name)
        if not value > 0:
            raise ValueError(f"{name} is {value}; it must be greater than 0")


def require_choice(name: str, value: str, choices: Iterable[str]) -> None:
    """Raise ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(unknown(name, value, choices))


def typed(name: str, value: object, hint: Any) -> Any:
    """Return the value as that type, lists as tuples and integers as floats where those are asked for.

    Raises:
        ValueError: it is another type's; the message begins with `name`.
    """
    try:
        return _converted(value, hint)
    except TypeError:
        raise ValueError(f"{name} is {value!r}; it must be {spelled(hint)}") from None


def spelled(hint: Any) -> str:
    """Return a field's type in words."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(spelled(option) for option in arguments)
    if origin is tuple:
        return f"a list of {spelled(arguments[0])}"
    names = {
        int: "an integer",
        float: "a finite number",
        str: "a string",
        bool: "true or false",
        types.NoneType: "null",
    }
    return names[hint]


def _converted(value: Any, hint: Any) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        inner = next(option for option in arguments if option is not types.NoneType)
        return None if value is None else _converted(value, inner)
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_converted(item, arguments[0]) for item in value)
    if hint is float and type(value) in (int, float) and math.isfinite(value):
        return float(value)
    # bool is an int to isinstance, and `true` is no number of heads.
    if hint in (int, str, bool) and type(value) is hint:
        return value
    raise TypeError
