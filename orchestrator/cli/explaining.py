"""Why memory was out, in a few lines at a run's end."""

from __future__ import annotations

from orchestrator import explaining
from orchestrator.cli.terminal import Screen
from orchestrator.errors import OrchError
from orchestrator.explain_view import MOST_SHORT_LINES, short_lines
from orchestrator.runs import Report
from orchestrator.text import printable
from orchestrator.workspace import Workspace

__all__ = ["explain_shortly"]

PATIENCE_S = 5.0  # for reading what a run printed


def explain_shortly(
    workspace: Workspace, report: Report, screen: Screen, *, most_lines: int = MOST_SHORT_LINES
) -> bool:
    """Writes why memory was out of a run that died so, in a few lines, and nothing of another run; tells
    whether it did. What cannot be explained keeps nobody from the run's own summary.
    """
    if not explaining.may_have_died_of_memory(report.row, report.outcome):
        return False
    run_id = report.row.run_id
    try:
        found = explaining.explain_run(workspace, run_id, patience_s=PATIENCE_S)
        lines = [] if found.explanation is None else short_lines(found.explanation, run_id, most_lines)
    except OrchError as error:
        screen.note(f"cannot explain why memory was out: {error}")
        return False
    except Exception as error:  # noqa: BLE001  (a fault of ours, or a host's odd word: the summary comes first)
        what = printable(f"{type(error).__name__}: {error}")[:300]
        screen.note(f"cannot explain why memory was out: {what}")
        return False
    if not lines:
        return False
    for line in lines:
        screen.line(line)
    screen.flush()
    return True
