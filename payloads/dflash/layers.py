"""One layer of the drafter: attention from slots over context and block, then SwiGLU.

Knows the weights under their serving names and their order of use. The context is shared and never updated:
it meets each layer's key and value weights without that layer's input norm. Which keys a slot sees is
`Attend`'s part.

Shape letters: S context tokens, T drafted slots, H hidden, A query heads, G key-value heads, D head_dim.
"""

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional

from dflash.attention import Attend, KeysValues
from dflash.config import DrafterConfig
from dflash.rope import RopeTable, rotate


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """What every layer attends to: states of the row's tokens and the positions of tokens and slots."""

    states_SH: Tensor
    rope_S: RopeTable
    slot_rope_T: RopeTable


class DrafterLayer(nn.Module):
    """A pre-norm transformer layer whose residual stream is the drafted slots alone."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = BlockAttention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = SwiGLU(config)

    def forward(self, slots_TH: Tensor, context: Context, attend: Attend) -> Tensor:
        """Return the slots' states `[T, H]` after this layer."""
        slots_TH = slots_TH + self.self_attn(self.input_layernorm(slots_TH), context, attend)
        output_TH: Tensor = slots_TH + self.mlp(self.post_attention_layernorm(slots_TH))
        return output_TH


class BlockAttention(nn.Module):
    """Queries from slots; keys and values from context and slots through the same weights."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        query_width = config.num_attention_heads * config.head_dim
        key_width = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, key_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, key_width, bias=False)
        self.o_proj = nn.Linear(query_width, config.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)

    def forward(self, normed_TH: Tensor, context: Context, attend: Attend) -> Tensor:
        """Return what attention adds to the slots, `[T, H]`."""
        queries_TAD = rotate(self.q_norm(self._heads(self.q_proj(normed_TH))), context.slot_rope_T)
        mixed_TH = attend(
            queries_TAD,
            self._keys_values(context.states_SH, context.rope_S),
            self._keys_values(normed_TH, context.slot_rope_T),
        )
        output_TH: Tensor = self.o_proj(mixed_TH)
        return output_TH

    def _keys_values(self, states_LH: Tensor, rope_L: RopeTable) -> KeysValues:
        keys_LGD = rotate(self.k_norm(self._heads(self.k_proj(states_LH))), rope_L)
        return KeysValues(keys_LGD, self._heads(self.v_proj(states_LH)))

    def _heads(self, projected_LX: Tensor) -> Tensor:
        return projected_LX.view(len(projected_LX), -1, self.head_dim)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) · up(x))."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, normed_TH: Tensor) -> Tensor:
        """Return what the feed-forward part adds to the slots, `[T, H]`."""
        output_TH: Tensor = self.down_proj(
            functional.silu(self.gate_proj(normed_TH)) * self.up_proj(normed_TH)
        )
        return output_TH
