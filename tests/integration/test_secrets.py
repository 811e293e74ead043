"""A secret is in the payload's environment, and nowhere else: no file, no command line, no view."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from tests.project import Project
from tests.sshd import Sshd

VALUE = "hf_s3cr3t-Value"
FOUND_BY = {"env": {"MY_TOKEN": VALUE}}
ENV = {"HF_TOKEN": {"secret": True, "from_env": "MY_TOKEN"}}
TALKER = """
import os, sys, time
token = os.environ["HF_TOKEN"]
print("token", token, len(token), flush=True)
print(token[:5], end="", flush=True)
time.sleep(0.2)
print(f"{token[5:]} up", flush=True)
while not os.path.exists("go"):
    time.sleep(0.02)
print(token, file=sys.stderr)
raise ValueError(token)
"""


RECORDS = "runs/*/records/*.jsonl"


def _wait_until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)


def _command_lines() -> list[bytes]:
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(path.read_bytes())
        except OSError:
            continue  # it has ended meanwhile
    return lines


def _files_with(folder: Path, text: str) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and text.encode() in path.read_bytes()]


def test_a_secret_reaches_the_payload_over_ssh_and_stands_nowhere(tmp_path: Path, sshd: Sshd) -> None:
    project = Project(tmp_path / "my project", {"here": {**sshd.inventory_entry(), "env": ENV}})
    path = project.experiment(TALKER, timeout="30s")
    with project.start("run", path, "--host", "here", "--json", **FOUND_BY) as process:
        # Only where runs keep their records: what is being installed beside them changes its name meanwhile.
        _wait_until(lambda: any(b"*** up" in path.read_bytes() for path in project.host_root.glob(RECORDS)))
        lines = _command_lines()
        assert any(b"probe.trial" in line for line in lines)
        assert not [line for line in lines if VALUE.encode() in line]
        [artifacts] = project.host_root.glob("runs/*/artifacts")
        (artifacts / "go").touch()
        out, err = process.communicate(timeout=60)
    run_id = artifacts.parent.name
    assert project.output(run_id) == f"token *** {len(VALUE)}\n*** up\n"
    assert project.output(run_id, "stderr").startswith("***\n")
    [spawn] = [record for record in project.records(run_id) if record["kind"] == "spawn"]
    assert spawn["env"].get("HF_TOKEN") == "***"
    shown = project.orch("logs", run_id, "--json").out + project.orch("show", run_id).out
    assert VALUE not in shown + out.decode() + err.decode()
    assert len(_files_with(project.folder, "***")) >= 2  # the records, there and here
    assert _files_with(tmp_path, VALUE) == []


def test_a_secret_that_is_not_there_is_said_before_anything_is_done(project: Project) -> None:
    path = project.experiment("print(1)", env=ENV)
    line = path.read_text().splitlines().index("  HF_TOKEN:") + 1
    refused = project.orch("run", path, "--host", "here")
    assert refused.code == 2
    assert f"{path}:{line}: env.HF_TOKEN: the secret MY_TOKEN is not in this environment" in refused.err
    assert not project.host_root.exists()
    assert not list(project.folder.glob(".orch/runs/*"))
    planned = project.orch("run", path, "--host", "here", "--dry-run", **FOUND_BY)
    assert planned.code == 0
    assert "HF_TOKEN from MY_TOKEN" in planned.out
    assert VALUE not in planned.out + planned.err


def test_a_run_that_is_made_again_asks_for_its_secrets_again(project: Project) -> None:
    path = project.experiment("import os; print(os.environ['HF_TOKEN'])", env=ENV)
    assert project.orch("run", path, "--host", "here", **FOUND_BY).code == 0
    refused = project.orch("rerun", "last")
    assert refused.code == 2
    assert "env.HF_TOKEN: the secret MY_TOKEN is not in this environment" in refused.err
    again = project.orch("rerun", "last", env={"MY_TOKEN": VALUE[::-1]})
    assert again.code == 0, again.err
    assert " | ***\n" in again.out
    assert _files_with(project.folder, VALUE[::-1]) == []
