"""What a supervisor costs while its payload says nothing."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.results import Figure, at_most
from benchmarks.rig import Rig

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def at_rest(rig: Rig, seconds: float) -> Iterator[Figure]:
    """Memory, and the share of a core, over ``seconds`` of silence."""
    run_id = rig.detached(rig.project.experiment("import time\ntime.sleep(600)\n", "silent"))
    try:
        pid = _supervisor(rig, run_id)
        time.sleep(1.0)  # it has just started a process
        before = _ticks(pid)
        time.sleep(seconds)
        percent = 100 * (_ticks(pid) - before) / TICKS_PER_S / seconds
        status = dict(
            line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line
        )
        resident_mb = int(status["VmRSS"].split()[0]) * 1024 / 1e6
    finally:
        rig.project.orch("cancel", run_id)
    yield at_most(20, name="supervisor at rest, resident", value=resident_mb, unit="MB")
    yield at_most(0.1, name="supervisor at rest, processor", value=percent, unit="% of a core")


def _supervisor(rig: Rig, run_id: str) -> int:
    rig.project.orch("logs", run_id)  # brings the first records here
    start = next(record for record in rig.project.records(run_id) if record["kind"] == "start")
    pid: int = start["identity"]["pid"]
    return pid


def _ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])
