"""The configuration: the reference drafter by default, every number replaceable, nonsense refused by name."""

import dataclasses
import subprocess
import sys
from typing import Any

import pytest
from dflash import create_drafter_config

SLIDING, FULL = "sliding_attention", "full_attention"
REFERENCE = {
    "num_hidden_layers": 5,
    "layer_types": (SLIDING, SLIDING, SLIDING, SLIDING, FULL),
    "hidden_size": 5120,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 17408,
    "vocab_size": 248320,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e7,
    "max_position_embeddings": 262144,
    "sliding_window": 2048,
    "num_target_layers": 64,
}
OTHER: dict[str, Any] = {
    "hidden_size": 640,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 999,
    "vocab_size": 1000,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "max_position_embeddings": 4096,
    "sliding_window": 77,
    "num_target_layers": 28,
    "attention": "eager",
    "recompute": "layer",
    "dtype": "float64",
    "loss_chunk_rows": 3,
}


# A served checkpoint's config.json, but for what describes its pairing with a target.
SERVED: dict[str, Any] = {
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
    "layer_types": [SLIDING, SLIDING, SLIDING, SLIDING, FULL],
    "sliding_window": 2048,
    "use_sliding_window": True,
    "max_window_layers": 5,
    "rope_theta": 10000000,
    "rope_scaling": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000},
    "num_target_layers": 64,
}


def refusal(num_draft_layers: Any = 5, **overrides: Any) -> str:
    """Return the message that refuses these settings."""
    with pytest.raises(ValueError, match=r".") as caught:
        create_drafter_config(num_draft_layers, **overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_defaults_are_the_reference_drafter() -> None:
    config = create_drafter_config(num_draft_layers=5)
    assert {name: getattr(config, name) for name in REFERENCE} == REFERENCE


def test_served_configuration_is_taken_whole_and_field_by_field() -> None:
    config = create_drafter_config(**SERVED)
    assert {name: getattr(config, name) for name in REFERENCE} == REFERENCE
    assert config.dtype == "bfloat16"
    for name, value in SERVED.items():
        alone: dict[str, Any] = {name: value}
        taken = create_drafter_config(**alone)
        assert {field: getattr(taken, field) for field in REFERENCE} == REFERENCE, name


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("architectures", ["Qwen3ForCausalLM"]),
        ("model_type", "llama"),
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("attention_dropout", 0.1),
        ("tie_word_embeddings", True),
        ("use_sliding_window", False),
        ("max_window_layers", 4),
        ("num_hidden_layers", 6),
        ("rope_scaling", {"rope_type": "yarn", "factor": 4.0}),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 10000000}),
    ],
)
def test_served_field_that_asks_for_what_is_not_implemented_is_refused(field: str, value: Any) -> None:
    message = refusal(**{field: value})
    assert field in message
    assert repr(value) in message
    # The number of layers is named where it decides, and nowhere else.
    assert ("num_draft_layers 5" in message) is (field in ("max_window_layers", "num_hidden_layers"))


def test_two_rotary_bases_that_contradict_are_both_named() -> None:
    message = refusal(rope_theta=10000.0, rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    assert "10000.0" in message
    assert "500000.0" in message


def test_rotary_parameters_alone_set_the_base() -> None:
    config = create_drafter_config(rope_parameters={"rope_type": "default", "rope_theta": 500000})
    assert config.rope_theta == 500000.0


@pytest.mark.parametrize("field", ["block_size", "dflash_config"])
def test_what_belongs_to_the_pairing_is_refused_with_its_place(field: str) -> None:
    message = refusal(**{field: 16})
    assert field in message
    assert "DFlashDrafter" in message


def test_unknown_weight_type_is_refused() -> None:
    assert "'bfloat61'" in refusal(dtype="bfloat61")


@pytest.mark.parametrize("layers", [1, 2, 6])
def test_only_the_last_layer_is_full_unless_said_otherwise(layers: int) -> None:
    assert create_drafter_config(num_draft_layers=layers).layer_types == (SLIDING,) * (layers - 1) + (FULL,)
    chosen = [FULL] * layers
    assert create_drafter_config(num_draft_layers=layers, layer_types=chosen).layer_types == tuple(chosen)


@pytest.mark.parametrize(("field", "value"), OTHER.items(), ids=OTHER.keys())
def test_every_field_can_be_replaced_alone(field: str, value: Any) -> None:
    overrides: dict[str, Any] = {field: value}
    config = create_drafter_config(**overrides)
    changed = {
        item.name: getattr(config, item.name)
        for item in dataclasses.fields(config)
        if getattr(config, item.name) != getattr(create_drafter_config(), item.name)
    }
    assert changed == {field: value}


@pytest.mark.parametrize(
    ("mistyped", "meant"),
    [
        ("hiden_size", "hidden_size"),
        ("num_attention_head", "num_attention_heads"),
        ("slidng_window", "sliding_window"),
    ],
)
def test_unknown_field_is_refused_with_the_nearest_known_one(mistyped: str, meant: str) -> None:
    message = refusal(**{mistyped: 64})
    assert repr(mistyped) in message
    assert f"did you mean {meant!r}" in message


def test_unknown_field_near_nothing_is_refused_with_all_known_ones() -> None:
    message = refusal(zzz=1)
    assert all(name in message for name in OTHER)


@pytest.mark.parametrize("name", ["attention", "recompute"])
def test_unknown_backend_or_policy_is_refused_by_name(name: str) -> None:
    assert "'egaer'" in refusal(**{name: "egaer"})


def test_mistyped_backend_is_answered_with_the_nearest() -> None:
    assert "did you mean 'sdpa_chunked'" in refusal(attention="sdpa_chunk")


@pytest.mark.parametrize(
    ("overrides", "numbers"),
    [
        ({"num_attention_heads": 30}, ("30", "8")),
        ({"num_key_value_heads": 5}, ("32", "5")),
        ({"layer_types": [FULL] * 3}, ("3", "5")),
        ({"head_dim": 127}, ("127",)),
    ],
)
def test_numbers_that_do_not_fit_are_both_named(overrides: dict[str, Any], numbers: tuple[str, ...]) -> None:
    message = refusal(**overrides)
    assert all(number in message for number in numbers), message


@pytest.mark.parametrize("field", [name for name, value in OTHER.items() if not isinstance(value, str)])
@pytest.mark.parametrize("value", [0, -1, "64", None, True, float("nan"), [64]], ids=repr)
def test_value_of_a_wrong_type_or_not_positive_is_refused_with_the_fields_name(
    field: str, value: Any
) -> None:
    assert field in refusal(**{field: value})


@pytest.mark.parametrize("layers", [0, -1, True, 2.5, "5"])
def test_number_of_layers_is_a_positive_integer(layers: Any) -> None:
    assert "layers" in refusal(layers)


def test_unknown_layer_type_is_refused_with_the_nearest() -> None:
    assert "did you mean 'full_attention'" in refusal(2, layer_types=[SLIDING, "full_atention"])


def test_configuration_cannot_be_changed_afterwards() -> None:
    config = create_drafter_config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.hidden_size = 1  # type: ignore[misc]  # that it fails is the point


@pytest.mark.parametrize("module", ["dflash", "dflash.config", "dflash.events", "dflash.probes.oom"])
def test_what_is_needed_before_work_starts_does_not_load_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    environment = {"PYTHONPATH": ":".join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=60)
