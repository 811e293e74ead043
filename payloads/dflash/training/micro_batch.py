"""One packed row with what the target made of it: what a target worker hands to a drafter.

Shape letters: S tokens of the row (the token budget), F features (target layers × H), H hidden.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """Row `number` of an epoch, padded at its end to the budget; states are on the drafter's device.

    `last_hidden_1SH` is after the target's final norm.
    """

    epoch: int
    number: int
    input_ids_1S: Tensor
    loss_mask_1S: Tensor
    lengths: tuple[int, ...]
    features_1SF: Tensor
    last_hidden_1SH: Tensor
