"""The reference shape, without its 3.5 GB: names, shapes and counts on the meta device."""

import torch
from dflash import DFlashDrafter, create_drafter_config

H, Q, KV, D, WIDE, V = 5120, 32 * 128, 8 * 128, 128, 17408, 248320
LAYER = {
    "self_attn.q_proj.weight": (Q, H),
    "self_attn.k_proj.weight": (KV, H),
    "self_attn.v_proj.weight": (KV, H),
    "self_attn.o_proj.weight": (H, Q),
    "self_attn.q_norm.weight": (D,),
    "self_attn.k_norm.weight": (D,),
    "mlp.gate_proj.weight": (WIDE, H),
    "mlp.up_proj.weight": (WIDE, H),
    "mlp.down_proj.weight": (H, WIDE),
    "input_layernorm.weight": (H,),
    "post_attention_layernorm.weight": (H,),
}
SERVED = {
    "fc.weight": (H, 5 * H),
    "hidden_norm.weight": (H,),
    "norm.weight": (H,),
    **{f"layers.{layer}.{name}": shape for layer in range(5) for name, shape in LAYER.items()},
}
FROZEN = {"embed_tokens.weight": (V, H), "lm_head.weight": (V, H)}


def reference_drafter() -> DFlashDrafter:
    with torch.device("meta"):
        return DFlashDrafter(
            config=create_drafter_config(num_draft_layers=5),
            target_layer_ids=[1, 16, 31, 46, 61],
            block_size=32,
            max_anchors=1024,
            mask_token_id=248070,
        )


def test_trainable_tensors_are_the_served_ones_by_name_and_shape() -> None:
    trainable = {
        name: tuple(parameter.shape)
        for name, parameter in reference_drafter().named_parameters()
        if parameter.requires_grad
    }
    assert trainable == SERVED
    assert len(trainable) == 58


def test_reference_shape_trains_1_730_213_120_parameters() -> None:
    drafter = reference_drafter()
    assert sum(p.numel() for p in drafter.parameters() if p.requires_grad) == 1_730_213_120


def test_state_is_the_served_tensors_and_the_frozen_embedding_and_head() -> None:
    state = {name: tuple(tensor.shape) for name, tensor in reference_drafter().state_dict().items()}
    assert state == SERVED | FROZEN


def test_embedding_and_head_do_not_train() -> None:
    frozen = {name for name, p in reference_drafter().named_parameters() if not p.requires_grad}
    assert frozen <= set(FROZEN)
