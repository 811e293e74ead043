"""A slow DFlash drafter in float64, written to be read beside the paper and compared with the fast one.

It knows the serving names of the weights and every rule of the training forward: documents, positions,
visibility, labels, teacher, weights, loss and metrics. It walks over blocks, slots and keys one at a time,
shares no code with the payload, and leaves gradients to autograd. Choosing anchors is left to the caller.

Shape letters: S row, H hidden, Q query heads, K key-value heads, D head_dim, V vocabulary, N visible keys.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """The numbers of one drafter that its weights' shapes do not tell."""

    layer_types: tuple[str, ...]
    sliding_window: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    block_size: int
    mask_token_id: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One packed row: `[S, 5H]` features, `[S, H]` normed last states, and per-token values of length S."""

    features: Tensor
    last_hidden: Tensor
    tokens: Sequence[int]
    loss_mask: Sequence[bool]
    lengths: Sequence[int]
    positions: Sequence[int] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """How slots are weighed and what they are trained on."""

    kl_weight: float = 0.15
    gamma: float = 10.0
    use_soft_labels: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """One valid slot: its weight and loss, and whether its argmax is the label's or the teacher's."""

    weight: float
    loss: Tensor
    is_label: bool
    is_teacher: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What one forward gives: the loss and every sum and count behind its metrics."""

    loss: Tensor
    loss_sum: float
    weight_sum: float
    valid: int
    blocks: int
    correct: int
    teacher_correct: int
    streak_sum: int
    teacher_streak_sum: int


class ReferenceDrafter:
    """One drafter over one row; `weights` maps serving names, `embed_tokens` and `lm_head` to tensors."""

    def __init__(self, weights: Mapping[str, Tensor], architecture: Architecture, row: Row) -> None:
        """Project the context once: all layers share it and none updates it."""
        self.weights = weights
        self.architecture = architecture
        self.row = row
        self.positions = positions_of(row)
        self.context = self.norm(row.features.double() @ weights["fc.weight"].T, "hidden_norm")
        layers = range(len(architecture.layer_types))
        self.context_keys_values = [
            [self.key_and_value(layer, *pair) for pair in zip(self.context, self.positions, strict=True)]
            for layer in layers
        ]

    def forward(self, anchors: Sequence[int], objective: Objective) -> Outcome:
        """Return loss and metrics of the blocks that start at `anchors`."""
        blocks = [self.scored_block(anchor, objective) for anchor in anchors]
        slots = [slot for block in blocks for slot in block.values()]
        weight_sum = sum(slot.weight for slot in slots)
        loss_sum = self.context.sum() * 0.0
        for slot in slots:
            loss_sum = loss_sum + slot.weight * slot.loss
        return Outcome(
            loss=loss_sum / weight_sum if slots else loss_sum,
            loss_sum=float(loss_sum.detach()),
            weight_sum=weight_sum,
            valid=len(slots),
            blocks=len(blocks),
            correct=sum(slot.is_label for slot in slots),
            teacher_correct=sum(slot.is_teacher for slot in slots),
            streak_sum=sum(streak({k: slot.is_label for k, slot in block.items()}) for block in blocks),
            teacher_streak_sum=sum(
                streak({k: slot.is_teacher for k, slot in block.items()}) for block in blocks
            ),
        )

    def scored_block(self, anchor: int, objective: Objective) -> dict[int, Slot]:
        """Return the block's valid slots by number; slot k is judged by the token at `anchor + k`."""
        logits = self.block_logits(anchor)
        scored = {}
        for k in range(1, self.architecture.block_size):
            if not slot_is_valid(self.row, anchor, k):
                continue
            label = self.row.tokens[anchor + k]
            teacher = self.weights["lm_head.weight"] @ self.row.last_hidden[anchor + k - 1].double()
            scored[k] = Slot(
                weight=float(torch.exp(torch.tensor(-(k - 1) / objective.gamma, dtype=torch.float64))),
                loss=slot_loss(logits[k], teacher, label, objective),
                is_label=int(logits[k].argmax()) == label,
                is_teacher=int(logits[k].argmax()) == int(teacher.argmax()),
            )
        return scored

    def block_logits(self, anchor: int) -> list[Tensor]:
        """Return the `[V]` logits of every slot of one block, slot 0 included."""
        masks = [self.architecture.mask_token_id] * (self.architecture.block_size - 1)
        states = [self.weights["embed_tokens.weight"][token] for token in [self.row.tokens[anchor], *masks]]
        for layer in range(len(self.architecture.layer_types)):
            states = self.layer(layer, anchor, states)
        return [self.weights["lm_head.weight"] @ self.norm(state, "norm") for state in states]

    def layer(self, layer: int, anchor: int, states: list[Tensor]) -> list[Tensor]:
        """Return the states of the block's slots after one layer."""
        name = f"layers.{layer}"
        normed = [self.norm(state, f"{name}.input_layernorm") for state in states]
        block_keys_values = [
            self.key_and_value(layer, state, self.positions[anchor] + slot)
            for slot, state in enumerate(normed)
        ]
        after = []
        for slot, before in enumerate(states):
            seen = [
                pair
                for key, pair in enumerate(self.context_keys_values[layer])
                if context_is_visible(
                    self.architecture, self.row, layer=layer, anchor=anchor, slot=slot, key=key
                )
            ] + [
                pair
                for other, pair in enumerate(block_keys_values)
                if slot_is_visible(self.architecture, layer, slot, other)
            ]
            query = self.query(layer, normed[slot], self.positions[anchor] + slot)
            mixed = before + self.weights[f"{name}.self_attn.o_proj.weight"] @ self.attend(query, seen)
            inner = self.norm(mixed, f"{name}.post_attention_layernorm")
            gate = self.weights[f"{name}.mlp.gate_proj.weight"] @ inner
            up = self.weights[f"{name}.mlp.up_proj.weight"] @ inner
            swiglu = gate / (1.0 + torch.exp(-gate)) * up
            after.append(mixed + self.weights[f"{name}.mlp.down_proj.weight"] @ swiglu)
        return after

    def attend(self, query: Tensor, seen: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Return `[Q·D]`: each query head attends over the keys of the one key-value head it shares."""
        keys = torch.stack([key for key, _ in seen])
        values = torch.stack([value for _, value in seen])
        group = self.architecture.num_attention_heads // self.architecture.num_key_value_heads
        mixed = []
        for head, query_head in enumerate(query):
            scores = keys[:, head // group] @ query_head / self.architecture.head_dim**0.5
            shares = torch.exp(scores - scores.max())
            mixed.append((shares / shares.sum()) @ values[:, head // group])
        return torch.cat(mixed)

    def query(self, layer: int, state: Tensor, position: int) -> Tensor:
        """Return the `[Q, D]` query: projected, normed per head, then rotated."""
        name = f"layers.{layer}.self_attn"
        projected = (self.weights[f"{name}.q_proj.weight"] @ state).view(-1, self.architecture.head_dim)
        return rotate(self.norm(projected, f"{name}.q_norm"), position, self.architecture.rope_theta)

    def key_and_value(self, layer: int, state: Tensor, position: int) -> tuple[Tensor, Tensor]:
        """Return `[K, D]` key and value of a context token or of a normed slot: the weights are the same."""
        name = f"layers.{layer}.self_attn"
        key = (self.weights[f"{name}.k_proj.weight"] @ state).view(-1, self.architecture.head_dim)
        value = (self.weights[f"{name}.v_proj.weight"] @ state).view(-1, self.architecture.head_dim)
        return rotate(self.norm(key, f"{name}.k_norm"), position, self.architecture.rope_theta), value

    def norm(self, x: Tensor, name: str) -> Tensor:
        """Return the plain RMSNorm over the last dimension, scaled by the named weight."""
        mean_square = (x * x).mean(dim=-1, keepdim=True)
        return x / torch.sqrt(mean_square + self.architecture.rms_norm_eps) * self.weights[f"{name}.weight"]


def documents(lengths: Sequence[int]) -> list[range]:
    """Return the row's documents as index ranges; what follows the last one is padding."""
    spans, start = [], 0
    for length in lengths:
        spans.append(range(start, start + length))
        start += length
    return spans


def document_of(lengths: Sequence[int], index: int) -> int | None:
    """Return which document holds the index, or None for padding and for beyond the row."""
    return next((number for number, span in enumerate(documents(lengths)) if index in span), None)


def positions_of(row: Row) -> list[int]:
    """Return each token's position: as given, or counted from 0 within its document."""
    if row.positions is not None:
        return list(row.positions)
    counted = [0] * len(row.tokens)
    for span in documents(row.lengths):
        for index in span:
            counted[index] = index - span.start
    return counted


def context_is_visible(
    architecture: Architecture, row: Row, *, layer: int, anchor: int, slot: int, key: int
) -> bool:
    """Return whether the slot sees the context token at row index `key` in that layer."""
    if document_of(row.lengths, key) != document_of(row.lengths, anchor) or key >= anchor:
        return False
    if architecture.layer_types[layer] == "full_attention":
        return True
    return key >= anchor + slot - (architecture.sliding_window - 1)


def slot_is_visible(architecture: Architecture, layer: int, slot: int, other: int) -> bool:
    """Return whether a slot sees another slot of its own block in that layer; other blocks it never sees."""
    return architecture.layer_types[layer] == "full_attention" or other <= slot


def slot_is_valid(row: Row, anchor: int, slot: int) -> bool:
    """Return whether the slot's position is in the row, in the anchor's document and in the loss mask."""
    index = anchor + slot
    document = document_of(row.lengths, index)
    if slot == 0 or index >= len(row.tokens) or document is None:
        return False
    return document == document_of(row.lengths, anchor) and bool(row.loss_mask[index])


def valid_anchors(row: Row) -> list[int]:
    """Return every index that may start a block: it and the next are in one document and in the loss mask."""
    return [
        index
        for span in documents(row.lengths)
        for index in span
        if index + 1 in span and row.loss_mask[index] and row.loss_mask[index + 1]
    ]


def rotate(heads: Tensor, position: int, theta: float) -> Tensor:
    """Return heads rotated to a position: dimension i pairs with i + D/2 at frequency theta^(-2i/D)."""
    half = heads.shape[-1] // 2
    exponents = torch.arange(half, dtype=torch.float64) / half
    angles = position * theta**-exponents
    cos, sin = torch.cos(angles), torch.sin(angles)
    low, high = heads[:, :half], heads[:, half:]
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


def slot_loss(logits: Tensor, teacher: Tensor, label: int, objective: Objective) -> Tensor:
    """Return one slot's loss: cross-entropy with the label, mixed with KL(teacher ‖ draft)."""
    log_draft = logits - torch.logsumexp(logits, dim=0)
    ce = -log_draft[label]
    if not objective.use_soft_labels:
        return ce
    log_teacher = teacher - torch.logsumexp(teacher, dim=0)
    kl = (torch.exp(log_teacher) * (log_teacher - log_draft)).sum()
    return (1.0 - objective.kl_weight) * ce + objective.kl_weight * kl


def streak(hits: Mapping[int, bool]) -> int:
    """Return the length of the prefix of slots 1, 2, … that hit; a slot that is not valid ends it."""
    length = 0
    while hits.get(length + 1, False):
        length += 1
    return length
