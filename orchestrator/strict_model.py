"""The form of a YAML file as classes: which keys a mapping has, of which kind, and what is wrong with one.

A subclass of `StrictModel` declares fields as a dataclass does. Nothing is converted (a whole number does for
a float, as in JSON), and no key is passed over unless the class says that it ``is_open``. Known kinds are
``str``, ``int``, ``float``, ``bool``, ``Any``, ``Literal`` words, models, ``dict[str, X]``, ``list[X]``,
``X | None``, and `Range` by way of ``Annotated``. Small, because every command pays for it: see
docs/decisions/0008-speed.md.
Knows nothing of files and lines: a `Problem` names its place by keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    Self,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from orchestrator.text import did_you_mean, quoted

__all__ = ["Field", "Key", "Keys", "Problem", "Range", "StrictModel", "kind_of"]

Key = str | int
Keys = tuple[Key, ...]

_KINDS: Mapping[type, tuple[str, tuple[type, ...]]] = {
    str: ("text", (str,)),
    bool: ("a boolean", (bool,)),
    int: ("an integer", (int,)),
    float: ("a number", (float, int)),
}


class Problem(NamedTuple):
    """What does not fit, at ``keys``; ``is_key`` says that the last key itself is none of ours."""

    keys: Keys
    message: str
    is_key: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """The whole numbers that a field takes, both ends included."""

    least: int
    most: int


class _Default(NamedTuple):
    make: Callable[[], Any]


def Field(*, default_factory: Callable[[], Any]) -> Any:  # noqa: N802  (reads as the type that it stands for)
    """Returns the default of a field that each value gets a new one of."""
    return _Default(default_factory)


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(Field,))
class StrictModel:
    """A checked mapping: its fields as attributes, and in ``model_fields_set`` those that were given."""

    is_open: ClassVar[bool] = False
    _fields: ClassVar[Mapping[str, Any] | None] = None
    model_fields_set: frozenset[str]

    def __init_subclass__(cls) -> None:
        cls._fields = None

    def __init__(self, **values: Any) -> None:
        for name in self.fields():
            default = getattr(type(self), name, None)
            fallback = default.make() if isinstance(default, _Default) else default
            object.__setattr__(self, name, values.get(name, fallback))
        object.__setattr__(self, "model_fields_set", frozenset(values))

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{type(self).__name__}.{name} is what a file says")

    @classmethod
    def fields(cls) -> Mapping[str, Any]:
        """Returns each field's kind, in the order of their declaration, a base class's first."""
        if cls._fields is None:
            hints = get_type_hints(cls, include_extras=True)
            cls._fields = {
                name: hint for name, hint in hints.items() if name not in StrictModel.__annotations__
            }
        return cls._fields

    @classmethod
    def check(cls, value: Any) -> Self | list[Problem]:
        """Returns ``value`` as this model, or everything that does not fit, in the order of the fields."""
        problems: list[Problem] = []
        model = _model(cls, value, (), problems)
        if problems:
            return problems
        assert isinstance(model, cls)
        return model


def kind_of(value: object) -> str:
    """Returns what a value is, for a person."""
    names = {dict: "a mapping", list: "a list", str: "text", bool: "a boolean", NoneType: "empty"}
    return names.get(type(value), "a number")


def _model(kind: type[StrictModel], value: Any, keys: Keys, problems: list[Problem]) -> StrictModel | None:
    if not isinstance(value, dict):
        problems.append(_unfit("a mapping", value, keys))
        return None
    fields, found = kind.fields(), {}
    for name, hint in fields.items():
        if name in value:
            found[name] = _value(hint, value[name], (*keys, name), problems)
        elif not hasattr(kind, name):
            problems.append(Problem((*keys, name), "is missing"))
    for name in [name for name in value if name not in fields and not kind.is_open]:
        hint = did_you_mean(str(name), fields) or f"; known are {', '.join(fields)}"
        problems.append(Problem((*keys, name), f"unknown key {quoted(name)}{hint}", is_key=True))
    return kind(**found) if not problems else None


def _value(hint: Any, value: Any, keys: Keys, problems: list[Problem]) -> Any:  # noqa: PLR0911  # a table
    """Returns ``value`` as ``hint`` wants it; what does not fit is told in ``problems``."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, UnionType):
        wanted = next(argument for argument in arguments if argument is not NoneType)
        return None if value is None else _value(wanted, value, keys, problems)
    if origin is Annotated:
        problems.extend(_outside(arguments[1], value, keys))
        return _value(arguments[0], value, keys, problems)
    if origin is Literal:
        problems.extend(_no_word(arguments, value, keys))
        return value
    if origin is dict:
        return _mapping(arguments[1], value, keys, problems)
    if origin is list:
        return _list(arguments[0], value, keys, problems)
    if hint in _KINDS:
        words, types = _KINDS[hint]
        if type(value) not in types:
            problems.append(_unfit(words, value, keys))
        return value
    assert issubclass(hint, StrictModel), f"not a kind of field: {hint}"
    return _model(hint, value, keys, problems)


def _mapping(hint: Any, value: Any, keys: Keys, problems: list[Problem]) -> Any:
    if not isinstance(value, dict):
        problems.append(_unfit("a mapping", value, keys))
        return value
    return {key: _value(hint, inner, (*keys, key), problems) for key, inner in value.items()}


def _list(hint: Any, value: Any, keys: Keys, problems: list[Problem]) -> Any:
    if not isinstance(value, list):
        problems.append(_unfit("a list", value, keys))
        return value
    return [_value(hint, inner, (*keys, index), problems) for index, inner in enumerate(value)]


def _outside(limits: Range, value: Any, keys: Keys) -> Iterator[Problem]:
    if type(value) is int and value < limits.least:
        yield Problem(keys, f"must be greater than or equal to {limits.least}")
    if type(value) is int and value > limits.most:
        yield Problem(keys, f"must be less than or equal to {limits.most}")


def _no_word(words: tuple[str, ...], value: Any, keys: Keys) -> Iterator[Problem]:
    """Shows a wrong value only here, where one of a few words belongs: elsewhere it may be a secret."""
    if isinstance(value, str) and value in words:
        return
    shown = f"{quoted(value)}{did_you_mean(value, words)}" if isinstance(value, str) else kind_of(value)
    yield Problem(keys, f"must be {_either(words)}, not {shown}")


def _either(words: tuple[str, ...]) -> str:
    *first, last = (f"'{word}'" for word in words)
    return f"{', '.join(first)} or {last}" if first else last


def _unfit(wanted: str, value: Any, keys: Keys) -> Problem:
    return Problem(keys, f"must be {wanted}, not {kind_of(value)}")
