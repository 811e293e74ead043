"""What the instrument reports of a card, on a card."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from orchestrator import supervisor

pytestmark = pytest.mark.gpu

MIB = 2**20
INSTRUMENT = Path(*supervisor.__path__, "instrument.py")
PROGRAM = """
import torch
for mebibytes in (64, 512, 128):
    torch.cuda.reset_peak_memory_stats()
    torch.empty(mebibytes * 2**20, dtype=torch.uint8, device="cuda")
    torch.cuda.empty_cache()
"""


def test_peak_is_the_whole_runs_although_the_payload_counts_anew_in_between(
    card: torch.device, tmp_path: Path
) -> None:
    (tmp_path / "allocate.py").write_text(PROGRAM)
    reader, writer = os.pipe()
    with os.fdopen(reader) as events:
        subprocess.run(
            [sys.executable, str(INSTRUMENT), "--script", str(tmp_path / "allocate.py")],
            env={**os.environ, "ORCH_EVENTS_FD": f"{writer}:{os.fstat(writer).st_ino}"},
            pass_fds=[writer],
            check=True,
        )
        os.close(writer)
        facts = [json.loads(line) for line in events]
    (peaks,) = [fact["peak_memory"] for fact in facts if "peak_memory" in fact]
    assert [(peak["index"], peak["allocated_bytes"] // MIB) for peak in peaks] == [(0, 512)]
    assert peaks[0]["reserved_bytes"] >= peaks[0]["allocated_bytes"]
