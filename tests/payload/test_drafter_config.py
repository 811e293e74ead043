"""A drafter's numbers are its target's, each one; default layers and mask token."""

from typing import Any

import pytest
import tokenizers
import torch
import transformers
from dflash import DFlashDrafter
from dflash.target.capture import Target
from dflash.target.drafter_config import choose_mask_token, default_target_layer_ids, drafter_config_for

from tests.payload.targets import config_of, model_of, tokens_of

# Every number differs from every other one and from the reference drafter's, so that no mistake hides.
NUMBERS: dict[str, Any] = {
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 10,
    "intermediate_size": 44,
    "rms_norm_eps": 3e-5,
    "vocab_size": 101,
    "max_position_embeddings": 555,
    "num_hidden_layers": 7,
}
THETA = 54321.0
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": THETA}}


def expected(**changed: Any) -> dict[str, Any]:
    numbers = {**NUMBERS, "rope_theta": THETA, **changed}
    numbers["num_target_layers"] = numbers.pop("num_hidden_layers")
    return numbers


def copied(config: Any, **overrides: Any) -> dict[str, Any]:
    drafter = drafter_config_for(config, **overrides)
    return {name: getattr(drafter, name) for name in expected()}


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_5"])
def test_every_number_is_the_targets(family: str) -> None:
    assert copied(config_of(family, **NUMBERS, **ROPE)) == expected()


def test_a_target_with_a_vision_part_gives_its_text_parts_numbers() -> None:
    text = config_of("qwen3_5", **NUMBERS, **ROPE).to_dict()
    config = transformers.Qwen3_5Config(text_config=text, vision_config={"hidden_size": 24, "depth": 3})
    assert copied(config) == expected()


def test_where_layer_types_have_their_own_rope_full_attentions_is_taken() -> None:
    rope = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
        "full_attention": {"rope_type": "default", "rope_theta": THETA},
    }
    config = transformers.Gemma3TextConfig(**NUMBERS, rope_parameters=rope)
    assert copied(config)["rope_theta"] == THETA


def test_a_rope_base_outside_rope_parameters_is_taken() -> None:
    config = config_of("llama", **NUMBERS)
    config.rope_parameters, config.rope_theta = None, THETA
    assert copied(config)["rope_theta"] == THETA


def test_a_head_dim_that_is_not_said_is_hidden_size_over_heads() -> None:
    numbers = {name: value for name, value in NUMBERS.items() if name != "head_dim"}
    make: Any = transformers.LlamaConfig
    config = make(**numbers, **ROPE)
    config.head_dim = None
    assert copied(config) == expected(head_dim=8)


def test_a_target_without_key_value_heads_of_its_own_gives_all_heads() -> None:
    config = config_of("llama", **NUMBERS, **ROPE)
    config.num_key_value_heads = None
    assert copied(config) == expected(num_key_value_heads=6)


def test_what_is_given_wins_and_the_drafter_has_its_own_layers() -> None:
    config = drafter_config_for(
        config_of("llama", **NUMBERS, **ROPE), num_draft_layers=2, head_dim=16, recompute="mlp"
    )
    assert (config.head_dim, config.num_hidden_layers, config.recompute) == (16, 2, "mlp")
    assert config.layer_types == ("sliding_attention", "full_attention")
    with pytest.raises(ValueError, match="did you mean 'head_dim'"):
        drafter_config_for(config_of("llama"), hed_dim=16)


def test_a_number_that_nobody_gives_is_asked_for() -> None:
    config = transformers.GPT2Config(n_embd=32, n_layer=3, n_head=4, n_inner=64)
    with pytest.raises(ValueError, match=r"\(gpt2\) has no intermediate_size; give the drafter one"):
        drafter_config_for(config)
    given = drafter_config_for(config, intermediate_size=64, rms_norm_eps=1e-6, rope_theta=1e4)
    assert (given.hidden_size, given.max_position_embeddings) == (32, 1024)


@pytest.mark.parametrize("family", ["llama", "smollm2"])
def test_a_drafter_of_a_targets_numbers_is_trained_with_the_targets_own_embedding_and_head(
    family: str,
) -> None:
    target = Target(model_of(config_of(family)), default_target_layer_ids(4))
    drafter = DFlashDrafter(
        config=drafter_config_for(target.config, num_draft_layers=1, attention="eager", sliding_window=4),
        target_layer_ids=target.target_layer_ids,
        block_size=4,
        max_anchors=3,
        mask_token_id=96,
    )
    drafter.use_target_weights(embed_tokens_VH=target.embed_tokens_VH, lm_head_VH=target.lm_head_VH)
    ids = tokens_of(20) % 96
    captured = target.capture(ids, (9, 8))
    loss, metrics = drafter(
        all_hidden_states=captured.features_1SF,
        verifier_last_hidden=captured.last_hidden_1SH,
        input_ids=ids,
        loss_mask=torch.ones_like(ids, dtype=torch.bool),
        lengths=(9, 8),
        seed=0,
    )
    loss.backward()
    assert torch.isfinite(loss)
    assert float(metrics["weight_sum"]) > 0
    own = target.model.get_output_embeddings().weight
    assert drafter.lm_head.weight.data_ptr() == own.data_ptr()
    assert (drafter.lm_head.weight.data_ptr() == drafter.embed_tokens.weight.data_ptr()) == (
        family == "smollm2"
    )


@pytest.mark.parametrize(
    ("layers", "ids"),
    [
        (64, (1, 16, 31, 46, 61)),
        (30, (1, 8, 14, 21, 27)),
        (36, (1, 9, 17, 25, 33)),
        (8, (1, 2, 3, 4, 5)),
        (7, (0, 1, 3, 4, 5)),
        (4, (0, 1, 2)),
        (2, (0,)),
    ],
)
def test_default_layers_are_spread_over_the_target(layers: int, ids: tuple[int, ...]) -> None:
    assert default_target_layer_ids(layers) == ids


def test_one_layer_is_taken_from_the_middle_and_a_target_of_one_layer_is_refused() -> None:
    assert default_target_layer_ids(64, 1) == (31,)
    with pytest.raises(ValueError, match="must be at least 2"):
        default_target_layer_ids(1)


def tokenizer_of(*special: str, template: str = "", mask: str | None = None) -> Any:
    words = {word: number for number, word in enumerate(["<s>", "</s>", "<pad>", "word"])}
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    make: Any = transformers.PreTrainedTokenizerFast
    tokenizer = make(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="word")),
        **(names if mask is None else {**names, "mask_token": mask}),
    )
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    tokenizer.chat_template = template
    return tokenizer


def test_the_mask_token_is_the_given_one_unless_it_pads_or_lies_outside() -> None:
    config = config_of("llama")
    assert choose_mask_token(config, None, 5) == 5
    with pytest.raises(ValueError, match="equals pad_token_id 2"):
        choose_mask_token(config, tokenizer_of(), 2)
    with pytest.raises(ValueError, match="out of range"):
        choose_mask_token(config, None, 97)
    config.pad_token_id = 5
    with pytest.raises(ValueError, match="equals pad_token_id 5"):
        choose_mask_token(config, None, 5)


def test_without_a_given_one_the_mask_token_is_one_that_no_text_has() -> None:
    larger, full = config_of("llama"), config_of("llama", vocab_size=6)
    assert choose_mask_token(larger, tokenizer_of(mask="<mask>")) == 4
    assert choose_mask_token(larger, tokenizer_of()) == 4
    chat = tokenizer_of("<turn>", "<file>", template="{{ '<turn>' }}")
    assert choose_mask_token(full, chat) == 5
    with pytest.raises(ValueError, match="name a mask_token_id"):
        choose_mask_token(config_of("llama", vocab_size=4), tokenizer_of())
    with pytest.raises(ValueError, match="name a mask_token_id"):
        choose_mask_token(larger, None)
