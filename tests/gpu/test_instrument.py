"""What the instrument reports of a card, on a card."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from orchestrator import supervisor
from orchestrator.host_cards import HostCard

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
LIMITED = """
import torch
free, total = torch.cuda.mem_get_info()
assert total - free < 2 * 2**30, "somebody else is on this card"
torch.empty(3 * 2**30, dtype=torch.uint8, device="cuda")
torch.cuda.empty_cache()
torch.cuda.set_per_process_memory_fraction(1.0)
try:
    torch.empty(5 * 2**30, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError:
    print("out of memory")
"""


def run_with_events(
    program: Path, *, expected: int = 0, **variables: str
) -> tuple[list[dict[str, Any]], str]:
    """Runs a script under the instrument; returns what it reported, read while it ran, and its output."""
    reader, writer = os.pipe()
    process = subprocess.Popen(
        [sys.executable, str(INSTRUMENT), "--script", str(program)],
        env={**os.environ, **variables, "ORCH_EVENTS_FD": f"{writer}:{os.fstat(writer).st_ino}"},
        stdout=subprocess.PIPE,
        pass_fds=[writer],
    )
    os.close(writer)
    with os.fdopen(reader) as events:
        told = [json.loads(line) for line in events]
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == expected
    return told, printed.decode()


def test_a_card_is_told_so_that_an_estimate_can_be_for_it(card: torch.device, tmp_path: Path) -> None:
    program = tmp_path / "use.py"
    program.write_text('import torch\ntorch.zeros(1, device="cuda")\n')
    facts, _ = run_with_events(program, CUDA_VISIBLE_DEVICES="0")
    (devices,) = (event["devices"] for event in facts if "devices" in event)
    told = HostCard.of(devices[0])
    assert told is not None
    assert told.capability == torch.cuda.get_device_capability(card)
    assert told.total_bytes == torch.cuda.get_device_properties(card).total_memory


def test_a_card_that_is_to_look_smaller_has_no_more_than_that(card: torch.device, tmp_path: Path) -> None:
    program = tmp_path / "allocate.py"
    program.write_text(LIMITED)
    limit = 5 * 1024 * MIB
    facts, printed = run_with_events(program, ORCH_MEMORY_LIMIT_BYTES=str(limit), CUDA_VISIBLE_DEVICES="0")
    assert printed == "out of memory\n"
    (told,) = [fact["memory_limit"] for fact in facts if "memory_limit" in fact]
    assert [(entry["index"], entry["limit_bytes"], entry["problem"]) for entry in told] == [(0, limit, None)]
    assert 3 * 1024 * MIB < told[0]["allocator_bytes"] < limit
    assert not [fact for fact in facts if "instrument_error" in fact]


def test_peak_is_the_whole_runs_although_the_payload_counts_anew_in_between(
    card: torch.device, tmp_path: Path
) -> None:
    (tmp_path / "allocate.py").write_text(PROGRAM)
    facts, _ = run_with_events(tmp_path / "allocate.py")
    (peaks,) = [fact["peak_memory"] for fact in facts if "peak_memory" in fact]
    assert [(peak["index"], peak["allocated_bytes"] // MIB) for peak in peaks] == [(0, 512)]
    assert peaks[0]["reserved_bytes"] >= peaks[0]["allocated_bytes"]
