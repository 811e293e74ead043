"""What a forward reports beside its loss: sums and counts that add up over rows and ranks, and their means.

`accuracy` is the share of valid slots whose argmax is the label; `avg_streak` the mean over blocks of the
length of the matching prefix of slots 1 … B − 1. The bonus token is not counted (acceptance length as
published is the streak plus 1), and a slot that is not valid ends the prefix. The `teacher_` figures compare
with the teacher's argmax instead, because labels of foreign or sampled text mislead; without a teacher they
are absent. `loss_sum / weight_sum` is the loss; the drafter adds them.

Shape letters: N blocks, B slots of a block, R valid slots.
"""

import torch
from torch import Tensor

from dflash.blocks import Blocks
from dflash.loss import RowScores
from dflash.transfer import to_device

Metrics = dict[str, Tensor]


def summarize(blocks: Blocks, scores: RowScores, labels_R: Tensor, *, by_slot: bool) -> Metrics:
    """Return the metrics of one row as scalars on the device: counts int64, means float32.

    A mean over nothing is 0. `by_slot` adds `accepted_blocks` and, with a teacher, `teacher_accepted_blocks`:
    `[B − 1]` counts of the blocks in which slots 1 … k all match.
    """
    device = labels_R.device
    metrics = {
        "valid_slots": torch.full((), len(labels_R), device=device),
        "blocks": torch.full((), blocks.count, device=device),
        "rows_without_loss": torch.full((), int(not blocks.has_loss), device=device),
    }
    answers = {"": labels_R} if scores.taught_R is None else {"": labels_R, "teacher_": scores.taught_R}
    for prefix, answers_R in answers.items():
        metrics |= _agreement(blocks, scores.predicted_R == answers_R, prefix=prefix, by_slot=by_slot)
    return metrics


def _agreement(blocks: Blocks, hits_R: Tensor, *, prefix: str, by_slot: bool) -> Metrics:
    hits_T = hits_R.new_zeros(blocks.count * blocks.block_size)
    hits_T[to_device(blocks.slots_R, hits_R.device)] = hits_R
    hits_NB = hits_T.view(-1, blocks.block_size)
    correct_slots = hits_R.sum()
    prefixes_NB = hits_NB[:, 1:].long().cumprod(dim=1)
    streak_sum = prefixes_NB.sum()
    agreement = {
        f"{prefix}accuracy": correct_slots.float() / max(1, len(hits_R)),
        f"{prefix}avg_streak": streak_sum.float() / max(1, blocks.count),
        f"{prefix}correct_slots": correct_slots,
        f"{prefix}streak_sum": streak_sum,
    }
    if by_slot:
        agreement[f"{prefix}accepted_blocks"] = prefixes_NB.sum(dim=0)
    return agreement
