"""Command lines of the data programs: a frozen dataclass whose fields are options.

    --max-new-tokens 192        the field max_new_tokens; values are JSON, or text where the field is text
    --prompts a --prompts b     a field of several values
    --params FILE, --set K=V    the same fields as `orch` hands them over; an option wins over both

A field's `help` stands in its metadata.
"""

import argparse
import dataclasses
import json
from collections.abc import Sequence
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from dflash.probes.params import OneLineParser, add_value_options, read_values
from dflash.values import build

T = TypeVar("T")


def option(text: str, default: Any = dataclasses.MISSING) -> Any:
    """Return a field with a sentence about it; without a default it must be given."""
    return dataclasses.field(default=default, metadata={"help": text})


def parse_options(cls: type[T], argv: Sequence[str] | None, *, program: str, description: str) -> T:
    """Return what the command line asks for.

    Raises:
        SystemExit: 0 after `--help`; 2 with one line on stderr when anything is unknown, missing or refused.
    """
    parser = _parser(cls, program, description)
    arguments = vars(parser.parse_args(argv))
    try:
        values = read_values(arguments.pop("params"), arguments.pop("set"))
        return build(cls, _complete(cls, {**values, **_typed(cls, arguments)}), what="parameter")
    except ValueError as error:
        parser.error(str(error))


def _parser(cls: Any, program: str, description: str) -> argparse.ArgumentParser:
    parser = OneLineParser(prog=program, description=description, allow_abbrev=False)
    for field in dataclasses.fields(cls):
        default = "" if field.default in {dataclasses.MISSING, None, ()} else f" ({field.default})"
        parser.add_argument(
            _flag(field.name),
            action="append" if _is_several(cls, field.name) else "store",
            default=argparse.SUPPRESS,
            metavar=field.name.split("_")[-1].upper(),
            help=f"{field.metadata['help']}{default}",
        )
    add_value_options(parser)
    return parser


def _complete(cls: Any, values: dict[str, object]) -> dict[str, object]:
    for field in dataclasses.fields(cls):
        if field.default is dataclasses.MISSING and field.name not in values:
            raise ValueError(f"{_flag(field.name)} is missing: {field.metadata['help']}")
    return values


def _typed(cls: Any, arguments: dict[str, Any]) -> dict[str, object]:
    hints = get_type_hints(cls)
    return {name: _value(text, hints[name]) for name, text in arguments.items()}


def _value(text: Any, hint: Any) -> object:
    if isinstance(text, list) or str in {hint, *get_args(hint)}:
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _is_several(cls: Any, name: str) -> bool:
    return get_origin(get_type_hints(cls)[name]) is tuple


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
