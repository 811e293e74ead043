"""`orch verify`: a whole run is proved, and what is changed on its host afterwards is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.project import Done, Project
from tests.sshd import Sshd

CODE = "import sys\nfor i in range(300): print('line', i, file=sys.stderr)\n"


@pytest.fixture
def ssh_project(tmp_path: Path, sshd: Sshd) -> Project:
    return Project(tmp_path / "project", {"here": sshd.inventory_entry()})


def finished(project: Project) -> str:
    done = project.orch("run", project.experiment(CODE, env={"WORD": "x"}), "--host", "here", "--json")
    assert done.code == 0, done.err
    run_id: str = done.json["run"]["run_id"]
    return run_id


def line(done: Done, name: str) -> str:
    return next(text for text in done.out.splitlines() if text[11:].strip().startswith(name))


def test_a_run_is_proved_and_what_is_changed_on_its_host_is_named(ssh_project: Project) -> None:
    project = ssh_project
    run_id = finished(project)
    done = project.orch("verify", "last")
    assert done.code == 0, done.out + done.err
    assert all(text.startswith("ok ") for text in done.out.splitlines())

    host = project.host_root / "runs" / run_id
    path = host / "records" / "000000.jsonl"
    data = path.read_bytes()
    at = data.index(b"line 120\\n") + 5
    path.write_bytes(data[:at] + b"9" + data[at + 1 :])
    (host / "job.json").write_text("{}")
    (host / "code" / "probe" / "trial.py").write_text("print('other')\n")
    done = project.orch("verify", run_id, "--json")
    assert done.code == 5
    found = {check["name"]: check for check in done.json["checks"]}
    wrong = {name for name, check in found.items() if check["status"] == "not ok"}
    assert wrong == {"host's records", "host's code"}
    assert found["host's records"]["place"]["offset"] == at
    assert found["host's records"]["place"]["record"] == f"{run_id}/main.stderr:121"
    assert "1 file not as in the bundle: probe/trial.py" in found["host's code"]["says"]
    assert project.written(run_id) != data, "nothing is repaired"


def test_a_host_that_cannot_be_asked_leaves_its_checks_open(project: Project) -> None:
    run_id = finished(project)
    project.write_inventory({"other": {"transport": "local"}})
    done = project.orch("verify", run_id)
    assert done.code == 3
    assert line(done, "seals").startswith("ok ")
    assert line(done, "host's records").startswith("not checked")
    mirror = project.folder / ".orch" / "runs" / run_id / "records" / "000000.jsonl"
    mirror.write_bytes(mirror.read_bytes().replace(b"line 7", b"line 8", 1))
    done = project.orch("verify", run_id)
    assert done.code == 5
    assert line(done, "seals").startswith("not ok")
