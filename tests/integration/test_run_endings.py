"""Cancelling from the command line: what gets its time to save, and what tries to get away."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.project import Project, wait_until

SAVES = """
import os, signal, sys, time
def save(*_):
    time.sleep(1.0)
    os.write(1, b"saved\\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
os.write(1, b"up\\n")
time.sleep(100)
"""
HIDES = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    os.execve("/bin/sh", ["sh", "-c", "echo hidden $$; exec sleep 100"], {})
os.write(1, b"up\\n")
time.sleep(100)
"""


def started(project: Project, experiment: Path, *words: str) -> str:
    """Starts a run and returns its id once its payload has printed ``words``."""
    run_id = project.orch("run", experiment, "--host", "here", "--detach").out.split()[0]
    wait_until(lambda: all(word in printed(project, run_id) for word in words), "output")
    return run_id


def printed(project: Project, run_id: str) -> str:
    """Returns what the run's host has of its output so far; two lines may come in one record."""
    found = []
    for line in project.written(run_id).splitlines():
        with contextlib.suppress(ValueError):  # the last one may be half written
            record = json.loads(line)
            found.append(record["text"] if record["kind"] == "out" else "")
    return "".join(found)


def test_a_cancelled_run_has_the_grace_of_its_experiment_to_save(project: Project) -> None:
    run_id = started(project, project.experiment(SAVES, grace="60s"), "up")
    assert project.orch("cancel", run_id).code == 0
    assert project.orch("wait", run_id).code == 1
    assert project.output(run_id) == "up\nsaved\n"
    (end,) = [record for record in project.records(run_id) if record["kind"] == "end"]
    assert (end["outcome"], end["code"], end["survivors"]) == ("cancelled", 0, [])


@pytest.mark.skipif(os.geteuid() != 0, reason="making a cgroup needs root")
def test_cancel_ends_a_process_without_the_runs_id_whose_supervisor_was_killed(project: Project) -> None:
    run_id = started(project, project.experiment(HIDES), "up", "hidden")
    (spawn,) = [record for record in records_there(project, run_id) if record["kind"] == "spawn"]
    assert spawn["cgroup"] is not None
    supervisor = records_there(project, run_id)[1]["identity"]["pid"]
    assert supervisor > 1
    os.kill(supervisor, signal.SIGKILL)
    wait_until(lambda: "its supervisor is gone" in project.orch("show", run_id).out, "the loss")
    done = project.orch("cancel", run_id, "--grace", "1")
    assert " sleep 100\n" in done.err
    assert not Path(spawn["cgroup"]).exists()


def records_there(project: Project, run_id: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in project.written(run_id).splitlines()]
