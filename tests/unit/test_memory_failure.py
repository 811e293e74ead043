"""What is told when memory runs out in real torch, of whose parts only the allocator is made up (on the CPU).

tests/gpu/test_capture.py has the allocator too.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from orchestrator.forensics.captures import read_capture
from orchestrator.forensics.making import being_made
from orchestrator.supervisor.memory_files import MemoryFiles
from orchestrator.supervisor.memory_owners import Owners
from orchestrator.supervisor.memory_watch import MemoryWatch
from tests.supervisor.snapshots import MIB, Allocator

here: list[Callable[[], None]] = []


class Planted(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, tokens: Tensor) -> Tensor:
        return tokens.clone()

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor) -> Tensor:
        here[0]()
        return gradients[0]


class Mlp(nn.Module):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.up = nn.Linear(8, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        if self.where == "forward":
            self.widen()
        if self.where == "backward":
            tokens = Planted.apply(tokens)  # type: ignore[no-untyped-call]
        wider: Tensor = self.up(tokens)
        return tokens + wider.sum()

    def widen(self) -> None:
        here[0]()


class Drafter(nn.Module):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Mlp(""), Mlp(where)])

    def forward(self, tokens: Tensor) -> Tensor:
        for layer in self.layers:
            tokens = layer(tokens)
        return tokens.sum()


class Told:
    """A process whose allocator is made up."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.events: list[dict[str, Any]] = []
        self.allocator = Allocator()
        attached: list[Callable[[int, int, int, int], None]] = []
        patch.setattr(torch._C, "_cuda_record_memory_history", lambda *_: None, raising=False)
        patch.setattr(torch._C, "_cuda_attach_out_of_memory_observer", attached.append, raising=False)
        patch.setattr(torch.autograd, "backward", torch.autograd.backward)
        patch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
        patch.setattr(torch.cuda, "memory_stats", lambda _: {"num_alloc_retries": 3})
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(torch.cuda.memory, "_snapshot", self.allocator.snapshot)
        patch.setattr(torch.cuda.memory, "_record_memory_history", lambda *_, **__: None)
        patch.setenv("CUDA_VISIBLE_DEVICES", "GPU-none")
        files = MemoryFiles(str(folder), "main")
        self.watch = MemoryWatch(torch, Owners(torch, "cpu"), self._note, lambda: None, files)
        self.watch.watch()
        self.watch.start()
        self._attached = attached

    def hold(self, *tensors: Tensor | None) -> None:
        for tensor in tensors:
            assert tensor is not None
            storage = tensor.untyped_storage()
            self.allocator.alloc(storage.nbytes(), at=storage.data_ptr())

    def fail(self) -> None:
        self.allocator.fail(5 * MIB, MIB)
        (observe,) = self._attached
        observe(0, 6 * MIB, 9 * MIB, MIB)

    def _note(self, kind: str, **fields: Any) -> None:
        self.events.append({"kind": kind, **fields})

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] == kind]


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Told]:
    made = Told(tmp_path, monkeypatch)
    here[:] = [made.fail]
    yield made
    assert [event for event in made.events if "instrument_error" in event] == []


def own(name: str | None) -> str | None:
    """Returns a name without its model's class, which is told while modules of other tests live."""
    return None if name is None else name.removeprefix("Drafter.")


def test_forward_is_told_with_the_very_module_and_who_holds_the_rest(told: Told, tmp_path: Path) -> None:
    drafter, states = Drafter("forward"), torch.zeros(3, 8)
    told.hold(drafter.layers[0].get_parameter("up.weight"), states)
    drafter(states)
    (event,) = told.of_kind("oom")
    assert (own(event["module"]), event["phase"], event["autograd_node"]) == ("layers.1", "forward", None)
    assert [line.split()[-1] for line in event["stack"][:3]] == ["fail", "widen", "forward"]
    named = {own(row["name"]): (row["category"], row["shape"], row["dtype"]) for row in event["largest"]}
    assert named["layers.0.up.weight"] == ("parameter", [16, 8], "float32")
    assert named[None][1:] == ([3, 8], "float32")
    assert (event["requested_bytes"], event["asked_bytes"], event["retries"]) == (5 * MIB, 6 * MIB, 3)
    kept = json.loads((tmp_path / "orch-memory" / "main-1.json").read_text())
    assert own(kept["event"]["module"]) == "layers.1"


def test_backward_is_told_with_the_node_that_autograd_runs(told: Told) -> None:
    drafter = Drafter("backward")
    torch.autograd.backward(drafter(torch.zeros(3, 8)))
    (event,) = told.of_kind("oom")
    assert (event["phase"], event["autograd_node"]) == ("backward", "PlantedBackward")
    assert [line.split()[-1] for line in event["stack"][:2]] == ["fail", "backward"]


def test_the_peak_is_told_by_name_though_its_owners_are_gone(told: Told) -> None:
    def train() -> None:
        drafter = Drafter("")
        drafter(torch.ones(3, 8)).backward()
        weight = drafter.layers[1].get_parameter("up.weight")
        told.hold(weight, weight.grad)

    train()
    told.watch.finish([{"index": 0, "allocated_bytes": 1024}])
    (event,) = told.of_kind("memory")
    assert [(row["category"], own(row["name"])) for row in event["largest"]] == [
        ("parameter", "layers.1.up.weight"),
        ("gradient", "layers.1.up.weight"),
    ]


def test_backward_is_what_it_was_but_for_the_look(told: Told) -> None:
    leaf = torch.ones(3, requires_grad=True)
    (2 * leaf).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [2, 2, 2]
    with pytest.raises(RuntimeError, match="does not require grad"):
        torch.autograd.backward(torch.ones(1))
    assert torch.autograd.backward.__name__ == "backward"


@pytest.mark.parametrize(
    ("function", "made"),
    [("empty", "a parameter of a module that is being made"), ("zeros_like", "optimizer state")],
)
def test_what_torch_itself_was_making_is_told_to_the_controller(
    told: Told, monkeypatch: pytest.MonkeyPatch, function: str, made: str
) -> None:
    real = getattr(torch, function)

    def failing(*arguments: Any, **named: Any) -> Any:
        told.fail()
        return real(*arguments, **named)

    layer = nn.Linear(8, 16)
    layer(torch.ones(3, 8)).sum().backward()
    optimizer = torch.optim.AdamW(layer.parameters())
    monkeypatch.setattr(torch, function, failing)
    action = (lambda: nn.Linear(8, 16)) if function == "empty" else optimizer.step
    thread = threading.Thread(target=action)  # without the frames of the test's own runner
    thread.start()
    thread.join()
    event = told.of_kind("oom")[0]
    assert being_made(read_capture(event, proc="main")) == made
