"""The clock of the host or of this machine is set while a run goes on, by a day, both ways.

Nothing that must be right hangs on a wall clock: order, seals, timeouts, the end.
"""

from __future__ import annotations

import itertools
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.project import ORCH, Project

PAYLOAD = """
import json, os, sys, time
params = json.load(open(sys.argv[sys.argv.index("--params") + 1]))
for i in range(30):
    print("line", i)
print("set the clock now")
while not os.path.exists(params["go"]):
    time.sleep(0.01)
for i in range(30, 60):
    print("line", i)
    time.sleep(0.01)
"""
LIBRARIES = "/usr/lib/*/faketime/libfaketime.so.1"
STEPPED_CLOCK = Path(__file__).with_name("stepped_clock.py")
DAY_S = 86400


@pytest.fixture
def library() -> Path:
    found = sorted(Path("/").glob(LIBRARIES.lstrip("/")))
    if not found:
        pytest.skip("libfaketime is missing: install faketime")
    return found[0]


@pytest.mark.parametrize("step_s", [DAY_S, -DAY_S])
@pytest.mark.parametrize("side", ["here", "there"])
def test_a_clock_that_is_set_changes_nothing_that_counts(
    project: Project, tmp_path: Path, library: Path, side: str, step_s: int, tally: Callable[[str], None]
) -> None:
    clock, go = tmp_path / "clock", tmp_path / "go"
    clock.write_text("+0\n")
    if side == "there":
        _set_clock_of_host(project, library, clock)
    path = project.experiment(PAYLOAD, params={"go": str(go)}, timeout="10m")
    program = [sys.executable, STEPPED_CLOCK, clock] if side == "here" else [ORCH]
    with project.start("run", path, "--host", "here", program=program) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        seen = iter(process.stdout.readline, b"")
        before = []
        for line in seen:
            before.append(line)
            if b"set the clock now" in line:
                break
        clock.write_text(f"{step_s:+d}\n")
        go.touch()
        out = b"".join((*before, *seen)).decode()
        err = process.stderr.read().decode()
    assert process.returncode == 0, err
    row = project.runs()[0]
    run_id = row["run_id"]
    shown = [line.partition(" | ")[2] for line in out.splitlines() if "/main.stdout:" in line]
    expected = [f"line {i}" for i in range(60)]
    assert [line for line in shown if line.startswith("line")] == expected
    _check_that_the_clock_was_set(project, run_id, side)
    assert row["state"] == "succeeded"
    assert project.orch("verify", run_id).code == 0
    assert project.orch("logs", run_id, "--tail", "5").out.count("\n") == 5
    tally(f"the clock set {'here' if side == 'here' else 'on the host'} during a run")


def _set_clock_of_host(project: Project, library: Path, clock: Path) -> None:
    wrapper = project.folder / "python"
    variables = {
        "LD_PRELOAD": str(library),
        "FAKETIME_TIMESTAMP_FILE": str(clock),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }
    given = " ".join(shlex.quote(f"{name}={value}") for name, value in variables.items())
    wrapper.write_text(f'#!/bin/sh\nexec env {given} {shlex.quote(sys.executable)} "$@"\n')
    wrapper.chmod(0o700)
    project.write_inventory({"here": {"transport": "local", "python": str(wrapper)}})


def _check_that_the_clock_was_set(project: Project, run_id: str, side: str) -> None:
    observations = (project.folder / ".orch" / "runs" / run_id / "observations.jsonl").read_text()
    noted = [json.loads(line)["t"] for line in observations.splitlines()]
    recorded = [record["t"] for record in project.records(run_id)]
    for times, is_set in ((recorded, side == "there"), (noted, side == "here")):
        jump = max(abs(b - a) for a, b in itertools.pairwise(times))
        assert (jump > 3000) == is_set
