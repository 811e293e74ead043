"""Logs as the field breaks them: bars, torn lines, any bytes, floods, many and stopped viewers, a queue."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from orchestrator.log_lines import LineAssembler
from orchestrator.supervisor.locks import is_held
from tests.project import Project, wait_until
from tests.sshd import Sshd

MOST_PEAK_BYTES = 80_000_000  # the line that must not be held is longer

ANY_BYTES = "grüße 漢字 🎉 ".encode() + b"caf\xe9 \xff\0\x1b[2J" + "\x9b31m\u202e".encode()
MIXED = f"""
import os
for i in range(20):
    os.write(2, b"\\r%3d%%|###" % i)
    os.write(1, b"step %d lo" % i)
    os.write(2, b" warning")
    os.write(1, b"ss=0.5\\n")
os.write(2, b"\\n")
os.write(1, {ANY_BYTES!r} + b"\\n")
"""
GATED = """
import os, time
print("up", flush=True)
end = time.monotonic() + 60
while not os.path.exists(os.environ["GATE"]):
    assert time.monotonic() < end
    time.sleep(0.02)
for i in range(int(os.environ["LINES"])):
    print("line", i)
"""


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    return tmp_path / "gate"


def gated(project: Project, gate: Path, lines: int, **keys: Any) -> Path:
    env = {"GATE": str(gate), "LINES": str(lines), "PYTHONUNBUFFERED": ""}
    return project.experiment(GATED, env=env, **keys)


def pull_lock(project: Project) -> Path:
    return next(project.folder.glob(".orch/runs/*/pull.lock"))


def holder_of(lock: Path) -> int:
    inode = lock.stat().st_ino
    return next(
        int(line.split()[4])
        for line in Path("/proc/locks").read_text().splitlines()
        if line.split()[1] == "FLOCK" and line.split()[5].endswith(f":{inode}")
    )


def texts(shown: str) -> list[str]:
    return [line.split(" | ", 1)[1] for line in shown.splitlines() if " | " in line]


def test_a_bar_torn_lines_and_any_bytes_are_kept_whole_and_shown_safely(project: Project) -> None:
    assert project.orch("run", project.experiment(MIXED), "--host", "here", "--detach").code == 0
    assert project.orch("wait", "last").code == 0
    out = project.orch("logs", "last", "--stream", "stdout").out
    err = project.orch("logs", "last", "--stream", "stderr").out
    assert texts(out)[:20] == [f"step {i} loss=0.5" for i in range(20)]
    assert texts(out)[20] == "grüße 漢字 🎉 caf\\xe9 \\xff\\x00\\x1b[2J\\x9b31m\\u202e"
    assert texts(err) == [" 19%|### warning"]
    with project.start("logs", "last", "--raw", "--stream", "stderr") as raw:
        updates, _ = raw.communicate(timeout=60)
    assert updates == b"".join(b"\r%3d%%|### warning" % i for i in range(20)) + b"\n"
    with project.start("logs", "last", "--raw", "--stream", "stdout") as raw:
        data, _ = raw.communicate(timeout=60)
    assert data.endswith(ANY_BYTES + b"\n")


def test_a_million_prints_are_all_there_and_in_order(project: Project) -> None:
    path = project.experiment("for i in range(10**6): print('loss', i)", env={"PYTHONUNBUFFERED": ""})
    assert project.orch("run", path, "--host", "here", "--detach").code == 0
    assert project.orch("wait", "last").code == 0
    run_id = project.runs()[0]["run_id"]
    lines, records = LineAssembler(host="here", run_id=run_id), project.records(run_id)
    shown = [(line.number, line.text) for record in records for line in lines.feed(record)]
    assert shown == [(number + 1, f"loss {number}") for number in range(10**6)]
    assert [record["seq"] for record in records] == list(range(len(records)))


def test_a_line_of_100_mb_is_held_whole_by_nobody(project: Project, tmp_path: Path, gate: Path) -> None:
    flood = """
import os
part = b"x" * 1000000
for _ in range(100):
    view = memoryview(part)
    while view:
        view = view[os.write(1, view):]
os.write(1, b"\\n")
"""
    path = project.experiment(flood + GATED, env={"GATE": str(gate), "LINES": "1"})
    with (tmp_path / "out").open("w+b") as out:
        run = project.start("run", path, "--host", "here", stdout=out, stderr=out)
        wait_until(lambda: b"stdout:2 | up\n" in (tmp_path / "out").read_bytes(), "the next line")
        (state,) = project.host_root.glob("runs/*/state.json")
        supervisor = json.loads(state.read_text())["identity"]["pid"]
        peaks = [peak_bytes(pid) for pid in (run.pid, supervisor)]
        gate.touch()
        assert run.wait(60) == 0
    line = texts((tmp_path / "out").read_text())[0]
    assert line.startswith("xxxx")
    assert "[… 99983616 more bytes" in line
    assert max(peaks) < MOST_PEAK_BYTES


def peak_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


def test_many_viewers_look_at_what_one_connection_brings(sshd: Sshd, tmp_path: Path, gate: Path) -> None:
    project = Project(tmp_path / "my project", {"here": sshd.inventory_entry()})
    run = project.start("run", gated(project, gate, 3000), "--host", "here")
    assert run.stdout is not None
    assert b"up" in run.stdout.readline()
    before = sshd.log.read_text().count("Accepted publickey")
    viewers = [project.start("logs", "-f", "last") for _ in range(3)]
    for viewer in viewers:
        assert viewer.stdout is not None
        assert b"up" in viewer.stdout.readline()
    assert sshd.log.read_text().count("Accepted publickey") == before == 1
    gate.touch()
    for process in (run, *viewers):
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        assert texts(out.decode()) == [f"line {i}" for i in range(3000)]


def test_a_stopped_viewer_slows_neither_the_run_nor_who_else_looks(
    project: Project, tmp_path: Path, gate: Path
) -> None:
    lines = 40_000
    out_file = (tmp_path / "out").open("w+b")
    run = project.start("run", gated(project, gate, lines), "--host", "here", stdout=out_file)
    wait_until(lambda: b"up" in (tmp_path / "out").read_bytes(), "the first line")
    viewer = project.start("logs", "-f", "last", stderr=subprocess.DEVNULL)
    assert viewer.stdout is not None
    assert b"up" in viewer.stdout.readline()
    viewer.send_signal(signal.SIGSTOP)
    try:
        gate.touch()
        run.communicate(timeout=60)
        assert run.returncode == 0
        out_file.seek(0)
        assert texts(out_file.read().decode())[1:] == [f"line {i}" for i in range(lines)]
    finally:
        viewer.send_signal(signal.SIGCONT)
        rest, _ = viewer.communicate(timeout=60)
        out_file.close()
    assert rest.count(b"\n") == lines
    assert rest.endswith(f"| line {lines - 1}\n".encode())


def test_a_stopped_viewer_that_pulls_is_named_to_those_who_wait_for_it(project: Project, gate: Path) -> None:
    assert project.orch("run", gated(project, gate, 3), "--host", "here", "--detach").code == 0
    with project.start("logs", "-f", "last") as puller, project.start("logs", "-f", "last") as viewer:
        assert puller.stdout is not None
        assert b"up" in puller.stdout.readline()
        wait_until(lambda: is_held(str(pull_lock(project))), "the puller")
        puller_pid = next(pid for pid in (puller.pid, viewer.pid) if pid == holder_of(pull_lock(project)))
        other = viewer if puller_pid == puller.pid else puller
        os.kill(puller_pid, signal.SIGSTOP)
        try:
            assert other.stderr is not None
            assert f"process {puller_pid}, which is stopped".encode() in other.stderr.readline()
        finally:
            os.kill(puller_pid, signal.SIGCONT)
        gate.touch()
        for process in (puller, viewer):
            out, err = process.communicate(timeout=60)
            assert (process.returncode, texts(out.decode())[-1]) == (0, "line 2"), err


def test_a_run_that_waits_says_for_whom_and_its_follow_sees_its_turn(project: Project, gate: Path) -> None:
    path = gated(project, gate, 1, params={"n": 0}, matrix={"params": {"n": [1, 2]}})
    done = project.orch("run", path, "--host", "here", "--detach", "--json")
    assert done.code == 0, done.err
    first, second = sorted(project.runs(), key=lambda row: row["job"]["turn"]["place"])
    wait_until(lambda: "up" in project.orch("logs", first["run_id"]).out, "the first run's output")
    waits = f"run {second['run_id']} waits for its turn in {first['group_id']}, behind {first['run_id']}"
    shown = project.orch("logs", second["run_id"])
    assert (shown.code, shown.out) == (0, "")
    assert waits in shown.err
    viewers = [
        project.start("logs", "-f", *arguments)
        for arguments in (["--merge", first["group_id"]], [second["run_id"]])
    ]
    for viewer in viewers:
        assert viewer.stderr is not None
        while waits.encode() not in (line := viewer.stderr.readline()):
            assert line
    gate.touch()
    for viewer, times in zip(viewers, (2, 1), strict=True):
        out, err = viewer.communicate(timeout=60)
        assert viewer.returncode == 0, err
        assert f"the turn of run {second['run_id']} came" in err.decode()
        assert texts(out.decode()) == ["up", "line 0"] * times


def test_a_run_without_output_says_so(project: Project) -> None:
    assert project.orch("run", project.experiment("pass"), "--host", "here").code == 0
    shown = project.orch("logs", "last")
    assert (shown.code, shown.out) == (0, "")
    assert "there is no output of run" in shown.err
