"""Runs on this machine, as commands make them, for the tests of cleaning and rebuilding."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from orchestrator.bundle import Bundle, build_bundle
from orchestrator.job_rows import noted_job, row_of
from orchestrator.ledger import RunRow
from orchestrator.lifecycle import State
from orchestrator.run_folder import RunFolder
from orchestrator.runs import conclude
from orchestrator.supervisor.records import RecordWriter
from orchestrator.workspace import Workspace

DAY_S = 86400.0


def a_workspace(folder: Path) -> Workspace:
    (folder / "inventory.yaml").write_text("hosts: {here: {transport: local}}\n")
    return Workspace.open(folder / "inventory.yaml", folder / "home")


def a_bundle(workspace: Workspace, code: str = "pass\n") -> Bundle:
    folder = workspace.project / "payloads" / "probe"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "go.py").write_text(code)
    return build_bundle(folder, workspace.store)


def a_job(run_id: str, bundle: Bundle, **changes: Any) -> dict[str, Any]:
    return {
        "version": 1,
        "run_id": run_id,
        "group_id": run_id,
        "experiment": "trial",
        "profile": None,
        "bundle": bundle.id,
        "module": "probe.go",
        "params": {},
        "env": {"TOKEN": "hf_secret"},
        "secrets": {},
        "alloc_conf": None,
        "devices": [],
        "timeout_s": None,
        "provenance": bundle.provenance.as_json(),
        "expect": {"verdicts": ["ok"], "metrics": {}},
        **changes,
    }


def a_run(
    workspace: Workspace,
    run_id: str,
    *,
    code: int | None = 0,
    bundle: Bundle | None = None,
    is_judged: bool = True,
    **changes: Any,
) -> RunRow:
    """Makes a run that was mirrored; ``code`` is its exit code, None while it has not ended."""
    job = a_job(run_id, bundle or a_bundle(workspace), **changes)
    folder = workspace.folder(run_id)
    row = row_of(job, run_id=run_id, host="here", state=State.RUNNING, created_t=time.time())
    workspace.ledger.insert(row)
    folder.observe("created", host="here", job=noted_job(job))
    folder.observe("started", is_new=True)
    write_records(folder, job, code)
    if code is not None and is_judged:
        conclude(workspace, run_id)
    return workspace.ledger.get(run_id)


def write_records(folder: RunFolder, job: dict[str, Any], code: int | None) -> None:
    folder.make()
    writer = RecordWriter(str(folder.records), folder.run_id, {"job": job, "bundle": {"id": job["bundle"]}})
    writer.write("spawn", proc="main", pid=4242)
    if code is not None:
        writer.write("end", outcome="exited", code=code, signal=None, reason=None, survivors=[])
    writer.close()


def make_old(folder: Path, age_s: float = 40 * DAY_S) -> None:
    then = time.time() - age_s
    for path in (*folder.rglob("*"), folder):
        os.utime(path, (then, then), follow_symlinks=False)
