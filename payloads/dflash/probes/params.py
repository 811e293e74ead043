"""A probe's command line: `--params FILE` and repeated `--set KEY=VALUE` become one frozen dataclass.

A value is JSON, or a plain string where it is not JSON. `--set` wins over the file. Loads without torch, so
that a mistyped name is refused at once.
"""

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from dflash.values import build

T = TypeVar("T")


def parse_params(cls: type[T], argv: Sequence[str], *, program: str, description: str) -> T:
    """Return the parameters that the command line asks for.

    Raises:
        SystemExit: 0 after `--help`; 2 with one line on stderr when anything is unknown or refused.
    """
    parser = _parser(cls, program, description)
    arguments = parser.parse_args(argv)
    try:
        return build(cls, read_values(arguments.params, arguments.set), what="parameter")
    except ValueError as error:
        parser.error(str(error))


class OneLineParser(argparse.ArgumentParser):
    """A parser that says what it refuses in one line."""

    def error(self, message: str) -> NoReturn:
        """Leave with 2."""
        self.exit(2, f"{self.prog}: {message}\n")


def add_value_options(parser: argparse.ArgumentParser) -> None:
    """Add the two options that parameters come by."""
    parser.add_argument("--params", type=Path, metavar="FILE", help="a JSON object of parameters")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="one parameter; wins over the file"
    )


def read_values(file: Path | None, assignments: Sequence[str]) -> dict[str, object]:
    """Return the values of a file and of assignments, as loose as they are.

    Raises:
        ValueError: the file is no JSON object, an assignment is none, or a name is given twice.
    """
    return (_read_file(file) if file else {}) | _assignments(assignments)


def _parser(cls: Any, program: str, description: str) -> argparse.ArgumentParser:
    defaults = "\n".join(f"  {field.name} = {_shown(field)}" for field in dataclasses.fields(cls))
    parser = OneLineParser(
        prog=program,
        description=description,
        epilog=f"parameters and defaults:\n{defaults}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_value_options(parser)
    return parser


def _shown(field: "dataclasses.Field[Any]") -> str:
    return "(required)" if field.default is dataclasses.MISSING else json.dumps(field.default)


def _read_file(path: Path) -> dict[str, object]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_without_duplicates)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except RecursionError:
        raise ValueError(f"{path}: is nested too deep") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(values, dict):
        message = f"{path}: expected a JSON object of parameters, found {type(values).__name__}"
        raise ValueError(message)  # noqa: TRY004  a user's mistake
    return values


def _assignments(assignments: Sequence[str]) -> dict[str, object]:
    pairs = []
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals or not name:
            raise ValueError(f"--set {assignment!r} is not KEY=VALUE")
        pairs.append((name, _json_or_text(text)))
    return _without_duplicates(pairs)


def _json_or_text(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text
    except RecursionError:
        raise ValueError("--set holds a value that is nested too deep") from None


def _without_duplicates(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    values: dict[str, object] = {}
    for name, value in pairs:
        if name in values:
            raise ValueError(f"{name} is given twice")
        values[name] = value
    return values
