"""The operations that a step needs, counted from the drafter's numbers and a row's blocks.

A multiplication with an addition counts as two. Counted are matrix products and attention, nothing pointwise,
and nothing twice: what a policy recomputes is its own cost, not the work.

Per layer, forward, with T slots, S context tokens, X = A·D and Y = G·D:

    queries and output   2·(2·T·H·X)
    keys and values      2·(2·(S + T)·H·Y)
    feed-forward         3·(2·T·H·I)
    attention            4·X for each pair of a slot and a key that it sees

Around the layers: `fc`, 2·S·F·H; the head over R valid slots and over P distinct teacher tokens, 2·H·V each.

Backward: twice each layer; attention 2.5 times, since scores are made again; `fc` once, because its input
needs no gradient; the frozen head once for the slots, whose states need one, and never for the teacher.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash.anchors import draw_anchors
from dflash.blocks import Blocks, lay_out
from dflash.cards import CARDS
from dflash.config import DrafterConfig
from dflash.drafter import DFlashDrafter
from dflash.packing import HOST, pack
from dflash.visibility import Visibility, visibilities

ATTENTION_BACKWARD = 2.5

# Dense bfloat16 products with float32 sums, by NVIDIA's data sheets and architecture papers. A card is known
# by its full name; another of the same architecture, an H100 PCIe say, has another peak.
PEAK_FLOPS_PER_S = {
    "a100-40gb": 312e12,
    "a100-80gb": 312e12,
    "b200": 2250e12,
    "h100": 989e12,
    "h200": 989e12,
    "l40s": 362e12,
    "rtx-4090": 165e12,
    "rtx-5090": 209e12,
    "rtx-6000-ada": 364e12,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RowCounts:
    """What of a row decides the work; `visible_keys` are pairs of a slot and a key, of all layers."""

    context_tokens: int
    slots: int
    valid_slots: int
    teacher_tokens: int
    visible_keys: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Flops:
    """Operations of one step."""

    forward: float
    backward: float

    @property
    def both(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward


def count_row(blocks: Blocks, config: DrafterConfig, *, context_tokens: int) -> RowCounts:
    """Return the counts of a row with these blocks."""
    seen = visibilities(config, blocks, context_length=context_tokens, device=HOST)
    visible = {kind: _visible_keys(visibility) for kind, visibility in seen.items()}
    return RowCounts(
        context_tokens=context_tokens,
        slots=blocks.count * blocks.block_size,
        valid_slots=len(blocks.slots_R),
        teacher_tokens=len(torch.unique_consecutive(blocks.teachers_R)),
        visible_keys=sum(visible[kind] for kind in config.layer_types),
    )


def count_flops(config: DrafterConfig, counts: RowCounts, *, target_layers: int) -> Flops:
    """Return the operations of one step, by the formulas above."""
    hidden, slots = config.hidden_size, counts.slots
    query_width = config.num_attention_heads * config.head_dim
    key_width = config.num_key_value_heads * config.head_dim
    layer = (
        4 * slots * hidden * query_width
        + 4 * (counts.context_tokens + slots) * hidden * key_width
        + 6 * slots * hidden * config.intermediate_size
    )
    layers = layer * config.num_hidden_layers
    attention = 4 * query_width * counts.visible_keys
    fc = 2 * counts.context_tokens * target_layers * hidden * hidden
    head = 2 * counts.valid_slots * hidden * config.vocab_size
    teacher = 2 * counts.teacher_tokens * hidden * config.vocab_size
    return Flops(
        forward=layers + attention + fc + head + teacher,
        backward=2 * layers + ATTENTION_BACKWARD * attention + fc + head,
    )


def count_micro_batch(
    drafter: DFlashDrafter,
    *,
    loss_mask_1S: Tensor,
    lengths: Sequence[int] | None,
    seed: int,
) -> Flops:
    """Return the operations of the drafter's forward and backward on a row, its anchors drawn by `seed`.

    `loss_mask_1S` is on the host, where anchors and blocks are decided as in the forward. Padding counts as
    context: the products run over it. A row without loss counts as no work.
    """
    loss_mask_S = loss_mask_1S[0] != 0
    packing = pack(lengths, len(loss_mask_S))
    anchors = draw_anchors(packing, loss_mask_S, max_anchors=drafter.max_anchors, seed=seed)
    blocks = lay_out(packing, loss_mask_S, anchors, block_size=drafter.block_size)
    if not blocks.has_loss:
        return Flops(forward=0.0, backward=0.0)
    counts = count_row(blocks, drafter.config, context_tokens=packing.row_length)
    return count_flops(drafter.config, counts, target_layers=len(drafter.target_layer_ids))


def peak_flops_per_s(device: torch.device) -> float | None:
    """Return what the card's data sheet says of bfloat16 products, None for a CPU or an unknown card."""
    if device.type != "cuda":
        return None
    return peak_of_card(torch.cuda.get_device_name(device))


def peak_of_card(name: str) -> float | None:
    """Return the peak of the card that torch calls so, None where it is not known."""
    return next((PEAK_FLOPS_PER_S.get(card.key) for card in CARDS.values() if card.name == name), None)


def _visible_keys(visibility: Visibility) -> int:
    context_from_T, context_until_T, slots_from_T, slots_until_T = visibility.bounds_XT
    return int((context_until_T - context_from_T + slots_until_T - slots_from_T).sum())
