"""What tests of the training loop share: micro-batches of random states, drafters and their steps."""

from dataclasses import replace
from typing import Any

import torch
from dflash import DFlashDrafter
from dflash.optimizer import MasterAdamW
from dflash.training.micro_batch import MicroBatch
from dflash.training.ranks import Alone, Ranks
from dflash.training.step import DrafterStep, Objective

from tests.payload.cases import Case, build_row, fresh_drafter, random_weights

# Rows of several documents, so many valid anchors that each row draws its own.
CASE = Case(lengths=(13, 9), padding=4, anchors=None, max_anchors=6, attention="sdpa_chunked")
LENGTHS = ((13, 9), (20, 3), (7, 7, 8), (22,))  # 22 of 26 tokens each, documents of their own
LR, MAX_NORM = 1e-3, 1.0


def micro_batch_of(case: Case, *, epoch: int = 0, number: int = 0) -> MicroBatch:
    """Return a case's random row as a micro-batch."""
    row = build_row(case)
    return MicroBatch(
        epoch=epoch,
        number=number,
        input_ids_1S=torch.tensor([row.tokens]),
        loss_mask_1S=torch.tensor([row.loss_mask]),
        lengths=tuple(row.lengths),
        features_1SF=row.features[None],
        last_hidden_1SH=row.last_hidden[None],
    )


def micro_batches(count: int, *, dtype: torch.dtype = torch.float32) -> list[MicroBatch]:
    """Return micro-batches 0 … of epoch 0 that differ in documents, tokens and states."""
    cases = [
        replace(CASE, lengths=LENGTHS[number % len(LENGTHS)], dtype=dtype, seed=number)
        for number in range(count)
    ]
    return [micro_batch_of(case, number=number) for number, case in enumerate(cases)]


def drafter_of(case: Case = CASE, dtype: torch.dtype = torch.float32) -> DFlashDrafter:
    """Return a drafter with random weights, the same for each call."""
    drafter = fresh_drafter(replace(case, dtype=dtype)).to(dtype)
    drafter.load_state_dict(random_weights(drafter, case.seed))
    return drafter


def step_of(drafter: DFlashDrafter, ranks: Ranks | None = None, **changed: Any) -> DrafterStep:
    """Return a drafter's step."""
    settings: dict[str, Any] = {
        "optimizer": MasterAdamW(drafter.parameters(), lr=LR),
        "objective": Objective(),
        "seed": 5,
        "accumulation": 1,
        "max_norm": MAX_NORM,
        "noise": 0.0,
    }
    return DrafterStep(drafter=drafter, ranks=ranks or Alone(), **{**settings, **changed})
