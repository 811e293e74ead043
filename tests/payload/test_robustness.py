"""What a careless caller, another thread or a torn row must not do to a drafter's numbers."""

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from dflash.anchors import anchor_quotas
from torch import Tensor

from tests.payload.cases import SLIDING, Case, build, fresh_drafter, gradients_of

SDPA_FLAGS = ("flash_sdp_enabled", "mem_efficient_sdp_enabled", "math_sdp_enabled", "cudnn_sdp_enabled")
BACKENDS = ("eager", "sdpa_chunked", "sdpa_math")


def test_threads_leave_the_choice_of_kernels_as_it_was() -> None:
    def flags() -> list[bool]:
        return [getattr(torch.backends.cuda, name)() for name in SDPA_FLAGS]

    before = flags()
    case = Case(attention="sdpa_math", chunk_blocks=1, anchors=tuple(range(12)))
    expected = float(build(case).run()[0].detach())
    found: list[float] = []

    def work() -> None:
        bench = build(case)
        found.extend(float(bench.run()[0].detach()) for _ in range(20))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert flags() == before
    assert found == [expected] * 60


@pytest.mark.parametrize("window", [2**31 - 1, 2**31, 2**32, 10**12, 2**63])
@pytest.mark.parametrize("attention", BACKENDS)
def test_window_of_any_length_is_one_that_sees_everything(attention: str, window: int) -> None:
    case = Case(attention=attention, layer_types=(SLIDING, SLIDING))
    wide, whole = (build(replace(case, sliding_window=size)).run()[0].detach() for size in (window, 1000))
    assert torch.equal(wide, whole)


@pytest.mark.parametrize("attention", BACKENDS)
def test_nan_in_the_padding_reaches_nothing(attention: str) -> None:
    case = Case(attention=attention, padding=4)
    clean, torn = build(case), build(case)
    torn.arguments["all_hidden_states"][:, -4:] = torch.nan
    losses = [bench.run()[0] for bench in (clean, torn)]
    for loss in losses:
        torch.autograd.backward(loss)
    assert torch.equal(losses[0].detach(), losses[1].detach())
    expected = gradients_of(clean.drafter)
    for name, gradient in gradients_of(torn.drafter).items():
        assert torch.equal(gradient, expected[name]), name


@pytest.mark.parametrize("of_features", [True, False])
def test_second_derivatives_are_refused_and_never_wrong(of_features: bool) -> None:
    bench = build(Case())
    features = bench.arguments["all_hidden_states"].requires_grad_(of_features)
    loss = bench.run()[0]
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(loss, features if of_features else bench.drafter.norm.weight, create_graph=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("attention", ["eager", "sdpa_chunked"])
def test_autocast_changes_nothing(attention: str, dtype: torch.dtype) -> None:
    case = Case(attention=attention, dtype=dtype)
    expected = build(case).run()[0].detach()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(build(case).run()[0].detach(), expected)


@pytest.mark.parametrize(
    ("anchors", "said"),
    [
        (torch.tensor([True, False, True]), "vector of integers"),
        (torch.tensor([2 + 0j]), "vector of integers"),
        (torch.tensor([2.0]), "vector of integers"),
        (torch.tensor([[2]]), "vector of integers"),
    ],
)
def test_anchors_that_are_no_indices_are_refused(anchors: Tensor, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        build(Case()).run(anchors=anchors)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.bool])
@pytest.mark.parametrize("which", ["embed_tokens_VH", "lm_head_VH"])
def test_quantised_target_weights_are_refused(which: str, dtype: torch.dtype) -> None:
    drafter = build(Case()).drafter
    weights = {name: torch.zeros(29, 12) for name in ("embed_tokens_VH", "lm_head_VH")}
    weights[which] = weights[which].to(dtype)
    with pytest.raises(ValueError, match=which.removesuffix("_VH")):
        drafter.use_target_weights(**weights)


def test_narrow_positions_do_not_wrap() -> None:
    bench = build(Case(lengths=(26,), padding=0, anchors=(3, 20), block_size=5))
    positions = torch.arange(102, 128)[None]
    losses = [bench.run(position_ids=positions.to(dtype))[0].detach() for dtype in (torch.int64, torch.int8)]
    assert torch.equal(losses[0], losses[1])


@pytest.mark.parametrize("gamma", [0.0, -1.0, 1e-46, float("nan")])
def test_gamma_that_makes_no_weight_is_refused(gamma: float) -> None:
    with pytest.raises(ValueError, match="gamma is"):
        build(Case()).run(gamma=gamma)


@pytest.mark.parametrize(
    "wrong", [{"block_size": 2.5}, {"max_anchors": 1.5}, {"mask_token_id": 1.5}, {"mask_token_id": True}]
)
def test_numbers_that_are_no_integers_are_refused(wrong: dict[str, Any]) -> None:

    with pytest.raises(ValueError, match="must be an integer"):
        fresh_drafter(Case(), **wrong)


def test_row_without_a_valid_slot_leaves_zeros_in_the_features_too() -> None:
    bench = build(Case(anchors=()))
    features = bench.arguments["all_hidden_states"].requires_grad_()
    bench.drafter.requires_grad_(requires_grad=False)
    torch.autograd.backward(bench.run()[0])
    assert features.grad is not None
    assert not features.grad.any()


def test_thousands_of_short_documents_are_shared_out_at_once() -> None:

    quotas = anchor_quotas([1] * 20_000, 8)
    assert sum(quotas) == 8
    assert max(quotas) == 1
