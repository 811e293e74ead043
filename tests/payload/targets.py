"""Small random targets of real families, and what each of their documents gives when it runs alone."""

from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import Tensor

VOCABULARY = 97
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
DELTA_NET: dict[str, Any] = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
FAMILIES = ("llama", "qwen3", "smollm2", "mistral", "qwen3_5", "qwen3_next")


def config_of(family: str, **changed: Any) -> Any:
    """Return a small configuration; SmolLM2 is a tied Llama, Mistral's attention slides."""
    sizes = {**SIZES, **changed}
    configs: dict[str, Any] = {
        "llama": lambda: transformers.LlamaConfig(**sizes),
        "smollm2": lambda: transformers.LlamaConfig(**{"tie_word_embeddings": True, **sizes}),
        "mistral": lambda: transformers.MistralConfig(**{"sliding_window": 8, **sizes}),
        "qwen3": lambda: transformers.Qwen3Config(**sizes),
        "qwen3_5": lambda: transformers.Qwen3_5TextConfig(**DELTA_NET, **sizes),
        "qwen3_next": lambda: transformers.Qwen3NextConfig(**DELTA_NET, **EXPERTS, **sizes),
    }
    return configs[family]()


def model_of(config: Any, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """Return a model whose every weight is random, norms and biases included, large enough to matter."""
    make: Any = transformers.AutoModelForCausalLM
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = make.from_config(config, dtype=dtype).eval().requires_grad_(requires_grad=False)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.add_((noise * (0.2 if parameter.ndim > 1 else 0.3)).to(dtype))
    return model


def tokens_of(row_length: int, seed: int = 0) -> Tensor:
    """Return a row of random tokens."""
    return torch.randint(0, VOCABULARY, (1, row_length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def alone(model: Any, ids_1S: Tensor, lengths: Sequence[int], layer_ids: Sequence[int]) -> tuple[Tensor, ...]:
    """Return features, normed states and logits of the documents, each run alone, one after the other."""
    found = []
    for document in ids_1S[:, : sum(lengths)].split(list(lengths), dim=1):
        output = model(input_ids=document, use_cache=False, output_hidden_states=True)
        features = torch.cat([output.hidden_states[layer + 1] for layer in layer_ids], -1)
        found.append((features[0], output.hidden_states[-1][0], output.logits[0]))
    return tuple(torch.cat(parts) for parts in zip(*found, strict=True))


def relative(found: Tensor, wanted: Tensor) -> float:
    """Return the largest relative error of a token."""
    error = (found.double() - wanted.double()).norm(dim=-1) / wanted.double().norm(dim=-1)
    return float(error.max())
