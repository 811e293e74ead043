"""The drafter's numbers: the fields of a served checkpoint's config.json, and how this process computes them.

Knows names, defaults (the reference drafter of a 27B target) and which numbers fit together. What belongs to
the pairing of a drafter with a target (layer ids, block size, mask token) is given to `DFlashDrafter` itself.
"""

from dataclasses import dataclass

from dflash.values import build, require_choice, require_positive

SLIDING = "sliding_attention"
FULL = "full_attention"
ATTENTION_BACKENDS = ("auto", "flex", "sdpa_chunked", "sdpa_math", "eager")
RECOMPUTE_POLICIES = ("none", "mlp", "layer")
LOSS_WEIGHTS = ("decay", "d-pace")
DTYPES = ("bfloat16", "float16", "float32", "float64")


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterConfig:
    """One drafter's architecture; fields from `attention` on change memory, speed and rounding, no more.

    `dtype` is that of the weights when they are made; None leaves it to torch's default dtype.

    `attention="auto"` is flex on a GPU and sdpa_chunked elsewhere; `chunk_blocks` is how many blocks
    sdpa_math takes at a time.
    `recompute="mlp"` keeps no feed-forward activation and computes gate and up again in backward; "layer"
    keeps of each layer only its two residual states, and computes attention again as well; nobody notices
    there if weights change between forward and backward.
    `loss_chunk_rows` slots at a time meet the vocabulary, in float32.
    `compile=False` leaves every kernel to PyTorch's own operators; flex then holds all scores.
    """

    num_hidden_layers: int
    layer_types: tuple[str, ...]
    hidden_size: int = 5120
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = 128
    intermediate_size: int = 17408
    vocab_size: int = 248320
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e7
    max_position_embeddings: int = 262144
    sliding_window: int = 2048
    num_target_layers: int = 64
    dtype: str | None = None
    attention: str = "auto"
    chunk_blocks: int = 64
    recompute: str = "none"
    loss_chunk_rows: int = 2048
    compile: bool = True

    def __post_init__(self) -> None:
        require_positive(
            self,
            "num_hidden_layers",
            "hidden_size",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "intermediate_size",
            "vocab_size",
            "rms_norm_eps",
            "rope_theta",
            "max_position_embeddings",
            "sliding_window",
            "num_target_layers",
            "chunk_blocks",
            "loss_chunk_rows",
        )
        require_choice("attention backend", self.attention, ATTENTION_BACKENDS)
        require_choice("recompute policy", self.recompute, RECOMPUTE_POLICIES)
        if self.dtype is not None:
            require_choice("dtype", self.dtype, DTYPES)
        self._check_layers()
        self._check_heads()

    def _check_layers(self) -> None:
        for layer_type in self.layer_types:
            require_choice("layer type", layer_type, (SLIDING, FULL))
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types names {len(self.layer_types)} layers, "
                f"num_draft_layers is {self.num_hidden_layers}"
            )

    def _check_heads(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; rotary positions need an even one")


def create_drafter_config(num_draft_layers: int = 5, **overrides: object) -> DrafterConfig:
    """Return the reference configuration with `num_draft_layers` layers and the given fields replaced.

    Takes every field of a served drafter's config.json. Those with one implemented value are accepted with
    that value; `block_size` and `dflash_config` describe the pairing with a target and go to `DFlashDrafter`.
    Unless `layer_types` is given, every layer slides except the last, which sees the whole document.

    Raises:
        ValueError: a field is unknown, has the wrong type or is out of range, or two numbers do not fit.
    """
    if type(num_draft_layers) is not int or num_draft_layers < 1:
        raise ValueError(f"num_draft_layers is {num_draft_layers!r}; it must be an integer of at least 1")
    values = dict(overrides)
    _take_implied(values, num_draft_layers)
    for name in _PAIRING & values.keys():
        raise ValueError(f"{name} belongs to the pairing with a target; give it to DFlashDrafter")
    values.setdefault("layer_types", default_layer_types(num_draft_layers))
    return build(DrafterConfig, {"num_hidden_layers": num_draft_layers, **values}, what="drafter setting")


_PAIRING = {"block_size", "dflash_config"}
_IMPLEMENTED: dict[str, object] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "use_sliding_window": True,
    "rope_scaling": None,
}


def _take_implied(values: dict[str, object], num_draft_layers: int) -> None:
    """Take out the fields that repeat another one or say what is implemented anyway; refuse other values."""
    counts = {"num_hidden_layers": num_draft_layers, "max_window_layers": num_draft_layers}
    implied = {**_IMPLEMENTED, **counts}
    rope = values.pop("rope_parameters", None)
    if rope is not None:
        theta = rope.get("rope_theta") if isinstance(rope, dict) else None
        expected = values.setdefault("rope_theta", theta)
        implied_rope = {"rope_type": "default", "rope_theta": expected}
        if rope != implied_rope:
            raise ValueError(f"rope_parameters is {rope!r}; implemented is {implied_rope!r}")
    for name in implied.keys() & values.keys():
        value, only = values.pop(name), implied[name]
        if value != only or isinstance(value, bool) != isinstance(only, bool):
            condition = f"with num_draft_layers {num_draft_layers} " if name in counts else ""
            raise ValueError(f"{name} is {value!r}; {condition}it can only be {only!r}")


def default_layer_types(num_layers: int) -> tuple[str, ...]:
    """Return sliding layers and one full layer last."""
    return (SLIDING,) * (num_layers - 1) + (FULL,)
