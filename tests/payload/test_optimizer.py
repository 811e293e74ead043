"""The optimizer of the trainer: float32 masters, clipping, steps that are skipped, and its state."""

import copy
import io
import math
from typing import Any

import pytest
import torch
from dflash.optimizer import MasterAdamW
from torch import Tensor, nn

from tests.payload.cases import FULL, SLIDING, Case, build

LR, STEPS = 1e-3, 30
SHAPES = ((7, 5), (5,), (3, 4, 2))


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    """Return the same values in every type: those that bfloat16 has."""
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=generator).bfloat16() for shape in SHAPES]
    return [nn.Parameter(value.to(dtype)) for value in made]


def give_gradients(trained: list[nn.Parameter], seed: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in trained:
        values = torch.randn(parameter.shape, generator=generator) * scale
        parameter.grad = values.bfloat16().to(parameter.dtype)


def weights_of(optimizer: MasterAdamW, trained: list[nn.Parameter]) -> list[Tensor]:
    return [optimizer.state[parameter].get("master", parameter).detach() for parameter in trained]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("max_norm", [0.5, math.inf])
def test_steps_equal_those_of_float32_training_with_clipping(dtype: torch.dtype, max_norm: float) -> None:
    own, plain = parameters(dtype), parameters(torch.float64 if dtype == torch.float64 else torch.float32)
    optimizer = MasterAdamW(own, lr=LR, betas=(0.9, 0.95), weight_decay=0.1)
    reference = torch.optim.AdamW(
        [{"params": [plain[0], plain[2]], "weight_decay": 0.1}, {"params": [plain[1]], "weight_decay": 0.0}],
        lr=LR,
        betas=(0.9, 0.95),
    )
    for number in range(STEPS):
        give_gradients(own, number, scale=0.1 * (1 + number % 3))
        give_gradients(plain, number, scale=0.1 * (1 + number % 3))
        norm = optimizer.step(max_norm)
        expected = nn.utils.clip_grad_norm_(plain, max_norm)
        torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
        reference.step()
    for mine, theirs in zip(weights_of(optimizer, own), plain, strict=True):
        torch.testing.assert_close(mine, theirs.detach(), rtol=1e-5, atol=1e-7)
    for parameter, weights in zip(own, weights_of(optimizer, own), strict=True):
        assert torch.equal(parameter, weights.to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("max_norm", [0.5, math.inf])
def test_gradients_beside_the_parameters_with_their_divisor_step_as_divided_ones(
    dtype: torch.dtype, max_norm: float
) -> None:
    own, plain = parameters(dtype), parameters(dtype)
    optimizer, expected = (MasterAdamW(trained, lr=LR, weight_decay=0.1) for trained in (own, plain))
    for number in range(STEPS):
        give_gradients(plain, number)
        sums = {
            mine: 4 * theirs.grad.float()
            for mine, theirs in zip(own, plain, strict=True)
            if theirs.grad is not None
        }
        norm = optimizer.step(max_norm, gradients=sums, divisor=torch.tensor(4.0, dtype=torch.float64))
        torch.testing.assert_close(norm.float(), expected.step(max_norm), rtol=1e-6, atol=0)
    for mine, theirs in zip(weights_of(optimizer, own), weights_of(expected, plain), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)
    assert all(parameter.grad is None for parameter in own)


def test_a_divisor_of_zero_changes_nothing() -> None:
    trained = parameters(torch.float32)
    optimizer = MasterAdamW(trained, lr=LR, weight_decay=0.1)
    before = copy.deepcopy(optimizer.state_dict()), [parameter.detach().clone() for parameter in trained]
    zeros = {parameter: torch.zeros_like(parameter) for parameter in trained}
    assert math.isnan(optimizer.step(1.0, gradients=zeros, divisor=torch.tensor(0.0)))
    assert all(torch.equal(now, then) for now, then in zip(trained, before[1], strict=True))
    for now, then in zip(optimizer.state_dict()["state"].values(), before[0]["state"].values(), strict=True):
        assert all(torch.equal(now[name], then[name]) for name in then)


def test_norms_in_bfloat16_move_only_with_masters() -> None:
    def trained(optimizer_of: Any) -> Tensor:
        case = Case(layer_types=(SLIDING, FULL), attention="sdpa_chunked", dtype=torch.bfloat16)
        bench = build(case)
        norms = [p for p in bench.drafter.parameters() if p.requires_grad and p.ndim == 1]
        with torch.no_grad():
            for norm in norms:
                norm.fill_(1.0)
        step = optimizer_of([p for p in bench.drafter.parameters() if p.requires_grad])
        for _ in range(40):
            bench.drafter.zero_grad()
            torch.autograd.backward(bench.run()[0])
            step()
        return torch.cat([norm.detach() for norm in norms])

    def with_masters(chosen: list[nn.Parameter]) -> Any:
        optimizer = MasterAdamW(chosen, lr=5e-4)
        return lambda: optimizer.step(1.0)

    frozen = trained(lambda chosen: torch.optim.AdamW(chosen, lr=5e-4).step)
    moved = trained(with_masters)
    assert (frozen == 1.0).float().mean() > 0.7
    assert (moved == 1.0).float().mean() < 0.1


def test_masters_and_moments_are_made_at_once_and_are_all_that_is_kept() -> None:
    own = [*parameters(torch.bfloat16), nn.Parameter(torch.ones(9), requires_grad=False)]
    optimizer = MasterAdamW(own, lr=LR)
    count = sum(parameter.numel() for parameter in own[:3])

    def kept() -> int:
        return sum(t.untyped_storage().nbytes() for state in optimizer.state.values() for t in state.values())

    assert kept() == 12 * count + 4 * len(SHAPES)
    give_gradients(own[:3], 0)
    optimizer.step(1.0)
    assert kept() == 12 * count + 4 * len(SHAPES)
    assert own[3] not in optimizer.state


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_norm_that_is_not_finite_is_returned_and_nothing_changes(poison: float) -> None:
    own = parameters(torch.bfloat16)
    optimizer = MasterAdamW(own, lr=LR, weight_decay=0.1)
    give_gradients(own, 0)
    assert optimizer.step(1.0).isfinite()
    before = copy.deepcopy((optimizer.state_dict(), own))
    give_gradients(own, 1)
    assert own[1].grad is not None
    own[1].grad[2] = poison
    assert not optimizer.step(1.0).isfinite()
    assert same(before[0]["state"], optimizer.state_dict()["state"])
    assert all(torch.equal(mine, old) for mine, old in zip(own, before[1], strict=True))
    give_gradients(own, 1)
    assert optimizer.step(1.0).isfinite()
    assert optimizer.state[own[0]]["step"] == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_training_goes_on_from_a_saved_state_bit_by_bit(dtype: torch.dtype) -> None:
    def steps(optimizer: MasterAdamW, trained: list[nn.Parameter], numbers: range) -> None:
        for number in numbers:
            give_gradients(trained, number)
            optimizer.step(0.7)

    whole = parameters(dtype)
    uninterrupted = MasterAdamW(whole, lr=LR, weight_decay=0.1)
    steps(uninterrupted, whole, range(6))

    first = parameters(dtype)
    interrupted = MasterAdamW(first, lr=LR, weight_decay=0.1)
    steps(interrupted, first, range(3))
    file = io.BytesIO()
    torch.save((interrupted.state_dict(), [p.detach() for p in first]), file)
    file.seek(0)
    state, values = torch.load(file, weights_only=True)

    second = [nn.Parameter(value) for value in values]
    resumed = MasterAdamW(second, lr=0.5, weight_decay=0.9)
    resumed.load_state_dict(state)
    assert resumed.param_groups[0]["lr"] == LR
    assert same(resumed.state_dict(), interrupted.state_dict())
    steps(resumed, second, range(3, 6))
    assert same(resumed.state_dict(), uninterrupted.state_dict())
    assert all(torch.equal(mine, other) for mine, other in zip(second, whole, strict=True))


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def test_parameters_become_what_loaded_masters_say() -> None:
    saved = parameters(torch.bfloat16)
    optimizer = MasterAdamW(saved, lr=LR)
    other = [nn.Parameter(torch.zeros_like(parameter)) for parameter in saved]
    loaded = MasterAdamW(other, lr=LR)
    loaded.load_state_dict(optimizer.state_dict())
    assert all(torch.equal(mine, its) for mine, its in zip(other, saved, strict=True))


def test_state_of_other_parameters_is_refused_and_changes_nothing() -> None:
    optimizer = MasterAdamW(parameters(torch.bfloat16), lr=LR)
    before = copy.deepcopy(optimizer.state_dict())
    others = {
        "2 parameters": MasterAdamW(parameters(torch.bfloat16)[:2], lr=LR),
        "types differ": MasterAdamW(parameters(torch.float32), lr=LR),
        r"\[2, 2\]": MasterAdamW(
            [*parameters(torch.bfloat16)[:2], nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16))], lr=LR
        ),
    }
    for told, other in others.items():
        with pytest.raises(ValueError, match=told):
            optimizer.load_state_dict(other.state_dict())
    assert same(optimizer.state_dict(), before)


def test_parameter_without_a_gradient_stays_as_it_is() -> None:
    own = parameters(torch.bfloat16)
    before = own[1].detach().clone()
    optimizer = MasterAdamW(own, lr=LR, weight_decay=0.1)
    give_gradients(own, 0)
    own[1].grad = None
    optimizer.step(1.0)
    assert torch.equal(own[1], before)
    assert optimizer.state[own[1]]["step"] == 0


def test_schedules_of_torch_set_the_rate() -> None:
    own = parameters(torch.bfloat16)
    optimizer = MasterAdamW(own, lr=LR)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 10))
    before = weights_of(optimizer, own)[0].clone()
    give_gradients(own, 0)
    optimizer.step(1.0)
    assert torch.equal(weights_of(optimizer, own)[0], before)
    schedule.step()
    give_gradients(own, 0)
    optimizer.step(1.0)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(LR / 10)
    assert (weights_of(optimizer, own)[0] - before).abs().max() == pytest.approx(LR / 10, rel=0.05)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"lr": -1.0}, "lr is -1"),
        ({"lr": math.nan}, "lr is nan"),
        ({"betas": (0.9, 1.0)}, "betas are"),
        ({"weight_decay": -0.1}, "weight_decay is -0.1"),
    ],
)
def test_numbers_out_of_range_are_refused(changed: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        MasterAdamW(parameters(torch.bfloat16), **{"lr": LR, **changed})


def test_nothing_to_train_no_gradient_and_no_norm_are_refused() -> None:
    with pytest.raises(ValueError, match="nothing to train"):
        MasterAdamW([nn.Parameter(torch.ones(2), requires_grad=False)], lr=LR)
    optimizer = MasterAdamW(parameters(torch.bfloat16), lr=LR)
    with pytest.raises(ValueError, match="call backward"):
        optimizer.step(1.0)
    with pytest.raises(ValueError, match="max_norm is 0"):
        optimizer.step(0.0)
