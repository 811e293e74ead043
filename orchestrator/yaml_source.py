"""Strict YAML whose every value knows its line.

Knows how to read a file (or one ``key=value`` override) as plain values, and how to point at the line of a
value that somebody found wrong. What the values mean is the models' and the callers' business.

Plain scalars follow YAML 1.2's core schema, where ``1e-5`` is a number and ``yes``, ``on`` and ``12:30`` are
text; a number with a leading zero stays text too. Refused: duplicate keys, keys that are not text, tags,
merge keys, and files that grow out of proportion through their aliases.
"""

from __future__ import annotations

import math
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from orchestrator.errors import ConfigError, UsageError
from orchestrator.strict_model import Field, Key, Keys, StrictModel, kind_of
from orchestrator.text import printable, quoted

__all__ = ["Field", "Key", "Source", "StrictModel", "load", "parse_value"]

_Model = TypeVar("_Model", bound=StrictModel)

_MAX_FILE_BYTES = 256 * 1024
_MAX_NODES = 20_000
_MAX_DEPTH = 50


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A YAML file's values; a ``Keys`` path such as ``("hosts", "a", "port")`` names one of them."""

    path: Path
    data: dict[str, Any] = field(repr=False)
    _lines: Mapping[Keys, _Lines] = field(repr=False)

    def validate(self, model: type[_Model], *keys: Key) -> _Model:
        """Returns the file, or its value at ``keys``, as ``model``.

        Raises:
            ConfigError: the first thing that does not fit, at its line.
        """
        value: Any = self.data
        for key in keys:
            value = value[key]
        checked = model.check(value)
        if not isinstance(checked, list):
            return checked
        # A misspelt key is also a missing one: the spelling is the better message.
        first = min(checked, key=lambda problem: not problem.is_key)
        if first.is_key:
            raise self._key_error(first.message, (*keys, *first.keys))
        raise self.error(first.message, *keys, *first.keys)

    def error(self, message: str, *keys: Key) -> ConfigError:
        """Returns an error about the value at ``keys``, or about the nearest one around it that exists."""
        text = f"{_dotted(keys)}: {message}" if keys else message
        return ConfigError(text, file=self.path, line=self._line(keys))

    def where(self, *keys: Key) -> str:
        """Returns file and line of the value at ``keys``, for a message that comes later."""
        return f"{self.path}:{self._line(keys)}"

    @contextmanager
    def at(self, *keys: Key) -> Iterator[None]:
        """Turns a `UsageError` raised inside into one that names the value at ``keys`` and its line."""
        try:
            yield
        except ConfigError:
            raise
        except UsageError as error:
            raise self.error(str(error), *keys) from error

    @contextmanager
    def at_key(self, *keys: Key) -> Iterator[None]:
        """As `at`, for a `UsageError` about the last key itself, which its message shows."""
        try:
            yield
        except UsageError as error:
            raise self._key_error(str(error), keys) from error

    def _line(self, keys: Keys) -> int:
        while keys not in self._lines:
            keys = keys[:-1]
        return self._lines[keys].value

    def _key_error(self, message: str, keys: Keys) -> ConfigError:
        where = f"{_dotted(keys[:-1])}: " if len(keys) > 1 else ""
        return ConfigError(f"{where}{message}", file=self.path, line=self._lines[keys].key)


def load(path: Path) -> Source:
    """Reads a YAML file whose top is a mapping.

    Raises:
        ConfigError: it cannot be read, is no YAML, or holds something that this reader refuses.
    """
    reader = _Reader(_read(path), path)
    data = reader.read()
    if not isinstance(data, dict):
        raise ConfigError(f"must be a mapping (key: value), not {kind_of(data)}", file=path, line=1)
    return Source(path=path, data=data, _lines=reader.lines)


def parse_value(text: str) -> Any:
    """Returns the value of one scalar or of a flow collection (``[1, 2]``, ``{a: 1}``), as on a command line.

    Raises:
        UsageError: nothing, a block of YAML, or no YAML at all; quoted text is always possible.
    """
    try:
        reader = _Reader(text, Path("value"))
        data = reader.read(is_flow_required=True)
    except ConfigError as error:
        reason = str(error).partition(": ")[2]
        shown = text if len(text) <= 60 else f"{text[:60]}…"
        raise UsageError(f"{shown!r} {reason}; text may need quotes of its own: '\"…\"'") from None
    return data


# Reading


@dataclass(frozen=True, kw_only=True, slots=True)
class _Lines:
    """Where a value's key stands, and what an error about the value points at."""

    key: int
    value: int


class _Loader(yaml.SafeLoader):
    """PyYAML's loader with the plain scalars of YAML 1.2's core schema."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012  PyYAML's own shape


for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(?:0|[1-9][0-9]*)|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|(?:0|[1-9][0-9]*)(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
    ("merge", r"<<", ["<"]),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})\Z"), _first)


class _Reader:
    """Turns YAML text into plain values and notes the line of each."""

    def __init__(self, text: str, path: Path) -> None:
        self._text = text
        self._path = path
        self._nodes = 0
        self.lines: dict[Keys, _Lines] = {}

    def read(self, *, is_flow_required: bool = False) -> Any:
        node = self._compose()
        if node is None:
            raise ConfigError("is empty", file=self._path, line=1)
        if is_flow_required and isinstance(node, MappingNode | SequenceNode) and not node.flow_style:
            raise ConfigError("is a block of YAML, not one value", file=self._path)
        self.lines[()] = _Lines(key=_line_of(node), value=_line_of(node))
        return self._value(node, ())

    def _compose(self) -> Node | None:
        try:
            return yaml.compose(self._text, Loader=_Loader)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            line = None if mark is None else mark.line + 1
            message = ", ".join(filter(None, (error.context, error.problem)))
            raise ConfigError(
                f"is not valid YAML: {printable(message)}", file=self._path, line=line
            ) from None
        except yaml.reader.ReaderError as error:
            line = self._text.count("\n", 0, error.position) + 1
            raise ConfigError("holds a control character", file=self._path, line=line) from None
        except RecursionError:
            raise ConfigError("is nested too deeply", file=self._path) from None
        except (ValueError, OverflowError):
            raise ConfigError("holds an escape that names no character", file=self._path) from None

    def _value(self, node: Node, keys: Keys) -> Any:
        self._nodes += 1
        if len(keys) > _MAX_DEPTH or self._nodes > _MAX_NODES:
            raise self._error("is too deep or too large (aliases count in full)", node, keys)
        if isinstance(node, MappingNode) and node.tag == "tag:yaml.org,2002:map":
            return self._mapping(node, keys)
        if isinstance(node, SequenceNode) and node.tag == "tag:yaml.org,2002:seq":
            return [self._item(item, (*keys, index)) for index, item in enumerate(node.value)]
        if isinstance(node, ScalarNode):
            return self._scalar(node, keys)
        raise self._error(f"has a tag that is not supported: {printable(node.tag)}", node, keys)

    def _mapping(self, node: MappingNode, keys: Keys) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = self._key(key_node, keys)
            if key in values:
                first = self.lines[(*keys, key)].key
                raise self._error(f"duplicate key {quoted(key)}, first in line {first}", key_node, keys)
            key_line = _line_of(key_node)
            line = _line_of(value_node) if isinstance(value_node, ScalarNode) else key_line
            self.lines[(*keys, key)] = _Lines(key=key_line, value=line)
            values[key] = self._value(value_node, (*keys, key))
        return values

    def _item(self, node: Node, keys: Keys) -> Any:
        self.lines[keys] = _Lines(key=_line_of(node), value=_line_of(node))
        return self._value(node, keys)

    def _key(self, node: Node, keys: Keys) -> str:
        if node.tag == "tag:yaml.org,2002:merge":
            raise self._error("merge keys (<<) are not supported: repeat the keys", node, keys)
        if not isinstance(node, ScalarNode):
            raise self._error("a key must be text, not a collection", node, keys)
        key = self._scalar(node, keys)
        if not isinstance(key, str):
            raise self._error(f"key {node.value} must be text: put it in quotes", node, keys)
        return key

    def _scalar(self, node: ScalarNode, keys: Keys) -> Any:
        kind = node.tag.removeprefix("tag:yaml.org,2002:")
        text: str = node.value
        if kind in ("str", "merge"):
            try:  # JSON's escapes write one character as two surrogates
                return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
            except UnicodeDecodeError:
                raise self._error("holds a lone surrogate, which is no text", node, keys) from None
        pattern = next(
            (p for tag, p in _Loader.yaml_implicit_resolvers.get(text[:1], []) if tag == node.tag), None
        )
        if kind not in _SCALARS or pattern is None or not pattern.match(text):
            raise self._error(f"has a tag that is not supported here: {printable(node.tag)}", node, keys)
        try:
            value = _SCALARS[kind](text)
        except ValueError:
            raise self._error("is a number with too many digits", node, keys) from None
        if isinstance(value, int) and value.bit_length() > _MAX_BITS:
            raise self._error("is a number with too many digits", node, keys)
        if isinstance(value, float) and not math.isfinite(value):
            raise self._error(f"{text} is no finite number; text needs quotes", node, keys)
        return value

    def _error(self, message: str, node: Node, keys: Keys) -> ConfigError:
        where = f"{_dotted(keys)}: " if keys else ""
        return ConfigError(f"{where}{message}", file=self._path, line=_line_of(node))


_MAX_BITS = 10_000  # Python prints no number that is much longer
_SCALARS: Mapping[str, Any] = {
    "null": lambda _: None,
    "bool": lambda text: text.lower() == "true",
    "int": lambda text: int(text, 0),
    "float": lambda text: float(re.sub(r"\.(inf|nan)", r"\1", text.lower())),
}


def _read(path: Path) -> str:
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ConfigError("is not a regular file", file=path)
        with path.open("rb") as file:
            raw = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", file=path) from error
    if len(raw) > _MAX_FILE_BYTES:
        raise ConfigError(f"is larger than {_MAX_FILE_BYTES // 1024} KiB", file=path)
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError("is not UTF-8", file=path, line=raw.count(b"\n", 0, error.start) + 1) from None


# Wording


def _line_of(node: Node) -> int:
    line: int = node.start_mark.line
    return line + 1


def _dotted(keys: Keys) -> str:
    text = ""
    for key in keys:
        if isinstance(key, int):
            text += f"[{key}]"
        else:
            shown = key if re.fullmatch(r"[A-Za-z0-9_-]{1,98}", key) else quoted(key)
            text += f".{shown}" if text else shown
    return text
