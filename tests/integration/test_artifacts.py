"""What a run wrote, brought here by `orch run`, `wait` and `fetch`: on this machine and over a real sshd."""

from __future__ import annotations

import json
import os
import pty
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.project import Project, wait_until
from tests.sshd import Sshd

MIB = 1024**2
LARGE_MIB = 64  # so that neither windows nor buffers hold the rest of it
LARGE = f"""
import os
block = os.urandom({MIB} - 8)
with open("large.bin", "wb") as file:
    for i in range({LARGE_MIB}):
        file.write(i.to_bytes(8, "big") + block)
"""
WRITER = """
import os, sys, time
os.makedirs("results/deep")
for name, data in (("results/a.json", "{}"), ("results/deep/b.csv", "1,2"), ("other", "x")):
    with open(name, "w") as file:
        file.write(data)
os.symlink("/etc/passwd", "results/link")
with open(b"results/\\xff\\x1b[2J", "w"):
    pass
with open("some.bin", "wb") as file:
    file.write(os.urandom(4 << 20))
"""
SOME_LEAD_OUT = """
import json, os, sys
if json.load(open(sys.argv[-1]))["leads_out"]:
    place = os.getcwd()
    os.chdir("/")
    os.rmdir(place)
    os.symlink("/etc", place)
else:
    with open("passwd", "w") as file:
        file.write("mine")
"""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """A project with one run that has written its files and goes on."""
    project = Project(tmp_path_factory.mktemp("artifacts") / "my project")
    code = f"{WRITER}print('printed', flush=True)\ntime.sleep(600)"
    run_id = project.orch("run", project.experiment(code), "--host", "here", "--detach").out.strip()
    wait_until(lambda: b'"text":"printed' in project.written(run_id), "the payload's word")
    yield project
    project.end_all()


def folders(project: Project) -> dict[str, dict[str, bytes]]:
    """Returns what is here of each run's artifacts."""
    return {
        run.name: {
            str(path.relative_to(run / "artifacts")): path.read_bytes()
            for path in (run / "artifacts").rglob("*")
            if path.is_file()
        }
        for run in (project.folder / ".orch" / "runs").iterdir()
    }


def test_what_an_experiment_collects_is_here_with_its_verdict_and_stays_there_while_it_is_not(
    project: Project,
) -> None:
    path = project.experiment(WRITER + "sys.exit(3)", collect=["results/**"])
    done = project.orch("run", path, "--host", "here")
    ((run_id, files),) = folders(project).items()
    assert files == {"results/a.json": b"{}", "results/deep/b.csv": b"1,2"}
    assert (done.code, "failed (not good)" in done.out) == (1, True)  # as without artifacts
    assert f"artifacts    2 files, 5 B, in {project.folder}/.orch/runs/{run_id}/artifacts" in done.out
    assert "left there: results/link: it is a symbolic link" in done.err
    assert r"not fetched: results/\udcff\x1b[2J: its name holds control characters" in done.err
    assert f"the rest: orch fetch {run_id}" in done.err

    there = project.host_root / "runs" / run_id
    for file in there.rglob("*"):
        os.utime(file, (1e9, 1e9), follow_symlinks=False)
    said = project.orch("gc", "--host", "here", "--yes").out
    assert "stays: not all that it collects is here: `orch fetch`" in said
    (there / "artifacts" / "results" / "\udcff\x1b[2J").unlink()
    assert "collected 2 files" in project.orch("wait", run_id).err
    project.orch("gc", "--host", "here", "--yes")
    assert not there.exists()


def test_a_group_brings_what_each_run_collects_and_one_that_leads_out_changes_no_verdict(
    project: Project,
) -> None:
    matrix = {"params": {"leads_out": [True, False]}}
    path = project.experiment(SOME_LEAD_OUT, params={"leads_out": 0}, matrix=matrix, collect=["passwd"])
    done = project.orch("run", path, "--host", "here")
    assert (done.code, ": 2 ok" in done.out) == (0, True)
    found = folders(project)
    assert sorted(found.values(), key=len) == [{}, {"passwd": b"mine"}]
    (led_out,) = (run_id for run_id, files in found.items() if not files)
    assert f"what run {led_out} collects is not here: orch fetch {led_out}" in done.err


def test_a_file_that_was_cut_in_the_middle_goes_on_over_the_next_connection(
    sshd: Sshd, tmp_path: Path
) -> None:
    project = Project(tmp_path / "p", {"here": sshd.inventory_entry()})
    project.orch("run", project.experiment(LARGE), "--host", "here")
    target = tmp_path / "to here"
    with project.start("fetch", "last", "large.bin", "--to", target, "--json") as process:
        wait_until(lambda: [*target.glob(".part/*")], "the file to begin")
        (part,) = target.glob(".part/*")
        wait_until(lambda: part.stat().st_size > MIB, "some of the file")
        sshd.pause_sessions()
        cut_at = part.stat().st_size
        sshd.kill_sessions()
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert b"going on from where it broke" in err
    assert cut_at < LARGE_MIB * MIB
    assert json.loads(out)["moved_bytes"] == LARGE_MIB * MIB
    (there,) = project.host_root.glob("runs/*/artifacts/large.bin")
    assert (target / "large.bin").read_bytes() == there.read_bytes()


def test_a_run_that_goes_on_is_fetched_from_and_what_is_not_there_is_said(
    running: Project, tmp_path: Path
) -> None:
    refused = running.orch("fetch", "last", "../x")
    assert (refused.code, "a pattern: '../x' must be a path below" in refused.err) == (2, True)
    done = running.orch("fetch", "last", "some.bin", "nothing*", "--to", tmp_path / "to")
    assert (done.code, done.out) == (1, f"1 file, 4.0 MiB, in {tmp_path}/to\n")
    assert done.err.startswith("orch: no file there is meant by nothing*; see: orch fetch --list ")
    assert (tmp_path / "to" / "some.bin").stat().st_size == 4 * MIB


def test_a_list_shows_what_is_there_and_fetches_nothing(running: Project, tmp_path: Path) -> None:
    done = running.orch("fetch", "last", "results/*", "--list", "--to", tmp_path / "not made")
    assert (done.code, done.err) == (0, "")
    rows = [(line.split()[0], line.split()[-1]) for line in done.out.splitlines()[1:]]
    assert rows == [
        ("results/a.json", "file"),
        ("results/link", "link"),
        (r"results/\udcff\x1b[2J", "file"),
    ]
    assert not (tmp_path / "not made").exists()


def test_a_terminal_shows_how_far_it_is(running: Project, tmp_path: Path) -> None:
    controller, terminal = pty.openpty()
    arguments = ("fetch", "last", "some.bin", "--to", tmp_path / "to")
    with running.start(*arguments, stdout=terminal, stderr=terminal):
        os.close(terminal)
        seen = _read_all(controller)
    assert b"\r\x1b[Kfetching 1 file, 4.0 MiB" in seen
    assert seen.endswith(b"\r\x1b[K" + f"1 file, 4.0 MiB, in {tmp_path}/to\r\n".encode())


def _read_all(fd: int) -> bytes:
    seen = b""
    with os.fdopen(fd, "rb", buffering=0) as file:
        try:
            while data := file.read(65536):
                seen += data
        except OSError:  # the last that had the terminal has closed it
            pass
    return seen
