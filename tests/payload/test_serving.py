"""Drafters written for serving engines and read back."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash import DFlashDrafter, create_drafter_config
from dflash.serving import load_drafter, save_drafter, served_config
from safetensors.torch import load_file, save_file

from tests.payload.cases import Case, build, build_drafter

# The example of the layout that serving engines read, key for key.
REFERENCE: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_size": 5120,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 17408,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "vocab_size": 248320,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
    "sliding_window": 2048,
    "use_sliding_window": True,
    "max_window_layers": 5,
    "rope_theta": 10000000,
    "rope_scaling": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000},
    "num_target_layers": 64,
    "block_size": 32,
    "dflash_config": {"mask_token_id": 248070, "target_layer_ids": [1, 16, 31, 46, 61], "block_size": 32},
}
# As z-lab publishes one for a target without sliding windows (an older transformers wrote it).
PUBLISHED: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": 16,
    "bos_token_id": 1,
    "dflash_config": {"mask_token_id": 28, "target_layer_ids": [0, 2, 3]},
    "dtype": "bfloat16",
    "eos_token_id": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "hidden_size": 12,
    "initializer_range": 0.02,
    "intermediate_size": 20,
    "layer_types": ["full_attention"] * 2,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_target_layers": 36,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "transformers_version": "4.57.1",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 29,
}
CASE = Case(dtype=torch.bfloat16)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_drafter(build_drafter(CASE), tmp_path / "drafter")
    return tmp_path / "drafter"


def change(folder: Path, **fields: Any) -> None:
    values = json.loads((folder / "config.json").read_text())
    values = {name: value for name, value in {**values, **fields}.items() if value != "gone"}
    (folder / "config.json").write_text(json.dumps(values))


def test_the_reference_drafters_config_is_the_layouts_key_for_key() -> None:
    with torch.device("meta"):
        drafter = DFlashDrafter(
            config=create_drafter_config(),
            target_layer_ids=[1, 16, 31, 46, 61],
            block_size=32,
            max_anchors=8,
            mask_token_id=248070,
        )
    config = served_config(drafter)
    assert config == REFERENCE
    assert list(config) == list(REFERENCE)


def test_a_drafter_read_back_is_the_same_bit_for_bit(saved: Path) -> None:
    drafter = build_drafter(CASE)
    loaded = load_drafter(saved, max_anchors=CASE.max_anchors, attention="eager")
    for name, tensor in drafter.state_dict().items():
        if name.split(".")[0] in ("embed_tokens", "lm_head"):
            assert loaded.state_dict()[name].is_meta
        else:
            assert loaded.state_dict()[name].dtype == tensor.dtype
            assert torch.equal(loaded.state_dict()[name], tensor), name
    assert (loaded.target_layer_ids, loaded.block_size, loaded.mask_token_id) == ((0, 2, 3), 5, 28)
    for field in ("layer_types", "sliding_window", "rope_theta", "head_dim", "num_target_layers"):
        assert getattr(loaded.config, field) == getattr(drafter.config, field)


def test_a_drafter_read_back_computes_the_same_and_can_be_trained(saved: Path) -> None:
    bench = build(CASE)
    loaded = load_drafter(saved, max_anchors=CASE.max_anchors, attention="eager")
    loaded.use_target_weights(
        embed_tokens_VH=bench.drafter.embed_tokens.weight, lm_head_VH=bench.drafter.lm_head.weight
    )
    loss = loaded(**bench.arguments)[0]
    assert torch.equal(loss, bench.run()[0])
    loss.backward()
    trained = {name for name, parameter in loaded.named_parameters() if parameter.grad is not None}
    assert trained == {n for n, p in bench.drafter.named_parameters() if p.requires_grad}


def test_weights_are_bfloat16_under_the_served_names_without_embedding_and_head(tmp_path: Path) -> None:
    save_drafter(build_drafter(Case(dtype=torch.float32)), tmp_path / "drafter")
    tensors = load_file(tmp_path / "drafter" / "model.safetensors")
    per_layer = [f"self_attn.{name}_proj" for name in "qkvo"] + ["self_attn.q_norm", "self_attn.k_norm"]
    per_layer += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    per_layer += ["input_layernorm", "post_attention_layernorm"]
    names = ["fc", "hidden_norm", "norm", *(f"layers.{i}.{name}" for i in range(2) for name in per_layer)]
    assert set(tensors) == {f"{name}.weight" for name in names}
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}


def test_a_drafter_can_be_read_in_another_type_and_with_another_block(saved: Path) -> None:
    loaded = load_drafter(saved, max_anchors=4, block_size=3, dtype="float32", recompute="mlp")
    weights = load_file(saved / "model.safetensors")
    assert loaded.block_size == 3
    assert loaded.config.recompute == "mlp"
    assert loaded.fc.weight.dtype == torch.float32
    assert torch.equal(loaded.fc.weight, weights["fc.weight"].float())


def test_a_published_drafter_is_read(saved: Path) -> None:
    (saved / "config.json").write_text(json.dumps(PUBLISHED))
    loaded = load_drafter(saved, max_anchors=4)
    assert loaded.config.layer_types == ("full_attention", "full_attention")
    assert (loaded.block_size, loaded.config.rope_theta) == (16, 1e6)


def test_a_drafter_without_layer_types_has_full_layers(saved: Path) -> None:
    (saved / "config.json").write_text(json.dumps({**PUBLISHED, "layer_types": None}))
    assert load_drafter(saved, max_anchors=4).config.layer_types == ("full_attention", "full_attention")


def test_tensors_that_do_not_fit_are_named(saved: Path) -> None:
    tensors = load_file(saved / "model.safetensors")
    tensors["lm_head.weight"] = torch.zeros(2, 2)
    tensors["fc.weight"] = torch.zeros(12, 24)
    tensors["norm.weight"] = torch.ones(12, dtype=torch.int32)
    del tensors["layers.1.mlp.up_proj.weight"]
    save_file(tensors, saved / "model.safetensors")
    with pytest.raises(ValueError, match="drafter: ") as refusal:
        load_drafter(saved, max_anchors=4)
    for part in (
        "layers.1.mlp.up_proj.weight is missing",
        "lm_head.weight is too much",
        "fc.weight has shape (12, 24), config.json asks for (12, 36)",
        "norm.weight is torch.int32",
    ):
        assert part in str(refusal.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_target_layers": "gone"}, "num_target_layers is missing"),
        ({"head_dim": None}, "head_dim is missing"),
        ({"rope_theta": "gone", "rope_parameters": "gone"}, "rope_theta is missing"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling is"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"hiden_size": 12}, "did you mean 'hidden_size'"),
        ({"use_sliding_window": False}, "use_sliding_window is False"),
        ({"sliding_window": None}, "sliding_window is missing"),
        ({"dflash_config": "gone"}, "this is no DFlash drafter"),
        ({"dflash_config": {"target_layer_ids": [0], "block_size": 4}}, "mask_token_id of dflash_config is"),
        ({"dflash_config": {**REFERENCE["dflash_config"], "mask_id": 3}}, "unknown dflash_config setting"),
        ({"block_size": 7}, "block_size is 7, but 5 in dflash_config"),
        ({"num_hidden_layers": "two"}, "num_draft_layers is 'two'"),
    ],
)
def test_a_configuration_that_is_not_implemented_is_refused(
    saved: Path, fields: dict[str, Any], message: str
) -> None:
    change(saved, **fields)
    with pytest.raises(ValueError, match=message) as refusal:
        load_drafter(saved, max_anchors=4)
    assert str(saved / "config.json") in str(refusal.value)


def test_a_folder_without_weights_or_with_broken_ones_says_so(saved: Path) -> None:
    weights = saved / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ValueError, match="cannot be read"):
        load_drafter(saved, max_anchors=4)
    weights.rename(saved / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"holds no \*\.safetensors"):
        load_drafter(saved, max_anchors=4)
    with pytest.raises(ValueError, match="is not there"):
        load_drafter(saved / "nowhere", max_anchors=4)


def test_an_older_drafter_is_replaced_and_nothing_else_is_left(saved: Path) -> None:
    newer = build_drafter(Case(dtype=torch.bfloat16, seed=1))
    save_drafter(newer, saved)
    assert torch.equal(load_drafter(saved, max_anchors=4).fc.weight, newer.fc.weight)
    assert [entry.name for entry in saved.parent.iterdir()] == ["drafter"]


def test_a_folder_with_other_files_is_left_alone(saved: Path) -> None:
    (saved / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"'notes\.txt'"):
        save_drafter(build_drafter(CASE), saved)
    assert (saved / "notes.txt").read_text() == "mine"


def test_a_failed_write_leaves_the_older_drafter_and_no_remains(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (saved / "model.safetensors").read_bytes()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dflash.serving.save_file", full)
    with pytest.raises(OSError, match="No space left"):
        save_drafter(build_drafter(Case(dtype=torch.bfloat16, seed=1)), saved)
    assert (saved / "model.safetensors").read_bytes() == before
    assert [entry.name for entry in saved.parent.iterdir()] == ["drafter"]
