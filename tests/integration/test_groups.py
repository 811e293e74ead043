"""Groups from the command line: a matrix, several hosts, and a controller that does not see the end."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from tests.project import Project, wait_until
from tests.sshd import Sshd

CODE = """
import json, os, sys
params = json.load(open(sys.argv[-1]))
print("case", params["a"], os.environ["MODE"], flush=True)
fd = int(os.environ["ORCH_EVENTS_FD"].split(":")[0])
os.write(fd, b'{"kind": "metric", "name": "loss", "value": %d}\\n' % params["a"])
"""
GATED = """
import os, sys, time
print("up", flush=True)
while not os.path.exists(os.environ["GATE"]):
    time.sleep(0.02)
"""
TWO_BY_TWO = {"env": {"MODE": ["x", "y"]}, "params": {"a": [1, 2]}}
DOWN = {"transport": "ssh", "address": "127.0.0.1", "port": 1}


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    project = Project(tmp_path / "my project", {"here": {"transport": "local"}, "down": DOWN})
    yield project
    project.end_all()


def group_of(stderr: IO[bytes]) -> str:
    """Reads what `orch run` says first: "orch: group g-… of …"."""
    word, name = stderr.readline().decode().split()[1:3]
    assert word == "group"
    return name


def test_a_matrix_ends_though_its_controller_was_killed(project: Project, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    code = GATED.replace("import os", "import json, os") + CODE
    path = project.experiment(code, params={"a": 0}, env={"GATE": str(gate)}, matrix=TWO_BY_TWO)
    with project.start("run", path, "--host", "here") as process:
        assert process.stderr is not None
        group = group_of(process.stderr)
        while b"runs submitted" not in (line := process.stderr.readline()):
            assert line
        process.kill()
    gate.touch()
    done = project.orch("wait", group[:6], "--json")
    assert done.code == 0, done.err
    assert done.json["group_id"] == group
    runs = done.json["runs"]
    assert [run["case"] for run in runs] == ["MODE=x, a=1", "MODE=x, a=2", "MODE=y, a=1", "MODE=y, a=2"]
    assert {run["verdict"]["name"] for run in runs} == {"ok"}
    told = [project.output(run["run"]["run_id"]) for run in runs]
    assert told == [f"up\ncase {a} {mode}\n" for mode in "xy" for a in (1, 2)]
    assert [run["outcome"]["metrics"] for run in runs] == [{"loss": 1.0}, {"loss": 2.0}] * 2
    begun = [run["run"]["started_t"] for run in runs]
    assert all(run["run"]["ended_t"] <= t for run, t in zip(runs, begun[1:], strict=False))  # one at a time
    table = project.orch("show", group).out
    assert table.splitlines()[0].split()[-1] == "loss"
    assert f"group {group}: 4 ok" in table


def test_a_group_is_followed_with_every_line_s_source_and_ends_with_one_table(project: Project) -> None:
    path = project.experiment(CODE, params={"a": 0}, matrix={**TWO_BY_TWO, "at_once": 2})
    done = project.orch("run", path, "--host", "here")
    assert done.code == 0, done.err
    for row in project.runs():
        case = row["job"]["case"]
        mode, a = case[5], case[-1]
        assert f"here {row['run_id'][:8]}/main.stdout:1 | case {a} {mode}\n" in done.out
        assert f"{case} begins on here, run {row['run_id']}" in done.err
        assert f"{case} on here ends: ok, run {row['run_id']}" in done.err
    assert done.out.count("verdict") == 0
    assert done.out.count("CASE ") == 1


def test_leaving_a_group_leaves_its_runs(project: Project, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    path = project.experiment(
        GATED, env={"GATE": str(gate)}, params={"a": 0}, matrix={"params": {"a": [1, 2]}}
    )
    with project.start("run", path, "--host", "here") as process:
        assert process.stderr is not None
        group = group_of(process.stderr)
        assert process.stdout is not None
        assert process.stdout.readline().endswith(b" | up\n")
        process.send_signal(signal.SIGINT)
        assert f"nothing was done to group {group}. Come back with: orch wait {group}" in (
            process.stderr.read().decode()
        )
    assert process.returncode == 130
    gate.touch()
    assert project.orch("wait", group).code == 0


def test_a_dry_run_lists_every_case_and_contacts_nobody(project: Project) -> None:
    path = project.experiment(CODE, params={"a": 0}, matrix=TWO_BY_TWO)
    asked = ("run", path, "--host", "down", "--host", "here", "--dry-run")
    lines = project.orch(*asked).out.splitlines()
    cases = [f"MODE={mode}, a={a}" for mode in "xy" for a in (1, 2)]
    assert lines[-8:] == [f"  {host}: {case}" for host in ("down", "here") for case in cases]
    planned = project.orch(*asked, "--json").json["runs"]
    assert [run["job"]["params"]["a"] for run in planned] == [1, 2] * 4
    assert project.runs() == []


def test_a_dead_host_s_cases_are_refused_and_the_others_run(project: Project, sshd: Sshd) -> None:
    project.write_inventory({"up": sshd.inventory_entry(), "down": DOWN})
    path = project.experiment(CODE, params={"a": 0}, matrix=TWO_BY_TWO)
    done = project.orch("run", path, "--host", "down", "--host", "up", "--json")
    assert done.code == 3, done.err
    verdicts = [(run["run"]["host"], run["verdict"]["name"]) for run in done.json["runs"]]
    assert verdicts == [("down", "refused")] * 4 + [("up", "ok")] * 4
    assert done.err.count("Connection refused") == 1


def test_a_detached_group_that_a_host_did_not_take_whole_is_no_success(project: Project) -> None:
    path = project.experiment("", params={"a": 0})
    done = project.orch("run", path, "--host", "down", "--host", "here", "--detach")
    assert done.code == 3, done.err
    group = done.out.split()[0]
    assert project.orch("wait", group).code == 3


def test_a_group_of_which_a_host_cannot_be_asked_is_not_cancelled_and_says_why(
    project: Project, sshd: Sshd
) -> None:
    project.write_inventory({"here": {"transport": "local"}, "up": sshd.inventory_entry()})
    path = project.experiment(GATED, env={"GATE": "/nowhere"})
    group = project.orch("run", path, "--host", "here", "--host", "up", "--detach").out.split()[0]
    sshd.stop()
    done = project.orch("cancel", group, "--grace", "0")
    sshd.start()
    again = project.orch("cancel", group, "--grace", "0")
    assert done.code == 3, done.err
    assert "up: " in done.err
    assert again.code == 0, again.err


def test_what_was_not_submitted_when_the_controller_was_killed_is_refused(project: Project) -> None:
    hold, first, late, wrapper = (project.folder / name for name in ("hold", "first", "late", "python"))
    wrapper.write_text(
        f"""#!/bin/sh
        if [ -e '{hold}' ] && ! mkdir '{first}' 2>/dev/null; then touch '{late}'; exec cat >/dev/null; fi
        exec '{sys.executable}' "$@"
        """
    )
    wrapper.chmod(0o755)
    hold.touch()
    project.write_inventory({"here": {"transport": "local", "python": str(wrapper)}})
    path = project.experiment(CODE, params={"a": 0}, matrix=TWO_BY_TWO)
    with project.start("run", path, "--host", "here") as process:
        assert process.stderr is not None
        group = group_of(process.stderr)
        wait_until(late.exists, "the second start")
        hold.unlink()
        shown = project.orch("show", group, "--json").json["runs"]
        assert [run["run"]["state"] for run in shown[1:]] == ["starting"] * 3
        process.kill()
    done = project.orch("wait", group, "--json")
    assert done.code == 3, done.err
    verdicts = [run["verdict"] for run in done.json["runs"]]
    assert [verdict["name"] for verdict in verdicts] == ["ok"] + ["refused"] * 3
    assert {verdict["reasons"][0] for verdict in verdicts[1:]} == {"its start never arrived at the host"}


def test_cancelling_a_group_ends_the_one_that_runs_and_those_that_wait(project: Project) -> None:
    path = project.experiment(
        GATED, env={"GATE": "/nowhere"}, params={"a": 0}, matrix={"params": {"a": [1, 2, 3]}}
    )
    group, *run_ids = project.orch("run", path, "--host", "here", "--detach").out.split()
    wait_until(lambda: project.orch("logs", run_ids[0]).out.endswith("up\n"), "the first case")
    done = project.orch("cancel", group, "--json")
    assert done.code == 0, done.err
    assert [run["verdict"]["name"] for run in done.json["runs"]] == ["cancelled"] * 3
    assert [project.output(run_id) for run_id in run_ids] == ["up\n", "", ""]
    again = project.orch("rerun", run_ids[1], "--detach", "--json").json["run_id"]
    row = project.runs()[0]
    assert (row["run_id"], row["group_id"], row["retry_of"]) == (again, group, run_ids[1])
    assert row["job"]["turn"] is None
