"""What stays in float32 or wider when the model is bfloat16, whichever way it became so."""

import math
from dataclasses import replace

import pytest
import torch
from dflash import DFlashDrafter
from dflash.rope import rope_table
from torch import Tensor

from tests.payload.cases import (
    FULL,
    SLIDING,
    Bench,
    Case,
    build,
    config_of,
    fresh_drafter,
    gradients_of,
    leaves,
    numbers,
    random_weights,
    relative_error,
)

EITHER_DEFAULT = pytest.mark.parametrize(
    "default", [torch.float32, torch.bfloat16], ids=["float32 default", "bfloat16 default"]
)
BF16 = Case(dtype=torch.bfloat16, rope_theta=1e7, lengths=(40, 25), padding=3, anchors=tuple(range(1, 60, 4)))


@EITHER_DEFAULT
def test_rope_angles_at_position_8000_are_right_to_a_thousandth(default: torch.dtype) -> None:
    torch.set_default_dtype(default)
    table = rope_table(torch.tensor([0, 1, 8000]), head_dim=128, theta=1e7, dtype=torch.float32)
    exact = torch.tensor([8000 * 1e7 ** (-2 * i / 128) for i in range(64)], dtype=torch.float64)
    cos, sin = (part[2].flatten().double() for part in (table.cos_L1F, table.sin_L1F))
    off = torch.atan2(sin * exact.cos() - cos * exact.sin(), cos * exact.cos() + sin * exact.sin())
    assert float(off.abs().max()) < 1e-3


@EITHER_DEFAULT
def test_bfloat16_model_rotates_by_the_float32_table(default: torch.dtype) -> None:
    positions = torch.tensor([0, 17, 8000])
    wide = rope_table(positions, head_dim=128, theta=1e7, dtype=torch.float32)
    torch.set_default_dtype(default)
    narrow = rope_table(positions, head_dim=128, theta=1e7, dtype=torch.bfloat16)
    assert narrow.cos_L1F.dtype == torch.float32
    assert torch.equal(narrow.cos_L1F, wide.cos_L1F)
    assert torch.equal(narrow.sin_L1F, wide.sin_L1F)


def test_far_positions_are_seen_as_they_are_under_a_bfloat16_default() -> None:
    # One document whose tokens lie hundreds of positions apart: a rounded frequency would turn every key.
    torch.set_default_dtype(torch.bfloat16)
    case = Case(
        dtype=torch.float32,
        layer_types=(FULL, FULL),
        lengths=(12,),
        padding=0,
        anchors=(5, 7),
        rope_theta=1e7,
    )
    bench = build(case)
    spread = [701 * index for index in range(12)]
    slow = replace(bench, row=replace(bench.row, positions=spread)).reference()
    loss, _ = bench.run(position_ids=torch.tensor([spread]))
    assert float(loss.detach()) == pytest.approx(float(slow.loss.detach()), rel=1e-4)


def drafter_made(*, default: torch.dtype, cast: bool) -> DFlashDrafter:
    """Return the bfloat16 drafter built under a default type, cast afterwards or not, weights the same."""
    torch.set_default_dtype(default)
    drafter = fresh_drafter(BF16)
    if cast:
        drafter = drafter.to(torch.bfloat16)
    drafter.load_state_dict(random_weights(drafter, seed=4))
    assert {parameter.dtype for parameter in drafter.parameters()} == {torch.bfloat16}
    return drafter


def outcome(bench: Bench) -> tuple[Tensor, dict[str, float], dict[str, Tensor]]:
    loss, metrics = bench.run()
    torch.autograd.backward(loss)
    return loss.detach(), numbers(metrics), gradients_of(bench.drafter)


@pytest.mark.parametrize("attention", ["eager", "sdpa_chunked"])
def test_bfloat16_default_and_cast_equal_building_in_float32_and_casting(attention: str) -> None:
    bench = build(replace(BF16, attention=attention))
    expected_loss, expected_metrics, expected = outcome(
        replace(bench, drafter=drafter_made(default=torch.float32, cast=True))
    )
    for cast in (False, True):
        made = replace(bench, drafter=drafter_made(default=torch.bfloat16, cast=cast))
        loss, metrics, gradients = outcome(made)
        assert torch.equal(loss, expected_loss)
        assert metrics == expected_metrics
        for name, gradient in gradients.items():
            assert torch.equal(gradient, expected[name]), name


@EITHER_DEFAULT
def test_loss_weights_and_sums_stay_float32(default: torch.dtype) -> None:
    torch.set_default_dtype(default)
    bench = build(replace(BF16, lengths=(400,), anchors=tuple(range(390)), sliding_window=8))
    with torch.no_grad():
        loss, metrics = bench.run()
    weights = 390 * sum(
        math.exp(-(k - 1) / bench.case.objective.gamma) for k in range(1, bench.case.block_size)
    )
    assert loss.dtype == metrics["loss_sum"].dtype == metrics["weight_sum"].dtype == torch.float32
    assert metrics["accuracy"].dtype == metrics["avg_streak"].dtype == torch.float32
    assert float(metrics["weight_sum"]) == pytest.approx(weights, rel=1e-6)
    assert float(loss) == pytest.approx(float(metrics["loss_sum"]) / weights, rel=1e-5)
    assert int(metrics["valid_slots"]) == 390 * (bench.case.block_size - 1)


def test_bfloat16_loss_and_gradients_are_near_the_exact_ones() -> None:
    bench = build(BF16)
    weights = {name: tensor.double() for name, tensor in bench.drafter.state_dict().items()}
    exact = build(replace(BF16, dtype=torch.float64))
    exact.drafter.load_state_dict(weights)
    for name in ("all_hidden_states", "verifier_last_hidden"):
        exact.arguments[name] = bench.arguments[name].double()
    expected_loss, _, expected = outcome(exact)
    loss, _, gradients = outcome(bench)
    assert float(loss) == pytest.approx(float(expected_loss), rel=0.02)
    for name, gradient in gradients.items():
        assert gradient.dtype == torch.bfloat16
        assert relative_error(gradient, expected[name]) < 0.1, name


@pytest.mark.parametrize("attention", ["eager", "sdpa_chunked"])
def test_float32_drafter_takes_a_bfloat16_targets_embedding_and_head(attention: str) -> None:
    # Their values are bfloat16's, the arithmetic is float32's.
    bench = build(replace(BF16, dtype=torch.float32, attention=attention))
    embedding, head = target_weights(bench, torch.bfloat16)
    assert (embedding.dtype, head.dtype) == (torch.bfloat16, torch.bfloat16)
    exact = leaves(bench.drafter)
    slow = bench.reference(exact)
    torch.autograd.backward(slow.loss)
    loss, _, gradients = outcome(bench)
    assert loss.dtype == torch.float32
    assert float(loss) == pytest.approx(float(slow.loss.detach()), rel=1e-4)
    for name, gradient in gradients.items():
        expected = exact[name].grad
        assert expected is not None
        assert gradient.dtype == torch.float32
        assert relative_error(gradient, expected) < 1e-3, name


@pytest.mark.parametrize("attention", ["eager", "sdpa_chunked"])
def test_bfloat16_drafter_takes_a_float32_targets_embedding_and_head(attention: str) -> None:
    bench = build(replace(BF16, attention=attention))
    target_weights(bench, torch.float32)
    slow = bench.reference()
    loss, _, gradients = outcome(bench)
    assert loss.dtype == torch.float32
    assert float(loss) == pytest.approx(float(slow.loss.detach()), rel=0.02)
    assert {gradient.dtype for gradient in gradients.values()} == {torch.bfloat16}


def target_weights(bench: Bench, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Give the drafter embedding and head of another type, as a target would; return them."""
    drafter = bench.drafter
    drafter.use_target_weights(
        embed_tokens_VH=drafter.embed_tokens.weight.to(dtype), lm_head_VH=drafter.lm_head.weight.to(dtype)
    )
    return drafter.embed_tokens.weight, drafter.lm_head.weight


@EITHER_DEFAULT
def test_configured_type_makes_the_weights_and_leaves_the_default_alone(default: torch.dtype) -> None:
    torch.set_default_dtype(default)
    drafter = DFlashDrafter(
        config=config_of(BF16, dtype="float64"),
        target_layer_ids=list(BF16.target_layer_ids),
        block_size=BF16.block_size,
        max_anchors=BF16.max_anchors,
        mask_token_id=BF16.mask_token_id,
    )
    assert {parameter.dtype for parameter in drafter.parameters()} == {torch.float64}
    assert torch.get_default_dtype() == default
    unsaid = fresh_drafter(BF16)
    assert {parameter.dtype for parameter in unsaid.parameters()} == {default}


def test_no_buffer_can_be_rounded_by_a_cast() -> None:
    drafter = drafter_made(default=torch.bfloat16, cast=True)
    rounded = [name for name, buffer in drafter.named_buffers() if buffer.dtype == torch.bfloat16]
    assert rounded == []


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 5, 6])
@EITHER_DEFAULT
def test_fresh_bfloat16_drafter_is_finite(default: torch.dtype, layers: int) -> None:
    torch.set_default_dtype(default)
    torch.manual_seed(layers)
    case = replace(
        BF16,
        layer_types=(SLIDING,) * (layers - 1) + (FULL,),
        hidden_size=64,
        head_dim=16,
        attention="sdpa_chunked",
    )
    drafter = fresh_drafter(case).to(torch.bfloat16)
    loss, _, gradients = outcome(replace(build(case), drafter=drafter))
    assert math.isfinite(float(loss))
    assert all(bool(gradient.isfinite().all()) for gradient in gradients.values())
    assert all(bool(gradient.any()) for gradient in gradients.values())
