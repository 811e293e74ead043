"""Many runs at the same moment on one host, over an sshd as it comes: all succeed and none is mixed up.

A default sshd drops connections before they are let in once ten of them wait (MaxStartups 10:30:100).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.faults.conftest import TRIES_ALL
from tests.project import Project
from tests.sshd import Sshd

PAYLOAD = """
import os
for i in range(300):
    print(os.environ["ORCH_RUN_ID"], i)
"""
AT_ONCE = 20
DETACHED = 300


def test_at_the_same_moment(tmp_path: Path, sshd: Sshd, tally: Callable[[str], None]) -> None:
    project = Project(tmp_path / "my project", {"here": sshd.inventory_entry()})
    path = project.experiment(PAYLOAD)
    started = [project.start("run", path, "--host", "here") for _ in range(AT_ONCE)]
    ended = [(process.communicate(timeout=120), process.returncode) for process in started]
    assert [code for _, code in ended] == [0] * AT_ONCE, [err.decode() for (_, err), _ in ended]
    rows = project.runs()
    assert len(rows) == AT_ONCE
    for row in rows:
        run_id = row["run_id"]
        assert row["state"] == "succeeded"
        assert project.output(run_id) == "".join(f"{run_id} {i}\n" for i in range(300))
        assert project.mirrored(run_id) == project.written(run_id)
        tally(f"{AT_ONCE} orch run at the same moment over a default sshd")


def test_hundreds_on_one_host(project: Project, tally: Callable[[str], None]) -> None:
    count = DETACHED if TRIES_ALL else 12
    path = project.experiment(PAYLOAD)
    run_ids = [project.orch("run", path, "--host", "here", "--detach").out.strip() for _ in range(count)]
    for run_id in run_ids:
        assert project.orch("wait", run_id).code == 0
        assert project.output(run_id) == "".join(f"{run_id} {i}\n" for i in range(300))
        assert project.mirrored(run_id) == project.written(run_id)
        tally("runs on one host, started one after the other and looked at later")
