"""Where the commands around a run come to its estimate: before it, and in what is said of it afterwards.

What estimating needs is imported only for runs that there is something to estimate of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.cli.terminal import Screen
from orchestrator.runs import Report
from orchestrator.starting import Plan
from orchestrator.workspace import Workspace

if TYPE_CHECKING:
    from orchestrator.cli.predicting import Beside


@contextmanager
def estimating(
    workspace: Workspace,
    plans: Sequence[Plan],
    screen: Screen,
    *,
    is_wanted: bool,
    file: Path | None = None,
) -> Iterator[Callable[[Callable[[], bool]], None]]:
    """Estimates in the background while it is open; yields what is called once the runs are started, to say
    what came of it, with what tells whether they have ended. ``file`` is the experiment's.
    """
    if not is_wanted or not any(plan.job["devices"] and plan.job.get("module") for plan in plans):
        yield lambda _: None
        return
    from orchestrator.cli.predicting import Predictor  # noqa: PLC0415

    with Predictor(workspace, plans, screen, file) as predictor:
        yield predictor.tell


def beside_measured(workspace: Workspace, report: Report) -> Beside | None:
    """Returns what was predicted of a run beside what it told; None where nothing was."""
    if not workspace.folder(report.row.run_id).has_prediction:
        return None
    from orchestrator.cli.predicting import Beside  # noqa: PLC0415

    return Beside.of(workspace, report)
