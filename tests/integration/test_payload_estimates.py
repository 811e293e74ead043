"""The drafter's own estimate through `orch`: the real work of its probe, in miniature, without a card."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.project import Project

REPOSITORY = Path(__file__).parents[2]
SMALL = {
    "num_draft_layers": 2,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 512,
    "vocab_size": 2048,
    "num_target_layers": 8,
    "target_layer_ids": "[1, 3, 5]",
    "block_size": 8,
    "max_anchors": 32,
    "mask_token_id": 2047,
    "packed_lengths": "[100, 200]",
    "attention": "eager",
    "compile": "false",
}


def test_the_probe_is_estimated_by_its_own_code_for_the_card_and_limit_that_it_would_get(
    project: Project,
) -> None:
    shutil.copytree(REPOSITORY / "payloads" / "dflash", project.folder / "payloads" / "dflash")
    path = project.folder / "experiments" / "oom_probe.yaml"
    path.write_text((REPOSITORY / "experiments" / "oom_probe.yaml").read_text() + "\nmemory_limit: 1GiB\n")
    small = [word for name, value in SMALL.items() for word in ("--set", f"{name}={value}")]
    done = project.orch("estimate", path, "--card", "rtx-pro-6000", "--json", *small, "--set", "seq_len=400")
    assert done.code == 0, done.err
    (case,) = done.json["cases"]
    estimate = case["estimate"]
    assert estimate["verdict"] == "fits"
    assert estimate["capacity_bytes"] < 2**30
    assert estimate["card"]["name"].startswith("NVIDIA RTX PRO 6000")
    phases = {phase["name"]: phase["by_category"] for phase in estimate["phases"]}
    assert {"warmup", "timed", "packed"} <= phases.keys()
    assert all(
        phase["scores"] > 0 and phase["parameter"] > 0 for phase in (phases["timed"], phases["packed"])
    )
    refused = project.orch("estimate", path, *small, "--set", "seq_len=1")
    assert (refused.code, refused.err) == (2, "orch: dflash.estimate: seq_len is 1; it must be at least 2\n")
