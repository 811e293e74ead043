"""The connection breaks after any number of bytes, in either direction, while a run is started and followed.

A run that could not be started says so; one that was is followed to its end over a new connection. It runs
at most once, and its mirror is the host's bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.faults.proxy import Direction, Proxy
from tests.project import Project
from tests.sshd import Sshd

PAYLOAD = """
import json, os, sys, time
params = json.load(open(sys.argv[sys.argv.index("--params") + 1]))
with open(params["marks"], "a") as file:
    file.write(os.environ["ORCH_RUN_ID"] + "\\n")
for i in range(200):
    print("line", i, "x" * 80)
    time.sleep(0.001)
"""
OUTPUT = "".join(f"line {i} {'x' * 80}\n" for i in range(200))
POINTS = 40
NEVER = 10**12


@pytest.fixture
def proxy(sshd: Sshd) -> Iterator[Proxy]:
    with Proxy(sshd.port) as proxy:
        yield proxy


@pytest.mark.parametrize("direction", ["up", "down"])
def test_a_connection_cut_anywhere_costs_nothing(
    tmp_path: Path,
    sshd: Sshd,
    proxy: Proxy,
    direction: Direction,
    some_of: Callable[[Sequence[int]], list[int]],
    tally: Callable[[str], None],
) -> None:
    project = Project(tmp_path / "my project", {"here": sshd.inventory_entry(port=proxy.port)})
    marks = tmp_path / "marks"
    path = project.experiment(PAYLOAD, params={"marks": str(marks)})
    for _ in range(2):  # the first one also ships the supervisor
        proxy.cut_at(direction, NEVER)
        assert project.orch("run", path, "--host", "here").code == 0
    whole = round(0.8 * proxy.carried[direction])  # how output falls into records differs from run to run
    executed = 2
    for point in some_of([whole * index // POINTS for index in range(POINTS)]):
        cuts = proxy.cuts
        proxy.cut_at(direction, point)
        done = project.orch("run", path, "--host", "here")
        assert proxy.cuts == cuts + 1, "the connection was not cut"
        row = project.runs()[0]
        assert (done.code, row["state"]) in ((0, "succeeded"), (3, "refused")), (point, done.err)
        if row["state"] == "succeeded":
            executed += 1
            assert project.output(row["run_id"]) == OUTPUT
            assert done.out.count("/main.stdout:") == OUTPUT.count("\n")
            assert project.mirrored(row["run_id"]) == project.written(row["run_id"])
        tally(f"connection cut, {'to' if direction == 'up' else 'from'} the host, after any number of bytes")
    assert len(marks.read_text().split()) == executed == len(set(marks.read_text().split()))
