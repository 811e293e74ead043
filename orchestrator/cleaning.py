"""Which ended runs `orch gc` lets go, and what it removes from a host.

Chooses by age and number among runs whose end is known here. On a host nothing goes that is not whole in the
mirror here, unless that is asked for; the host itself (supervisor/cleaning.py) has the last word on what
lives. What goes from this machine is `home_cleaning`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator import remote
from orchestrator.errors import ProtocolError, UnknownName
from orchestrator.fetching import is_uncollected
from orchestrator.ledger import RunRow
from orchestrator.lifecycle import State, is_settled
from orchestrator.run_folder import REMOVED_THERE, RunFolder
from orchestrator.runs import GLANCE_TIMEOUT_S
from orchestrator.transports import connect
from orchestrator.workspace import Workspace


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """Which ended runs may go: older than ``older_than_s``, and not among the ``keep`` newest of their place.

    ``unmirrored``: from a host even what is not whole here.
    """

    older_than_s: float
    keep: int = 0
    unmirrored: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """One thing that goes (``why`` is empty) or stays; ``name`` is a run's id, a digest or a count."""

    place: str
    what: str
    name: str
    size_bytes: int
    age_s: float | None = None
    why: str = ""

    @property
    def goes(self) -> bool:
        """It is removed, or would be."""
        return not self.why


@dataclass(frozen=True, kw_only=True, slots=True)
class Surveyed:
    """A run as its host described it; ``end`` is its last segment's index and size in bytes."""

    run_id: str
    standing: str
    age_s: float
    size_bytes: int
    end: tuple[int, int] | None


def clean_host(workspace: Workspace, host_name: str, policy: Policy, *, is_real: bool) -> list[Item]:
    """Removes from a host what the policy lets go, or says what it would.

    Raises:
        HostError: the host cannot be asked; when that comes late, some of it may have gone.
    """
    host = workspace.inventory.host(host_name)
    with connect(host, connect_timeout_s=GLANCE_TIMEOUT_S) as transport:
        surveyed = [_surveyed(host_name, told) for told in remote.survey(transport)]
        why_kept = choose(surveyed, policy, lambda run: _why_not_from_host(workspace, run, policy))
        chosen = [
            {"run": run.run_id, "end": None if run.end is None else list(run.end)}
            for run in surveyed
            if run.run_id not in why_kept
        ]
        told = remote.clean(transport, chosen, is_real=is_real)
    by_id = {run.run_id: run for run in surveyed}
    kept = [_kept_item(host_name, by_id[run_id], why) for run_id, why in why_kept.items()]
    items = [_told_item(host_name, item, by_id) for item in told]
    if is_real:
        _note_removed(workspace, (item.name for item in items if item.what == "run" and item.goes))
    return kept + items


def choose(runs: Iterable[Surveyed], policy: Policy, why_not: Callable[[Surveyed], str]) -> dict[str, str]:
    """Returns the ids of the runs that stay, and why; ``why_not(run)`` says what else keeps one."""
    kept = {}
    ended = 0
    for run in sorted(runs, key=lambda run: run.age_s):
        if run.standing in ("alive", "waiting"):
            kept[run.run_id] = "it is alive" if run.standing == "alive" else "it waits for its turn"
            continue
        ended += 1
        if ended <= policy.keep:
            kept[run.run_id] = f"one of the newest {policy.keep}"
        elif run.age_s < policy.older_than_s:
            kept[run.run_id] = "not old enough"
        elif why := why_not(run):
            kept[run.run_id] = why
    return kept


def _note_removed(workspace: Workspace, run_ids: Iterable[str]) -> None:
    """Whoever asks a host for such a run later is told why it is not there."""
    for run_id in run_ids:
        if known_row(workspace, run_id) is not None:
            workspace.folder(run_id).observe(REMOVED_THERE)


def _surveyed(host: str, told: Mapping[str, Any]) -> Surveyed:
    try:
        end = None if told["end"] is None else (int(told["end"][0]), int(told["end"][1]))
        return Surveyed(
            run_id=str(told["run"]),
            standing=str(told["standing"]),
            age_s=float(told["age_s"]),
            size_bytes=int(told["bytes"]),
            end=end,
        )
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise ProtocolError(f"what it says of a run cannot be read: {error}", host=host) from error


def _kept_item(host: str, run: Surveyed, why: str) -> Item:
    return Item(place=host, what="run", name=run.run_id, size_bytes=run.size_bytes, age_s=run.age_s, why=why)


def _told_item(host: str, told: Mapping[str, Any], runs: Mapping[str, Surveyed]) -> Item:
    try:
        name, why = (
            str(told["name"]),
            "" if told["removed"] is True else str(told["why"]) or "no reason given",
        )
        age_s = runs[name].age_s if told["what"] == "run" and name in runs else None
        if told["what"] == "environment":
            age_s = float(told["age_s"])
        size_bytes = int(told["bytes"])
        return Item(
            place=host, what=str(told["what"]), name=name, size_bytes=size_bytes, age_s=age_s, why=why
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ProtocolError(f"what it removed cannot be read: {error}", host=host) from error


def _why_not_from_host(workspace: Workspace, run: Surveyed, policy: Policy) -> str:
    if policy.unmirrored or run.standing == "never started":
        return ""
    row = known_row(workspace, run.run_id)
    if row is None:
        return "not known here: `orch ps --host … --all` enters it"
    if row.state is State.LOST:
        return "it is lost, and may still be found (--unmirrored removes it all the same)"
    if not is_settled(row.state):
        return "its end is not known here: `orch reconcile`"
    folder, missing = workspace.folder(run.run_id), ""
    if _end(folder) != run.end:
        missing = "not all of it is mirrored here"
    elif is_uncollected(row, folder):
        missing = "not all that it collects is here: `orch fetch`"
    return f"{missing} (--unmirrored removes it all the same)" if missing else ""


def known_row(workspace: Workspace, run_id: str) -> RunRow | None:
    """Returns a run's row, None for a run that is not in the ledger."""
    try:
        return workspace.ledger.get(run_id)
    except UnknownName:
        return None


def _end(folder: RunFolder) -> tuple[int, int] | None:
    """Returns the index of the mirror's last segment and its size in bytes."""
    last = max((path for path in folder.records.glob("*.jsonl")), default=None)
    return None if last is None else (int(last.stem), last.stat().st_size)
