"""What runs will hold, predicted before they begin and kept with them: one estimate for each question.

Knows which runs there is something to predict of. Questions are asked a few at a time, and whoever waits may
stop waiting. What an estimate says to a person is `estimate_view`'s.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from threading import Event
from typing import Any

from orchestrator import payload_programs
from orchestrator.apart import Stopped
from orchestrator.bundle import Bundle
from orchestrator.errors import NeedsTorch, OrchError
from orchestrator.host_cards import HostCard
from orchestrator.inventory import Host
from orchestrator.payload_answers import Estimate, as_json, estimate_of
from orchestrator.payload_programs import ESTIMATE, Question, answer_key, has_program
from orchestrator.run_folder import RunFolder
from orchestrator.workspace import Workspace

__all__ = [
    "Forecast",
    "Prediction",
    "equal_ones",
    "forecasts",
    "is_predictable",
    "keep",
    "kept",
    "question_of",
]

MOST_AT_ONCE = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """What came of a question: an estimate, or the error that kept it from being made."""

    question: Question
    estimate: Estimate | None = None
    error: OrchError | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """What was predicted of a run; ``card`` is the one of its host, None where it was not known."""

    estimate: Estimate
    card: HostCard | None


def is_predictable(job: Mapping[str, Any], bundle: Bundle) -> bool:
    """Tells whether there is something to predict: a module that gets cards, of a payload that can tell."""
    return bool(job.get("devices")) and has_program(bundle, job.get("module"), ESTIMATE)


def question_of(job: Mapping[str, Any], card: str | None) -> Question:
    """Returns what there is to ask about a module's run, also of one that an older orch started."""
    return Question(
        entry=job["module"],
        params=job["params"],
        card=card,
        alloc_conf=job.get("alloc_conf"),
        memory_limit_bytes=job.get("memory_limit_bytes"),
    )


def forecasts(
    workspace: Workspace,
    bundle: Bundle,
    questions: Sequence[Question],
    told: Callable[[int, Forecast], object],
    stopping: Event,
    hosts: Sequence[Host] = (),
) -> None:
    """Asks what differs among questions and tells what came of each by its place, from threads of its own, as
    it comes.

    Where torch is lacking here, what one of ``hosts`` has estimated counts. Once ``stopping`` is set nothing
    more is told.
    """
    asker = _Asker(workspace, bundle, stopping, hosts)

    def ask(places: Sequence[int]) -> None:
        with suppress(Stopped):
            forecast = asker.forecast(questions[places[0]])
            for place in places:
                told(place, forecast)

    with ThreadPoolExecutor(min(MOST_AT_ONCE, os.cpu_count() or 1)) as pool:
        try:
            list(pool.map(ask, equal_ones(questions)))
        except BaseException:
            stopping.set()
            raise


def equal_ones(questions: Sequence[Question]) -> list[list[int]]:
    """Returns the places of questions, those of equal ones together."""
    places: dict[str, list[int]] = {}
    for place, question in enumerate(questions):
        places.setdefault(answer_key(question, None), []).append(place)
    return [*places.values()]


class _Asker:
    """Knows where estimates come from, and that torch is lacking here once that is known."""

    def __init__(self, workspace: Workspace, bundle: Bundle, stopping: Event, hosts: Sequence[Host]) -> None:
        self._workspace = workspace
        self._bundle = bundle
        self._stopping = stopping
        self._hosts = hosts
        self._lacking: NeedsTorch | None = None

    def forecast(self, question: Question) -> Forecast:
        """Returns what came of a question.

        Raises:
            Stopped: nobody waits for it.
        """
        if self._stopping.is_set():
            raise Stopped
        try:
            return Forecast(question=question, estimate=self._here(question) or self._kept(question))
        except OrchError as error:
            return Forecast(question=question, error=error)

    def _here(self, question: Question) -> Estimate | None:
        if self._lacking is not None:
            return None
        try:
            return payload_programs.estimate(self._workspace, self._bundle, question, self._stopping)
        except NeedsTorch as error:
            self._lacking = error
            return None

    def _kept(self, question: Question) -> Estimate:
        for host in self._hosts:
            kept = payload_programs.kept_on(self._workspace, self._bundle, question, host)
            if kept is not None:
                return kept
        assert self._lacking is not None
        raise self._lacking


def keep(folder: RunFolder, prediction: Prediction) -> None:
    """Keeps what was predicted in the run's folder.

    Raises:
        StorageError: the disk does not take it.
    """
    card = None if prediction.card is None else prediction.card.as_json()
    folder.keep_prediction({"estimate": as_json(prediction.estimate), "card": card})


def kept(folder: RunFolder) -> Prediction | None:
    """Returns what was predicted of a run before it began."""
    found = folder.prediction or {}
    estimate = estimate_of(found.get("estimate"))
    return None if estimate is None else Prediction(estimate=estimate, card=HostCard.of(found.get("card")))
