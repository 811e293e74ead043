"""What `orch gc` removed and kept, as a table, as one line in sum, and as JSON (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table
from rich.text import Text

from orchestrator.cleaning import Item
from orchestrator.text import printable, size_text


def cleaning_table(items: Iterable[Item], *, is_real: bool) -> Table:
    """Returns one line for each thing; what goes comes first."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("WHERE")
    table.add_column("WHAT", no_wrap=True)
    table.add_column("NAME", no_wrap=True)
    table.add_column("AGE")
    table.add_column("SIZE", justify="right")
    table.add_column("")
    going = "removed" if is_real else "would go"
    for item in sorted(items, key=lambda item: not item.goes):
        age = "-" if item.age_s is None else _age(item.age_s)
        says = going if item.goes else f"stays: {item.why}"
        texts = (item.place, item.what, _short(item.name), age, size_text(item.size_bytes), says)
        table.add_row(*(Text(printable(text), style="" if item.goes else "dim") for text in texts))
    return table


def cleaning_sum(items: Sequence[Item], *, is_real: bool) -> str:
    """Returns what all of it comes to."""
    going = [item for item in items if item.goes]
    size = size_text(sum(item.size_bytes for item in going))
    runs = sum(item.what in ("run", "mirror") for item in going)
    if is_real:
        return f"removed {size}, {runs} runs among it"
    return f"{size} would go, {runs} runs among it; nothing was removed: --yes does it"


def item_json(item: Item) -> dict[str, Any]:
    """Returns an item's fields, and whether it goes."""
    return {**asdict(item), "goes": item.goes}


def _short(name: str) -> str:
    return name[:16] or "-"


def _age(age_s: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if age_s >= size:
            return f"{age_s / size:.0f}{unit}"
    return f"{max(0.0, age_s):.0f}s"
