"""Where a Hugging Face causal language model keeps its decoder, its layers, its embedding and its head.

Knows transformers' conventions about names; nothing about captures or devices.
"""

from typing import Any

from torch import Tensor, nn


def text_config(config: Any) -> Any:
    """Return the language model's part of a configuration; a text model's is the whole."""
    return config.get_text_config(decoder=True)


def decoder_of(model: Any) -> nn.Module:
    """Return the module from token ids to normed states: everything but the head."""
    decoder = model.get_decoder()
    found: nn.Module = model.base_model if decoder is model else decoder
    return found


def layers_of(model: Any) -> nn.ModuleList:
    """Return the decoder's layers in order.

    Raises:
        ValueError: no list of modules is as long as the configuration's number of layers.
    """
    count = text_config(model.config).num_hidden_layers
    for module in decoder_of(model).children():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise ValueError(
        f"{type(model).__name__} keeps its {count} layers where nobody looks for them; "
        "a target's decoder needs them in one list"
    )


def embedding_of(model: Any) -> Tensor:
    """Return the embedding's weight `[V, H]`."""
    weight: Tensor = model.get_input_embeddings().weight
    return weight


def head_of(model: Any) -> Tensor:
    """Return the head's weight `[V, H]`; a tied model's is its embedding's."""
    weight: Tensor = model.get_output_embeddings().weight
    return weight
