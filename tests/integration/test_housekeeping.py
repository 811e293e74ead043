"""Runs that others started, hosts that cannot be asked, what is seen of a run, and what is cleaned up."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from tests.project import Project, wait_until
from tests.sshd import Sshd

SLEEPER = """
import time
print("printed", flush=True)
time.sleep(600)
"""
OLD_S = 40 * 86400.0


def start(project: Project, code: str = SLEEPER, host: str = "here", **keys: Any) -> str:
    """Starts a run that is not followed, and waits for its own word."""
    run_id = project.orch("run", project.experiment(code, **keys), "--host", host, "--detach").out.strip()
    wait_until(lambda: b'"text":"printed' in project.written(run_id), "the payload's word")
    return run_id


def supervisor(project: Project, run_id: str) -> int:
    state = json.loads((project.host_root / "runs" / run_id / "state.json").read_text())
    pid: int = state["identity"]["pid"]
    assert pid > 1
    return pid


def make_old(folder: Path) -> None:
    then = time.time() - OLD_S
    for path in folder.rglob("*"):
        os.utime(path, (then, then), follow_symlinks=False)


def second_home(tmp_path: Path) -> dict[str, dict[str, str]]:
    return {"env": {"ORCH_HOME": str(tmp_path / "second home")}}


def test_a_run_that_another_controller_started_can_be_shown_proven_and_cancelled(
    project: Project, tmp_path: Path
) -> None:
    run_id = start(project, env={"TOKEN": "hf_secret"})
    other = second_home(tmp_path)
    listed = project.orch("ps", "--host", "here", "--all", "--json", **other)
    assert "1 were unknown here" in listed.err
    (row,) = listed.json
    assert (row["run_id"], row["state"], row["is_adopted"]) == (run_id, "running", True)
    ledger = b"".join(path.read_bytes() for path in (tmp_path / "second home").glob("ledger.db*"))
    assert b"hf_secret" not in ledger
    assert "0 were unknown here" in project.orch("ps", "--host", "here", "--all", **other).err
    assert project.orch("cancel", run_id, "--grace", "1", **other).code == 0
    assert "printed" in project.orch("logs", run_id, **other).out
    verified = project.orch("verify", run_id, "--json", **other)
    assert {check["name"]: check["status"] for check in verified.json["checks"]}["job"] == "ok"
    again = project.orch("rerun", run_id, **other)
    assert again.code == 4
    assert "cannot be run again" in again.err
    assert (
        project.orch("reconcile").out
        == f"here {run_id} trial: running → cancelled, cancelled: {reason(project)}\n"
    )


def test_a_found_run_gets_no_variable_of_this_environment_at_its_hosts_word(
    project: Project, tmp_path: Path
) -> None:
    path = project.experiment("print('x')", env={"HF_TOKEN": {"secret": True, "from_env": "MY_TOKEN"}})
    env = {"MY_TOKEN": "hf_0123456789"}
    assert project.orch("run", path, "--host", "here", env=env).code == 0
    run_id = project.runs()[0]["run_id"]
    assert project.orch("rerun", run_id, env=env).code == 0
    other = {"env": {**env, "ORCH_HOME": str(tmp_path / "second home")}}
    project.orch("ps", "--host", "here", "--all", **other)
    refused = project.orch("rerun", run_id, **other)
    assert refused.code == 2
    assert "asks for MY_TOKEN of this environment" in refused.err


def reason(project: Project) -> str:
    text: str = project.runs()[0]["reason"]
    return text


def test_another_job_under_a_known_id_and_hostile_folders_are_left_alone(
    project: Project, tmp_path: Path
) -> None:
    run_id = project.orch(
        "run", project.experiment("print('done')"), "--host", "here", "--detach"
    ).out.strip()
    project.orch("wait", run_id)
    path = project.host_root / "runs" / run_id / "records" / "000000.jsonl"
    first, rest = path.read_text().split("\n", 1)
    record = json.loads(first)
    evil = project.host_root / "runs" / "evil"
    (evil / "records").mkdir(parents=True)
    record["job"] |= {"experiment": "\x1b[2Jelsewhere", "params": {"size": 2}}
    path.write_text(json.dumps(record) + "\n" + rest)
    (evil / "records" / "000000.jsonl").write_text(json.dumps(record) + "\n")
    (project.host_root / "runs" / "\x1b[31m").mkdir()
    done = project.orch("ps", "--host", "here", "--all")
    assert done.code == 0
    assert f"finding: here has a run {run_id} whose job is not that of the run {run_id} here" in done.err
    assert "evil was left alone: its first record is that of another run" in done.err
    assert "no run has such a name" in done.err
    assert "\x1b" not in done.err + done.out
    assert [finding["message"] for finding in project.observations(run_id, "finding")] == [
        f"here has a run {run_id} whose job is not that of the run {run_id} here"
    ]
    other = project.orch("ps", "--host", "here", "--all", **second_home(tmp_path))
    assert "\x1b" not in other.out
    assert "\\x1b[2Jelsewhere" in other.out


def test_a_host_that_cannot_be_asked_is_an_observation_and_heals(sshd: Sshd, tmp_path: Path) -> None:
    project = Project(tmp_path / "my project", {"there": sshd.inventory_entry()})
    run_id = start(project, host="there")
    sshd.stop()
    shown = project.orch("ps")
    assert (shown.code, "running · UNREACHABLE since" in shown.out) == (0, True)
    (row,) = project.runs()
    assert row["state"] == "running"
    assert row["observed"]["unreachable"]
    since_t = row["observed"]["since_t"]
    asked = project.orch("reconcile", "--json")
    assert (asked.code, list(asked.json["unreachable"]), asked.json["changes"]) == (3, ["there"], [])
    assert project.orch("show", run_id, "--json").json["run"]["observed"]["since_t"] == since_t
    sshd.start()
    (row,) = project.runs()
    assert (row["state"], row["observed"]["unreachable"]) == ("running", None)
    assert project.orch("cancel", run_id, "--grace", "0").code == 0


def test_a_stopped_supervisor_is_seen_and_a_killed_one_is_a_finding(project: Project) -> None:
    run_id = start(project)
    pid = supervisor(project, run_id)
    os.kill(pid, signal.SIGSTOP)
    assert "running · its supervisor is stopped" in project.orch("ps").out
    assert project.runs()[0]["observed"]["is_stopped"]
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: project.runs()[0]["state"] == "lost", "the loss to be noticed")
    row = project.runs()[0]
    assert "its supervisor is gone and wrote no end" in row["reason"]
    assert f"1 of its processes still run: orch cancel {run_id}" in row["reason"]
    assert project.orch("cancel", run_id, "--grace", "0").code == 0
    (item,) = (
        item
        for item in project.orch("gc", "--host", "here", "--older-than", "0.001", "--json").json["items"]
        if item["what"] == "run"
    )
    assert "--unmirrored" in item["why"]  # to reconcile would change nothing


def test_a_run_that_waits_for_its_turn_is_queued_until_it_comes(project: Project) -> None:
    path = project.experiment(SLEEPER, params={"a": 0}, matrix={"params": {"a": [1, 2]}, "at_once": 1})
    assert project.orch("run", path, "--host", "here", "--detach").code == 0
    wait_until(lambda: project.runs()[1]["state"] == "running", "the first to have its turn")
    first, second = reversed(project.runs())
    assert (second["state"], second["observed"]["ahead"]) == ("queued", 1)
    assert "queued · 1 ahead" in project.orch("ps").out
    assert project.orch("cancel", first["run_id"], "--grace", "0").code == 0
    wait_until(lambda: project.runs()[0]["state"] == "running", "the turn of the second")


def test_gc_says_what_would_go_and_removes_it_only_when_told(project: Project, tmp_path: Path) -> None:
    mirrored = project.orch("run", project.experiment("print(1)"), "--host", "here", "--json")
    run_id = mirrored.json["run"]["run_id"]
    other = second_home(tmp_path)
    theirs = project.orch(
        "run", project.experiment("print(2)", name="theirs"), "--host", "here", "--json", **other
    ).json["run"]["run_id"]
    living = start(project, name="living")
    make_old(project.host_root)
    make_old(project.folder / ".orch")
    looked = project.orch("gc", "--json")
    assert looked.code == 0
    told = {item["name"]: item for item in looked.json["items"] if item["what"] == "run"}
    assert {name: item["goes"] for name, item in told.items()} == {run_id: True, theirs: False, living: False}
    assert "not known here" in told[theirs]["why"]
    assert (project.host_root / "runs" / run_id).is_dir()
    assert project.orch("gc", "--host", "here", "--yes").code == 0
    verified = project.orch("verify", run_id)
    assert (verified.code, "`orch gc` removed it from there" in verified.out) == (1, True)
    assert project.orch("gc", "--yes").code == 0
    assert {path.name for path in (project.host_root / "runs").iterdir()} == {theirs, living}
    assert not (project.folder / ".orch" / "runs" / run_id / "records").exists()
    assert project.orch("wait", run_id, "--json").json["verdict"]["is_good"]
    (project.folder / ".orch" / "ledger.db").unlink()
    assert "orch ledger rebuild" in project.orch("ps").err
    assert project.orch("ledger", "rebuild").code == 0
    assert project.orch("ps").err == ""
    assert {row["run_id"]: row["verdict"] for row in project.runs()} == {run_id: "ok", living: None}
