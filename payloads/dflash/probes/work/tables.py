"""How a probe tells its results: metrics as events, and a table for whoever reads the log."""

from collections.abc import Mapping, Sequence

from dflash.events import emit_metric


def emit(case: str, values: Mapping[str, float]) -> None:
    """Send each value as the metric `case.name`."""
    for name, value in values.items():
        emit_metric(f"{case}.{name}", value)


def print_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print columns under their titles; the last one may be of any length."""
    lines = [titles, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(titles))]
    print()
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        print("  ".join(cells).rstrip())
    print(flush=True)


def title(metric: str) -> str:
    """Return a metric's name as a column's title: "peak_reserved_gib" becomes "peak reserved GiB"."""
    return metric.replace("_gib", " GiB").replace("_", " ")


def shown(values: Mapping[str, float], name: str, digits: int = 2) -> str:
    """Return a value as a table's cell, "-" where there is none."""
    return f"{values[name]:.{digits}f}" if name in values else "-"
