"""The optimizer on a card: torch's fused kernel, and exactly the memory that it says."""

import pytest
import torch
from dflash.optimizer import MasterAdamW
from torch import nn

from tests.payload.test_optimizer import STEPS, give_gradients, parameters, weights_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_steps_on_the_card_equal_those_of_the_host(card: torch.device, dtype: torch.dtype) -> None:
    here = parameters(dtype)
    there = [nn.Parameter(value.detach().to(card)) for value in here]
    own, other = MasterAdamW(here, lr=1e-3), MasterAdamW(there, lr=1e-3)
    for number in range(STEPS):
        give_gradients(here, number)
        for parameter, its in zip(there, here, strict=True):
            assert its.grad is not None
            parameter.grad = its.grad.to(card)
        torch.testing.assert_close(other.step(0.5).cpu(), own.step(0.5), rtol=1e-5, atol=0)
    for mine, expected in zip(weights_of(other, there), weights_of(own, here), strict=True):
        torch.testing.assert_close(mine.cpu(), expected, rtol=1e-5, atol=1e-7)


def test_state_takes_twelve_bytes_a_parameter_and_a_step_one_gradients_copy(card: torch.device) -> None:
    count = 2**22
    trained = [
        nn.Parameter(torch.ones(2048, count // 2048, dtype=torch.bfloat16, device=card)) for _ in range(3)
    ]
    for parameter in trained:
        parameter.grad = torch.ones_like(parameter)
    before = torch.cuda.memory_allocated(card)
    optimizer = MasterAdamW(trained, lr=1e-3)
    kept = torch.cuda.memory_allocated(card) - before
    assert kept == 3 * (12 * count + 512)
    torch.cuda.reset_peak_memory_stats(card)
    optimizer.step(1.0)
    assert torch.cuda.memory_allocated(card) - before == kept
    assert 4 * count <= torch.cuda.max_memory_allocated(card) - before - kept < 4 * count + 2**16


def test_not_finite_gradients_are_skipped_without_waiting_for_the_card(card: torch.device) -> None:
    (trained,) = [nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16, device=card))]
    optimizer = MasterAdamW([trained], lr=1.0)
    trained.grad = torch.full_like(trained, torch.inf)
    torch.cuda.set_sync_debug_mode("error")
    try:
        norm = optimizer.step(1.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.isinf(norm)
    assert bool((trained == 1).all())
    assert optimizer.state[trained]["step"] == 0
