"""Which large tensors does a configuration make, and how large is each? An answer for programs, in JSON.

    python -m dflash.shapes --params params.json                 # those of one file of a probe's parameters
    python -m dflash.shapes --params a.json --params b.json      # of several, one set for each

One JSON object, `{"format": 1, "sets": [{"tensors": […], "notes": […], "unknown": […], "misspelt": […]}]}`,
a set for each file, in their order; `unknown` are the parameters that no probe has, `misspelt` a sentence for
each that is nearly one. A tensor has `name`, `category`, `dtype`, `dims` (each with `name`, `expression`,
`value`, the expression in `numbers`, and `free`, the quantity in it that the parameters leave open: bounds,
factor and offset), `bytes`, `applies` (whether this configuration makes it), `when`, `count`, `born` (a
function of the payload), `remedy` (parameters that avoid or shrink it, or null) and `notes`.
`dflash.catalogue` says more. Loads without torch.

Exit codes: 0 answered, 2 a parameter is refused.
"""

import json
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from dflash.catalogue import attention, states, vocabulary, weights
from dflash.catalogue.parameters import Parameters, misspelt, read_parameters
from dflash.catalogue.rows import Row, rows_of
from dflash.catalogue.terms import Shape, Term
from dflash.probes.params import OneLineParser, read_values

PARTS = (weights, states, attention, vocabulary)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the answer and return the exit code.

    Raises:
        SystemExit: after `--help`, or with 2 when a file or a parameter is refused.
    """
    parser = OneLineParser(
        prog="dflash.shapes", description="List the large tensors of configurations.", allow_abbrev=False
    )
    parser.add_argument(
        "--params",
        action="append",
        required=True,
        type=Path,
        metavar="FILE",
        help="a JSON object of parameters; repeat it for several",
    )
    files = parser.parse_args(argv).params
    try:
        sets = [_of_file(path) for path in files]
    except ValueError as error:
        parser.error(str(error))
    print(json.dumps({"format": 1, "sets": sets}))
    return 0


def set_of(values: Mapping[str, object]) -> dict[str, Any]:
    """Return a probe's parameters as one set of the answer.

    Raises:
        ValueError: a value has the wrong type or is out of range.
    """
    parameters, unknown = read_parameters(values)
    notes = [f"ignored, as no probe has them: {', '.join(unknown)}"] if unknown else []
    return {
        "tensors": [_tensor(shape) for shape in shapes_of(parameters)],
        "notes": notes,
        "unknown": list(unknown),
        "misspelt": misspelt(unknown),
    }


def shapes_of(parameters: Parameters) -> list[Shape]:
    """Return every tensor of every configuration and row of the parameters, each size once."""
    found: dict[tuple[object, ...], Shape] = {}
    for configuration in parameters.configurations():
        for row in rows_of(configuration):
            for shape in _of_row(row):
                key = shape.name, shape.dtype, shape.values
                if key not in found or shape.applies > found[key].applies:
                    found[key] = shape
    return list(found.values())


def _of_file(path: Path) -> dict[str, Any]:
    values = read_values(path, [])
    try:
        return set_of(values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _of_row(row: Row) -> Iterator[Shape]:
    for part in PARTS:
        yield from (_with_what_helps(shape, row.parameters) for shape in part.shapes(row))


def _with_what_helps(shape: Shape, parameters: Parameters) -> Shape:
    """Leave out of a remedy what is so already."""
    so = [
        ("attention", parameters.backend),
        *((name, getattr(parameters, name)) for name in shape.remedy or ()),
    ]
    remedy = {name: value for name, value in (shape.remedy or {}).items() if (name, value) not in so}
    return replace(shape, remedy=remedy or None)


def _tensor(shape: Shape) -> dict[str, Any]:
    return {
        "name": shape.name,
        "category": shape.category,
        "dtype": shape.dtype,
        "dims": [_dimension(name, size) for name, size in shape.dims],
        "bytes": shape.size_bytes,
        "applies": shape.applies,
        "when": shape.when,
        "count": shape.count,
        "born": shape.born,
        "remedy": shape.remedy,
        "notes": list(shape.notes),
    }


def _dimension(name: str, size: Term) -> dict[str, Any]:
    values: dict[str, Any] = {"name": name, "expression": size.expression, "value": size.value}
    if size.numbers != str(size.value):
        values["numbers"] = size.numbers
    if size.free is not None:
        values["free"] = asdict(size.free)
    return values


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it without a word
    sys.exit(main())
