"""Small drafters with random weights and rows, in the forms that the payload and the reference each take.

A `Case` is the numbers; `build` turns it into a `Bench`: one drafter, the keyword arguments of its forward,
and the same weights and row for the reference. Sizes are odd on purpose: heads times head_dim is not hidden,
embedding and head differ, no length divides another.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from dflash import DFlashDrafter, create_drafter_config
from dflash.blocks import Blocks, lay_out
from dflash.packing import pack
from torch import Tensor

from tests.payload.reference import Architecture, Objective, Outcome, ReferenceDrafter, Row, documents

SLIDING, FULL = "sliding_attention", "full_attention"
FROZEN = ("embed_tokens.weight", "lm_head.weight")


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Everything that decides one small forward; `holes` are indices that the loss mask leaves out."""

    layer_types: tuple[str, ...] = (SLIDING, FULL)
    sliding_window: int = 6
    hidden_size: int = 12
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 8
    intermediate_size: int = 20
    vocab_size: int = 29
    rope_theta: float = 100.0
    block_size: int = 5
    mask_token_id: int = 28
    target_layer_ids: tuple[int, ...] = (0, 2, 3)
    max_anchors: int = 6
    lengths: tuple[int, ...] = (13, 9)
    padding: int = 4
    holes: tuple[int, ...] = ()
    first_position: int | None = None
    anchors: tuple[int, ...] | None = (2, 5, 9, 15, 19)
    objective: Objective = field(default_factory=Objective)
    attention: str = "eager"
    recompute: str = "none"
    loss_chunk_rows: int = 1024
    chunk_blocks: int = 64
    compile: bool = True
    dtype: torch.dtype = torch.float64
    seed: int = 0

    @property
    def row_length(self) -> int:
        return sum(self.lengths) + self.padding


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """One drafter, its forward's arguments, and what the reference needs to do the same."""

    case: Case
    drafter: DFlashDrafter
    arguments: dict[str, Any]
    row: Row

    def run(self, **changed: Any) -> tuple[Tensor, dict[str, Any]]:
        """Return the payload's loss and metrics, some arguments changed."""
        loss, metrics = self.drafter(**{**self.arguments, **changed})
        return loss, metrics

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradient of every trainable parameter after one forward and backward."""
        self.drafter.zero_grad()
        torch.autograd.backward(self.run()[0])
        return gradients_of(self.drafter)

    def reference(
        self, weights: dict[str, Tensor] | None = None, *, anchors: Sequence[int] | None = None
    ) -> Outcome:
        """Return what the slow drafter makes of the same weights and row."""
        chosen = self.case.anchors if anchors is None else anchors
        assert chosen is not None, "the reference does not choose anchors"
        slow = ReferenceDrafter(weights or leaves(self.drafter), architecture_of(self.case), self.row)
        return slow.forward(chosen, self.case.objective)


def build(case: Case) -> Bench:
    """Return the case as a drafter with random weights and a random row."""
    drafter = build_drafter(case)
    row = build_row(case)
    return Bench(case=case, drafter=drafter, arguments=arguments_of(case, row), row=row)


def build_drafter(case: Case) -> DFlashDrafter:
    """Return a drafter of the case's shape whose every weight is random, norms included."""
    drafter = fresh_drafter(case).to(case.dtype)
    drafter.load_state_dict(random_weights(drafter, case.seed))
    return drafter


def fresh_drafter(case: Case, **pairing: Any) -> DFlashDrafter:
    """Return a drafter of the case's shape as its constructor leaves it, in torch's default type."""
    arguments: dict[str, Any] = {
        "target_layer_ids": list(case.target_layer_ids),
        "block_size": case.block_size,
        "max_anchors": case.max_anchors,
        "mask_token_id": case.mask_token_id,
    }
    return DFlashDrafter(config=config_of(case), **{**arguments, **pairing})


def config_of(case: Case, **overrides: Any) -> Any:
    """Return the payload's configuration of the case."""
    numbers: dict[str, Any] = {
        "layer_types": list(case.layer_types),
        "sliding_window": case.sliding_window,
        "hidden_size": case.hidden_size,
        "num_attention_heads": case.num_attention_heads,
        "num_key_value_heads": case.num_key_value_heads,
        "head_dim": case.head_dim,
        "intermediate_size": case.intermediate_size,
        "vocab_size": case.vocab_size,
        "rope_theta": case.rope_theta,
        "max_position_embeddings": 16384,
        "num_target_layers": 6,
        "attention": case.attention,
        "recompute": case.recompute,
        "loss_chunk_rows": case.loss_chunk_rows,
        "chunk_blocks": case.chunk_blocks,
        "compile": case.compile,
    }
    return create_drafter_config(num_draft_layers=len(case.layer_types), **{**numbers, **overrides})


def random_weights(drafter: DFlashDrafter, seed: int) -> dict[str, Tensor]:
    """Return random values for the whole state: matrices that keep variance, norms around one."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, tensor in drafter.state_dict().items():
        noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        wide = tensor.ndim > 1
        value = noise * (2.0 / tensor.shape[-1] ** 0.5) if wide else 1.0 + 0.3 * noise
        weights[name] = value.to(tensor.dtype)
    return weights


def build_row(case: Case) -> Row:
    """Return a random row of the case; padding has random tokens and states too, and a set loss mask."""
    generator = torch.Generator().manual_seed(case.seed + 1)
    length, width = case.row_length, case.hidden_size
    tokens = torch.randint(0, case.vocab_size - 1, (length,), generator=generator).tolist()
    features = torch.randn(
        length, len(case.target_layer_ids) * width, generator=generator, dtype=torch.float64
    )
    last_hidden = torch.randn(length, width, generator=generator, dtype=torch.float64)
    return Row(
        features=features.to(case.dtype),
        last_hidden=last_hidden.to(case.dtype),
        tokens=tokens,
        loss_mask=[index not in case.holes for index in range(length)],
        lengths=case.lengths,
        positions=None if case.first_position is None else counted_positions(case, case.first_position),
    )


def counted_positions(case: Case, first: int) -> list[int]:
    """Return positions that restart at `first` in each document; padding keeps counting from there too."""
    spans = documents([*case.lengths, case.padding])
    return [first + index - span.start for span in spans for index in span]


def arguments_of(case: Case, row: Row) -> dict[str, Any]:
    """Return the keyword arguments of the payload's forward."""
    arguments: dict[str, Any] = {
        "all_hidden_states": row.features[None].clone(),
        "verifier_last_hidden": row.last_hidden[None].clone(),
        "input_ids": torch.tensor([row.tokens]),
        "loss_mask": torch.tensor([row.loss_mask]),
        "lengths": torch.tensor(row.lengths),
        "position_ids": None if row.positions is None else torch.tensor([row.positions]),
        "use_soft_labels": case.objective.use_soft_labels,
        "kl_weight": case.objective.kl_weight,
        "gamma": case.objective.gamma,
    }
    if case.anchors is not None:
        arguments["anchors"] = torch.tensor(case.anchors, dtype=torch.long)
    return arguments


def blocks_of(case: Case) -> Blocks:
    """Return the payload's blocks of the case's row and anchors."""
    assert case.anchors is not None
    row = build_row(case)
    packing = pack(case.lengths, case.row_length)
    mask = torch.tensor(row.loss_mask)
    return lay_out(packing, mask, torch.tensor(case.anchors), block_size=case.block_size)


def architecture_of(case: Case) -> Architecture:
    """Return the numbers that the reference needs."""
    return Architecture(
        layer_types=case.layer_types,
        sliding_window=case.sliding_window,
        num_attention_heads=case.num_attention_heads,
        num_key_value_heads=case.num_key_value_heads,
        head_dim=case.head_dim,
        rope_theta=case.rope_theta,
        rms_norm_eps=1e-6,
        block_size=case.block_size,
        mask_token_id=case.mask_token_id,
    )


def leaves(drafter: DFlashDrafter) -> dict[str, Tensor]:
    """Return float64 copies of the weights; those that train ask for a gradient."""
    copies = {name: tensor.detach().double().clone() for name, tensor in drafter.state_dict().items()}
    return {name: copy.requires_grad_(name not in FROZEN) for name, copy in copies.items()}


def gradients_of(drafter: DFlashDrafter) -> dict[str, Tensor]:
    """Return the gradients of the trainable parameters, each of which must have one."""
    found = {}
    for name, parameter in drafter.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, f"{name} has no gradient"
            found[name] = parameter.grad.clone()
    return found


def expected_metrics(slow: Outcome, objective: Objective) -> dict[str, float]:
    """Return every metric that the payload should report for what the reference found."""
    means, blocks = max(1, slow.valid), max(1, slow.blocks)
    metrics = {
        "loss_sum": slow.loss_sum,
        "weight_sum": slow.weight_sum,
        "valid_slots": slow.valid,
        "blocks": slow.blocks,
        "rows_without_loss": int(slow.valid == 0),
        "correct_slots": slow.correct,
        "streak_sum": slow.streak_sum,
        "accuracy": slow.correct / means,
        "avg_streak": slow.streak_sum / blocks,
    }
    if objective.use_soft_labels:
        metrics |= {
            "teacher_correct_slots": slow.teacher_correct,
            "teacher_streak_sum": slow.teacher_streak_sum,
            "teacher_accuracy": slow.teacher_correct / means,
            "teacher_avg_streak": slow.teacher_streak_sum / blocks,
        }
    return metrics


def numbers(metrics: dict[str, Any]) -> dict[str, float]:
    """Return metrics as plain numbers."""
    return {name: float(value) for name, value in metrics.items()}


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the distance of two tensors as a share of the expected one's norm."""
    distance = (actual.double() - expected.double()).norm()
    return float(distance / expected.double().norm().clamp(min=1e-30))
