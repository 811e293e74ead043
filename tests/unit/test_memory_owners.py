"""Whose storages lie where, of real torch on the CPU: names, gradients, optimizer state, modules by code."""

from __future__ import annotations

import gc
import sys
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from orchestrator.supervisor.memory_blocks import Block
from orchestrator.supervisor.memory_names import Known, describe
from orchestrator.supervisor.memory_owners import Owners
from orchestrator.supervisor.memory_stacks import Stack

VOCABULARY = 30_011


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16, bias=False)
        self.down = nn.Linear(16, 8, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        here.append(_frames())
        hidden: Tensor = self.down(self.up(tokens))
        return hidden


class Drafter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Mlp(), Mlp()])
        self.head = nn.Linear(8, VOCABULARY, bias=False)
        self.angles = nn.Buffer(torch.zeros(7))

    def forward(self, tokens: Tensor) -> Tensor:
        for layer in self.layers:
            tokens = layer(tokens)
        logits: Tensor = self.head(tokens)
        return logits


here: list[list[dict[str, Any]]] = []


def _frames() -> list[dict[str, Any]]:
    """Returns the caller's frames as torch's history keeps them."""
    found = []
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        found.append({"filename": code.co_filename, "line": frame.f_lineno, "name": code.co_name})
        frame = frame.f_back  # type: ignore[assignment]
    return found


@pytest.fixture
def owners() -> Owners:
    return Owners(torch, "cpu")


def address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def names(known: Known, *tensors: Tensor | None) -> list[tuple[str, str] | None]:
    found = [None if tensor is None else known.owners.get(address(tensor)) for tensor in tensors]
    return [None if owner is None else (owner.category, own(owner.name)) for owner in found]


def own(name: str) -> str:
    """Returns a name without its model's class, which is told while modules of other tests live."""
    return name.removeprefix("Drafter.")


def test_parameters_buffers_gradients_and_optimizer_states_are_named(owners: Owners) -> None:
    drafter = Drafter()
    optimizer = torch.optim.AdamW(drafter.parameters())
    torch.autograd.backward(drafter(torch.ones(3, 8)).sum())
    optimizer.step()
    owners.look()
    weight = drafter.head.weight
    moment = optimizer.state[weight]["exp_avg"]
    assert names(owners.seen(), weight, drafter.angles, weight.grad, moment) == [
        ("parameter", "head.weight"),
        ("buffer", "angles"),
        ("gradient", "head.weight"),
        ("optimizer_state", "head.weight.exp_avg"),
    ]
    owner = owners.seen().owners[address(weight)]
    assert (owner.size, own(owner.module or ""), owner.shape, owner.dtype) == (
        VOCABULARY * 8 * 4,
        "head",
        (VOCABULARY, 8),
        "float32",
    )


def test_what_was_seen_is_told_when_the_objects_are_gone(owners: Owners) -> None:
    drafter = Drafter()
    owners.look()
    is_alive = weakref.ref(drafter)
    place, size = address(drafter.head.weight), VOCABULARY * 8 * 4
    del drafter
    (found,) = describe([Block(place, size, size, [], 1)], owners.seen())
    assert (found.category, own(found.name or "")) == ("parameter", "head.weight")
    assert is_alive() is None


def test_another_look_finds_new_storages_without_another_search(
    owners: Owners, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = Drafter()
    owners.look()
    monkeypatch.setattr(gc, "get_objects", lambda: pytest.fail("searched again"))
    torch.autograd.backward(drafter(torch.ones(3, 8)).sum())
    drafter.double()
    owners.look()
    found = names(owners.seen(), drafter.head.weight, drafter.head.weight.grad)
    assert found == [("parameter", "head.weight"), ("gradient", "head.weight")]


def test_modules_that_are_not_inside_each_other_are_told_apart_by_their_class(owners: Owners) -> None:
    drafter, other, empty = Drafter(), Mlp(), nn.CrossEntropyLoss()
    owners.look()
    weight, up = (owners.seen().owners[address(each)] for each in (drafter.head.weight, other.up.weight))
    assert (weight.name, up.name) == ("Drafter.head.weight", "Mlp.up.weight")
    assert owners.name_of(other.down) == "Mlp.down"
    assert owners.name_of(empty) is None


def test_a_compiled_module_keeps_its_name(owners: Owners) -> None:
    drafter = Drafter()
    compiled = torch.compile(drafter, backend="eager")
    owners.look()
    name = owners.seen().owners[address(drafter.head.weight)].name
    assert name.removeprefix(f"{type(compiled).__name__}.") == "head.weight"


def test_what_has_no_storage_yet_keeps_nobody_from_telling_the_rest(owners: Owners) -> None:
    with torch.device("meta"):
        elsewhere = nn.Linear(3, 3)
    model = nn.ModuleList([nn.LazyLinear(5), elsewhere, Mlp()])
    owners.look()
    last = model[2]
    assert isinstance(last, Mlp)
    assert owners.seen().owners[address(last.up.weight)].name.endswith("2.up.weight")


def test_one_storage_of_two_parameters_has_the_first_ones_name(owners: Owners) -> None:
    tied = Mlp()
    tied.down.weight = nn.Parameter(tied.up.weight.detach().T)
    owners.look()
    assert owners.seen().owners[address(tied.down.weight)].name.endswith("up.weight")


def test_a_parameter_without_a_module_is_its_optimizers(owners: Owners) -> None:
    loose = torch.zeros(5, requires_grad=True)
    optimizer = torch.optim.SGD([loose], lr=0.1)
    owners.look()
    assert names(owners.seen(), loose) == [("parameter", "param_groups.0.0")]
    assert optimizer.param_groups


def test_tensors_that_python_holds_have_their_shape_and_a_view_does_not_stand_for_the_whole(
    owners: Owners,
) -> None:
    states = torch.zeros(4, 6, dtype=torch.bfloat16)
    part = states[:2]
    meta = torch.zeros(9, device="meta")
    known = owners.look_at_all()
    assert known.alive[address(states)] == ((4, 6), "bfloat16", False)
    assert (part.shape, meta.shape) == ((2, 6), (9,))
    assert 0 not in known.alive


def test_vocabularies_and_gradients_are_known_by_their_sizes(owners: Owners) -> None:
    drafter = Drafter()
    owners.look()
    known = owners.seen()
    assert known.vocabularies[VOCABULARY] == frozenset([8])
    assert known.gradient_sizes[VOCABULARY * 8 * 4] == 1
    assert drafter.head.weight.grad is None


def test_a_module_is_told_by_the_code_that_ran(owners: Owners) -> None:
    drafter = Drafter()
    here.clear()
    drafter(torch.ones(3, 8))
    owners.look()
    known = owners.seen()
    assert own(Stack(here[0], known.sites, known.torch_folder).module or "") == "layers.*"
    assert Stack(here[0], known.sites, known.torch_folder).where == f"test_memory_owners.py:{LINE} forward"


LINE = Mlp.forward.__code__.co_firstlineno + 1


def test_cublas_workspace_that_the_environment_asks_for_is_known(
    owners: Owners, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:2:16:8")
    assert (4096 * 2 + 16 * 8) * 1024 in owners.seen().workspaces
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":1:3")
    assert 3 * 1024 in owners.seen().workspaces


def test_objects_that_pretend_to_be_something_else_are_not_asked(owners: Owners) -> None:
    class Pretender:
        def __getattribute__(self, name: str) -> object:
            asked.append(name)
            return super().__getattribute__(name)

    asked: list[str] = []
    pretenders = [Pretender()]
    owners.look_at_all()
    assert asked == []
    assert not isinstance(pretenders[0], nn.Module)
    assert asked == ["__class__"]  # what isinstance asks
