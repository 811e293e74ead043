"""A probe as a program: parameters first, then the work, and an exit code.

The work loads torch, which takes seconds, so it is imported only when the parameters have been accepted.

Exit codes: 0 the probe has its answer, 1 an error (out of memory included) or nothing fits, 2 a parameter is
refused, 3 no such device.
"""

import sys
from collections.abc import Callable, Sequence
from typing import ClassVar, TypeVar

from dflash.probes.params import parse_params

T = TypeVar("T")


class CannotStart(Exception):
    """The machine cannot do what the parameters ask for; nothing has been allocated yet."""

    exit_code: ClassVar[int]


class LimitTooLarge(CannotStart):
    """The memory limit cannot be simulated on this card."""

    exit_code = 2


class NoSuchDevice(CannotStart):
    """The device that was asked for is not there."""

    exit_code = 3


def run_program(
    cls: type[T], argv: Sequence[str] | None, *, program: str, description: str, work: Callable[[T], int]
) -> int:
    """Parse the parameters, work, and return the exit code.

    Raises:
        SystemExit: after `--help`, or with 2 when a parameter is refused.
    """
    arguments = sys.argv[1:] if argv is None else argv
    params = parse_params(cls, arguments, program=program, description=description)
    try:
        return work(params)
    except CannotStart as error:
        print(f"{program}: {error}", file=sys.stderr)
        return error.exit_code
