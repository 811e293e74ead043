"""Trainings to start from: a config says `preset: NAME` and only what is different.

Where target and documents lie is left open in each. Loads without torch.
"""

from collections.abc import Mapping

Loose = Mapping[str, Mapping[str, object]]

PRESETS: Mapping[str, Loose] = {
    # A CPU and seconds, whatever small target: every part of a training, no statement about quality.
    "tiny": {
        "target": {"dtype": "float32"},
        "data": {"token_budget": 256, "max_documents": 16, "held_out_share": 0.1},
        "drafter": {
            "layers": 2,
            "block_size": 4,
            "max_anchors": 64,
            "dtype": "float32",
            "compile": False,
            "loss_chunk_rows": 256,
        },
        "loss": {"gamma": 4.0},
        "optimizer": {"lr": 3e-3},
        "schedule": {"steps": 100},
        "workers": {"targets": ["cpu"], "drafters": ["cpu"], "timeout_s": 60.0},
        "run": {"checkpoint_every": 25, "validate_every": 50, "validate_rows": 4, "log_every": 5},
    },
    # SmolLM2-135M-Instruct and a drafter of 15.8 M parameters on one GPU; learning rate, decay and layers are
    # those of the prototype that reached a held-out streak of 2.58 in 220 s.
    "smollm2": {
        "data": {"token_budget": 16384, "max_documents": 64},
        "drafter": {
            "layers": 4,
            "block_size": 8,
            "max_anchors": 2048,
            "target_layer_ids": [1, 8, 14, 21, 27],
            "mask_token_id": 5,
        },
        "loss": {"kl_weight": 0.0, "gamma": 4.0},
        "optimizer": {"lr": 1e-3, "weight_decay": 0.01},
        "schedule": {"epochs": 6, "min_lr_share": 0.05},
    },
    # The original's pairs: two targets feed two drafters on four GPUs.
    "qwen3.6-27b": {
        "data": {"token_budget": 8192},
        "drafter": {
            "layers": 5,
            "block_size": 16,
            "max_anchors": 512,
            "attention_heads": 32,  # the published drafter's, which are not the target's
            "key_value_heads": 8,
            "head_dim": 128,
            "target_layer_ids": [1, 16, 31, 46, 61],
            "mask_token_id": 248070,
        },
        "loss": {"gamma": 7.0},
        "optimizer": {"micro_batches": 2},
        "schedule": {"epochs": 6},
        "workers": {"targets": ["cuda:0", "cuda:1"], "drafters": ["cuda:2", "cuda:3"]},
    },
}
