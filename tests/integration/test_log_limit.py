"""A run that prints more than its log limit: the host keeps to it, and every view says what is missing."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

from tests.project import Project, wait_until
from tests.sshd import Sshd

MIB = 1024 * 1024
LIMIT = "16MiB"
CODE = """
import os
for i in range(12000):
    os.write(1, b"%d %s\\n" % (i, b"x" * 1990))
"""
WAITING_CODE = """
import os, time
def fill(first):
    for i in range(first, first + 12000):
        os.write(1, b"%d %s\\n" % (i, b"x" * 1990))
os.write(1, b"ready\\n")
while not os.path.exists("go"):
    time.sleep(0.05)
fill(0)
"""
WAIT_S = 60.0


def host_size(project: Project, run_id: str) -> int:
    records = project.host_root / "runs" / run_id / "records"
    return sum(path.stat().st_size for path in records.iterdir())


def test_a_late_reader_sees_the_beginning_one_line_for_what_is_missing_and_the_end(tmp_path: Path) -> None:
    project = Project(tmp_path / "project")
    experiment = project.experiment(CODE, log_limit=LIMIT)
    run_id = project.orch("run", experiment, "--host", "here", "--detach").out.strip()
    state = project.host_root / "runs" / run_id / "state.json"
    wait_until(lambda: json.loads(state.read_text())["state"] == "ended", "the end, with nobody reading")
    summary = project.orch("wait", run_id)
    assert summary.code == 0, summary.err
    assert "cut by the run's log limit before they came" in summary.out
    assert host_size(project, run_id) <= 16 * MIB

    lines = [json.loads(line) for line in project.orch("logs", run_id, "--json").out.splitlines()]
    texts = [line["text"] for line in lines]
    (at,) = [index for index, line in enumerate(lines) if "cut" in line]
    assert texts[at].startswith(
        f"[… {lines[at]['cut']['size_bytes']} bytes cut by the run's log limit, records "
    )
    assert texts[0].startswith("0 x")
    assert texts[-1].startswith("11999 x")
    assert [line["number"] for line in lines[at + 1 :]][-1] == 12000
    assert len(texts) < 10000
    raw = project.orch("logs", run_id, "--raw")
    assert (raw.code, raw.out) == (2, "")
    assert "were cut by its log limit" in raw.err

    done = project.orch("verify", run_id)
    assert done.code == 0, done.out
    assert "cut by the run's log limit" in done.out


def test_a_follow_that_was_stopped_goes_on_behind_what_went_meanwhile(tmp_path: Path, sshd: Sshd) -> None:
    project = Project(tmp_path / "project", {"here": sshd.inventory_entry()})
    experiment = project.experiment(WAITING_CODE, log_limit=LIMIT)
    with project.start("run", experiment, "--host", "here") as process:
        assert process.stdout is not None
        assert b"ready" in process.stdout.readline()
        (run,) = (project.host_root / "runs").iterdir()
        os.kill(process.pid, signal.SIGSTOP)
        (run / "artifacts" / "go").touch()
        end_at = time.monotonic() + WAIT_S
        while json.loads((run / "state.json").read_text())["state"] != "ended":
            assert time.monotonic() < end_at
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGCONT)
        out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, err
    texts = [line.partition(" | ")[2] for line in out.decode().splitlines() if " | " in line]
    assert texts[-1].startswith("11999 x")
    assert host_size(project, run.name) <= 16 * MIB
    missing = next(index for index, text in enumerate(texts) if text.startswith("[… "))
    assert "bytes cut by the run's log limit, records " in texts[missing]
    numbers = [int(text.split()[0]) for text in texts[:missing]]
    assert numbers == list(range(len(numbers)))
    done = project.orch("verify", run.name)
    assert done.code == 0, done.out
