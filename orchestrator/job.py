"""The job: what a host receives to start one run, and keeps as job.json.

Knows its keys and which part of a run each comes from. Whether the parts are in order was decided when they
were read; what a key makes the host do is the supervisor's business.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from orchestrator.bundle import Bundle
from orchestrator.experiment import Experiment
from orchestrator.fields import Secret
from orchestrator.inventory import Host

__all__ = ["job_for", "secrets_of", "secrets_of_job"]

_VERSION = 1
_GRACE_S = 10.0


def job_for(run_id: str, experiment: Experiment, bundle: Bundle, host: Host) -> dict[str, Any]:
    """Returns plain JSON values, copied, so that a job stays what it is whatever becomes of its parts.

    A variable of the experiment wins over the same one of the host. Of a secret it says which variable here
    has it.

    Raises:
        ValueError: the parameters hold a number that JSON has not (NaN, infinity).
    """
    job = {
        "version": _VERSION,
        "run_id": run_id,
        "group_id": run_id,
        "experiment": experiment.name,
        "profile": experiment.profile,
        "bundle": bundle.id,
        "module": experiment.module,
        "params": experiment.params,
        "env": {name: value for name, value in _env(experiment, host).items() if isinstance(value, str)},
        "secrets": {secret.name: secret.from_env for secret in secrets_of(experiment, host)},
        "alloc_conf": experiment.alloc_conf,
        "devices": experiment.devices,
        "timeout_s": experiment.timeout_s,
        "grace_s": _GRACE_S,
        "provenance": bundle.provenance.as_json(),
        "expect": experiment.expect.as_json(),
    }
    copied: dict[str, Any] = json.loads(json.dumps(job, allow_nan=False))
    return copied


def secrets_of(experiment: Experiment, host: Host) -> tuple[Secret, ...]:
    """Returns the secrets that a run of ``experiment`` on ``host`` gets."""
    return tuple(value for value in _env(experiment, host).values() if isinstance(value, Secret))


def secrets_of_job(job: Mapping[str, Any]) -> tuple[Secret, ...]:
    """Returns the secrets that the run of an earlier ``job`` got, to be read again for the next."""
    where = f"run {job['run_id']}"
    return tuple(
        Secret(name=name, from_env=from_env, where=where) for name, from_env in job.get("secrets", {}).items()
    )


def _env(experiment: Experiment, host: Host) -> dict[str, str | Secret]:
    return {**host.env, **experiment.env}
