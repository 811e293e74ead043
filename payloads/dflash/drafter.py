"""The drafter as a module: one packed row of a target's hidden states in, loss and metrics out.

Knows the order of the parts: row, blocks, context, layers, loss, metrics. Targets, data, optimizers and
checkpoints are others' business.

Shape letters: S tokens of the row, F features (target layers × H), H hidden, V vocabulary, N blocks, B slots
of a block, T = N·B drafted slots, R valid slots.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dflash.anchors import draw_anchors
from dflash.attention import prepare_attention
from dflash.attention.interface import KeyLayout
from dflash.blocks import Blocks, lay_out
from dflash.checks import (
    check_loss_weights,
    check_objective,
    check_shape,
    check_states,
    check_window,
    checked_anchors,
    checked_at_least,
    checked_layer_ids,
    checked_mask_token,
)
from dflash.config import DTYPES, DrafterConfig
from dflash.execution import Execution, choose_execution
from dflash.gathering import select_rows
from dflash.layers import Context, DrafterLayer
from dflash.loss import RowScores, Teacher, score_rows
from dflash.loss_weights import slot_weights
from dflash.metrics import Metrics, summarize
from dflash.projections import Plan
from dflash.rope import RopeTable, rope_table
from dflash.row import Row, read_row
from dflash.transfer import to_device
from dflash.values import require_choice
from dflash.visibility import visibilities

INITIAL_STD = 0.02


class DFlashDrafter(nn.Module):
    """A block-diffusion drafter with the target's embedding and head, both frozen.

    A layer's products and norms are steps of their own (`dflash.projections`, `dflash.feed_forward`) that
    read its modules' weights: hooks and replaced modules inside it do nothing there, parametrizations do.

    Matrices start normal with a deviation of 0.02, norms at one. Embedding and head start random as well:
    `use_target_weights` or a state dict brings the real ones.

    Raises:
        ValueError: a target layer id, the mask token or a size is out of range, or the sliding window is
            smaller than a block.
    """

    def __init__(
        self,
        *,
        config: DrafterConfig,
        target_layer_ids: Sequence[int],
        block_size: int,
        max_anchors: int,
        mask_token_id: int | None,
        pad_token_id: int | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.target_layer_ids = checked_layer_ids(target_layer_ids, config.num_target_layers)
        self.block_size = checked_at_least("block_size", block_size, 2)
        check_window(config, block_size)
        self.max_anchors = checked_at_least("max_anchors", max_anchors, 1)
        self.mask_token_id = checked_mask_token(mask_token_id, pad_token_id, config.vocab_size)
        self.fc = nn.Linear(len(self.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(DrafterLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.dtype is not None:
            self.to(getattr(torch, config.dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights anew and freeze embedding and head."""
        for parameter in self.parameters():
            if parameter.ndim == 1:
                nn.init.ones_(parameter)
            else:
                nn.init.normal_(parameter, std=INITIAL_STD)
        self.embed_tokens.requires_grad_(requires_grad=False)
        self.lm_head.requires_grad_(requires_grad=False)

    def use_target_weights(self, *, embed_tokens_VH: Tensor, lm_head_VH: Tensor) -> None:
        """Use the target's embedding and head without copying; a tied target gives one tensor twice.

        Their type may be another than the drafter's: embedded tokens are cast to the drafter's, and
        `dflash.loss` says in which type the head multiplies.
        """
        shape = (self.config.vocab_size, self.config.hidden_size)
        check_shape("the target's embed_tokens", embed_tokens_VH, shape)
        check_shape("the target's lm_head", lm_head_VH, shape)
        for name, tensor in (("embed_tokens", embed_tokens_VH), ("lm_head", lm_head_VH)):
            require_choice(f"type of the target's {name}", str(tensor.dtype).removeprefix("torch."), DTYPES)
        self.embed_tokens.weight = nn.Parameter(embed_tokens_VH.detach(), requires_grad=False)
        self.lm_head.weight = nn.Parameter(lm_head_VH.detach(), requires_grad=False)

    @torch.autocast("cpu", enabled=False)  # type: ignore[untyped-decorator]
    @torch.autocast("cuda", enabled=False)  # type: ignore[untyped-decorator]
    def forward(
        self,
        *,
        all_hidden_states: Tensor,
        verifier_last_hidden: Tensor | None,
        input_ids: Tensor,
        loss_mask: Tensor,
        lengths: Sequence[int] | Tensor | None = None,
        position_ids: Tensor | None = None,
        use_soft_labels: bool = True,
        kl_weight: float = 0.15,
        gamma: float = 10.0,
        loss_weights: str = "decay",
        alpha: float = 0.5,
        anchors: Tensor | None = None,
        seed: int | None = None,
        by_slot: bool = False,
    ) -> tuple[Tensor, Metrics]:
        """Return the weighted mean loss over the row's valid slots, and the metrics of `dflash.metrics`.

        The loss is Σ w·l / Σ w with w = exp(−(k − 1)/gamma) for slot k and l = (1 − kl_weight)·CE +
        kl_weight·KL, or CE alone without soft labels; float32 at least. `dflash.loss_weights` has the other
        weights, whose denominator is another. For one denominator over several rows multiply the loss by
        `metrics["weight_sum"]`, which is what it was divided by, and divide the gradients by the sum of
        those. A row without a valid slot has loss 0 and zero gradients, and counts in
        `metrics["rows_without_loss"]`. Every product has its weights' type, under autocast too; there are no
        second derivatives.

        Args:
            all_hidden_states: `[1, S, F]`, the target layers' states, joined in `target_layer_ids`' order.
            verifier_last_hidden: `[1, S, H]`, the target's last states after its final norm; may be None
                without soft labels.
            input_ids: `[1, S]` integers.
            loss_mask: `[1, S]`, nonzero where a token may be a label.
            lengths: tokens of each document in order; what they leave of the row is padding. None: the row
                is one document.
            position_ids: `[1, S]` integers, taken as they are. None: counted from 0 within each document.
            use_soft_labels: whether the teacher is asked at all.
            kl_weight: the teacher's share of the loss, 0 to 1.
            gamma: slots over which the weight falls by a factor of e, with "decay".
            loss_weights: "decay" or "d-pace"; the latter weighs the cross-entropy alone.
            alpha: what of its confidence d-pace takes for granted, above 0 to 1.
            anchors: row indices that start the blocks, in any order. None: drawn.
            seed: decides the drawing. None: torch's global generator does.
            by_slot: whether the metrics say for each slot how many blocks are right up to it.

        Raises:
            ValueError: shapes, documents, anchors or loss weights do not fit; the message names both numbers.
        """
        check_objective(kl_weight, gamma)
        check_loss_weights(loss_weights, alpha, kl_weight=kl_weight if use_soft_labels else 0.0)
        teacher_states = _required(verifier_last_hidden) if use_soft_labels else None
        check_states(
            all_hidden_states,
            teacher_states,
            row_length=input_ids.shape[-1],
            target_layers=len(self.target_layer_ids),
            hidden_size=self.config.hidden_size,
        )
        row = read_row(
            all_hidden_states=all_hidden_states,
            input_ids=input_ids,
            loss_mask=loss_mask,
            lengths=lengths,
            position_ids=position_ids,
        )
        # The largest product before the layers goes first: the card is busy while the host lays out blocks.
        context_SH = self.hidden_norm(self.fc(row.features_SF.to(self.fc.weight.dtype)))
        blocks = self._blocks(row, anchors, seed)
        teacher = None
        if teacher_states is not None:
            teacher = Teacher(
                states_SH=teacher_states[0].detach(), tokens_R=blocks.teachers_R, kl_weight=kl_weight
            )
        labels_R = row.tokens_S[to_device(blocks.labels_R, row.tokens_S.device)]
        scores = self._score(row, context_SH, blocks, labels_R, teacher)
        weights_R, weight_sum = slot_weights(
            blocks, scores.losses_R.detach(), loss_weights=loss_weights, gamma=gamma, alpha=alpha
        )
        loss_sum = (weights_R * scores.losses_R).sum()
        loss = loss_sum / weight_sum if blocks.has_loss else self._zero_loss(loss_sum, row)
        sums = {"loss_sum": loss_sum.detach(), "weight_sum": weight_sum}
        return loss, sums | summarize(blocks, scores, labels_R, by_slot=by_slot)

    def _blocks(self, row: Row, anchors: Tensor | None, seed: int | None) -> Blocks:
        if anchors is None:
            chosen = draw_anchors(row.packing, row.loss_mask_S, max_anchors=self.max_anchors, seed=seed)
        else:
            chosen = checked_anchors(anchors, row.packing.row_length)
        return lay_out(row.packing, row.loss_mask_S, chosen, block_size=self.block_size)

    def _score(
        self, row: Row, context_SH: Tensor, blocks: Blocks, labels_R: Tensor, teacher: Teacher | None
    ) -> RowScores:
        if not blocks.has_loss:
            exact = torch.promote_types(torch.float32, self.fc.weight.dtype)
            return RowScores(labels_R.to(exact), labels_R, None if teacher is None else labels_R)
        execution = choose_execution(
            self.config,
            device=context_SH.device,
            dtype=context_SH.dtype,
            needs_gradients=torch.is_grad_enabled(),
        )
        states_TH = self._draft(row, context_SH, blocks, execution)
        # Only valid slots meet the final norm and the vocabulary, in the order of their teachers.
        return score_rows(
            self.norm(select_rows(states_TH, to_device(blocks.slots_R, labels_R.device))),
            self.lm_head.weight,
            labels_R,
            teacher=teacher,
            chunk_rows=self.config.loss_chunk_rows,
            is_compiled=execution.is_compiled,
        )

    def _draft(self, row: Row, context_SH: Tensor, blocks: Blocks, execution: Execution) -> Tensor:
        """Return the slots' states `[T, H]` after the last layer, before the final norm."""
        device = row.tokens_S.device
        anchors_N = to_device(blocks.anchors_N, device)
        block_tokens_NB = row.tokens_S.new_full((blocks.count, self.block_size), self.mask_token_id)
        block_tokens_NB[:, 0] = row.tokens_S[anchors_N]
        slots_B = torch.arange(self.block_size, device=device)
        seen = visibilities(self.config, blocks, context_length=len(context_SH), device=device)
        attend = prepare_attention(execution, seen)
        layout = next(iter(attend.values())).layout
        plan = Plan(
            layout=layout,
            rope_K=self._rope(
                layout, row.positions_S, (row.positions_S[anchors_N, None] + slots_B).flatten()
            ),
            eps=self.config.rms_norm_eps,
            is_compiled=execution.is_compiled,
        )
        context = Context(states_SH=context_SH, plan=plan)
        states_TH: Tensor = self.embed_tokens(block_tokens_NB).flatten(0, 1).to(self.fc.weight.dtype)
        for layer, layer_type in zip(self.layers, self.config.layer_types, strict=True):
            states_TH = layer(states_TH, context, attend[layer_type])
        return states_TH

    def _rope(self, layout: KeyLayout, context_S: Tensor, slots_T: Tensor) -> RopeTable:
        """Return the angles of every key row; padding is at position 0."""
        positions_K = context_S.new_zeros(layout.key_rows)
        positions_K[: layout.context_rows] = context_S
        positions_K[layout.slots] = slots_T
        return rope_table(
            positions_K,
            head_dim=self.config.head_dim,
            theta=self.config.rope_theta,
            dtype=self.fc.weight.dtype,
        )

    def _zero_loss(self, zero: Tensor, row: Row) -> Tensor:
        """Return 0 that depends on features and trainable parameters, so that backward leaves zeros."""
        for tensor in (row.features_SF, *self.parameters()):
            if tensor.requires_grad:
                zero = zero + tensor.flatten()[:0].sum()
        return zero


def _required(verifier_last_hidden: Tensor | None) -> Tensor:
    if verifier_last_hidden is None:
        raise ValueError(
            "verifier_last_hidden is missing; soft labels need it, use_soft_labels=False does not"
        )
    return verifier_last_hidden
