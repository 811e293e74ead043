"""What a benchmark found: figures with the bar that they must reach, as a table and as JSON."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

__all__ = ["Figure", "at_least", "at_most", "percentile", "save", "table"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One figure; ``bar`` reads ``<= 2.2`` or ``>= 80``, and ``beside`` holds what else was measured."""

    name: str
    value: float
    unit: str
    bar: str = ""
    is_met: bool | None = None
    beside: dict[str, float] = field(default_factory=dict)
    note: str = ""


def at_most(limit: float, *, name: str, value: float, unit: str, note: str = "", **beside: float) -> Figure:
    """Returns a figure that must not pass ``limit``."""
    is_met = value <= limit
    return Figure(
        name=name, value=value, unit=unit, bar=f"<= {limit:g}", is_met=is_met, beside=beside, note=note
    )


def at_least(limit: float, *, name: str, value: float, unit: str, note: str = "", **beside: float) -> Figure:
    """Returns a figure that must reach ``limit``."""
    is_met = value >= limit
    return Figure(
        name=name, value=value, unit=unit, bar=f">= {limit:g}", is_met=is_met, beside=beside, note=note
    )


def percentile(values: Sequence[float], percent: int) -> float:
    """Returns the value that ``percent`` of 100 do not pass."""
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def table(figures: Iterable[Figure]) -> str:
    """Returns one line for each figure."""
    marks = {True: "ok", False: "MISSED", None: ""}
    rows = [("what", "found", "must be", "", "beside it")]
    for figure in figures:
        beside = ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in figure.beside.items())
        found = f"{figure.value:.4g} {figure.unit}".strip()
        told = "; ".join(filter(None, (beside, figure.note)))
        rows.append((figure.name, found, figure.bar, marks[figure.is_met], told))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [
        "  ".join((*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]))
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)


def save(figures: Sequence[Figure], path: Path, *, load_before: float) -> None:
    """Writes the figures, and what they were found on, as JSON."""
    machine = {
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "system": platform.platform(),
        "python": sys.version.split()[0],
        "load_before": load_before,
        "load_after": os.getloadavg()[0],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"on": machine, "figures": [asdict(figure) for figure in figures]}, indent=2))
