"""A frozen Hugging Face causal language model from a local folder, a GGUF file, or a configuration alone.

Nothing is fetched, no code of a checkpoint runs, and nothing is unpickled: weights come from safetensors or
GGUF. Knows files, types and devices; what is read from the model is `dflash.target.capture`'s business.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from dflash.config import DTYPES
from dflash.target.placement import device_map
from dflash.values import require_choice

GGUF_SUFFIX = ".gguf"
MODELS: Any = transformers.AutoModelForCausalLM  # whose annotations do not say what it returns
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedTarget:
    """A frozen model in evaluation mode, and its tokenizer if it came with one."""

    model: Any
    tokenizer: Any
    devices: tuple[torch.device, ...]

    @property
    def config(self) -> Any:
        """The model's configuration as transformers has it."""
        return self.model.config


def load_target(
    path: str | Path,
    *,
    device: str | torch.device | Sequence[str | torch.device] = "cpu",
    dtype: str = "bfloat16",
    random_seed: int | None = None,
) -> LoadedTarget:
    """Return the model at a path, frozen, on one device or with its layers spread over several.

    Args:
        path: a folder with config.json and safetensors, or a GGUF file; with `random_seed` a folder with
            config.json or such a file is enough.
        device: one device, or several cards in the order in which layers shall stand on them.
        dtype: of weights and states.
        random_seed: draw weights with this seed instead of reading them, for tests under load. They are
            made on the first device, which must have room for all of them.

    Raises:
        ValueError: there is no such model, its weights are pickled, or it needs code of its own.
    """
    path, devices = Path(path), _devices(device)
    require_choice("dtype", dtype, DTYPES)
    if not path.exists():
        raise ValueError(f"{path} is not there; a target is a local folder or a {GGUF_SUFFIX} file")
    precision: torch.dtype = getattr(torch, dtype)
    if random_seed is not None:
        model = _random(path, devices, precision, random_seed)
    elif path.suffix == GGUF_SUFFIX:
        model = _read(path.parent, devices, precision, gguf_file=path.name)
    else:
        _require_safetensors(path)
        model = _read(path, devices, precision)
    return LoadedTarget(model=model.requires_grad_(False).eval(), tokenizer=_tokenizer(path), devices=devices)


def _devices(device: str | torch.device | Sequence[str | torch.device]) -> tuple[torch.device, ...]:
    named = (device,) if isinstance(device, str | torch.device) else device
    devices = tuple(torch.device(one) for one in named)
    spelled = ", ".join(str(one) for one in devices)
    if not devices or len(set(devices)) != len(devices):
        raise ValueError(f"a target's devices are [{spelled}]; name different ones")
    if len(devices) > 1 and any(one.type != "cuda" or one.index is None for one in devices):
        raise ValueError(f"a target cannot be spread over {spelled}; name cards, as cuda:0 and cuda:1")
    for one in devices:
        if one.type == "cuda" and (one.index or 0) >= torch.cuda.device_count():
            raise ValueError(f"{one} is not there: torch sees {torch.cuda.device_count()} cards")
    return devices


def _require_safetensors(folder: Path) -> None:
    if not folder.is_dir() or not (folder / "config.json").is_file():
        raise ValueError(f"{folder} is no model's folder: it has no config.json")
    if any(folder.glob("*.safetensors")):
        return
    pickled = sorted([*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")])
    if pickled:
        raise ValueError(
            f"{folder} has its weights in {pickled[0].name}, a pickle, which can run anything when read; "
            "where you trust it, load it with transformers and save_pretrained() it: that writes safetensors"
        )
    raise ValueError(f"{folder} has no *.safetensors; fetch the model's weights (or name a GGUF file)")


def _config(path: Path, **options: Any) -> Any:
    try:
        return transformers.AutoConfig.from_pretrained(
            path, local_files_only=True, trust_remote_code=False, **options
        )
    except (ValueError, OSError, KeyError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"{path}: its configuration cannot be used: {reason}; a target is a causal language model that "
            "this transformers knows, without code of its own"
        ) from None


def _read(
    folder: Path, devices: tuple[torch.device, ...], dtype: torch.dtype, gguf_file: str | None = None
) -> Any:
    source: dict[str, Any] = {} if gguf_file is None else {"gguf_file": gguf_file}
    config = _config(folder, **source)
    model, report = MODELS.from_pretrained(
        folder,
        config=config,
        dtype=dtype,
        device_map=_places(config, devices),
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        output_loading_info=True,
        **source,
    )
    # transformers would draw at random what it does not find.
    if missing := sorted(report["missing_keys"]):
        raise ValueError(f"{folder} lacks the weight {missing[0]} ({len(missing)} in all); fetch it again")
    return model


def _random(path: Path, devices: tuple[torch.device, ...], dtype: torch.dtype, seed: int) -> Any:
    config = _config(path)
    places = _places(config, devices)
    cards = [one for one in devices if one.type == "cuda"]
    with torch.random.fork_rng(devices=cards), torch.device(devices[0]):
        torch.manual_seed(seed)
        model = MODELS.from_config(config, dtype=dtype)
    if len(devices) == 1:
        return model
    # Seconds of loading, for targets on several devices only.
    from accelerate import dispatch_model  # type: ignore[import-untyped]  # noqa: PLC0415

    return dispatch_model(model, device_map=places, main_device=devices[0])


def _places(config: Any, devices: tuple[torch.device, ...]) -> Any:
    if len(devices) == 1:
        return {"": devices[0]}
    with torch.device("meta"):
        model = MODELS.from_config(config)
    return device_map(model, devices, room_bytes=[_room(one) for one in devices])


def _room(device: torch.device) -> int:
    free, _ = torch.cuda.mem_get_info(device)
    return free


def _tokenizer(path: Path) -> Any:
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    if path.suffix == GGUF_SUFFIX:
        return transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, **options)
    folder = path if path.is_dir() else path.parent
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return None
    return transformers.AutoTokenizer.from_pretrained(folder, **options)
