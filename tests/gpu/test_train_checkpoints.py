"""A training on a card, left and continued: bit by bit as one that was not, what the card draws included."""

import contextlib
from pathlib import Path

import pytest
import torch
from dflash import flops

from tests.payload.small_training import Interrupted, Training, assert_same, seed_generators

pytestmark = pytest.mark.gpu


def test_a_training_on_a_card_ends_bit_by_bit_as_if_it_had_not_been_left(
    card: torch.device, tmp_path: Path
) -> None:
    expected = Training(tmp_path / "whole", device=card, every=100).run().everything()
    left = iter(range(7))

    def interrupt() -> None:
        if next(left, None) is None:
            raise Interrupted

    with contextlib.suppress(Interrupted):
        Training(tmp_path / "run", device=card, every=2).run(interrupt)
    seed_generators()
    assert_same(Training(tmp_path / "run", device=card, every=2).run().everything(), expected)


def test_an_h200s_peak_is_known(card: torch.device) -> None:
    if torch.cuda.get_device_name(card) != "NVIDIA H200":
        pytest.skip("another card")
    assert flops.peak_flops_per_s(card) == 989e12
