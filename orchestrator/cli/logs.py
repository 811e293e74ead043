"""``orch logs``: a run's output, from the mirror, up to date with the host."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path

import click

from orchestrator import line_origin, runs
from orchestrator.cli.leaving import Left, leaving, say_goodbye
from orchestrator.cli.log_output import Asked, LinesView, RawView, bring_up_to_date
from orchestrator.cli.options import inventory_option, json_option, open_workspace
from orchestrator.cli.terminal import Screen, show
from orchestrator.errors import RecordsAltered, UnknownName, UsageError
from orchestrator.log_filter import LineFilter, parse_pattern, parse_since
from orchestrator.workspace import Workspace


@click.command()
@click.argument("names", metavar="[RUN]...", nargs=-1)
@click.option("--merge", "is_merged", is_flag=True, help="Several runs, or a group, in one order by time.")
@click.option("-f", "--follow", is_flag=True, help="Go on until the run has ended.")
@click.option("--stream", type=click.Choice(["stdout", "stderr"]), help="Only this stream.")
@click.option("--proc", metavar="NAME", help="Only this process.")
@click.option("--tail", "count", type=click.IntRange(min=0), metavar="N", help="Only the last N lines.")
@click.option(
    "--since",
    metavar="TIME",
    help="Only lines from 10m ago, or 2026-11-29T20:00:00Z, on: by the host's clock.",
)
@click.option("--grep", "pattern", metavar="REGEX", help="Only lines whose text matches.")
@click.option("--long", "is_long", is_flag=True, help="Show pid and time (the host's clock) of each line.")
@click.option("--raw", "is_raw", is_flag=True, help="The recorded bytes of one stream, and nothing else.")
@click.option("--where", metavar="RUN/PROC.STREAM:N", help="Which process wrote this line, and is it sealed?")
@inventory_option
@json_option
def logs(
    names: tuple[str, ...],
    is_merged: bool,
    follow: bool,
    stream: str | None,
    proc: str | None,
    count: int | None,
    since: str | None,
    pattern: str | None,
    is_long: bool,
    is_raw: bool,
    where: str | None,
    inventory: Path | None,
    as_json: bool,
) -> int:
    """Show the output of RUN (an id, the beginning of one, or `last`), every line with its source.

    A line's name is RUN/PROC.STREAM:NUMBER; --where says who wrote it. Times are by the host's clock; a
    duration counts back from this machine's. --grep looks at the text as the payload wrote it; with --tail
    the last N lines that match are shown.

    --merge shows several runs of any hosts, and all runs of a group, in the order in which their lines were
    written: all times are then by this machine's clock, and standard error says how far each host's is off.
    """
    asked = {"--tail": count is not None, "--since": since, "--grep": pattern, "--long": is_long}
    if where is not None:
        _refuse(
            "--where",
            {
                "RUN": names,
                "--merge": is_merged,
                "-f": follow,
                "--stream": stream,
                "--proc": proc,
                "--raw": is_raw,
                **asked,
            },
        )
        return _show_origin(inventory, where, as_json=as_json)
    if not names:
        raise click.UsageError("name a run: an id, the beginning of one, or last")
    if len(names) > 1 and not is_merged:
        raise click.UsageError("one run at a time, or several with --merge")
    if is_raw:
        _refuse("--raw", {"--json": as_json, "--merge": is_merged, **asked})
        if follow and stream is None:
            raise click.UsageError("--raw with -f needs --stream: output may come on both")
    wanted = LineFilter(
        since_t=None if since is None else parse_since(since, now_t=time.time()),
        pattern=None if pattern is None else parse_pattern(pattern),
    )
    lines = Asked(proc=proc, stream=stream, wanted=wanted, as_json=as_json, is_long=is_long)
    if is_merged:
        return _merge(inventory, names, lines, follow=follow, count=count)
    with open_workspace(inventory) as workspace:
        run_id = _one_run(workspace, names[0])
        view = (RawView if is_raw else LinesView)(workspace, run_id, lines)
        try:
            with leaving():
                if follow:
                    view.follow(count)
                else:
                    view.show(count)
        except Left as left:
            view.screen.close()
            return say_goodbye(left, run_id) if follow else left.exit_code
        return 0


def _one_run(workspace: Workspace, name: str) -> str:
    try:
        return runs.resolve(workspace, name)
    except UnknownName:
        if runs.resolve_group(workspace, name) is not None:
            raise UsageError(f"{name} is a group; see the lines of all its runs with --merge") from None
        raise


def _merge(
    inventory: Path | None, names: tuple[str, ...], lines: Asked, *, follow: bool, count: int | None
) -> int:
    from orchestrator.cli.log_merge import MergedView, runs_of  # noqa: PLC0415  (one run has no use for it)

    with open_workspace(inventory) as workspace:
        view = MergedView(workspace, runs_of(workspace, names), lines)
        try:
            with leaving():
                if follow:
                    return view.follow(count)
                view.show(count)
        except Left as left:
            view.screen.close()
            if not follow:
                return left.exit_code
            return say_goodbye(left, " ".join(names), what="runs", come_back="orch logs -f --merge")
        return 0


def _show_origin(inventory: Path | None, where: str, *, as_json: bool) -> int:
    name = line_origin.LineName.parse(where)
    with open_workspace(inventory) as workspace:
        run_id = runs.resolve(workspace, name.run)
        bring_up_to_date(workspace, run_id, Screen())
        origin = line_origin.find_origin(workspace.ledger.get(run_id), workspace.folder(run_id), name)
    if as_json:
        print(json.dumps(line_origin.origin_json(origin), indent=2))
    else:
        show(line_origin.origin_table(origin))
    return 0 if origin.standing.problem is None else RecordsAltered.exit_code


def _refuse(option: str, others: Mapping[str, object]) -> None:
    given = [name for name, value in others.items() if value not in (None, False, ())]
    if given:
        raise click.UsageError(f"{option} and {given[0]} do not go together")
