"""Values of JSON that a host or a payload told, believed only as far as their types go (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["MOST_BYTES", "items", "mappings", "scaled_size", "size", "text"]

MOST_BYTES = 2**63


def size(value: Any) -> int | None:
    """Returns a whole number that a 64-bit column holds and that is not negative; a bool is none."""
    return value if type(value) is int and 0 <= value < MOST_BYTES else None


def scaled_size(value: Any, unit_bytes: int) -> int | None:
    """Returns a number of units as bytes, where that is a size; not of what is infinite or no number."""
    if type(value) not in (int, float):
        return None
    size_bytes = value * unit_bytes
    return int(size_bytes) if 0 <= size_bytes < MOST_BYTES else None


def text(value: Any) -> str | None:
    """Returns a string as it is."""
    return value if isinstance(value, str) else None


def items(value: Any, most: int | None = None) -> list[Any]:
    """Returns the first so many items of a list, none of anything else."""
    return value[:most] if isinstance(value, list) else []


def mappings(value: Any, most: int | None = None) -> list[Mapping[str, Any]]:
    """Returns the objects among the first so many items of a list."""
    return [item for item in items(value, most) if isinstance(item, Mapping)]
