"""Turns runs and hosts into what a person reads (rich) and what a program reads (JSON values).

Knows which facts belong together and how they are spelt; what was recorded and what it means comes in as
values, and so does the clock. Everything that came from a file or a host is escaped and carries no markup.
The JSON forms hold it as it is, since JSON escapes it, and never a variable of the environment, which may be
a secret.

Log lines are `orchestrator.log_view`'s.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from orchestrator.fields import devices_text
from orchestrator.inventory import Host
from orchestrator.job import program_of, setup_text
from orchestrator.ledger import RunRow
from orchestrator.lifecycle import is_terminal
from orchestrator.observed import Observed
from orchestrator.outcome import CardUse, Device, MemoryLimit, Outcome, Peak
from orchestrator.text import counted, gib, printable, size_text
from orchestrator.verdict import Verdict

if TYPE_CHECKING:  # a log's first line does not wait for rich
    from rich.table import Table
    from rich.text import Text

    from orchestrator.artifact_folder import Fetched
    from orchestrator.remote_artifacts import Artifact

_GOOD, _BAD, _OPEN = "green", "bold red", "cyan"


def runs_table(
    rows: Iterable[RunRow], *, now_t: float, seen: Mapping[str, Observed] = MappingProxyType({})
) -> Table:
    """Returns one line for each run; ``now_t`` is what ages are counted from, ``seen`` what was observed."""
    table, shown = _columns(), list(rows)
    table.add_column("RUN", no_wrap=True)
    has_groups = any(row.group_id != row.run_id for row in shown)
    for title in (
        *(("GROUP",) if has_groups else ()),
        *("EXPERIMENT", "HOST", "STATE", "VERDICT", "AGE", "TOOK", "COMMIT"),
    ):
        table.add_column(title)
    for row in shown:
        experiment = row.experiment if row.profile is None else f"{row.experiment}:{row.profile}"
        experiment += f" ({row.job['case']})" if row.job.get("case") else ""
        experiment += "" if row.retry_of is None else f", retry of {row.retry_of[:8]}"
        group = "-" if row.group_id == row.run_id else row.group_id
        table.add_row(
            plain(row.run_id),
            *((plain(group),) if has_groups else ()),
            plain(experiment),
            plain(row.host),
            plain(_state(row, seen.get(row.run_id), now_t)),
            plain(row.verdict or "-", style=_style(row)),
            plain(duration(now_t - row.created_t)),
            plain(took(row, now_t)),
            plain(short_commit(row.commit_id, is_dirty=row.dirty)[:13]),
        )
    return table


def hosts_table(hosts: Iterable[Host]) -> Table:
    """Returns one line for each host of an inventory."""
    table = _columns()
    for title in ("HOST", "TRANSPORT", "ADDRESS", "HOST KEY", "PYTHON", "ROOT"):
        table.add_column(title)
    for host in hosts:
        way = host.node or host
        key = "-" if way.transport == "local" else "pinned" if way.host_key else "by known_hosts"
        table.add_row(*map(plain, (host.name, host.transport, _address(host), key, host.python, host.root)))
    return table


def artifacts_table(found: Iterable[Artifact]) -> Table:
    """Returns one line for each thing in a run's artifacts folder on its host."""
    table = _columns()
    table.add_column("PATH", overflow="fold")
    table.add_column("SIZE", justify="right")
    table.add_column("CHANGED")
    table.add_column("KIND")
    for artifact in found:
        size = size_text(artifact.size_bytes) if artifact.kind == "file" else "-"
        changed = _clock(artifact.mtime_ns / 1e9)
        table.add_row(*map(plain, (artifact.path, size, changed, artifact.kind)))
    return table


def summary(
    row: RunRow,
    outcome: Outcome,
    verdict: Verdict | None,
    observed: Observed | None = None,
    *,
    now_t: float = 0.0,
    artifacts: Mapping[str, Sequence[Fetched]] = MappingProxyType({}),
    estimate: str = "",
) -> Table:
    """Returns everything that tells what a run was and what became of it, as labels and values.

    ``artifacts``: the files that were fetched, by the folder that they are in; ``estimate``: what was
    predicted of its memory.
    """
    table = _grid()
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    state = _state(row, observed, now_t)
    parts = (
        _what(row),
        _where(row, outcome),
        _result(row, outcome, verdict, state, estimate, tuple(_artifact_lines(artifacts))),
    )
    for label, values in itertools.chain.from_iterable(parts):
        style = verdict_style(verdict) if label == "verdict" else ""
        for position, value in enumerate(values):
            table.add_row("" if position else label, plain(value, style=style if not position else ""))
    return table


def run_json(row: RunRow, observed: Observed | None = None) -> dict[str, Any]:
    """Returns a ledger row without its job, of which it keeps what says how the run was asked for.

    ``observed`` is null for a run that was not asked about, since it has ended or is being started.
    """
    kept = (
        "module",
        "script",
        "args",
        "command",
        "prepares",
        "setup",
        "case",
        "turn",
        "params",
        "alloc_conf",
        "devices",
        "waits_for_cards",
        "shares_cards",
        "processes",
        "memory_limit_bytes",
        "timeout_s",
        "provenance",
        "expect",
    )
    job = {name: row.job[name] for name in kept if name in row.job}
    seen = None if observed is None else observed.as_json()
    return {**asdict(row), "state": row.state.value, "job": job, "observed": seen}


def summary_json(
    row: RunRow,
    outcome: Outcome,
    verdict: Verdict | None,
    observed: Observed | None = None,
    *,
    artifacts: Mapping[str, Sequence[Fetched]] = MappingProxyType({}),
    prediction: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Returns what `summary` shows; a metric that is not finite is null."""
    metrics = {name: value if math.isfinite(value) else None for name, value in outcome.metrics.items()}
    return {
        "run": run_json(row, observed),
        "outcome": {**asdict(outcome), "metrics": metrics},
        "verdict": None if verdict is None else asdict(verdict),
        "artifacts": {to: [asdict(file) for file in files] for to, files in artifacts.items()},
        "prediction": prediction,
    }


def host_json(host: Host) -> dict[str, Any]:
    """Returns a host as the inventory describes it, of its variables the names only."""
    form = {name: value for name, value in asdict(host).items() if name != "env"}
    identity = None if host.identity is None else str(host.identity)
    node = None if host.node is None else host_json(host.node)
    return {**form, "identity": identity, "node": node, "env_names": sorted(host.env)}


_Lines = Iterable[tuple[str, tuple[str, ...]]]


def _what(row: RunRow) -> _Lines:
    retry = () if row.retry_of is None else (f"retry of {row.retry_of}",)
    adopted = ("found on its host, started by another controller",) if row.is_adopted else ()
    group = () if row.group_id == row.run_id else (f"group {row.group_id}",)
    yield "run", (row.run_id, *group, *retry, *adopted)
    yield (
        "experiment",
        (row.experiment if row.profile is None else f"{row.experiment}, profile {row.profile}",),
    )
    if row.job.get("case"):
        yield "case", (str(row.job["case"]),)
    program = program_of(row.job)
    params = f", parameters {_parameters(row.job.get('params'))}" if program.kind == "module" else ""
    yield program.kind, (f"{program.text}{params}",)
    if row.job.get("setup"):
        yield "setup", tuple(map(setup_text, row.job["setup"]))
    if (count := row.job.get("processes") or 1) > 1:
        yield "processes", (f"{count}, rank0 to rank{count - 1}",)
    if program.kind != "command":  # which has no code of ours
        yield "bundle", (row.bundle,)
    if program.kind not in ("command", "prepares"):  # files of a setup: are told apart by their bundle alone
        yield "commit", (_provenance(row),)


def _where(row: RunRow, outcome: Outcome) -> _Lines:
    pid = outcome.pid if outcome.pid is not None else row.pid
    yield "host", (row.host if pid is None else f"{row.host}, pid {pid}",)
    sharing = ", shared with whoever has them" if row.job.get("shares_cards") else ""
    asked = f"asked: {devices_text(row.job.get('devices'))}{sharing}"
    yield "devices", (asked, *map(_device, outcome.devices), *map(_use, outcome.card_use))
    if limit_bytes := row.job.get("memory_limit_bytes"):
        yield "memory limit", _memory_limit(limit_bytes, outcome.memory_limits)
    asked_of_allocator = row.job.get("alloc_conf")
    effective = _effective(outcome, str(asked_of_allocator or ""))
    yield "allocator", (f"asked: {asked_of_allocator or 'nothing'}", f"effective: {effective}")
    python, torch = outcome.python or "not reported", outcome.torch or "not imported"
    yield "software", (f"python {python}, torch {torch}",)
    if outcome.prepared:
        yield "prepared", outcome.prepared


def _result(
    row: RunRow,
    outcome: Outcome,
    verdict: Verdict | None,
    state: str,
    estimate: str,
    artifacts: tuple[str, ...],
) -> _Lines:
    yield "times", (_times(row, outcome),)
    rss = outcome.peak_rss_bytes
    where = "in the largest process" if (row.job.get("processes") or 1) > 1 else "resident"
    peaks = (*map(_peak, outcome.peak_memory), *(() if rss is None else (f"host {gib(rss)} {where}",)))
    if peaks:
        yield "peak memory", peaks
    if estimate:
        yield "estimate", (estimate,)
    if outcome.metrics:
        yield "metrics", _metrics(outcome.metrics)
    if artifacts:
        yield "artifacts", artifacts
    if outcome.survivors:
        yield "still running", outcome.survivors
    if outcome.notes:
        yield "notes", outcome.notes
    ended = "" if row.exit_code is None else f", exit code {row.exit_code}"
    ended += "" if row.signal is None else f", signal {row.signal}"
    yield "state", (f"{state}{ended}",)
    if verdict is not None:
        yield "verdict", (f"{verdict.name} ({'good' if verdict.is_good else 'not good'})", *verdict.reasons)
    elif is_terminal(row.state):
        yield "reason", (row.reason or "not judged yet",)


def _columns() -> Table:
    from rich.table import Table  # noqa: PLC0415

    return Table(box=None, pad_edge=False, header_style="bold")


def _grid() -> Table:
    from rich.table import Table  # noqa: PLC0415

    return Table.grid(padding=(0, 2))


def plain(value: object, style: str = "") -> Text:
    """Returns a cell that shows ``value`` as it is spelt, without markup."""
    from rich.text import Text  # noqa: PLC0415

    return Text(printable(str(value)), style=style)


def _state(row: RunRow, observed: Observed | None, now_t: float) -> str:
    """Returns what is known, and beside it what was seen."""
    said = "" if observed is None else observed.said(now_t)
    return f"{row.state} · {said}" if said else str(row.state)


def _style(row: RunRow) -> str:
    if row.verdict is None:
        return _OPEN
    expect = row.job.get("expect")
    expected = expect.get("verdicts", ()) if isinstance(expect, Mapping) else ()
    return _GOOD if row.verdict in expected else _BAD


def verdict_style(verdict: Verdict | None) -> str:
    """Returns the colour of a verdict."""
    return _GOOD if verdict is not None and verdict.is_good else _BAD


def _address(host: Host) -> str:
    if host.node is not None:
        where = "this machine" if host.node.transport == "local" else _address(host.node)
        return f"container {host.vmid} at {where}"
    user = f"{host.user}@" if host.user else ""
    port = f":{host.port}" if host.port else ""
    return "-" if host.transport == "local" else f"{user}{host.address}{port}"


def short_commit(commit: str | None, *, is_dirty: bool) -> str:
    """Returns the beginning of a commit's id, with a star where the files are not what it holds."""
    return "none" if commit is None else f"{commit[:12]}{'*' if is_dirty else ''}"


def _provenance(row: RunRow) -> str:
    stated = row.job.get("provenance")
    found: Mapping[str, Any] = stated if isinstance(stated, Mapping) else {}
    if row.commit_id is None:
        return "not in a git repository"
    changes = "payload with uncommitted changes" if row.dirty else "payload as committed"
    untracked = f", {counted(found['untracked'], 'untracked file')}" if found.get("untracked") else ""
    branch = f" on {found['branch']}" if found.get("branch") else ""
    remote = f" of {found['remote']}" if found.get("remote") else ""
    return f"{row.commit_id}{branch}{remote}, {changes}{untracked}"


def _device(device: Device) -> str:
    size = "" if device.total_bytes is None else f", {gib(device.total_bytes)}"
    return f"cuda:{device.index} is {device.name} ({device.uuid}{size})"


def _use(use: CardUse) -> str:
    parts = [f"at most {gib(use.most_used_bytes)} in use"]
    if use.utilisation_percent is not None:
        parts.append(f"{use.utilisation_percent:.0f} % busy on average")
    if use.most_temperature_c is not None:
        parts.append(f"at most {use.most_temperature_c} °C")
    return f"{use.name}: {', '.join(parts)}, in {counted(use.samples, 'sample')}"


def _memory_limit(asked_bytes: int, limits: Sequence[MemoryLimit]) -> tuple[str, ...]:
    """Returns what each allocator may take of a card that is made to look smaller."""
    if not limits:
        return (f"asked: {gib(asked_bytes)}", "effective: not reported")
    kept = [f"the allocator of {limit.card} may take {gib(limit.allocator_bytes)}" for limit in limits]
    return (f"{gib(asked_bytes)}, simulated; out-of-memory messages show the real capacity", *kept)


def _peak(peak: Peak) -> str:
    return f"{peak.card} {gib(peak.allocated_bytes)} allocated, {gib(peak.reserved_bytes)} reserved"


def _parameters(params: object) -> str:
    shown = params if isinstance(params, Mapping) else {}
    return ", ".join(f"{name}={json.dumps(value)}" for name, value in shown.items()) or "none"


def _effective(outcome: Outcome, asked: str) -> str:
    """Returns the settings that were asked for and those that are on; the others are torch's defaults."""
    settings = outcome.allocator_settings
    if settings is None:
        return "not reported, CUDA was not used"
    named = {part.partition(":")[0].removesuffix("_mb") for part in asked.split(",")}
    shown = [
        f"{name}={value}"
        for name, value in sorted(settings.items())
        if name in named or value is True or name == "PYTORCH_CUDA_ALLOC_CONF"
    ]
    return ", ".join((*shown, f"backend={outcome.allocator or '?'}"))


def _metrics(metrics: Mapping[str, float]) -> tuple[str, ...]:
    """Returns one line for each scenario: the part of the names before the last dot."""
    groups: dict[str, list[str]] = {}
    for name, value in metrics.items():
        group, _, last = name.rpartition(".")
        groups.setdefault(group, []).append(f"{last} {value:.6g}")
    return tuple((f"{group}: " if group else "") + ", ".join(values) for group, values in groups.items())


def _artifact_lines(artifacts: Mapping[str, Sequence[Fetched]]) -> Iterator[str]:
    for to, files in artifacts.items():
        size = size_text(sum(file.size_bytes for file in files))
        yield f"{counted(len(files), 'file')}, {size}, in {to}"


def _times(row: RunRow, outcome: Outcome) -> str:
    """Returns when a run was what; the ledger hears of its start with its end."""
    began_t = outcome.started_t if row.started_t is None else row.started_t
    started = "" if began_t is None else f", started {_clock(began_t)}"
    ended = "" if row.ended_t is None else f", ended {_clock(row.ended_t)}"
    if row.started_t is not None and row.ended_t is not None:
        ended += f" after {took(row, row.ended_t)}"
    return f"created {_clock(row.created_t)}{started}{ended}"


def took(row: RunRow, now_t: float) -> str:
    """Returns how long a run took, or has taken so far."""
    if row.started_t is None:
        return "-"
    end_t = row.ended_t if row.ended_t is not None else now_t
    return "?" if row.ended_t is None and is_terminal(row.state) else duration(end_t - row.started_t)


def _clock(t: float) -> str:
    try:
        return datetime.fromtimestamp(t, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
    except (ValueError, OverflowError, OSError):
        return f"{t} (no time)"


def duration(duration_s: float) -> str:
    """Returns the two largest units; a host's clock may run behind ours."""
    if not math.isfinite(duration_s):
        return "?"
    seconds = max(0, round(duration_s))
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02}s"
    if seconds < 86400:
        return f"{seconds // 3600}h{seconds % 3600 // 60:02}m"
    return f"{seconds // 86400}d{seconds % 86400 // 3600:02}h"
