"""The job: what a host receives to start one run, and keeps as job.json.

Knows its keys, which part of a run each comes from, and what a job says of its program. Whether the parts are
in order was decided when they were read; what a key makes the host do is the supervisor's business.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from orchestrator.bundle import Bundle
from orchestrator.experiment import Experiment
from orchestrator.fields import Secret, devices_json
from orchestrator.inventory import Host

__all__ = ["Program", "Turn", "job_for", "program_of", "secrets_of", "secrets_of_job", "setup_text"]

_VERSION = 1


class Program(NamedTuple):
    """What a job runs: its ``kind`` (module, script, command, prepares) and the text that a person reads."""

    kind: str
    text: str


class Turn(NamedTuple):
    """A run's place in its group's queue on a host; ``at_once`` of it run together."""

    queue: str
    place: int
    at_once: int


def job_for(
    run_id: str,
    experiment: Experiment,
    bundle: Bundle,
    host: Host,
    turn: Turn | None = None,
    setup: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Returns plain JSON values, copied, so that a job stays what it is whatever becomes of its parts.

    A variable of the experiment wins over the same one of the host. Of a secret it says which variable here
    has it. ``setup`` is what has to be prepared on the host before, as `setups` says it.

    Raises:
        ValueError: the parameters hold a number that JSON has not (NaN, infinity).
    """
    job = {
        "version": _VERSION,
        "run_id": run_id,
        "group_id": run_id if turn is None else turn.queue,
        "experiment": experiment.name,
        "profile": experiment.profile,
        "bundle": bundle.id,
        "case": experiment.case,
        **_program(experiment),
        "params": experiment.params,
        "env": {name: value for name, value in _env(experiment, host).items() if isinstance(value, str)},
        "import_container_env": host.import_container_env,
        "venv": host.venv,
        "workdir": host.workdir,
        "secrets": {secret.name: secret.from_env for secret in secrets_of(experiment, host)},
        "alloc_conf": experiment.alloc_conf,
        "devices": devices_json(experiment.devices),
        "waits_for_cards": experiment.waits_for_cards,
        "shares_cards": experiment.shares_cards,
        "processes": experiment.processes,
        "memory_limit_bytes": experiment.memory_limit_bytes,
        "timeout_s": experiment.timeout_s,
        "grace_s": experiment.grace_s,
        "on_disk_full": experiment.on_disk_full,
        "log_limit_bytes": experiment.log_limit_bytes,
        "setup": list(setup),
        "collect": experiment.collect,
        "collect_limit_bytes": experiment.collect_limit_bytes,
        "turn": None if turn is None else turn._asdict(),
        "provenance": bundle.provenance.as_json(),
        "expect": experiment.expect.as_json(),
    }
    copied: dict[str, Any] = json.loads(json.dumps(job, allow_nan=False))
    return copied


def program_of(job: Mapping[str, Any]) -> Program:
    """Returns what a job runs, whoever wrote the job."""
    if isinstance(made := job.get("prepares"), dict):
        return Program("prepares", setup_text(made))
    if isinstance(command := job.get("command"), list):
        return Program("command", shlex.join(map(str, command)))
    args = job.get("args")
    words = map(str, args if isinstance(args, list) else ())
    if script := job.get("script"):
        return Program("script", shlex.join([str(script), *words]))
    return Program("module", " ".join([str(job.get("module") or "?"), *map(shlex.quote, words)]))


def setup_text(spec: Mapping[str, Any]) -> str:
    """Returns what a job's ``setup`` or ``prepares`` is about, as a person reads it."""
    return f"{spec.get('kind')} {spec.get('path')}"


def secrets_of(experiment: Experiment, host: Host) -> tuple[Secret, ...]:
    """Returns the secrets that a run of ``experiment`` on ``host`` gets."""
    return tuple(value for value in _env(experiment, host).values() if isinstance(value, Secret))


def secrets_of_job(job: Mapping[str, Any]) -> tuple[Secret, ...]:
    """Returns the secrets that the run of an earlier ``job`` got, to be read again for the next."""
    where = f"run {job['run_id']}"
    return tuple(
        Secret(name=name, from_env=from_env, where=where) for name, from_env in job.get("secrets", {}).items()
    )


def _program(experiment: Experiment) -> dict[str, Any]:
    if experiment.prepares is not None:
        return {"prepares": experiment.prepares}
    if experiment.command:
        return {"command": experiment.command}
    if experiment.script is not None:
        return {"script": experiment.script, "args": experiment.args}
    assert experiment.module is not None
    return {"module": experiment.module, **({"args": experiment.args} if experiment.args else {})}


def _env(experiment: Experiment, host: Host) -> dict[str, str | Secret]:
    return {**host.env, **experiment.env}
