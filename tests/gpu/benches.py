"""A small drafter on a card, and what the slow float64 reference on the CPU makes of its weights and row."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tests.payload.cases import Bench, Case, build, gradients_of, leaves, relative_error


@dataclass(frozen=True, kw_only=True, slots=True)
class Exact:
    """Loss and gradients in float64, of weights and states that were rounded to the case's type before."""

    loss: Tensor
    gradients: Mapping[str, Tensor]


@functools.cache
def exact(case: Case) -> Exact:
    """Return the reference's outcome; the case's attention and recomputation do not matter to it."""
    bench = build(case)
    weights = leaves(bench.drafter)
    loss = bench.reference(weights).loss
    torch.autograd.backward(loss)
    gradients = {name: tensor.grad for name, tensor in weights.items() if tensor.grad is not None}
    return Exact(loss=loss.detach(), gradients=gradients)


def build_on(device: torch.device, case: Case) -> Bench:
    """Return the case with its drafter and every tensor of its row on the device."""
    bench = build(case)
    bench.drafter.to(device)
    moved = {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in bench.arguments.items()
    }
    return replace(bench, arguments=moved)


def errors(bench: Bench, expected: Exact) -> dict[str, float]:
    """Return the relative error of the loss and of every parameter's gradient after one step."""
    bench.drafter.zero_grad()
    loss, _ = bench.run()
    torch.autograd.backward(loss)
    found = {"loss": relative_error(loss.detach().cpu(), expected.loss)}
    for name, gradient in gradients_of(bench.drafter).items():
        found[name] = relative_error(gradient.cpu(), expected.gradients[name])
    return found
