"""A drafter as the files that serve it: z-lab's layout, which vLLM, SGLang and z-lab's own code load.

A folder holds `config.json` and `model.safetensors` in bfloat16, without embedding and head: those are the
target's. Knows names, shapes and which fields a published drafter may carry. Training checkpoints (float32
masters, moments, positions in the data) are others' business.
"""

import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash.config import FULL, SLIDING, DrafterConfig, create_drafter_config
from dflash.drafter import DFlashDrafter
from dflash.values import build

CONFIG, WEIGHTS = "config.json", "model.safetensors"
OF_THE_TARGET = ("embed_tokens.weight", "lm_head.weight")
MOST_NAMED = 8
# Fields of published drafters that change nothing of what a drafter computes here.
IGNORED = (
    "auto_map",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "initializer_range",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    "max_window_layers",
    "tie_word_embeddings",
)
REQUIRED = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "rms_norm_eps",
    "vocab_size",
    "max_position_embeddings",
    "num_target_layers",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pairing:
    """`dflash_config`: what a drafter and its target have agreed on."""

    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    block_size: int


def save_drafter(drafter: DFlashDrafter, folder: Path) -> None:
    """Write the drafter so that no reader ever sees half of it; an older one at that place is replaced.

    Raises:
        ValueError: the folder holds other files than a drafter's.
        OSError: the disk is full or may not be written.
    """
    folder = Path(folder).absolute()
    if folder.exists() and (strangers := {entry.name for entry in folder.iterdir()} - {CONFIG, WEIGHTS}):
        raise ValueError(f"{folder} holds {min(strangers)!r}, which is no drafter's; name another folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        _write(drafter, partial)
        _put_in_place(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def served_tensors(drafter: DFlashDrafter) -> dict[str, Tensor]:
    """Return what is served, under its names: bfloat16, contiguous, on the host."""
    return {
        name: tensor.detach().to(device="cpu", dtype=torch.bfloat16).contiguous()
        for name, tensor in _served(drafter).items()
    }


def served_config(drafter: DFlashDrafter) -> dict[str, Any]:
    """Return `config.json` of a served drafter."""
    config = drafter.config
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "layer_types": list(config.layer_types),
        "sliding_window": config.sliding_window,
        "use_sliding_window": SLIDING in config.layer_types,
        "max_window_layers": config.num_hidden_layers,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "num_target_layers": config.num_target_layers,
        "block_size": drafter.block_size,
        "dflash_config": {
            "mask_token_id": drafter.mask_token_id,
            "target_layer_ids": list(drafter.target_layer_ids),
            "block_size": drafter.block_size,
        },
    }


def load_drafter(
    folder: Path,
    *,
    max_anchors: int,
    device: str = "cpu",
    block_size: int | None = None,
    pad_token_id: int | None = None,
    **overrides: object,
) -> DFlashDrafter:
    """Return the drafter of a folder, to train it further or to draft with it.

    Its embedding and head are empty (device "meta") until `use_target_weights` brings the target's.

    Args:
        folder: holds config.json and *.safetensors.
        max_anchors: as in `DFlashDrafter`.
        device: where its weights shall be.
        block_size: another one than the drafter was trained with.
        pad_token_id: as in `DFlashDrafter`.
        overrides: fields of `create_drafter_config`, above all how this process computes. Without `dtype`
            the weights keep the file's type.

    Raises:
        ValueError: config.json cannot be read or describes what is not implemented; a tensor is missing,
            too much, or has another shape than the configuration asks for.
    """
    folder = Path(folder)
    config, pairing = _read_config(folder / CONFIG, overrides)
    with torch.device("meta"):
        drafter = DFlashDrafter(
            config=config,
            target_layer_ids=pairing.target_layer_ids,
            block_size=pairing.block_size if block_size is None else block_size,
            max_anchors=max_anchors,
            mask_token_id=pairing.mask_token_id,
            pad_token_id=pad_token_id,
        )
    tensors = _read_tensors(folder, device)
    _check_tensors(folder, _served(drafter), tensors)
    if config.dtype is not None:
        tensors = {name: tensor.to(getattr(torch, config.dtype)) for name, tensor in tensors.items()}
    drafter.load_state_dict(tensors, strict=False, assign=True)
    return drafter


def read_pairing(folder: Path) -> Pairing:
    """Return what a served drafter and its target have agreed on.

    Raises:
        ValueError: as `load_drafter`, of config.json alone.
    """
    _, pairing = _read_config(Path(folder) / CONFIG, {})
    return pairing


def _served(drafter: DFlashDrafter) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in drafter.state_dict().items() if name not in OF_THE_TARGET}


def _write(drafter: DFlashDrafter, folder: Path) -> None:
    text = json.dumps(served_config(drafter), indent=2) + "\n"
    (folder / CONFIG).write_text(text, encoding="utf-8")
    # What loads through transformers asks for the framework.
    save_file(served_tensors(drafter), folder / WEIGHTS, metadata={"format": "pt"})
    folder.chmod(0o755)
    for name in (CONFIG, WEIGHTS):
        (folder / name).chmod(0o644)
        _sync(folder / name)
    _sync(folder)


def _put_in_place(whole: Path, folder: Path) -> None:
    """Rename; between the two renames of a replacement there is no drafter, but never half of one."""
    if folder.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        folder.rename(old / folder.name)
        whole.rename(folder)
        shutil.rmtree(old)
    else:
        whole.rename(folder)
    _sync(folder.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_config(path: Path, overrides: dict[str, object]) -> tuple[DrafterConfig, Pairing]:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        pairing = _take_pairing(fields)
        return create_drafter_config(**{**_architecture(fields), **overrides}), pairing
    except FileNotFoundError:
        raise ValueError(f"{path} is not there; a served drafter has one beside its weights") from None
    except (ValueError, OSError) as error:
        raise ValueError(f"{path}: {error}") from None


def _take_pairing(fields: Any) -> Pairing:
    """Take out what pairs a drafter with its target; the block size may stand in either place."""
    pairing = fields.pop("dflash_config", None) if isinstance(fields, dict) else None
    if not isinstance(pairing, dict):
        raise ValueError("dflash_config is missing; this is no DFlash drafter")  # noqa: TRY004  a file's fault
    outside = fields.pop("block_size", None)
    values = {name: value for name, value in {"block_size": outside, **pairing}.items() if value is not None}
    _require(values, tuple(Pairing.__dataclass_fields__), "of dflash_config ")
    built = build(Pairing, values, what="dflash_config setting")
    if outside not in (None, built.block_size):
        raise ValueError(f"block_size is {outside}, but {built.block_size} in dflash_config")
    return built


def _architecture(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields as `create_drafter_config` takes them; none is left to its default."""
    known = {name: value for name, value in fields.items() if name not in IGNORED and value is not None}
    rope = known.get("rope_parameters")
    _require(known, REQUIRED if rope is not None else (*REQUIRED, "rope_theta"))
    layers, slides = known.pop("num_hidden_layers"), known.pop("use_sliding_window", False)
    if slides is False and type(layers) is int:
        known.setdefault("layer_types", [FULL] * layers)
    _require(known, ("layer_types", "sliding_window") if slides else ("layer_types",))
    if (SLIDING in list(known["layer_types"])) != slides:
        raise ValueError(f"layer_types is {known['layer_types']}, but use_sliding_window is {slides}")
    return {"num_draft_layers": layers, **known}


def _require(values: dict[str, Any], names: tuple[str, ...], where: str = "") -> None:
    if missing := [name for name in names if name not in values]:
        raise ValueError(f"{', '.join(missing)} {where}{'are' if len(missing) > 1 else 'is'} missing")


def _read_tensors(folder: Path, device: str) -> dict[str, Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} holds no *.safetensors; other formats of weights are not read")
    tensors: dict[str, Tensor] = {}
    for path in files:
        try:
            tensors |= load_file(path, device)
        except SafetensorError as error:
            raise ValueError(f"{path} cannot be read: {error}; fetch it again") from None
    return tensors


def _check_tensors(folder: Path, expected: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    problems = [f"{name} is missing" for name in expected.keys() - found.keys()]
    problems += [f"{name} is too much" for name in found.keys() - expected.keys()]
    for name in expected.keys() & found.keys():
        shape, wanted = tuple(found[name].shape), tuple(expected[name].shape)
        if shape != wanted:
            problems.append(f"{name} has shape {shape}, config.json asks for {wanted}")
        elif not found[name].is_floating_point():
            problems.append(f"{name} is {found[name].dtype}, no floating-point type")
    if problems:
        more = f"; and {len(problems) - MOST_NAMED} more" if len(problems) > MOST_NAMED else ""
        raise ValueError(f"{folder}: {'; '.join(sorted(problems)[:MOST_NAMED])}{more}")
