"""Cases that may not fit: an out-of-memory error, or any other failure, becomes a value.

Knows the texts with which torch's allocators refuse. What a case allocated is given back before and after.
"""

import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from dflash.platforms import simulation
from dflash.probes.work.machine import GIB, Machine

T = TypeVar("T")

MISTAKES = (AssertionError, AttributeError, LookupError, NameError, TypeError)  # of who wrote the case

_BYTES = {"": 1, "bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_ASKED = re.compile(r"tried to allocate ([\d.]+) ?(bytes|[KMGT]iB)", re.IGNORECASE)
_NO_MEMORY = re.compile(r"out of memory|not enough memory|can't allocate memory|ALLOC_FAILED", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Why a case did not run; `asked_gib` is the allocation that was refused, where one is told."""

    message: str
    is_out_of_memory: bool
    asked_gib: float | None = None

    def __str__(self) -> str:
        """Return it for a table."""
        if not self.is_out_of_memory:
            return f"failed: {self.message}"
        return "out of memory" + ("" if self.asked_gib is None else f": asked {self.asked_gib:.2f} GiB")


def try_case(machine: Machine, case: Callable[[], T]) -> T | Failure:
    """Return what the case returns, or why it failed."""
    machine.release()
    try:
        return _outcome(case)
    finally:
        # The error, whose frames hold the case's tensors, is gone by now.
        machine.release()


def _outcome(case: Callable[[], T]) -> T | Failure:
    try:
        return case()
    except MISTAKES:
        raise
    except Exception as error:  # compilers raise what they like
        if simulation() is not None:
            raise  # in a simulation nothing runs out, and nothing may pass for a result
        failure = explain(error)
        if not failure.is_out_of_memory:
            traceback.print_exc()
        return failure


def explain(error: Exception) -> Failure:
    """Return an error as a failure."""
    text = " ".join(str(error).split())
    is_out_of_memory = (
        isinstance(error, torch.OutOfMemoryError | MemoryError) or _NO_MEMORY.search(text) is not None
    )
    asked = _ASKED.search(text)
    return Failure(
        message=f"{type(error).__name__}: {text[:200]}",
        is_out_of_memory=is_out_of_memory,
        asked_gib=None if asked is None else float(asked[1]) * _unit(asked[2]) / GIB,
    )


def _unit(name: str) -> int:
    return next(size for unit, size in _BYTES.items() if unit.lower() == name.lower())
