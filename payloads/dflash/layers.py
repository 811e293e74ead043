"""One layer of the drafter: attention from slots over context and block, then SwiGLU.

Knows the weights under their serving names, their order of use, and what is computed again in backward. The
context is shared and never updated: it meets each layer's key and value weights without that layer's input
norm. Which keys a slot sees is `Attend`'s part; the products and norms are those of `dflash.projections` and
`dflash.feed_forward`.

Shape letters: S context tokens, T slots, X = A·D query width, H hidden.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dflash.attention import Attend
from dflash.config import DrafterConfig
from dflash.feed_forward import FeedForwardWeights, feed_forward
from dflash.projections import Plan, ProjectionWeights, project
from dflash.tiling import PART_COLUMNS


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """What every layer attends to, and how its keys are laid out."""

    states_SH: Tensor
    plan: Plan


class DrafterLayer(nn.Module):
    """A pre-norm transformer layer whose residual stream is the drafted slots alone."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.recomputes_attention = config.recompute == "layer"
        # With attention computed again as well, memory is what is short: gate and up come in parts.
        parts = {"none": None, "mlp": config.intermediate_size, "layer": PART_COLUMNS}
        self.part_columns = parts[config.recompute]
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = BlockAttention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = SwiGLU(config)

    def forward(self, slots_TH: Tensor, context: Context, attend: Attend) -> Tensor:
        """Return the slots' states `[T, H]` after this layer."""
        norm_H = self.input_layernorm.weight
        if self.recomputes_attention and torch.is_grad_enabled():
            # Nothing in a layer is random.
            slots_TH = checkpoint(
                self.self_attn,
                slots_TH,
                norm_H,
                context,
                attend,
                use_reentrant=False,
                preserve_rng_state=False,
            )
        else:
            slots_TH = self.self_attn(slots_TH, norm_H, context, attend)
        return feed_forward(
            slots_TH,
            FeedForwardWeights(
                self.post_attention_layernorm.weight,
                self.mlp.gate_proj.weight,
                self.mlp.up_proj.weight,
                self.mlp.down_proj.weight,
            ),
            eps=context.plan.eps,
            part_columns=self.part_columns,
            is_compiled=context.plan.is_compiled,
        )


class BlockAttention(nn.Module):
    """Queries from slots; keys and values from context and slots through the same weights."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        query_width = config.num_attention_heads * config.head_dim
        key_width = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, key_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, key_width, bias=False)
        self.o_proj = nn.Linear(query_width, config.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)

    def forward(self, slots_TH: Tensor, norm_H: Tensor, context: Context, attend: Attend) -> Tensor:
        """Return the slots' states with what attention adds to them, `[T, H]`."""
        weights = ProjectionWeights(
            norm_H,
            self.q_proj.weight,
            self.k_proj.weight,
            self.v_proj.weight,
            self.q_norm.weight,
            self.k_norm.weight,
        )
        projected = project(slots_TH, context.states_SH, weights, context.plan)
        mixed_TX = attend(projected.queries_QAD, projected.keys_KGD, projected.values_KGD)
        return torch.addmm(projected.slots_TH, mixed_TX, self.o_proj.weight.t())


class SwiGLU(nn.Module):
    """The weights of down(silu(gate(x))·up(x)) under their serving names."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
