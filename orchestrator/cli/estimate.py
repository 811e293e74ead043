"""``orch estimate``: what an experiment's runs will hold on a card, before there is one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from threading import Event

import click

from orchestrator import starting
from orchestrator.cli.leaving import Left, leaving
from orchestrator.cli.options import inventory_option, json_option, open_workspace
from orchestrator.cli.terminal import Screen, show
from orchestrator.errors import ProgramFailed, UsageError
from orchestrator.estimate_view import (
    MOST_NOTES,
    alternatives_table,
    cases_table,
    categories_table,
    estimate_line,
    failure_text,
    forecast_json,
    largest_table,
    phases_table,
    provenance_text,
)
from orchestrator.experiment import Experiment, load_experiment
from orchestrator.following import Watcher
from orchestrator.host_cards import HostCard, last_card
from orchestrator.payload_answers import UNFIT, Estimate
from orchestrator.payload_programs import ESTIMATE, Question, has_program
from orchestrator.predicting import Forecast, equal_ones, forecasts
from orchestrator.remote_estimate import estimate_on
from orchestrator.text import check_text, printable
from orchestrator.workspace import Workspace


@click.command()
@click.argument("experiment", metavar="FILE", type=click.Path(path_type=Path))
@click.option("--profile", metavar="P", help="One of the experiment's profiles.")
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change a parameter; repeatable."
)
@click.option("--card", metavar="CARD", help="Such as rtx-pro-6000, h200, or 96GiB:sm_120.")
@click.option("--host", "host_name", metavar="NAME", help="The card that runs on this host have told of.")
@click.option(
    "--on-host", "maker_name", metavar="NAME", help="Estimate there, as a run of its own; implies --host."
)
@click.option("--alternatives", "has_alternatives", is_flag=True, help="Also what changes would come to.")
@inventory_option
@json_option
def estimate(
    experiment: Path,
    profile: str | None,
    overrides: tuple[str, ...],
    card: str | None,
    host_name: str | None,
    maker_name: str | None,
    has_alternatives: bool,
    inventory: Path | None,
    as_json: bool,
) -> int:
    """Say what runs of FILE, an experiment, will hold on a card: the peak, who holds it, whether it fits.

    Nothing runs and no card is needed: the payload's own program follows its code without computing, in the
    interpreter that `estimate: {python: PATH}` of inventory.yaml names, or in the one that runs orch. Of a
    matrix each case is estimated.

    Exit code 1 when a case does not fit, 2 when a parameter is refused, 3 when it cannot be estimated.
    """
    with open_workspace(inventory) as workspace:
        loaded = load_experiment(experiment, profile=profile, overrides=overrides)
        known = None
        if card is not None and host_name is not None:
            raise UsageError("--card and --host both name a card: leave one out")
        if card is None and (named := host_name or maker_name) is not None:
            known = _card_of(workspace, named)
        asked = check_text("a card", card) if card is not None else None if known is None else known.text
        screen = Screen(lines_to_stderr=as_json)
        try:
            with leaving():
                cases = _estimated(workspace, loaded, asked, maker_name, screen, has_alternatives)
        except Left as left:
            screen.close()
            return left.exit_code
        return _tell(loaded, cases, known, as_json=as_json)


def _card_of(workspace: Workspace, name: str) -> HostCard | None:
    host = workspace.inventory.host(name)
    known = last_card(workspace, host.name)
    if known is None:
        Screen().note(f"{host.name}: no run here has told its card yet, so there is no verdict; see --card")
    return known


def _estimated(
    workspace: Workspace,
    experiment: Experiment,
    card: str | None,
    maker_name: str | None,
    screen: Screen,
    has_alternatives: bool,
) -> list[tuple[Experiment, Forecast]]:
    """Returns each case with what came of it; equal ones are estimated once."""
    bundle = starting.bundle_of(workspace, experiment)
    if not has_program(bundle, experiment.module, ESTIMATE):
        program = f"{experiment.payload}/{ESTIMATE}.py"
        raise UsageError(
            f"{experiment.name}: its payload ships no {program}, which would tell; ship one that answers "
            f"`python -m {experiment.payload}.{ESTIMATE} --entry MODULE --params FILE --json`"
        )
    cases = [*experiment.cases()]
    questions = [_question(case, card, has_alternatives) for case in cases]
    found: dict[int, Forecast] = {}

    def told(place: int, forecast: Forecast) -> None:
        found[place] = forecast
        screen.status(f"{len(found)} of {len(questions)} estimated")

    screen.status("estimating")
    if maker_name is None:
        forecasts(workspace, bundle, questions, told, Event())
    else:
        for places in equal_ones(questions):
            forecast = _made_there(workspace, experiment, questions[places[0]], maker_name, screen)
            for place in places:
                told(place, forecast)
    screen.close()
    return [(case, found[place]) for place, case in enumerate(cases)]


def _question(case: Experiment, card: str | None, has_alternatives: bool) -> Question:
    assert case.module is not None
    return Question(
        entry=case.module,
        params=case.params,
        card=card,
        alloc_conf=case.alloc_conf,
        memory_limit_bytes=case.memory_limit_bytes,
        has_alternatives=has_alternatives,
    )


def _made_there(
    workspace: Workspace, experiment: Experiment, question: Question, maker_name: str, screen: Screen
) -> Forecast:
    host = workspace.inventory.host(maker_name)
    try:
        made, run_id = estimate_on(workspace, experiment, question, host, Watcher())
    except (UsageError, ProgramFailed) as error:
        return Forecast(question=question, error=error)
    if run_id is not None:
        screen.note(f"estimated by run {run_id} on {host.name}")
    return Forecast(question=question, estimate=made)


def _tell(
    experiment: Experiment,
    cases: Sequence[tuple[Experiment, Forecast]],
    known: HostCard | None,
    *,
    as_json: bool,
) -> int:
    code = _exit_code([forecast for _, forecast in cases])
    if as_json:
        told = [forecast_json(case.case, forecast) for case, forecast in cases]
        print(json.dumps({"experiment": experiment.name, "exit_code": code, "cases": told}, indent=2))
        return code
    (case, first), *others = cases
    if others or first.estimate is None:
        if not others and first.error is not None:
            raise first.error
        show(cases_table([(case.case or case.name, forecast) for case, forecast in cases]))
        distinct = {id(forecast): forecast.estimate for _, forecast in cases if forecast.estimate}
        print(printable(provenance_text(distinct.values())))
        return code
    _show_one(case, first.estimate, known)
    return code


def _show_one(case: Experiment, made: Estimate, known: HostCard | None) -> None:
    """Prints all that one estimate says."""
    name = None if known is None else known.name
    print(printable(f"{case.name}: {estimate_line(made, name)}"))
    if made.failure is not None:
        print(printable(f"fails: {failure_text(made.failure)}"))
    tables = [phases_table(made), categories_table(made), largest_table(made)] if made.phases else []
    tables += [alternatives_table(made, made.alternatives)] if made.alternatives else []
    for table in tables:
        print()
        show(table)
    print()
    for note in filter(None, (provenance_text([made]), *made.notes[:MOST_NOTES])):
        print(printable(note))


def _exit_code(found: Sequence[Forecast]) -> int:
    codes = {forecast.error.exit_code for forecast in found if forecast.error is not None}
    if codes:
        return UsageError.exit_code if UsageError.exit_code in codes else max(codes)
    unfit = any(forecast.estimate and forecast.estimate.verdict == UNFIT for forecast in found)
    return 1 if unfit else 0
