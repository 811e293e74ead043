"""Twenty `orch run` at the same moment on one host, whose sshd drops connections as a default one does."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterator

from benchmarks.results import Figure, at_least
from benchmarks.rig import Rig
from tests.project import ORCH

CODE = """
import os
for number in range(20):
    print(os.environ["ORCH_RUN_ID"], number, flush=True)
"""


def crowd(rig: Rig, count: int) -> Iterator[Figure]:
    """All must succeed, and each must show its own lines alone, all of them and in order."""
    experiment = rig.project.experiment(CODE, "crowd")
    argv = [str(ORCH), "run", str(experiment), "--host", "near"]
    options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    begin = time.perf_counter()
    crowd = [subprocess.Popen(argv, cwd=rig.project.folder, text=True, **options) for _ in range(count)]  # type: ignore[call-overload]
    well = 0
    for process in crowd:
        out, err = process.communicate()
        run_id = re.search(r"run (\w+) of crowd", err)
        shown = re.findall(r"\| (\w+) (\d+)$", out, re.MULTILINE)
        expected = [(run_id[1], str(number)) for number in range(20)] if run_id else None
        well += process.returncode == 0 and shown == expected
    took_s = time.perf_counter() - begin
    yield at_least(
        count, name=f"{count} runs at once, whole and unmixed", value=well, unit="runs", seconds=took_s
    )
