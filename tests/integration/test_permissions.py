"""Every file and folder that a run makes, here and on its host, is for one user alone, whatever the umask."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.project import Project

CODE = """
import json, os, sys
os.makedirs("made/deeper")
open("made/deeper/checkpoint", "w").close()
print(json.load(open(sys.argv[-1]))["a"])
"""


def foreign(folder: Path) -> Iterator[str]:
    """Yields what anybody but the owner may use, and what its owner may not; a symbolic link has no mode."""
    for path in (folder, *folder.rglob("*")):
        mode = stat.S_IMODE(path.lstat().st_mode)
        wanted = 0o700 if path.is_dir() else 0o600
        if not path.is_symlink() and (mode & 0o7077 or mode & wanted != wanted):
            yield f"{path.relative_to(folder)} is {mode:o}"


@pytest.mark.parametrize(
    ("umask", "then"), [(0o000, [("gc", "--yes"), ("ledger", "rebuild")]), (0o077, [])], ids=["000", "077"]
)
def test_all_that_a_run_makes_is_for_its_user_alone(
    project: Project, umask: int, then: list[tuple[str, ...]]
) -> None:
    path = project.experiment(CODE, params={"a": 0}, matrix={"params": {"a": [1]}})
    script = project.folder / "payloads" / "probe" / "tool.sh"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o777)
    there, above = project.host_root, project.folder / "of orch"
    env = {"ORCH_HOME": str(above / "deeper" / "home")}
    for words in [("run", path, "--host", "here"), *then]:
        done = project.orch(*words, umask=umask, env=env)
        assert done.code == 0, done.err
    assert [*foreign(above), *foreign(there)] == []
    [sent] = there.glob("runs/*/code/probe/tool.sh")
    assert os.access(sent, os.X_OK)
    assert {"ledger.db", "objects", "runs"} <= {path.name for path in Path(env["ORCH_HOME"]).iterdir()}
    assert {"objects", "runs", "supervisor", "turns"} <= {path.name for path in there.iterdir()}
