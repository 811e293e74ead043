"""How good a drafter is on held-out rows: loss, and agreement with labels and with the teacher's argmax.

Every validation of a run draws the same anchors, and no noise. `acceptance.k` is the share of blocks whose
slots 1 … k all match, which sum up to the streak; `teacher_acceptance.k` the same against the teacher.
"""

from collections.abc import Iterable
from dataclasses import replace

import torch

from dflash.drafter import DFlashDrafter
from dflash.training.micro_batch import MicroBatch
from dflash.training.ranks import Ranks
from dflash.training.seeds import seed_for
from dflash.training.step import Objective, forward
from dflash.training.sums import Sums


@torch.no_grad()
def validate(
    drafter: DFlashDrafter,
    micro_batches: Iterable[MicroBatch],
    *,
    objective: Objective,
    ranks: Ranks,
    seed: int,
) -> dict[str, float]:
    """Return sums and means over all drafters' rows; each gives its own share, which may be none."""
    # The teacher is asked also where it was not trained on; at no weight it changes no loss.
    kl_weight = objective.kl_weight if objective.use_soft_labels else 0.0
    asking = replace(objective, use_soft_labels=True, kl_weight=kl_weight)
    sums = Sums(drafter.fc.weight.device, slots=drafter.block_size - 1)
    for micro_batch in micro_batches:
        _, metrics = forward(
            drafter,
            micro_batch,
            asking,
            features_1SF=micro_batch.features_1SF,
            seed=seed_for("validation anchors", seed, 0, micro_batch.number),
            by_slot=True,
        )
        sums.add(metrics, tokens=sum(micro_batch.lengths))
    ranks.sum([sums.vector])
    return sums.read()
