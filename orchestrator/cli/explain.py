"""``orch explain``: why memory was out, of a run or of a pasted message."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from threading import Timer
from typing import IO, Any

import click

from orchestrator import explaining, runs
from orchestrator.cli.options import inventory_option, json_option, open_workspace
from orchestrator.cli.terminal import Screen
from orchestrator.errors import ConfigError, HostError, UnknownName, UsageError
from orchestrator.experiment import load_experiment
from orchestrator.explain_view import explanation_json, explanation_lines, remedy_lines
from orchestrator.explaining import Explained
from orchestrator.text import quoted
from orchestrator.workspace import Workspace

READ_CHARACTERS = 1024 * 1024
MOST_PARAMS_BYTES = 1024 * 1024
QUIET_S = 2.0  # what takes longer is told of


@click.command()
@click.argument("run", metavar="[RUN]", required=False)
@click.option("--message", metavar="FILE", help="A pasted message or a whole log; - reads standard input.")
@click.option(
    "--params",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The parameters (JSON) that the message belongs to.",
)
@click.option(
    "--experiment",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The experiment that it belongs to: its payload, and its parameters where --params lacks them.",
)
@click.option("--profile", metavar="P", help="One of the experiment's profiles.")
@click.option(
    "--snapshot",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="What a snapshot of torch's allocator holds; nothing in it is run.",
)
@click.option("--no-estimate", is_flag=True, help="Do not ask the payload what would fit: quicker.")
@inventory_option
@json_option
def explain(
    run: str | None,
    message: str | None,
    params: Path | None,
    experiment: Path | None,
    profile: str | None,
    snapshot: Path | None,
    no_estimate: bool,
    inventory: Path | None,
    as_json: bool,
) -> int:
    """Explain why RUN, or a program that printed a message, ran out of memory.

    Says what was asked for, what was free, who held the rest, which tensor it was and what would fit; and
    first, where the size belongs to another recent run's parameters, that it does.

    Exit code 0 when there is something to explain, 1 when nothing says that memory was out.
    """
    _check(run, message, snapshot, {"--params": params, "--experiment": experiment, "--profile": profile})
    if snapshot is not None:
        return _sum_up(snapshot, as_json=as_json)
    with open_workspace(inventory) as workspace:
        screen, run_id = Screen(lines_to_stderr=as_json), None
        if message is not None:
            found = _of_message(workspace, message, params, experiment, profile)
        else:
            run_id = runs.resolve(workspace, run or "last")
            _bring_up_to_date(workspace, run_id, screen)
            found = explaining.explain_run(workspace, run_id)
        if not as_json:
            print("\n".join(_lines(found, run_id)), flush=True)
        if not no_estimate:
            found = _predicted(workspace, found, screen)
        if as_json:
            print(json.dumps(explanation_json(found.explanation, run_id=run_id, where=found.where), indent=2))
        elif found.explanation is not None:
            print("".join(f"{line}\n" for line in remedy_lines(found.explanation)), end="")
        return 0 if found.explanation is not None else 1


def _sum_up(snapshot: Path, *, as_json: bool) -> int:
    from orchestrator.forensics.snapshot import read_snapshot, summarise  # noqa: PLC0415  (few ask for one)
    from orchestrator.snapshot_view import snapshot_json, snapshot_lines  # noqa: PLC0415

    cards = summarise(read_snapshot(snapshot))
    print(json.dumps(snapshot_json(cards), indent=2) if as_json else "\n".join(snapshot_lines(cards)))
    return 0 if cards else 1


def _lines(found: Explained, run_id: str | None) -> list[str]:
    if found.explanation is not None:
        return list(explanation_lines(found.explanation, run_id=run_id, where=found.where))
    whose = "the text holds" if run_id is None else f"run {run_id}: its records hold"
    return [f"{whose} nothing that says that memory was out"]


def _predicted(workspace: Workspace, found: Explained, screen: Screen) -> Explained:
    """Adds predictions; whoever looks on sees what takes so long."""
    if explaining.can_be_predicted(found):
        screen.status("asking the payload what would fit; Ctrl-C does without")
        waiting = Timer(
            QUIET_S, screen.note, ["asking the payload what would fit; --no-estimate leaves that out"]
        )
        waiting.daemon = True
        waiting.start()
        try:
            return explaining.with_outlook(workspace, found)
        except KeyboardInterrupt:
            return found
        finally:
            waiting.cancel()
            screen.close()
    return found


def _check(
    run: str | None, message: str | None, snapshot: Path | None, of_message: Mapping[str, object]
) -> None:
    missing = [run, message, snapshot].count(None)
    if missing != 2:
        which = "name one of" if missing == 3 else "only one of"
        raise click.UsageError(f"{which}: a run (or `last`), --message FILE, --snapshot FILE")
    given = [option for option, value in of_message.items() if value is not None]
    if message is None and given:
        raise click.UsageError(f"{given[0]} goes with --message: a run has its own")
    if of_message["--profile"] is not None and of_message["--experiment"] is None:
        raise click.UsageError("--profile needs --experiment")


def _of_message(
    workspace: Workspace, message: str, params: Path | None, experiment: Path | None, profile: str | None
) -> Explained:
    given = None if params is None else _read_params(params)
    loaded = None if experiment is None else load_experiment(experiment, profile=profile)
    if message == "-" and sys.stdin is None:
        raise UsageError("standard input is closed: give the message's file, or pipe it to --message -")
    with ExitStack() as opened:
        try:
            file = opened.enter_context(click.open_file(message, encoding="utf-8", errors="backslashreplace"))
            return explaining.explain_text(workspace, _pieces(file), params=given, experiment=loaded)
        except OSError as error:
            raise UsageError(f"{message}: cannot be read: {error.strerror}") from error


def _pieces(file: IO[str]) -> Iterator[str]:
    while piece := file.read(READ_CHARACTERS):
        yield piece


def _read_params(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            raw = file.read(MOST_PARAMS_BYTES + 1)
        if len(raw) > MOST_PARAMS_BYTES:
            raise ConfigError(f"more than {MOST_PARAMS_BYTES} bytes are no parameters", file=path)
        values = json.loads(raw, object_pairs_hook=_once_each)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"no JSON: {error}", file=path) from error
    if not isinstance(values, dict):
        raise ConfigError('must be one JSON object, such as {"max_anchors": 512}', file=path)
    return values


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuses a name that stands twice, of which JSON's readers take the last."""
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise ValueError(f"{quoted(name)} stands there twice")
        values[name] = value
    return values


def _bring_up_to_date(workspace: Workspace, run_id: str, screen: Screen) -> None:
    """Of a detached run that nobody looked at the records are still on its host alone."""
    try:
        runs.refresh(workspace, run_id)
    except (HostError, UnknownName) as error:
        screen.note(f"{error}; explaining what is known here of run {run_id}")
