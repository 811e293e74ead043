"""Targets from folders, GGUF files and configurations alone."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from dflash.target.capture import Target
from dflash.target.loading import load_target
from dflash.target.placement import device_map, spread
from safetensors.torch import load_file, save_file

from tests.payload.gguf_files import write_llama
from tests.payload.targets import config_of, model_of, relative, tokens_of

TOKENS = ["<s>", "</s>", "<|im_start|>", "a", "b", "c", "ab", "abc"]
MERGES = ["a b", "ab c"]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def save(family: str, folder: Path, **changed: Any) -> Any:
    """Save a small model as a folder and return it."""
    model = model_of(config_of(family, **changed))
    model.save_pretrained(folder)
    return model


def save_tokenizer(folder: Path) -> None:
    model = tokenizers.models.BPE(
        vocab={token: number for number, token in enumerate(TOKENS)},
        merges=[("a", "b"), ("ab", "c")],
    )
    make: Any = transformers.PreTrainedTokenizerFast
    make(tokenizer_object=tokenizers.Tokenizer(model), **SPECIAL).save_pretrained(folder)


def states(model: Any) -> torch.Tensor:
    return Target(model, [0, 1]).capture(tokens_of(12), (7, 5)).last_hidden_1SH


@pytest.mark.parametrize("family", ["llama", "smollm2", "qwen3_5"])
def test_a_folders_weights_are_read_exactly_and_frozen(tmp_path: Path, family: str) -> None:
    saved = save(family, tmp_path)
    loaded = load_target(tmp_path, dtype="float32")
    for (name, found), wanted in zip(
        loaded.model.named_parameters(), saved.state_dict().values(), strict=family != "smollm2"
    ):
        assert torch.equal(found, wanted), name
        assert not found.requires_grad
    assert not loaded.model.training
    assert loaded.tokenizer is None
    assert torch.equal(states(loaded.model), states(saved))


def test_a_target_is_read_in_the_type_asked_for(tmp_path: Path) -> None:
    saved = save("llama", tmp_path)
    loaded = load_target(tmp_path)
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.bfloat16}
    assert torch.equal(loaded.model.lm_head.weight, saved.lm_head.weight.bfloat16())
    with pytest.raises(ValueError, match="did you mean 'bfloat16'"):
        load_target(tmp_path, dtype="bfloat")


def test_a_folders_tokenizer_comes_with_it(tmp_path: Path) -> None:
    save("llama", tmp_path)
    save_tokenizer(tmp_path)
    assert load_target(tmp_path).tokenizer.encode("abca") == [7, 3]


def test_pickled_weights_are_refused_with_what_to_do(tmp_path: Path) -> None:
    save("llama", tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin, a pickle.*save_pretrained"):
        load_target(tmp_path)


@pytest.mark.parametrize(
    ("left", "message"),
    [
        ([], "no config.json"),
        (["config.json"], r"no \*\.safetensors"),
        (["model.safetensors"], "no config.json"),
    ],
)
def test_a_folder_that_is_no_target_says_what_is_missing(
    tmp_path: Path, left: list[str], message: str
) -> None:
    save("llama", tmp_path)
    for path in list(tmp_path.iterdir()):
        if path.name not in left:
            path.unlink()
    with pytest.raises(ValueError, match=message):
        load_target(tmp_path)
    with pytest.raises(ValueError, match="is not there"):
        load_target(tmp_path / "nowhere")


def test_a_missing_weight_is_refused_rather_than_drawn_at_random(tmp_path: Path) -> None:
    save("llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks the weight model\.layers\.1\.mlp\.up_proj\.weight \(1 in"):
        load_target(tmp_path)


def test_code_of_a_checkpoint_never_runs(tmp_path: Path) -> None:
    save("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {
        "model_type": "mine",
        "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.M"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "code.py").write_text("raise SystemExit('it ran')")
    with pytest.raises(ValueError, match="configuration cannot be used"):
        load_target(tmp_path)


@pytest.mark.parametrize("family", ["llama", "smollm2"])
def test_a_gguf_file_gives_the_same_model_and_its_tokenizer(tmp_path: Path, family: str) -> None:
    model = model_of(config_of(family, vocab_size=len(TOKENS), head_dim=8))
    write_llama(model, tmp_path / "small.gguf", merges=MERGES, tokens=TOKENS, special=3)
    loaded = load_target(tmp_path / "small.gguf", dtype="float32")
    ids = tokens_of(9) % len(TOKENS)
    found, wanted = (one(input_ids=ids, use_cache=False).logits for one in (loaded.model, model))
    assert relative(found, wanted) < 1e-5
    assert loaded.tokenizer.encode("abca", add_special_tokens=False) == [7, 3]
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())


def test_random_weights_follow_from_their_seed_and_nothing_else(tmp_path: Path) -> None:
    config_of("qwen3_5").save_pretrained(tmp_path)
    torch.manual_seed(1)
    first = load_target(tmp_path, random_seed=3).model.state_dict()
    after = torch.rand(())
    torch.manual_seed(1)
    assert torch.equal(after, torch.rand(()))
    again = load_target(tmp_path / "config.json", random_seed=3).model.state_dict()
    other = load_target(tmp_path, random_seed=4).model.state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in first.items())
    assert not torch.equal(other["lm_head.weight"], first["lm_head.weight"])
    assert {tensor.dtype for tensor in first.values()} == {torch.bfloat16}


def test_the_text_part_of_a_larger_model_is_a_target(tmp_path: Path) -> None:
    text = config_of("qwen3_5").to_dict()
    transformers.Qwen3_5Config(text_config=text, vision_config={"depth": 1}).save_pretrained(tmp_path)
    target = Target(load_target(tmp_path, random_seed=0, dtype="float32").model, [0, 2])
    assert (target.num_layers, target.hidden_size) == (4, 32)
    assert target.capture(tokens_of(6), (6,)).features_1SF.shape == (1, 6, 64)


def test_layers_are_spread_by_the_room_that_devices_have() -> None:
    assert spread([1] * 8, [10, 10]) == [0] * 4 + [1] * 4
    assert spread([1] * 8, [30, 10]) == [0] * 6 + [1] * 2
    assert spread([4, 1, 1, 1, 1, 4], [1, 1, 1]) == [0, 1, 1, 1, 1, 2]
    assert spread([0, 0, 1], [1, 1]) == [0, 0, 1]


@pytest.mark.parametrize(("family", "head"), [("llama", "cuda:1"), ("smollm2", "cuda:0")])
def test_embedding_stands_first_and_norm_and_head_last_unless_the_head_is_the_embedding(
    family: str, head: str
) -> None:
    with torch.device("meta"):
        model = model_of(config_of(family))
    places = device_map(model, [torch.device("cuda", n) for n in (0, 1)], room_bytes=[1, 1])
    named = {name: str(device) for name, device in places.items()}
    layers = [named.pop(f"model.layers.{number}") for number in range(4)]
    assert layers == sorted(layers)
    assert set(layers) == {"cuda:0", "cuda:1"}
    assert named == {
        "model.embed_tokens": "cuda:0",
        "model.norm": "cuda:1",
        "model.rotary_emb": "cuda:0",
        "lm_head": head,
    }


def test_more_devices_than_layers_are_refused() -> None:
    model = model_of(config_of("llama", num_hidden_layers=2))
    devices = [torch.device("cuda", number) for number in range(3)]
    with pytest.raises(ValueError, match="2 layers cannot be spread over 3 devices"):
        device_map(model, devices, room_bytes=[1, 1, 1])


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (["cpu", "cpu"], "name different ones"),
        ([], "name different ones"),
        (["cuda:0", "cpu"], "cannot be spread over cuda:0, cpu"),
        ("cuda:99", "cuda:99 is not there: torch sees"),
    ],
)
def test_devices_that_are_not_there_or_no_cards_are_refused(
    tmp_path: Path, devices: str | list[str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load_target(tmp_path, device=devices)
