"""A run once more, from what was kept of it, and two runs beside each other."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import RecordsAltered
from orchestrator.ledger import RunRow
from orchestrator.lifecycle import State
from orchestrator.starting import original_job
from orchestrator.workspace import Workspace
from tests.project import Project

CODE = """
import json, os, sys
print("before", os.environ["MODE"], json.load(open(sys.argv[-1])))
fd = int(os.environ["ORCH_EVENTS_FD"].split(":")[0])
os.write(fd, b'{"kind": "metric", "name": "loss", "value": 2.5}\\n')
sys.exit(9)
"""
HERE: Mapping[str, Any] = {"transport": "local", "env": {"MODE": "one"}}
UNREACHABLE: Mapping[str, Any] = {"transport": "ssh", "address": "127.0.0.1", "port": 1}


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path / "my project", {"here": HERE, "gone": UNREACHABLE})


def change_everything(project: Project) -> Path:
    project.write_inventory({"here": {**HERE, "env": {"MODE": "two", "NEW": "x"}}, "gone": UNREACHABLE})
    return project.experiment(CODE.replace("before", "after"), params={"lr": 2})


def test_a_rerun_is_what_ran_and_not_what_is_there_now(project: Project) -> None:
    project.orch("run", project.experiment(CODE, params={"lr": 1}), "--host", "here")
    (old,) = project.runs()
    change_everything(project)
    done = project.orch("rerun", "last", "--json")
    new = done.json["run"]
    assert (done.code, new["state"], new["exit_code"]) == (1, "failed", 9), done.err
    assert project.output(new["run_id"]) == "before one {'lr': 1}\n"
    assert "no file sent" in done.err
    assert (new["retry_of"], new["bundle"]) == (old["run_id"], old["bundle"])
    assert project.records(new["run_id"])[0]["job"]["retry_of"] == old["run_id"]
    assert project.runs()[1] == old
    assert f"retry of {old['run_id']}" in project.orch("show", "last").out


def test_a_run_whose_records_were_altered_is_not_run_again(project: Project) -> None:
    old = project.orch("run", project.experiment(CODE), "--host", "here", "--json").json["run"]["run_id"]
    segment = project.folder / ".orch" / "runs" / old / "records" / "000000.jsonl"
    segment.write_bytes(segment.read_bytes().replace(b'"MODE":"one"', b'"MODE":"two"', 1))
    assert project.orch("rerun", old).code == 5
    assert len(project.runs()) == 1


def test_a_detached_run_that_nobody_looked_at_can_be_run_again(project: Project) -> None:
    old = project.orch("run", project.experiment(CODE), "--host", "here", "--detach").out.strip()
    assert project.mirrored(old) == b""
    new = project.orch("rerun", old, "--detach", "--json")
    assert new.code == 0, new.err
    assert project.orch("wait", new.json["run_id"]).code == 1
    assert project.output(new.json["run_id"]) == "before one {}\n"


def test_what_cannot_be_run_again_is_named_and_starts_nothing(project: Project) -> None:
    path = project.experiment(CODE)
    assert project.orch("run", path, "--host", "gone").code == 3
    assert project.orch("rerun", "last", "--host", "here").code == 1  # it has no variable that could be lost
    run_id = project.runs()[0]["run_id"]
    objects = sorted(project.folder.glob(".orch/objects/*/*"), key=lambda path: path.stat().st_size)
    objects[-1].write_bytes(b"#" * objects[-1].stat().st_size)
    objects[0].unlink()
    done = project.orch("rerun", run_id)
    assert done.code == 4
    assert "2 of 2 files" in done.err
    assert "probe/trial.py" in done.err
    assert "probe/__init__.py" in done.err
    project.write_inventory({"gone": {**UNREACHABLE, "env": {"HF_TOKEN": "hf_x"}}, "here": HERE})
    assert project.orch("run", path, "--host", "gone").code == 3
    done = project.orch("rerun", "last", "--host", "here")
    assert done.code == 2
    assert "HF_TOKEN" in done.err
    assert "hf_x" not in done.err
    assert len(project.runs()) == 3


def test_a_first_record_that_is_not_the_run_of_the_ledger_is_a_finding(project: Project) -> None:
    with closing(Workspace.open(project.folder / "inventory.yaml")) as workspace:
        job = {"module": "probe.trial", "env": {"MODE": "one"}, "expect": {}}
        row = RunRow(
            run_id="a" * 12,
            group_id="a" * 12,
            experiment="trial",
            host="here",
            bundle="1" * 64,
            state=State.RUNNING,
            created_t=1.0,
            job=job,
        )
        workspace.ledger.insert(row)
        folder = workspace.folder(row.run_id)
        folder.make()
        assert original_job(workspace, row.run_id) is None
        for recorded in (job, {**job, "module": "probe.other"}):
            line = json.dumps({"seq": 0, "t": 1.0, "kind": "segment", "job": recorded})
            folder.segment(0).write_text(line + "\n")
            if recorded == job:
                assert original_job(workspace, row.run_id) == job
            else:
                with pytest.raises(RecordsAltered, match="another job"):
                    original_job(workspace, row.run_id)


def test_diff_tells_what_was_changed_between_two_runs(project: Project) -> None:
    project.orch("run", project.experiment(CODE, params={"lr": 1}), "--host", "here")
    first = project.runs()[0]["run_id"]
    project.orch("run", change_everything(project), "--host", "here")
    done = project.orch("diff", first, "last", "--json")
    assert done.code == 0, done.err
    found = done.json
    assert {"name": "params.lr", "a": 1, "b": 2} in found["asked"]
    assert {"name": "env.MODE", "a": "one", "b": "two"} in found["asked"]
    assert {"name": "env.NEW", "b": "x"} in found["asked"]
    assert [file["path"] for file in found["code"]["files"]] == ["probe/trial.py"]
    assert {"name": "loss", "a": 2.5, "b": 2.5, "difference": 0.0} in found["measures"]
    (change,) = found["code"]["diffs"]
    assert [line for line in change["lines"] if line.startswith("+print")]
    assert (
        "no difference in what was asked\nno difference in the code\n"
        in project.orch("diff", first, first).out
    )
