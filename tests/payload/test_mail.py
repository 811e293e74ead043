"""The queue between processes: the same rows in the same order, and failures that name who failed."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.payload.mail_program import DRAFTERS, EPOCHS, ROWS, row_of

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the drafters of every case took, and how they ended."""
    folder = tmp_path_factory.mktemp("mail")
    command = [sys.executable, "-m", "tests.payload.mail_program", str(folder)]
    environment = {
        "PYTHONPATH": f"{ROOT / 'payloads'}:{ROOT}",
        "OMP_NUM_THREADS": "1",
        "PATH": "/usr/bin:/bin",
    }
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=120)
    return folder


def drafters_of(folder: Path, case: str) -> list[dict[str, Any]]:
    return [torch.load(folder / f"{case}-{drafter}.pt") for drafter in range(DRAFTERS)]


def test_drafters_take_what_workers_of_other_processes_bring(folder: Path) -> None:
    for drafter, found in enumerate(drafters_of(folder, "whole")):
        assert found["ended"] == "whole"
        own = [(epoch, number) for epoch in range(EPOCHS) for number in range(drafter, ROWS, DRAFTERS)]
        assert [(row["epoch"], row["number"]) for row in found["rows"]] == own
        for row in found["rows"]:
            sent = row_of(row["epoch"], row["number"])
            for name, value in row.items():
                original = getattr(sent, name)
                same = torch.equal(value, original) if isinstance(value, torch.Tensor) else value == original
                assert same, name


@pytest.mark.parametrize(
    ("case", "reason"),
    [("failing", "RuntimeError: CUDA out of memory"), ("dying", "its process has ended: ")],
)
def test_a_worker_that_fails_in_its_process_is_named(folder: Path, case: str, reason: str) -> None:
    # Row 4 is worker 1's and drafter 0's; the others only lose what they would have got after it.
    first, other = (found["ended"] for found in drafters_of(folder, case))
    assert first.startswith(f"MemberFailed: target worker 1 failed: {reason}")
    assert other.startswith("MemberFailed: target worker ")
