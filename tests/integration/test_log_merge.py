"""`orch logs --merge`: one group on two hosts, one of which has a clock that is an hour ahead."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.project import Project
from tests.sshd import Sshd, require_sshd

AHEAD_S = 3600.0
LAST = 11

# Two runs count in turn: each goes on when the other's number stands in that one's records.
IN_TURN = """
import os, pathlib, sys, time
me, place = int(os.environ["ME"]), pathlib.Path(os.environ["PLACE"])
records, end = pathlib.Path("../records/000000.jsonl"), time.monotonic() + 30
for number in range(me, 12, 2):
    while number and not (place / str(number - 1)).exists():
        assert time.monotonic() < end
        time.sleep(0.005)
    sys.stdout.write(f"number {number}\\n")
    while f'"text":"number {number}\\\\n"' not in records.read_text():
        assert time.monotonic() < end
        time.sleep(0.005)
    (place / str(number)).touch()
"""

# Runs the supervisor as python3 would, with another idea of the time.
PYTHON_AHEAD = f"""
import sys, time
real = time.time
time.time = lambda: real() + {AHEAD_S}
code = sys.argv[sys.argv.index("-c") + 1]
sys.argv = ["-c"]
exec(code, {{"__name__": "__main__"}})
"""


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    require_sshd()
    with Sshd(tmp_path_factory.mktemp("sshd") / "a server") as server:
        yield server


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, sshd: Sshd) -> Project:
    """A project with one group of two runs, ``here`` and ``there``, that have ended."""
    folder = tmp_path_factory.mktemp("merge")
    place, python = folder / "place", folder / "python-ahead"
    place.mkdir()
    (folder / "ahead.py").write_text(PYTHON_AHEAD)
    command = shlex.join([sys.executable, "-I", "-S", str(folder / "ahead.py")])
    python.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    python.chmod(0o700)
    env = {"PLACE": str(place)}
    there = sshd.inventory_entry(python=str(python), root=str(folder / "there"), env={**env, "ME": "1"})
    hosts: dict[str, dict[str, Any]] = {
        "here": {"transport": "local", "env": {**env, "ME": "0"}},
        "there": there,
    }
    project = Project(folder / "my project", hosts)
    done = project.orch("run", project.experiment(IN_TURN), "--host", "here", "--host", "there")
    assert done.code == 0, done.err
    return project


def group_of(project: Project) -> str:
    return str(project.runs()[-1]["group_id"])


def test_lines_of_a_group_come_in_the_order_in_which_they_were_written(project: Project) -> None:
    done = project.orch("logs", "--merge", group_of(project), "--json")
    assert done.code == 0, done.err
    lines = [json.loads(line) for line in done.out.splitlines()]
    assert [line["text"] for line in lines] == [f"number {number}" for number in range(LAST + 1)]
    assert [line["host"] for line in lines] == ["here", "there"] * 6
    ahead = [line["t"] - line["t_here"] for line in lines if line["host"] == "there"]
    assert all(abs(seconds - AHEAD_S) < 5 for seconds in ahead)
    assert "clock of there: +3600." in done.err
    assert "clock of here: " in done.err


def test_every_line_says_host_run_process_and_pid(project: Project) -> None:
    rows = {row["host"]: row["run_id"] for row in project.runs()}
    out = project.orch("logs", "--merge", rows["there"], rows["here"], "--long").out.splitlines()
    spawned = [next(r for r in project.records(run_id) if r["kind"] == "spawn") for run_id in rows.values()]
    pids = {host: record["pid"] for host, record in zip(rows, spawned, strict=True)}
    for index, line in enumerate(out):
        host = ("here", "there")[index % 2]
        source, text = line.split(" | ")
        assert text == f"number {index}"
        assert source.startswith(f"{host} {rows[host][:8]}/main.stdout:{index // 2 + 1} pid {pids[host]} 20")
    times = [line.split(" | ")[0].rsplit(" ", 1)[1] for line in out]
    assert times == sorted(times)


def test_tail_grep_and_since_look_at_all_runs_together(project: Project) -> None:
    group = group_of(project)
    tail = project.orch("logs", "--merge", group, "--tail", "3", "--grep", r"\d$", "--since", "1h").out
    assert [line.split(" | ")[1] for line in tail.splitlines()] == ["number 9", "number 10", "number 11"]
    assert project.orch("logs", "--merge", group, "--since", "2100-01-01").out == ""


def test_a_host_that_is_away_is_said_and_its_last_known_offset_is_used(project: Project, sshd: Sshd) -> None:
    group = group_of(project)
    for path in (project.folder / ".orch" / "runs").glob("*/observations.jsonl"):
        lines = path.read_text().splitlines()
        old = [
            {**entry, "t": entry["t"] - 9e5}
            for line in lines
            if (entry := json.loads(line))["kind"] == "clock"
        ]
        path.write_text("".join(f"{json.dumps(entry)}\n" for entry in old))
    sshd.stop_listening()
    try:
        done = project.orch("logs", "--merge", group, "--json")
    finally:
        sshd.start()
    assert done.code == 0
    assert len(done.out.splitlines()) == LAST + 1
    assert "showing what is mirrored here" in done.err
    assert "clock of there: +3600." in done.err


def test_a_merged_follow_shows_every_line_once_and_ends_with_the_runs(project: Project) -> None:
    code = """
        import sys, time
        for i in range(40):
            print("tick", i, flush=True)
            time.sleep(0.02)
        sys.stdout.write("no line end")
        """
    path = project.experiment(code, name="ticks")
    ids = [project.orch("run", path, "--host", host, "--detach").out.strip() for host in ("here", "there")]
    done = project.orch("logs", "-f", "--merge", *ids, "--json")
    assert done.code == 0, done.err
    lines = [json.loads(line) for line in done.out.splitlines()]
    for run_id in ids:
        mine = [line["text"] for line in lines if line["run_id"] == run_id]
        assert mine == [*(f"tick {i}" for i in range(40)), "no line end"]
        assert f"run {run_id} has ended: succeeded, verdict ok" in done.err
    noted = [entry for run_id in ids for entry in project.observations(run_id, "clock")]
    assert {round(entry["offset_s"], -1) for entry in noted} == {0.0, AHEAD_S}


def test_several_runs_without_merge_are_refused(project: Project) -> None:
    for names in (["last", "last"], [group_of(project)]):
        done = project.orch("logs", *names)
        assert (done.code, done.out) == (2, "")
        assert "--merge" in done.err
