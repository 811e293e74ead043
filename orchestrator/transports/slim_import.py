"""Imports fabric without what it never uses here.

invoke, on which fabric and paramiko build, imports ``unittest.mock`` (and with it asyncio: a third of the
time of it all) for ``MockContext``, a class for the tests of programs that use it. A stand-in answers that
one import and goes again, so that whoever asks for ``unittest.mock`` later gets the real one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

__all__ = ["without_mock"]

_MOCK = "unittest.mock"


@contextmanager
def without_mock() -> Iterator[None]:
    """Answers ``from unittest.mock import Mock`` with a class that nobody can use."""
    if _MOCK in sys.modules or "invoke" in sys.modules:
        yield
        return
    stand_in = ModuleType(_MOCK)
    stand_in.Mock = None  # type: ignore[attr-defined]  # a module of our own making
    sys.modules[_MOCK] = stand_in
    try:
        yield
    finally:
        if sys.modules.get(_MOCK) is stand_in:
            del sys.modules[_MOCK]
