"""What accepted metacharacters become on a host: everything arrives as it was written, and nothing runs it.

One run has them all at once: each text is a parameter, a variable and a metric's name, and a folder of the
paths of its key, its virtual environment, its working folder and its root. Which fields accept which texts is
tests/unit/test_metacharacters.py.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.metacharacters import ATTACKS, IN_PATHS, MARK
from tests.project import Project
from tests.sshd import Sshd

METRICS = [text for text in IN_PATHS if not text.startswith("-")]

CODE = """
import json, os, sys
params = json.load(open(sys.argv[-1]))
env = {name: value for name, value in os.environ.items() if name.startswith("V_")}
told = {"params": params, "env": env, "cwd": os.getcwd(), "venv": os.environ["VIRTUAL_ENV"], "code": __file__}
print(json.dumps(told))
fd = int(os.environ["ORCH_EVENTS_FD"].split(":")[0])
for name in params["metrics"]:
    os.write(fd, json.dumps({"kind": "metric", "name": name, "value": 1}).encode() + b"\\n")
"""


@pytest.fixture
def touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that every `touch` leaves a line in: it comes first on PATH, here and on the host."""
    log, folder = tmp_path / "touched", tmp_path / "bin"
    folder.mkdir()
    (folder / "touch").write_text(f"#!/bin/sh\necho \"$*\" >>'{log}'\n")
    (folder / "touch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return log


def test_everything_arrives_as_written_and_nothing_is_run(
    touched: Path, start_sshd: Callable[..., Sshd], tmp_path: Path, home: Path
) -> None:
    server = start_sshd(variables={"PATH": os.environ["PATH"]})
    odd = tmp_path.joinpath("odd", *IN_PATHS)
    identity, venv, workdir, root = odd / "key", odd / "venv", odd / ATTACKS["colon"], odd / "root"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").symlink_to(sys.executable)
    workdir.mkdir()
    shutil.copy(server.client_key, identity)
    entry = server.inventory_entry(
        identity=str(identity), venv=str(venv), workdir=str(workdir), root=str(root), env=variables("V_HOST")
    )
    del entry["python"]
    project = Project(tmp_path / "my project", {"odd": entry})
    params = {"texts": [*ATTACKS.values()], "metrics": METRICS}
    bounds = {name: {"min": 1, "max": 1} for name in METRICS}
    path = project.experiment(CODE, params=params, env=variables("V_RUN"), expect={"metrics": bounds})

    done = project.orch("run", path, "--host", "odd")
    assert done.code == 0, done.out + done.err
    assert all(line.isprintable() for line in (done.out + done.err).splitlines())
    (row,) = project.runs()
    told = json.loads(project.output(row["run_id"]))
    assert told["params"] == params
    assert told["env"] == {**variables("V_HOST"), **variables("V_RUN")}
    assert (told["cwd"], told["venv"]) == (str(workdir), str(venv))
    assert told["code"] == str(root / "runs" / row["run_id"] / "code" / "probe" / "trial.py")
    assert not touched.exists()
    searched = (tmp_path, home, Path.cwd())
    assert not [place for folder in searched for place in folder.rglob(MARK)]


def variables(prefix: str) -> dict[str, str]:
    """Returns every text that a variable can be."""
    named = {name.upper().replace(" ", "_"): text for name, text in ATTACKS.items() if "\0" not in text}
    return {f"{prefix}_{name}": text for name, text in named.items()}
