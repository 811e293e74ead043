"""SIGKILL at every step: of `orch run`, of the host's side of a start, and of a run's supervisor.

Whatever moment it hits, the next command finds one of few states; the payload runs at most once, what
it wrote is whole, nothing of it goes on unseen, and the next run works.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from orchestrator.supervisor import processes
from orchestrator.supervisor.cgroups import MOUNTS
from tests.project import Project

KILLER = Path(__file__).with_name("killer.py")
PAYLOAD = """
import json, os, sys
params = json.load(open(sys.argv[sys.argv.index("--params") + 1]))
with open(params["marks"], "a") as file:
    file.write(os.environ["ORCH_RUN_ID"] + "\\n")
for i in range(50):
    print("line", i)
"""
OUTPUT = "".join(f"line {i}\n" for i in range(50))

Choose = Callable[[Sequence[int]], list[int]]
Tally = Callable[[str], None]


@pytest.fixture
def marks(tmp_path: Path) -> Path:
    """Each execution of a payload leaves its run's id here."""
    path = tmp_path / "marks"
    path.touch()
    return path


def test_orch_run(project: Project, marks: Path, some_of: Choose, tally: Tally) -> None:
    path = project.experiment(PAYLOAD, params={"marks": str(marks)})
    for step in some_of(range(1, _last_step_of_orch_run(project, path, marks) + 1)):
        killed = _orch_run_killed_at(project, path, step, project.folder / "count")
        assert killed.returncode in (0, -9), (step, killed.stderr)
        for row in _settled(project):
            assert row["state"] in ("succeeded", "refused"), (step, row)
        _check_runs(project, marks)
        tally("kill -9 of orch run, at every step of it")


def test_the_hosts_side_of_a_start(project: Project, marks: Path, some_of: Choose, tally: Tally) -> None:
    _sweep_host(project, marks, some_of, "first", lambda: tally("kill -9 of the host's side of a start"))


def test_a_supervisor(project: Project, marks: Path, some_of: Choose, tally: Tally) -> None:
    _sweep_host(project, marks, some_of, "forked", lambda: tally("kill -9 of a run's supervisor"))


def _sweep_host(project: Project, marks: Path, some_of: Choose, who: str, count: Callable[[], None]) -> None:
    path = project.experiment(PAYLOAD, params={"marks": str(marks)})
    assert project.orch("run", path, "--host", "here").code == 0  # the supervisor is installed and compiled
    for step in some_of(range(1, _last_step_of_host(project, path, who) + 1)):
        _kill_on_host_at(project, who, step)
        done = project.orch("run", path, "--host", "here")
        assert done.code in (0, 1, 3), (step, done.err)
        _kill_on_host_at(project, who, 0)
        for row in _settled(project):
            assert row["state"] in ("succeeded", "refused", "lost"), (step, row)
        _check_runs(project, marks)
        count()


def _settled(project: Project) -> list[dict[str, Any]]:
    """Returns all runs once each has ended, as any later command finds and leaves them."""
    for row in project.runs():
        if row["state"] in ("created", "starting", "running"):
            project.orch("wait", row["run_id"])
    rows = project.runs()
    for row in rows:
        if row["state"] == "lost":
            project.orch("cancel", row["run_id"], "--grace", "0")
        assert processes.members(row["run_id"]) == [], row
    return rows


def _check_runs(project: Project, marks: Path) -> None:
    executed = marks.read_text().split()
    rows = {row["run_id"]: row for row in project.runs()}
    assert len(executed) == len(set(executed)), "a payload ran twice"
    assert set(executed) <= set(rows), "a payload ran that nobody knows"
    cgroups = [path for mount in MOUNTS for path in Path(mount).glob("**/orch-*") if path.name[5:] in rows]
    assert cgroups == [], "a cgroup is left"
    on_host = {path.name for path in project.host_root.glob("runs/*")}
    assert on_host <= set(rows), "a host has a run that nobody knows"
    newest = next(iter(rows.values()), None)
    if newest is not None and newest["state"] == "succeeded":
        run_id = newest["run_id"]
        assert run_id in executed
        assert project.output(run_id) == OUTPUT
        assert project.mirrored(run_id) == project.written(run_id)
        assert project.orch("verify", run_id).code == 0


def _orch_run_killed_at(project: Project, path: Path, step: int, count_file: Path) -> Any:
    killer: list[str | Path] = [sys.executable, KILLER, "first", str(step), count_file]
    return project.execute([*killer, "orch", "run", path, "--host", "here"])


def _last_step_of_orch_run(project: Project, path: Path, marks: Path) -> int:
    count_file = project.folder / "count"
    done = _orch_run_killed_at(project, path, 0, count_file)
    assert done.returncode == 0, done.stderr
    assert marks.read_text()
    return int(count_file.read_text())


def _last_step_of_host(project: Project, path: Path, who: str) -> int:
    _kill_on_host_at(project, who, 0)
    assert project.orch("run", path, "--host", "here").code == 0
    return int((project.folder / "count").read_text())


def _kill_on_host_at(project: Project, who: str, step: int) -> None:
    """The host's interpreter becomes one that ends itself at that step."""
    wrapper = project.folder / "python"
    command = shlex.join(
        [sys.executable, "-I", "-S", str(KILLER), who, str(step), str(project.folder / "count"), "python"]
    )
    wrapper.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    wrapper.chmod(0o700)
    project.write_inventory({"here": {"transport": "local", "python": str(wrapper)}})
