"""What has to be prepared for a run: as part of its job, and as jobs of their own.

A job's ``setup`` lists specs: ``kind``, ``path`` in the ``bundle`` of the files that matter, and
``system_packages``. A host makes a digest of one with its own interpreter; what is there under that digest is
not made again. A job that ``prepares`` one has the variables of the run that needs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.bundle import Bundle, ObjectStore, build_setup_bundle, find_payload
from orchestrator.experiment import Experiment
from orchestrator.inventory import Host
from orchestrator.job import job_for, setup_text

if TYPE_CHECKING:
    from orchestrator.setup_form import Setup

__all__ = ["EXPERIMENT", "Spec", "preparing_job", "specs_of"]

EXPERIMENT = "setup"
Spec = dict[str, Any]


def specs_of(project: Path, store: ObjectStore, host: Host, experiment: Experiment | None) -> list[Spec]:
    """Returns what a run needs, the host's first, and puts the files into ``store``.

    Raises:
        UsageError: a file is not there, or cannot be shipped.
    """
    specs = []
    if host.setup is not None:
        specs.append(_spec(store, project, "", host.setup))
    if experiment is not None and experiment.setup is not None:
        assert experiment.payload is not None
        payload = find_payload(project, experiment.payload)
        specs.append(_spec(store, payload, experiment.payload, experiment.setup))
    return specs


def preparing_job(run_id: str, needing: Mapping[str, Any], place: int, bundle: Bundle, host: Host) -> Spec:
    """Returns the job that prepares ``needing["setup"][place]``, upon those before it, in the same group if
    there is one.
    """
    specs = needing["setup"]
    experiment = Experiment(name=EXPERIMENT, path=Path(specs[place]["path"]), prepares=specs[place])
    same = ("env", "secrets", "import_container_env", "venv")
    job = job_for(run_id, experiment, bundle, host)
    return {
        **job,
        **{name: needing[name] for name in same},
        "group_id": needing["group_id"] or run_id,
        "workdir": None,
        "setup": specs[:place],
        "case": setup_text(specs[place]) if needing.get("turn") else None,
    }


def _spec(store: ObjectStore, root: Path, prefix: str, setup: Setup) -> Spec:
    from orchestrator.setup_files import find_setup_files  # noqa: PLC0415  (a run without setup has no use)

    files = find_setup_files(root, prefix, setup)
    program = files[0].path if setup.kind == "script" else None
    bundle = build_setup_bundle(files, store, program)
    return {
        "kind": setup.kind,
        "path": files[0].path,
        "bundle": bundle.id,
        "system_packages": setup.system_packages,
    }
