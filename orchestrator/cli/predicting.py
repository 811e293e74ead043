"""What ``orch run`` says of memory: the prediction before a run, and what is said of it afterwards.

The estimate is made while the connection is made and code is shipped; a run never waits for it, only its view
does, and not for long.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Any, Self

from orchestrator.cli.terminal import Screen, show
from orchestrator.errors import StorageError
from orchestrator.estimate_view import (
    comparison_line,
    comparison_table,
    estimate_line,
    failure_text,
    prediction_json,
)
from orchestrator.host_cards import last_card
from orchestrator.payload_answers import UNFIT
from orchestrator.payload_programs import Question
from orchestrator.predicted import Comparison, compare
from orchestrator.predicting import Forecast, Prediction, forecasts, is_predictable, keep, kept, question_of
from orchestrator.runs import Report
from orchestrator.starting import Plan
from orchestrator.text import counted, printable
from orchestrator.workspace import Workspace

MOST_S = 15.0
AFTER_END_S = 3.0  # enough for a kept one, also of a run that is refused at once
MOST_LINES = 20
MOST_SHOWN = 300
TICK_S = 0.2

_Found = Sequence[tuple[Plan, Forecast | None]]


class Predictor:
    """Estimates in the background what planned runs will hold; a context manager that ends it."""

    def __init__(
        self, workspace: Workspace, plans: Sequence[Plan], screen: Screen, file: Path | None = None
    ) -> None:
        self._file = file
        self._workspace = workspace
        self._screen = screen
        self._plans = [plan for plan in plans if is_predictable(plan.job, plan.bundle)]
        hosts = {plan.host.name for plan in self._plans}
        self._cards = {host: last_card(workspace, host) for host in hosts}
        self._found: dict[int, Forecast] = {}  # by the place of the plan
        self._error: Exception | None = None
        self._stopping = Event()
        self._give_up_at = time.monotonic() + MOST_S
        self._thread = Thread(target=self._ask, name="estimate", daemon=True)

    def __enter__(self) -> Self:
        if self._plans:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        if self._plans:
            self._thread.join()

    def tell(self, have_ended: Callable[[], bool] = lambda: False) -> None:
        """Waits for what is not estimated yet, as long as that is bearable, and hardly where the runs have
        ended; says it, and keeps it.

        A run goes on whatever happens here: what nobody thought of is a line as well.
        """
        if not self._plans:
            return
        try:
            self._tell(have_ended)
        except Exception as error:  # noqa: BLE001  (an answer is somebody else's)
            self._screen.close()
            self._screen.note(f"estimate: not made: {_unexpected(error)}; the run goes on")

    def _tell(self, have_ended: Callable[[], bool]) -> None:
        end_wait_at = time.monotonic() + AFTER_END_S
        while self._thread.is_alive() and time.monotonic() < self._give_up_at:
            if have_ended() and time.monotonic() >= end_wait_at:
                break
            self._screen.status("estimating memory")
            self._thread.join(TICK_S)
        self._stopping.set()
        self._screen.close()
        if self._error is not None:
            raise self._error
        found = [(plan, self._found.get(place)) for place, plan in enumerate(self._plans)]
        when = "when the run ended" if have_ended() else f"after {MOST_S:g} s, the run goes on"
        for text in (*self._lines(found), *self._warnings(found, when)):
            self._screen.note(f"estimate: {text}")

    def _ask(self) -> None:
        bundle = self._plans[0].bundle  # the runs of a group have one
        hosts = list({plan.host.name: plan.host for plan in self._plans}.values())
        told = self._found.__setitem__
        try:
            forecasts(self._workspace, bundle, self._questions(), told, self._stopping, hosts)
        except Exception as error:  # noqa: BLE001  (of a thread: told by `tell`)
            self._error = error

    def _questions(self) -> list[Question]:
        cards = [self._cards[plan.host.name] for plan in self._plans]
        return [
            question_of(plan.job, None if card is None else card.text)
            for plan, card in zip(self._plans, cards, strict=True)
        ]

    def _lines(self, found: _Found) -> Iterator[str]:
        """Yields a line for each case that is estimated."""
        lines = []
        for plan, forecast in found:
            estimate = None if forecast is None else forecast.estimate
            if estimate is not None and estimate.phases:
                card = self._cards[plan.host.name]
                self._keep(plan, Prediction(estimate=estimate, card=card))
                label = f"{plan.job.get('case') or plan.job['experiment']} on {plan.host.name}: "
                name = None if card is None else card.name
                line = estimate_line(estimate, name)
                lines.append(line if len(found) == 1 else f"{label}{line}")
        yield from lines[:MOST_LINES]
        if len(lines) > MOST_LINES:
            yield f"{counted(len(lines) - MOST_LINES, 'more case')}: orch estimate shows them"

    def _keep(self, plan: Plan, prediction: Prediction) -> None:
        """Keeps a prediction with its run; where this disk does not take it, only that is lost."""
        try:
            keep(self._workspace.folder(plan.job["run_id"]), prediction)
        except StorageError as error:
            self._screen.note(f"estimate: not kept: {error}")

    def _warnings(self, found: _Found, when: str) -> Iterator[str]:
        """Yields what will not fit, and why a case is not estimated; ``when`` nobody waited any longer."""
        estimates = [forecast.estimate for _, forecast in found if forecast and forecast.estimate]
        unfit = [estimate for estimate in estimates if estimate.verdict == UNFIT]
        if unfit:
            first = next((failure_text(each.failure) for each in unfit if each.failure is not None), "")
            which = "it" if len(found) == 1 else f"{len(unfit)} of {len(found)} cases"
            what = f": {first}" if first else ""
            advice = _in_words(found[0][0], self._file, "--alternatives")
            yield f"WARNING, {which} will not fit{what}; started all the same. Next: {advice}"
        problems = dict.fromkeys(str(forecast.error) for _, forecast in found if forecast and forecast.error)
        for problem in [*problems][:MOST_LINES]:
            yield f"not made: {problem}; the run goes on, and --no-estimate asks nothing"
        late = sum(forecast is None for _, forecast in found)
        if late:
            which = "" if len(found) == 1 else f"{late} of {len(found)} cases are "
            advice = _in_words(found[0][0], self._file)
            yield f"{which}not ready {when}; to have it next time: {advice}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Beside:
    """What was predicted, and what that is worth where something was measured."""

    prediction: Prediction
    comparison: Comparison | None

    @classmethod
    def of(cls, workspace: Workspace, report: Report) -> Self | None:
        """Returns what is kept of a run's prediction and what the run told; None where nothing is."""
        prediction = kept(workspace.folder(report.row.run_id))
        if prediction is None:
            return None
        return cls(prediction=prediction, comparison=compare(prediction.estimate, report.outcome))

    @property
    def line(self) -> str:
        """For a summary."""
        return comparison_line(self.prediction, self.comparison)

    def show(self) -> None:
        """Prints predicted and measured memory category by category, where anything was measured."""
        if self.comparison is None:
            return
        print()
        show(comparison_table(self.comparison))
        if self.comparison.reason is not None:
            print(printable(f"measured categories: {self.comparison.reason}"))

    def as_json(self) -> dict[str, Any]:
        """Returns plain JSON values."""
        return prediction_json(self.prediction, self.comparison)


def _unexpected(error: Exception) -> str:
    """Returns an error that is none of ours in one line."""
    return printable(f"{type(error).__name__}: {error}")[:MOST_SHOWN]


def _in_words(plan: Plan, file: Path | None, *options: str) -> str:
    """Returns the command that estimates what was planned, as far as its experiment says it."""
    profile = plan.job.get("profile")
    words = ["--host", plan.host.name, *(() if profile is None else ("--profile", profile)), *options]
    if file is None:
        return f"`{shlex.join(['orch', 'estimate', *words])}` of its experiment, {plan.job['experiment']}"
    near = os.path.relpath(file)
    path = str(file) if near.startswith("..") else near
    return shlex.join(["orch", "estimate", path, *words])
