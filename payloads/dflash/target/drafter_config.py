"""A drafter's numbers, copied from the target that it drafts for.

Knows where transformers' configurations keep them, which layers are captured unless told otherwise, and which
token may stand for a masked slot. What a drafter does not share with its target (biases, activations, rope
scaling, partial rotation) is not copied: the architecture has one form.
"""

from collections.abc import Callable, Mapping
from typing import Any

from dflash.checks import checked_at_least, checked_mask_token
from dflash.config import DrafterConfig, create_drafter_config
from dflash.target.parts import text_config

LAYERS_CAPTURED = 5


def drafter_config_for(
    target_config: Any, *, num_draft_layers: int = 5, **overrides: object
) -> DrafterConfig:
    """Return a drafter of the target's shape; `overrides` are fields of `create_drafter_config`.

    Raises:
        ValueError: the target's configuration lacks a number that nobody gave, or the numbers do not fit.
    """
    config = text_config(target_config)
    copied: dict[str, object] = {}
    for name, read in _COPIED.items():
        value = overrides[name] if name in overrides else read(config)
        if value is None:
            raise ValueError(
                f"the target's configuration ({config.model_type}) has no {name}; give the drafter one"
            )
        copied[name] = value
    return create_drafter_config(num_draft_layers, **{**overrides, **copied})


def default_target_layer_ids(num_target_layers: int, count: int = LAYERS_CAPTURED) -> tuple[int, ...]:
    """Return `count` layers spread evenly from the second to the last but two, as z-lab's drafters have them.

    A target of few layers gives fewer, from its first to its last but one.

    Raises:
        ValueError: there is no layer whose states can be captured.
    """
    checked_at_least("the target's number of layers", num_target_layers, 2)
    first, last = 1, num_target_layers - 3
    if last - first + 1 < count:
        first, last = 0, num_target_layers - 2
        count = min(count, num_target_layers - 1)
    if count == 1:
        return ((first + last) // 2,)
    steps = count - 1
    # Halves are rounded up: 1, 8, 14, 21, 27 of 30.
    return tuple(first + (2 * number * (last - first) + steps) // (2 * steps) for number in range(count))


def choose_mask_token(target_config: Any, tokenizer: Any, given: int | None = None) -> int:
    """Return the token of masked slots: the given one, the tokenizer's own mask, or one that no text has.

    That is an id between the tokenizer's last and the vocabulary's end, else a special token that neither
    begins, ends or pads a text nor occurs in the chat template.

    Raises:
        ValueError: there is none, or the given one is the padding or out of range.
    """
    vocab_size = text_config(target_config).vocab_size
    pad = _pad_token(target_config, tokenizer)
    if given is not None:
        return checked_mask_token(given, pad, vocab_size)
    candidates = [] if tokenizer is None else _unused(tokenizer, vocab_size)
    for candidate in candidates:
        if candidate != pad and 0 <= candidate < vocab_size:
            return candidate
    raise ValueError("every token of the target is in use; name a mask_token_id that its data never holds")


def _unused(tokenizer: Any, vocab_size: int) -> list[int]:
    """Return ids that no text holds, the best first."""
    own = [] if tokenizer.mask_token_id is None else [tokenizer.mask_token_id]
    beyond = max(tokenizer.get_vocab().values()) + 1
    roles = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id, tokenizer.pad_token_id}
    template = str(tokenizer.chat_template or "")
    special = [
        number
        for number, token in sorted(tokenizer.added_tokens_decoder.items())
        if token.special and number not in roles and token.content not in template
    ]
    return [*own, *([beyond] if beyond < vocab_size else []), *special]


def _pad_token(target_config: Any, tokenizer: Any) -> int | None:
    of_tokenizer = getattr(tokenizer, "pad_token_id", None)
    pad = getattr(text_config(target_config), "pad_token_id", None) if of_tokenizer is None else of_tokenizer
    return None if pad is None else int(pad)


def _attribute(*names: str) -> Callable[[Any], Any]:
    """Return a reader of the first of several attributes that a configuration has."""

    def read(config: Any) -> Any:
        return next((value for name in names if (value := getattr(config, name, None)) is not None), None)

    return read


def _head_dim(config: Any) -> Any:
    found = getattr(config, "head_dim", None)
    return config.hidden_size // config.num_attention_heads if found is None else found


def _rope_theta(config: Any) -> Any:
    """Return the base of rotary positions; where each type of layer has its own, that of full attention."""
    parameters = getattr(config, "rope_parameters", None)
    if isinstance(parameters, Mapping):
        parameters = parameters.get("full_attention", parameters)
        if parameters.get("rope_theta") is not None:
            return parameters["rope_theta"]
    return getattr(config, "rope_theta", None)


_COPIED: dict[str, Callable[[Any], Any]] = {
    "hidden_size": _attribute("hidden_size"),
    "num_attention_heads": _attribute("num_attention_heads"),
    "num_key_value_heads": _attribute("num_key_value_heads", "num_attention_heads"),
    "head_dim": _head_dim,
    "intermediate_size": _attribute("intermediate_size"),
    "rms_norm_eps": _attribute("rms_norm_eps"),
    "rope_theta": _rope_theta,
    "vocab_size": _attribute("vocab_size"),
    "max_position_embeddings": _attribute("max_position_embeddings"),
    "num_target_layers": _attribute("num_hidden_layers"),
}
