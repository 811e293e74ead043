"""A ledger row from a job in a record or an observation: somebody's word, checked before it is believed.

A job that this controller made is as it is; one that comes from a host's folder may hold anything, and every
reader of a row relies on the types that are checked here. What texts say stays theirs: views escape it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from orchestrator.errors import UsageError
from orchestrator.ledger import MASK, RunRow
from orchestrator.lifecycle import State
from orchestrator.provenance import Provenance
from orchestrator.supervisor import ranks
from orchestrator.text import check_name

MOST_TEXT = 4096


class NotAJob(Exception):
    """A value that no row can be made from; the message says why."""


def row_of(
    job: object, *, run_id: str, host: str, state: State, created_t: object, is_adopted: bool = False
) -> RunRow:
    """Returns the row of a run that has this job.

    ``job["env"]`` may be a mapping, whose values go, or the list of its names.

    Raises:
        NotAJob: it is none, or another run's.
    """
    if not isinstance(job, Mapping):
        raise NotAJob("there is no job in it")
    if job.get("run_id") != run_id:
        raise NotAJob(f"its job is that of another run, {str(job.get('run_id'))[:80]!r}")
    if not isinstance(created_t, int | float) or not _is_number(created_t):
        raise NotAJob("its time is none")
    for key, is_right in _KEYS.items():
        if not is_right(job.get(key)):
            raise NotAJob(f"its job has no usable {key!r}")
    try:
        provenance = Provenance(**job["provenance"])
        check_name("run", run_id)
        check_name("group", job["group_id"])
    except (UsageError, TypeError) as error:
        raise NotAJob(f"its job cannot be read: {error}") from error
    return RunRow(
        run_id=run_id,
        group_id=job["group_id"],
        retry_of=job.get("retry_of"),
        experiment=job["experiment"],
        profile=job["profile"],
        host=host,
        bundle=job["bundle"],
        commit_id=provenance.commit if isinstance(provenance.commit, str) else None,
        dirty=bool(provenance.dirty),
        state=state,
        created_t=float(created_t),
        is_adopted=is_adopted,
        job={**job, "env": dict.fromkeys(job["env"], MASK)},
    )


def noted_job(job: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a job as an observation holds it: of its variables the names."""
    return {**job, "env": sorted(job["env"])}


def _is_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= MOST_TEXT


def _is_text_or_none(value: object) -> bool:
    return value is None or _is_text(value)


def _is_mapping(value: object) -> bool:
    return isinstance(value, dict)


def _is_text_mapping(value: object) -> bool:
    return isinstance(value, dict) and all(map(_is_text, value.values()))


def _is_environment(value: object) -> bool:
    return isinstance(value, dict) or _is_texts(value)


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_texts_or_none(value: object) -> bool:
    return value is None or _is_texts(value)


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that no float holds
        return False


def _is_number_or_none(value: object) -> bool:
    return value is None or _is_number(value)


def _is_count_or_none(value: object) -> bool:
    return value is None or (type(value) is int and 1 <= value <= ranks.MOST_RANKS)


def _is_size_or_none(value: object) -> bool:
    return value is None or (type(value) is int and 0 < value < 2**63)


def _is_hash(value: object) -> bool:
    return isinstance(value, str) and len(value) == 64 and set(value) <= set("0123456789abcdef")


def _is_provenance(value: object) -> bool:
    return isinstance(value, dict) and all(
        _is_text_or_none(part) or isinstance(part, int) for part in value.values()
    )


def _are_devices(value: object) -> bool:
    if not isinstance(value, dict):
        return _is_texts(value)
    count, free = value.get("count"), value.get("free_bytes")
    return value.keys() <= {"count", "free_bytes"} and type(count) is int and type(free) in (int, type(None))


def _is_flag_or_none(value: object) -> bool:
    return value is None or isinstance(value, bool)


def _is_expectation(value: object) -> bool:
    if not isinstance(value, dict) or value.keys() != {"verdicts", "metrics"}:
        return False
    return (
        _is_texts(value["verdicts"])
        and isinstance(value["metrics"], dict)
        and all(
            isinstance(bounds, dict)
            and bounds.keys() <= {"min", "max"}
            and all(map(_is_number_or_none, bounds.values()))
            for bounds in value["metrics"].values()
        )
    )


def _is_turn(value: object) -> bool:
    if value is None:
        return True
    if not isinstance(value, dict) or not _is_text(value.get("queue")):
        return False
    place, at_once = value.get("place"), value.get("at_once")
    return type(place) is int and type(at_once) is int and place >= 0 and at_once >= 1


def _is_spec(value: object) -> bool:
    return (
        isinstance(value, dict)
        and _is_hash(value.get("bundle"))
        and all(_is_text(value.get(key)) for key in ("kind", "path"))
        and isinstance(value.get("system_packages"), bool)
    )


_KEYS: Mapping[str, Callable[[object], bool]] = {
    "group_id": _is_text,
    "retry_of": _is_text_or_none,
    "experiment": _is_text,
    "profile": _is_text_or_none,
    "case": _is_text_or_none,
    "bundle": _is_hash,
    "module": _is_text_or_none,
    "script": _is_text_or_none,
    "args": _is_texts_or_none,
    "command": _is_texts_or_none,
    "prepares": lambda value: value is None or _is_spec(value),
    "setup": lambda value: value is None or (isinstance(value, list) and all(map(_is_spec, value))),
    "params": _is_mapping,
    "env": _is_environment,
    "secrets": lambda value: value is None or _is_text_mapping(value),
    "alloc_conf": _is_text_or_none,
    "devices": _are_devices,
    "waits_for_cards": _is_flag_or_none,
    "shares_cards": _is_flag_or_none,
    "processes": _is_count_or_none,
    "memory_limit_bytes": _is_size_or_none,
    "timeout_s": _is_number_or_none,
    "collect": _is_texts_or_none,
    "collect_limit_bytes": _is_number_or_none,
    "grace_s": _is_number_or_none,
    "provenance": _is_provenance,
    "expect": _is_expectation,
    "turn": _is_turn,
}
