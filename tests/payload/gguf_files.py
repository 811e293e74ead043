"""A GGUF file of a small Llama with a byte-pair tokenizer, as llama.cpp's converter writes one."""

from pathlib import Path
from typing import Any

import gguf
from torch import Tensor

NORMAL, CONTROL = 1, 3  # token types


def write_llama(model: Any, path: Path, *, merges: list[str], tokens: list[str], special: int) -> None:
    """Write the model; the first `special` tokens are control tokens, the first two begin and end a text."""
    config = model.config
    writer: Any = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_merges(merges)
    writer.add_token_types([CONTROL if number < special else NORMAL for number in range(len(tokens))])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    for name, tensor in _tensors(model).items():
        writer.add_tensor(name, tensor.float().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(model: Any) -> dict[str, Tensor]:
    config, decoder = model.config, model.model
    tensors = {"token_embd.weight": decoder.embed_tokens.weight, "output_norm.weight": decoder.norm.weight}
    if not config.tie_word_embeddings:
        tensors["output.weight"] = model.lm_head.weight
    for number, layer in enumerate(decoder.layers):
        attention, block = layer.self_attn, f"blk.{number}"
        tensors |= {
            f"{block}.attn_norm.weight": layer.input_layernorm.weight,
            f"{block}.attn_q.weight": _permuted(attention.q_proj.weight, config.num_attention_heads),
            f"{block}.attn_k.weight": _permuted(attention.k_proj.weight, config.num_key_value_heads),
            f"{block}.attn_v.weight": attention.v_proj.weight,
            f"{block}.attn_output.weight": attention.o_proj.weight,
            f"{block}.ffn_norm.weight": layer.post_attention_layernorm.weight,
            f"{block}.ffn_gate.weight": layer.mlp.gate_proj.weight,
            f"{block}.ffn_up.weight": layer.mlp.up_proj.weight,
            f"{block}.ffn_down.weight": layer.mlp.down_proj.weight,
        }
    return tensors


def _permuted(weight: Tensor, heads: int) -> Tensor:
    """Return the rows in llama.cpp's order of rotated pairs."""
    return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
