"""A training step on a card: compiled, as on the host, with noise that waits for nothing."""

import pytest
import torch
from dflash.training.micro_batch import MicroBatch
from dflash.training.noise import with_noise

from tests.payload.cases import relative_error
from tests.payload.training import LR, drafter_of, micro_batches, step_of

pytestmark = pytest.mark.gpu


def on(card: torch.device, row: MicroBatch) -> MicroBatch:
    return MicroBatch(
        epoch=row.epoch,
        number=row.number,
        input_ids_1S=row.input_ids_1S.to(card),
        loss_mask_1S=row.loss_mask_1S.to(card),
        lengths=row.lengths,
        features_1SF=row.features_1SF.to(card),
        last_hidden_1SH=row.last_hidden_1SH.to(card),
    )


def test_steps_on_the_card_are_those_of_the_host(card: torch.device) -> None:
    here, there = drafter_of(), drafter_of().to(card)
    own, other = step_of(here, accumulation=2), step_of(there, accumulation=2)
    rows = micro_batches(4)
    for first in (0, 2):
        expected = own(rows[first : first + 2], lr=LR).read()
        found = other([on(card, row) for row in rows[first : first + 2]], lr=LR).read()
        assert found["blocks"] == expected["blocks"]
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-4)
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3)
    for mine, theirs in zip(there.parameters(), here.parameters(), strict=True):
        assert relative_error(mine.detach().cpu(), theirs.detach()) < 1e-3


def test_noise_on_the_card_repeats_itself_and_waits_for_nothing(card: torch.device) -> None:
    features = torch.zeros(1, 300, 200, dtype=torch.bfloat16, device=card)
    torch.cuda.set_sync_debug_mode("error")
    try:
        first, again = (with_noise(features, 0.05, seed=1, epoch=2, number=3) for _ in range(2))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(first, again)
    assert 0.045 < float(first.abs().max()) < 0.0505
