"""What is told of CUDA memory in a process that runs out of it on a card."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from orchestrator.forensics.snapshot import read_snapshot, summarise
from tests.gpu.test_instrument import run_with_events

pytestmark = pytest.mark.gpu

MIB = 2**20
GIB = 2**30
VOCABULARY = 40_009
MODEL = f"""
    import gc, sys, torch
    from torch import nn
    from torch.nn import functional

    class Mlp(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(1024, 4096, bias=False)
            self.down = nn.Linear(4096, 1024, bias=False)
        def forward(self, tokens):
            return tokens + self.down(functional.silu(self.up(tokens)))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Mlp() for _ in range(3))
            self.head = nn.Linear(1024, {VOCABULARY}, bias=False)
            self.register_buffer("angles", torch.zeros(1024, 1024))
        def forward(self, tokens):
            for layer in self.layers:
                tokens = layer(tokens)
            return self.head(tokens)

    def states(rows):
        return torch.randn(rows, 1024, device="cuda")

    model = Model().cuda()
    weights = sum(p.numel() * 4 for p in model.parameters())
    """


def run(folder: Path, code: str, *, expected: int = 0, **variables: str) -> list[dict[str, Any]]:
    """Runs a program that has the model, under the instrument; returns its events."""
    program = folder / "go.py"
    program.write_text(textwrap.dedent(MODEL) + textwrap.dedent(code))
    told = {"ORCH_ARTIFACTS": str(folder), "CUDA_VISIBLE_DEVICES": "0", **variables}
    found, _ = run_with_events(program, expected=expected, **told)
    assert [event for event in found if "instrument_error" in event] == []
    return found


def of_kind(events: Sequence[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in events if event["kind"] == kind]


def sizes(event: dict[str, Any]) -> dict[str, int]:
    return {row["category"]: row["bytes"] for row in event["owners"]}


@pytest.fixture
def limit(card: torch.device) -> str:
    """A simulated card with some gigabytes more than what is in use."""
    free, total = torch.cuda.mem_get_info(card)
    return str(total - free + 4 * GIB)


def test_logits_that_do_not_fit_are_told_with_their_line_and_who_holds_the_rest(
    limit: str, tmp_path: Path
) -> None:
    events = run(tmp_path, "model(states(16_000))\n", expected=1, ORCH_MEMORY_LIMIT_BYTES=limit)
    (event,) = of_kind(events, "oom")
    assert (event["phase"], event["autograd_node"], event["module"]) == ("forward", None, "head")
    assert event["stack"][0].startswith("go.py:")
    assert event["requested_bytes"] == -(-16_000 * VOCABULARY * 4 // 512) * 512
    assert event["asked_bytes"] >= event["requested_bytes"]
    weights = (3 * 2 * 1024 * 4096 + 1024 * VOCABULARY) * 4
    assert weights <= sizes(event)["parameter"] <= weights + 7 * MIB
    assert sizes(event)["buffer"] == 4 * MIB
    assert 16_000 * 1024 * 4 <= sizes(event)["input"] < 16_000 * 1024 * 4 + MIB
    assert sizes(event)["activation"] > sizes(event)["input"]
    assert sum(sizes(event).values()) == event["allocated_bytes"]
    named = {row["name"]: row for row in event["largest"]}
    assert named["head.weight"]["shape"] == [VOCABULARY, 1024]
    assert any(row["module"] == "layers.*.mlp.*" or row["module"] == "layers.*.*" for row in event["largest"])
    own = [each["is_own"] for each in event["processes"]]
    assert own.count(True) == min(1, len(own))  # some containers show nobody
    (exception,) = of_kind(events, "exception")
    assert exception["type"] == "torch.OutOfMemoryError"


def test_the_snapshot_is_torchs_own_and_is_read_as_plain_containers(limit: str, tmp_path: Path) -> None:
    events = run(tmp_path, "model(states(16_000))\n", expected=1, ORCH_MEMORY_LIMIT_BYTES=limit)
    (event,) = of_kind(events, "oom")
    snapshot = read_snapshot(tmp_path / event["snapshot"])
    (summary,) = summarise(snapshot)
    assert summary.now.allocated_bytes == event["allocated_bytes"]
    assert summary.reserved_bytes == event["reserved_bytes"]
    assert summary.now.by_category["parameter"] >= sizes(event)["parameter"]
    assert snapshot["device_traces"][0][-1]["action"] in ("oom", "snapshot")


def test_backward_is_told_with_the_node_that_autograd_runs(limit: str, tmp_path: Path) -> None:
    code = """
        class Greedy(torch.autograd.Function):
            @staticmethod
            def forward(ctx, tokens):
                return tokens.clone()
            @staticmethod
            def backward(ctx, gradient):
                torch.empty(8 * 2**30, dtype=torch.uint8, device="cuda")
        Greedy.apply(model.layers[0](states(64).requires_grad_())).sum().backward()
        """
    (event,) = of_kind(run(tmp_path, code, expected=1, ORCH_MEMORY_LIMIT_BYTES=limit), "oom")
    assert (event["phase"], event["autograd_node"]) == ("backward", "GreedyBackward")
    assert event["stack"][0].endswith(" backward")


def test_backward_without_a_line_of_python_has_its_node(limit: str, tmp_path: Path) -> None:
    code = """
        loss = model(states(64)).sum()
        held = []
        try:
            while True:
                held.append(torch.empty(32 * 2**20, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            del held[-2:]  # less than the gradient of the head
        loss.backward()
        """
    events = of_kind(run(tmp_path, code, expected=1, ORCH_MEMORY_LIMIT_BYTES=limit), "oom")
    assert [event["phase"] for event in events] == ["forward", "backward"]
    assert events[1]["autograd_node"]
    assert sizes(events[1])["input"] > 2 * GIB


def test_the_peak_of_a_training_step_is_told_by_owner_to_the_byte(card: torch.device, tmp_path: Path) -> None:
    code = """
        def train():
            optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
            for _ in range(4):
                classes = torch.zeros(2048, dtype=torch.long, device="cuda")
                functional.cross_entropy(model(states(2048)), classes).backward()
                optimizer.step()
                optimizer.zero_grad()
        train()
        """
    (event,) = of_kind(run(tmp_path, code), "memory")
    assert (event["is_whole"], event["reason"]) == (True, None)
    found = sizes(event)
    weights = (3 * 2 * 1024 * 4096 + 1024 * VOCABULARY) * 4
    assert found["parameter"] == pytest.approx(weights, rel=0.01)
    assert found["optimizer_state"] == pytest.approx(2 * weights, rel=0.01)
    assert sum(found.values()) == pytest.approx(event["peak_allocated_bytes"], rel=0.01)
    assert found.get("unnamed", 0) == 0


def test_a_program_that_catches_it_goes_on_with_all_its_memory(limit: str, tmp_path: Path) -> None:
    code = """
        held = torch.cuda.memory_allocated()
        for _ in range(7):
            try:
                model(states(16_000))
            except torch.OutOfMemoryError:
                pass
            gc.collect()
            assert torch.cuda.memory_allocated() <= held + 64 * 2**20, torch.cuda.memory_allocated()
        """
    events = run(tmp_path, code, ORCH_MEMORY_LIMIT_BYTES=limit)
    assert [event["number"] for event in of_kind(events, "oom")] == [1, 2, 3, 4, 5]


def test_an_allocator_without_a_history_is_said(card: torch.device, tmp_path: Path) -> None:
    events = run(tmp_path, "", PYTORCH_CUDA_ALLOC_CONF="backend:cudaMallocAsync")
    told = [event["memory_history"] for event in events if "memory_history" in event]
    assert told == ["none: the allocator cudaMallocAsync keeps no history"]
