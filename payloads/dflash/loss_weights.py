"""How much each slot counts: falling with its number, or following what the drafter is sure of by now.

`decay`: w_k = exp(−(k − 1)/gamma), and the loss is divided by Σ w.

`d-pace` (arXiv 2605.18810, equations 7 to 9): of each slot's probability of its label, q = exp(−CE), the
smoothed q̃ = (1 − alpha)·q + alpha gives w_k = Σ_{m ≥ k} Π_{i ≤ m} q̃_i, the share that slot k has in the
length that would be accepted. Weights are constants to the gradient. The loss is divided by the number of
blocks that carry loss: dividing by Σ w would take out again what the weights say (SpecForge did so at first
and was told by the paper's author). A slot that is not valid has no share and lowers nobody's, as in
speculators.

Shape letters: N blocks, B slots of a block, T = N·B slots, R valid slots.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dflash.blocks import Blocks
from dflash.transfer import to_device


class SlotWeights(NamedTuple):
    """Each valid slot's weight, and what the sum of weighted losses is divided by."""

    weights_R: Tensor
    weight_sum: Tensor


@torch.no_grad()
def slot_weights(
    blocks: Blocks, losses_R: Tensor, *, loss_weights: str, gamma: float, alpha: float
) -> SlotWeights:
    """Return the weights in the losses' type; with `d-pace` the losses are cross-entropies alone."""
    if loss_weights == "decay":
        weights_R = _decay(blocks, gamma, losses_R)
        return SlotWeights(weights_R, weights_R.sum())
    blocks_with_loss = len((blocks.slots_R // blocks.block_size).unique())
    return SlotWeights(_d_pace(blocks, alpha, losses_R), losses_R.new_full((), blocks_with_loss))


def _decay(blocks: Blocks, gamma: float, losses_R: Tensor) -> Tensor:
    numbers_R = to_device(blocks.slot_numbers_R(), losses_R.device).to(losses_R.dtype)
    return torch.exp(-(numbers_R - 1) / gamma)


def _d_pace(blocks: Blocks, alpha: float, losses_R: Tensor) -> Tensor:
    slots_R = to_device(blocks.slots_R, losses_R.device)
    confidences_T = losses_R.new_ones(blocks.count * blocks.block_size)
    confidences_T[slots_R] = (1 - alpha) * torch.exp(-losses_R) + alpha
    reached_NB = confidences_T.view(-1, blocks.block_size).cumprod(dim=1)
    counted_T = torch.zeros_like(confidences_T)
    counted_T[slots_R] = 1
    shares_NB = reached_NB * counted_T.view_as(reached_NB)
    return shares_NB.flip(1).cumsum(dim=1).flip(1).flatten()[slots_R]
