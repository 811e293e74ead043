"""Whose memory it was: code and parameters that a failure belongs to, and recent runs of the same program.

A log may have been printed by another run than the one it is taken for: a size is compared with the
parameters of recent runs too.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.bundle import Bundle, build_bundle, find_payload
from orchestrator.errors import OrchError, StorageError, UnknownName
from orchestrator.experiment import Experiment
from orchestrator.ledger import RunRow
from orchestrator.payload_programs import SHAPES
from orchestrator.starting import bundle_of
from orchestrator.workspace import Workspace

__all__ = ["Subject", "canonical", "label_of", "of_run", "of_text"]

RECENT_S = 30 * 24 * 3600.0
MOST_OTHERS = 20
_MOST_ROWS = 2000


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A configuration: ``bundle`` is its code, ``module`` what ran, None where that is not known, and
    ``unknown_why`` says why. ``others`` are recent runs of the same program. ``is_unnamed``: only the
    package is known, not which of its programs it was.
    """

    label: str
    module: str | None = None
    params: Mapping[str, Any] | None = None
    bundle: Bundle | None = None
    unknown_why: str | None = None
    is_unnamed: bool = False
    alloc_conf: str | None = None
    memory_limit_bytes: int | None = None
    others: tuple[RunRow, ...] = ()


def of_run(workspace: Workspace, row: RunRow) -> Subject:
    """Returns what a run was, by its row and the object store."""
    module, params = row.job.get("module"), row.job.get("params")
    bundle, why = None, None
    if not isinstance(module, str):
        module, why = None, "only a payload's module can say which tensors it makes, and this was none"
    else:
        try:
            bundle = workspace.store.load_manifest(row.bundle)
        except (UnknownName, StorageError) as error:
            why = f"its code is not here, which would say which tensors it makes: {error}"

    def is_other(other: RunRow) -> bool:
        return other.run_id != row.run_id and other.job.get("module") == module

    return Subject(
        label=label_of(row),
        module=module,
        params=params if isinstance(params, dict) else {},
        bundle=bundle,
        unknown_why=why,
        alloc_conf=row.job.get("alloc_conf"),
        memory_limit_bytes=row.job.get("memory_limit_bytes"),
        others=() if module is None else _recent(workspace, row.created_t, is_other),
    )


def of_text(workspace: Workspace, params: Mapping[str, Any] | None, experiment: Experiment | None) -> Subject:
    """Returns what a text belongs to: an experiment, or the one payload here that says which tensors it
    makes. ``params`` go over the experiment's.

    Raises:
        UsageError: the experiment's payload cannot be bundled.
    """
    if experiment is None:
        return _of_only_payload(workspace, params)
    module = experiment.module
    return Subject(
        label=experiment.name,
        module=module,
        params={**experiment.params, **(params or {})},
        bundle=bundle_of(workspace, experiment),
        alloc_conf=experiment.alloc_conf,
        memory_limit_bytes=experiment.memory_limit_bytes,
        others=_recent(workspace, time.time(), lambda row: row.job.get("module") == module),
    )


def label_of(row: RunRow) -> str:
    """Returns how a run is called in an explanation."""
    return f"run {row.run_id}"


def canonical(params: Mapping[str, Any]) -> str:
    """Returns a text that is the same for the same parameters."""
    return json.dumps(params, sort_keys=True, default=str)


def _of_only_payload(workspace: Workspace, params: Mapping[str, Any] | None) -> Subject:
    label, payloads = "these parameters", workspace.project / "payloads"
    names = sorted(path.parent.name for path in payloads.glob(f"*/{SHAPES}.py"))
    if len(names) != 1:
        which = f"{', '.join(names)} all do" if names else "none here does"
        why = f"which payload says which tensors it makes? {which}: name its experiment with --experiment"
        return Subject(label=label, params=params, unknown_why=why)
    package = f"{names[0]}."
    try:
        bundle = build_bundle(find_payload(workspace.project, names[0]), workspace.store)
    except OrchError as error:
        return Subject(label=label, params=params, unknown_why=str(error))
    return Subject(
        label=label,
        module=package + SHAPES,
        is_unnamed=True,
        params=params,
        bundle=bundle,
        others=_recent(workspace, time.time(), lambda row: str(row.job.get("module")).startswith(package)),
    )


def _recent(workspace: Workspace, t: float, is_of_it: Callable[[RunRow], bool]) -> tuple[RunRow, ...]:
    """Returns the runs of a program within thirty days, the newest first, each set of parameters once."""
    found: dict[str, RunRow] = {}
    for row in workspace.ledger.recent(_MOST_ROWS):
        if abs(row.created_t - t) <= RECENT_S and isinstance(row.job.get("params"), dict) and is_of_it(row):
            found.setdefault(canonical(row.job["params"]), row)
    return tuple(found.values())[:MOST_OTHERS]
