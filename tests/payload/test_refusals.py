"""What the drafter refuses, each with the numbers that do not fit."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.payload.cases import FULL, SLIDING, Case, build, fresh_drafter

CASE = Case(dtype=torch.float32)  # 6 target layers, ids 0, 2, 3, hidden 12, 29 tokens, a row of 26


def refused_pairing(**pairing: Any) -> str:
    with pytest.raises(ValueError, match=r".") as caught:
        fresh_drafter(CASE, **pairing)
    return str(caught.value)


def refused_row(**changed: Any) -> str:
    bench = build(CASE)
    with pytest.raises(ValueError, match=r".") as caught:
        bench.run(**changed)
    return str(caught.value)


def names(message: str, *parts: object) -> bool:
    return all(str(part) in message for part in parts)


def test_missing_mask_token() -> None:
    assert names(refused_pairing(mask_token_id=None), "mask_token_id")


def test_mask_token_that_is_the_padding() -> None:
    assert names(refused_pairing(mask_token_id=5, pad_token_id=5), "mask_token_id 5", "pad_token_id 5")
    assert fresh_drafter(CASE, mask_token_id=5, pad_token_id=6).mask_token_id == 5


@pytest.mark.parametrize("token", [-1, 29])
def test_mask_token_outside_the_vocabulary(token: int) -> None:
    assert names(refused_pairing(mask_token_id=token), token, 29)


@pytest.mark.parametrize("layer", [-1, 6, 61])
def test_target_layer_that_does_not_exist(layer: int) -> None:
    assert names(refused_pairing(target_layer_ids=[0, layer]), layer, 6)


def test_last_target_layer_whose_state_is_normed() -> None:
    assert names(refused_pairing(target_layer_ids=[0, 5]), 5, 6)


@pytest.mark.parametrize("ids", [[], [1, 1]])
def test_no_or_repeated_target_layers(ids: list[int]) -> None:
    assert names(refused_pairing(target_layer_ids=ids), ids)


@pytest.mark.parametrize(("name", "value"), [("block_size", 1), ("block_size", 0), ("max_anchors", 0)])
def test_sizes_without_meaning(name: str, value: int) -> None:
    assert names(refused_pairing(**{name: value}), name, value)


@pytest.mark.parametrize("window", [1, 4])
def test_sliding_window_that_ends_inside_a_block_names_both_numbers(window: int) -> None:
    sliding, full = (
        replace(CASE, layer_types=types, sliding_window=window, block_size=5)
        for types in ((SLIDING, FULL), (FULL, FULL))
    )
    with pytest.raises(ValueError, match=rf"sliding_window is {window}, but block_size is 5"):
        fresh_drafter(sliding)
    assert fresh_drafter(full).block_size == 5
    assert fresh_drafter(replace(sliding, sliding_window=5)).config.sliding_window == 5


def test_features_of_another_width_name_both_numbers() -> None:
    assert names(refused_row(all_hidden_states=torch.zeros(1, 26, 60)), 60, 36)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("all_hidden_states", (1, 25, 36)),
        ("all_hidden_states", (26, 36)),
        ("verifier_last_hidden", (1, 26, 11)),
        ("verifier_last_hidden", (1, 27, 12)),
        ("loss_mask", (1, 25)),
        ("loss_mask", (26,)),
        ("position_ids", (1, 30)),
        ("input_ids", (2, 26)),
    ],
)
def test_tensor_of_another_shape_is_named_with_its_shape(name: str, shape: tuple[int, ...]) -> None:
    dtype = torch.float32 if "hidden" in name else torch.long
    assert names(refused_row(**{name: torch.zeros(shape, dtype=dtype)}), name, *shape)


def test_soft_labels_without_a_teacher() -> None:
    assert names(refused_row(verifier_last_hidden=None), "verifier_last_hidden")
    bench = build(CASE)
    assert bool(bench.run(verifier_last_hidden=None, use_soft_labels=False)[0].isfinite())


def test_documents_longer_than_the_row() -> None:
    assert names(refused_row(lengths=torch.tensor([20, 7])), 27, 26)


@pytest.mark.parametrize("length", [0, -3])
def test_document_without_tokens(length: int) -> None:
    assert names(refused_row(lengths=torch.tensor([9, length])), length)


@pytest.mark.parametrize("anchor", [-1, 26])
def test_anchor_outside_the_row(anchor: int) -> None:
    assert names(refused_row(anchors=torch.tensor([3, anchor])), anchor, 26)


@pytest.mark.parametrize("anchors", [torch.tensor([1.0]), torch.tensor([[1, 2]]), torch.tensor(3)])
def test_anchors_that_are_no_vector_of_integers(anchors: torch.Tensor) -> None:
    assert names(refused_row(anchors=anchors), "anchors", anchors.dtype)


@pytest.mark.parametrize(("name", "value"), [("kl_weight", -0.1), ("kl_weight", 1.5), ("gamma", 0.0)])
def test_loss_weights_without_meaning(name: str, value: float) -> None:
    assert names(refused_row(**{name: value}), name, value)


@pytest.mark.parametrize("name", ["kl_weight", "gamma"])
def test_loss_weight_that_is_no_number(name: str) -> None:
    assert names(refused_row(**{name: float("nan")}), name)
