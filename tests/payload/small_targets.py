"""A small target of transformers' with random weights, what it makes of documents, and a drafter for it."""

from collections.abc import Sequence

import torch
from dflash import DFlashDrafter, create_drafter_config
from dflash.training.micro_batch import MicroBatch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel, Qwen3Config
from transformers.models.qwen3 import Qwen3ForCausalLM

LAYER_IDS = (0, 1, 2)


def random_target(*, hidden_size: int, vocab_size: int) -> PreTrainedModel:
    """Return a frozen target of four layers with random weights."""
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden_size // 4,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        initializer_range=0.2,  # so that states and logits differ from token to token
    )
    target = Qwen3ForCausalLM(config)
    target.train(mode=False)
    return target.requires_grad_(requires_grad=False)


def drafter_for(target: PreTrainedModel, *, block_size: int, max_anchors: int) -> DFlashDrafter:
    """Return a drafter of one layer for that target, whose last token is the mask."""
    config = target.config
    drafter = DFlashDrafter(
        config=create_drafter_config(
            num_draft_layers=1,
            hidden_size=config.hidden_size,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=config.hidden_size // 4,
            intermediate_size=2 * config.hidden_size,
            vocab_size=config.vocab_size,
            max_position_embeddings=256,
            num_target_layers=config.num_hidden_layers,
            rope_theta=1e4,
        ),
        target_layer_ids=LAYER_IDS,
        block_size=block_size,
        max_anchors=max_anchors,
        mask_token_id=config.vocab_size - 1,
    )
    weights = target.state_dict()
    drafter.use_target_weights(
        embed_tokens_VH=weights["model.embed_tokens.weight"], lm_head_VH=weights["lm_head.weight"]
    )
    return drafter


@torch.no_grad()
def captured_row(
    target: PreTrainedModel, documents: Sequence[Tensor], *, budget: int, number: int
) -> MicroBatch:
    """Return documents as one padded row, each captured alone from the target."""
    features, last_hidden = [], []
    for tokens in documents:
        states = target.base_model(tokens[None], output_hidden_states=True)
        features.append(torch.cat([states.hidden_states[layer + 1] for layer in LAYER_IDS], dim=-1)[0])
        last_hidden.append(states.last_hidden_state[0])
    padding = budget - sum(map(len, documents))
    return MicroBatch(
        epoch=0,
        number=number,
        input_ids_1S=functional.pad(torch.cat(list(documents)), (0, padding))[None],
        loss_mask_1S=torch.tensor([[True] * (budget - padding) + [False] * padding]),
        lengths=tuple(map(len, documents)),
        features_1SF=functional.pad(torch.cat(features), (0, 0, 0, padding))[None],
        last_hidden_1SH=functional.pad(torch.cat(last_hidden), (0, 0, 0, padding))[None],
    )
