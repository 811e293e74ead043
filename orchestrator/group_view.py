"""The runs of a group as one table and as JSON values, and what they come to (pure).

Each run stands in its place with its case, host, verdict and metrics. A run that was retried in its group is
shown and does not count: its retry does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from rich.table import Table

from orchestrator.errors import OrchError, RecordsAltered
from orchestrator.ledger import RunRow
from orchestrator.lifecycle import is_terminal
from orchestrator.runs import Report
from orchestrator.text import printable
from orchestrator.views import plain, summary_json, took, verdict_style

MOST_METRICS = 6


def group_table(reports: Sequence[Report], *, now_t: float) -> Table:
    """Returns one line for each run, with the metrics that the experiment judges."""
    metrics = shown_metrics(reports)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("CASE", "HOST", "RUN", "STATE", "VERDICT", "TOOK", "EXIT", *metrics):
        table.add_column(
            plain(title), no_wrap=title == "RUN", justify="right" if title in metrics else "left"
        )
    for report in reports:
        row = report.row
        verdict = row.verdict or "-" if report.verdict is None else report.verdict.name
        table.add_row(
            plain(case_of(row)),
            plain(row.host),
            plain(row.run_id),
            plain(row.state),
            plain(verdict, style=verdict_style(report.verdict)),
            plain(took(row, now_t)),
            plain(_exit(report)),
            *(plain(_value(report.outcome.metrics.get(name))) for name in metrics),
        )
    return table


def group_notes(reports: Sequence[Report]) -> list[str]:
    """Returns why runs are not good, one line for those of a host that have the same reasons; and how many
    metrics have no column.
    """
    alike: dict[tuple[str, str], list[RunRow]] = {}
    for report in reports:
        verdict = report.verdict
        if verdict is not None and not verdict.is_good and verdict.reasons:
            alike.setdefault((report.row.host, "; ".join(verdict.reasons)), []).append(report.row)
    lines = []
    for (host, reasons), rows in alike.items():
        more = f" and {len(rows) - 1} more" if len(rows) > 1 else ""
        text = f"{case_of(rows[0])}{more} on {host}: {reasons.removeprefix(f'{host}: ')}"
        lines.append(printable(text))
    left_out = len(_metric_names(reports)) - len(shown_metrics(reports))
    return [*lines, f"{left_out} more metrics: --json shows them"] if left_out > 0 else lines


def group_json(
    group_id: str,
    reports: Sequence[Report],
    predictions: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> dict[str, Any]:
    """Returns what `group_table` shows and each run's whole summary; ``predictions`` are by run."""
    return {
        "group_id": group_id,
        "exit_code": group_exit_code(reports),
        "runs": [
            {
                "case": report.row.job.get("case"),
                **summary_json(
                    report.row,
                    report.outcome,
                    report.verdict,
                    report.observed,
                    prediction=predictions.get(report.row.run_id),
                ),
            }
            for report in reports
        ],
    }


def group_exit_code(reports: Iterable[Report]) -> int:
    """Returns 0 when every run that counts is good, 5 for altered records, 3 when only hosts are at fault."""
    bad = {report.exit_code for report in _counting(reports)} - {0}
    if RecordsAltered.exit_code in bad:
        return RecordsAltered.exit_code
    return OrchError.exit_code if len(bad) > 1 else next(iter(bad), 0)


def group_tally(reports: Iterable[Report]) -> str:
    """Returns how many of the runs that count stand how, such as "3 ok, 1 running"."""
    counts: dict[str, int] = {}
    for report in _counting(reports):
        has_ended = report.verdict is not None and is_terminal(report.row.state)
        name = report.verdict.name if has_ended and report.verdict is not None else str(report.row.state)
        counts[name] = counts.get(name, 0) + 1
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def case_of(row: RunRow) -> str:
    """Returns a case's label, or the experiment's name where nothing varies; a retry says so."""
    label = str(row.job.get("case") or row.experiment)
    return label if row.retry_of is None else f"{label}, retry of {row.retry_of[:8]}"


def shown_metrics(reports: Sequence[Report]) -> list[str]:
    """Returns the names that get a column, at most 6: those with bounds, or else those that differ."""
    names = _metric_names(reports)
    bounded = {name for report in reports for name in _bounds(report)}
    cases = [report for report in reports if not report.row.job.get("prepares")]
    values = {name: {str(report.outcome.metrics.get(name)) for report in cases} for name in names}
    judged = [name for name in names if name in bounded]
    return (judged or [name for name in names if len(values[name]) > 1] or names)[:MOST_METRICS]


def _metric_names(reports: Sequence[Report]) -> list[str]:
    return list(dict.fromkeys(name for report in reports for name in report.outcome.metrics))


def _bounds(report: Report) -> Iterable[str]:
    expect = report.row.job.get("expect")
    metrics = expect.get("metrics") if isinstance(expect, dict) else None
    return metrics if isinstance(metrics, dict) else ()


def _counting(reports: Iterable[Report]) -> list[Report]:
    """Returns the runs in whose place no retry stands, and of several retries of one run the newest; a retry
    that a host tells of stands for none of ours.
    """
    reports = list(reports)
    ours = {report.row.run_id for report in reports if not report.row.is_adopted}
    retries = {
        report.row.run_id: report.row.retry_of
        for report in reports
        if report.row.retry_of and not (report.row.is_adopted and report.row.retry_of in ours)
    }
    own = {run_id: retried_id for run_id, retried_id in retries.items() if run_id in ours}
    retried = set(retries.values())
    newest: dict[str, Report] = {}
    for report in reports:
        if report.row.run_id not in retried:
            first = _first(report.row.run_id, retries if report.row.is_adopted else own)
            newest[first] = max(report, newest.get(first, report), key=_precedence)
    counting = {report.row.run_id for report in newest.values()}
    return [report for report in reports if report.row.run_id in counting]


def _first(run_id: str, retries: Mapping[str, str]) -> str:
    """Returns the run that a chain of retries begins with; what a host tells may go in a circle."""
    seen = {run_id}
    while run_id in retries and retries[run_id] not in seen:
        run_id = retries[run_id]
        seen.add(run_id)
    return run_id


def _precedence(report: Report) -> tuple[bool, float]:
    return not report.row.is_adopted, report.row.created_t


def _exit(report: Report) -> str:
    row = report.row
    if row.signal is not None:
        return f"signal {row.signal}"
    return "-" if row.exit_code is None else str(row.exit_code)


def _value(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.6g}" if math.isfinite(value) else str(value)
