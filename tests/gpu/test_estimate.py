"""Predicted peaks beside measured ones: the memory probe estimated for this card, and run on it."""

import contextlib
import io
import json
from typing import Any

import pytest
import torch
from dflash import estimate

from tests.payload.probe_program import assignments, cpu_params, run_probe

pytestmark = pytest.mark.gpu

GIB = 2**30
CONF = "expandable_segments:True"
# Large enough that no workspace hides an error, small enough for any card.
SIZE = {
    **cpu_params(),
    "device": "cuda:0",
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 4096,
    "vocab_size": 32768,
    "mask_token_id": 32767,
    "seq_len": 2000,
    "packed_lengths": [800, 900, 1300],
    "max_anchors": 256,
    "block_size": 16,
    "loss_chunk_rows": 1024,
    "iterations": 1,
}


@pytest.mark.parametrize(
    "changed",
    [
        {"recompute": "none"},
        {"recompute": "mlp"},
        {"recompute": "layer"},
        {"recompute": "none", "optimizer": "adamw"},
        {"recompute": "layer", "optimizer": "adamw", "max_anchors": 128},
        {"attention": "sdpa_chunked", "recompute": "none"},
        {"attention": "sdpa_chunked", "compile": False},
        {"attention": "sdpa_math", "compile": False, "max_anchors": 64},
        {"attention": "eager", "recompute": "none", "compile": False},
        {"attention": "eager", "recompute": "layer", "compile": False, "optimizer": "adamw"},
    ],
    ids=lambda changed: ", ".join(f"{name}={value}" for name, value in changed.items()),
)
def test_peaks_are_those_that_the_card_measures(
    card: torch.device, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any]
) -> None:
    values = {**SIZE, **changed}
    predicted = predict(card, values)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", CONF)
    done = run_probe(assignments(values), events=True)
    assert done.code == 0, done.err
    measured = done.metrics()
    for phase in predicted["phases"][1:]:
        for kind in ("allocated", "reserved"):
            found = phase[f"peak_{kind}_bytes"] / GIB
            expected = measured[f"{phase['name']}.peak_{kind}_gib"]
            share = predicted["error_share"] if kind == "allocated" else 0.05
            assert found == pytest.approx(expected, rel=share), (phase["name"], kind)


def predict(card: torch.device, values: dict[str, Any]) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(card)
    name = f"{properties.total_memory / GIB:.2f}GiB:sm_{properties.major}{properties.minor}"
    with contextlib.redirect_stdout(io.StringIO()) as out:
        options = ["--entry", "dflash.probes.oom", *assignments(values), "--card", name, "--alloc-conf", CONF]
        assert estimate.main([*options, "--json"]) == 0
    predicted: dict[str, Any] = json.loads(out.getvalue())
    return predicted
