"""The out-of-memory probe on a card, at the size of its `cpu` profile, on a simulated smaller card."""

import json
import re
from pathlib import Path

import pytest
import torch
from dflash.probes import oom

from tests.payload.probe_program import cpu_params, experiment, run_probe

pytestmark = pytest.mark.gpu

GIB = 2**30
ROOM_GIB = 6


@pytest.fixture
def params_file(card: torch.device, tmp_path: Path) -> str:
    """Parameters for the card, limited to a little more than what it has in use."""
    free, total = torch.cuda.mem_get_info(card)
    limit_gib = (total - free) / GIB + ROOM_GIB
    path = tmp_path / "params.json"
    path.write_text(json.dumps({**cpu_params(), "device": "cuda:0", "memory_limit_gib": limit_gib}))
    return str(path)


def test_probe_runs_its_scenarios_and_reports_the_cards_peak(params_file: str) -> None:
    done = run_probe(["--params", params_file], events=True)
    assert done.code == 0, done.err
    assert "simulated card of" in done.out
    metrics = done.metrics()
    for name, bounds in experiment()["profiles"]["cpu"]["expect"]["metrics"].items():
        if not name.endswith("peak_rss_gib"):
            assert bounds.get("min", -1e300) <= metrics[name] <= bounds.get("max", 1e300), name
    for scenario in ("warmup", "timed", "packed"):
        allocated = metrics[f"{scenario}.peak_allocated_gib"]
        assert 0 < allocated <= metrics[f"{scenario}.peak_reserved_gib"] < ROOM_GIB


def test_row_that_does_not_fit_the_simulated_card_is_out_of_memory(params_file: str) -> None:
    # Its features alone are 300,000 × 3 × 4,096 numbers of two bytes: 6.9 GiB.
    size = ["num_draft_layers=1", "hidden_size=4096", "seq_len=300000"]
    done = run_probe(["--params", params_file, *[part for each in size for part in ("--set", each)]])
    assert done.code == 1
    assert re.search(r"^\[warmup\] OutOfMemoryError .*finished before: nothing$", done.out, re.MULTILINE)
    assert "CUDA out of memory" in done.err


def test_card_larger_than_the_real_one_is_refused(
    card: torch.device, params_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert oom.main(["--params", params_file, "--set", "memory_limit_gib=100000"]) == 2
    _, err = capsys.readouterr()
    assert "memory_limit_gib 100000" in err
    assert err.count("\n") == 1
