"""The numbers that probes share: device, drafter, row, and how the drafter computes.

Defaults are the reference drafter at the size that once ran out of memory. Knows which numbers fit together;
loads without torch.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields

from dflash.checks import (
    check_objective,
    check_window,
    checked_at_least,
    checked_between,
    checked_layer_ids,
    checked_mask_token,
)
from dflash.config import DTYPES, DrafterConfig, create_drafter_config
from dflash.values import require_choice, require_positive

REFERENCE = create_drafter_config()


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterSize:
    """A drafter on a device, and a row for it.

    `dtype` becomes torch's default type and the module's. `position_base` is the position of a document's
    first token. `memory_limit_gib` stands in for a smaller card: the allocator's share of this one is capped.
    """

    device: str = "cuda"
    dtype: str = "bfloat16"
    seed: int = 0
    memory_limit_gib: float | None = None
    compile: bool = REFERENCE.compile
    chunk_blocks: int = REFERENCE.chunk_blocks
    loss_chunk_rows: int = REFERENCE.loss_chunk_rows
    num_draft_layers: int = REFERENCE.num_hidden_layers
    hidden_size: int = REFERENCE.hidden_size
    num_attention_heads: int = REFERENCE.num_attention_heads
    num_key_value_heads: int = REFERENCE.num_key_value_heads
    head_dim: int = REFERENCE.head_dim
    intermediate_size: int = REFERENCE.intermediate_size
    vocab_size: int = REFERENCE.vocab_size
    sliding_window: int = REFERENCE.sliding_window
    rope_theta: float = REFERENCE.rope_theta
    num_target_layers: int = REFERENCE.num_target_layers
    target_layer_ids: tuple[int, ...] = (1, 16, 31, 46, 61)
    block_size: int = 32
    mask_token_id: int = 248070
    seq_len: int = 8000
    position_base: int = 1
    kl_weight: float = 0.15
    gamma: float = 10.0

    def __post_init__(self) -> None:
        check_device(self.device, self.memory_limit_gib)
        require_choice("dtype", self.dtype, DTYPES)
        checked_between("seed", self.seed, 0, 2**63 - 1)
        checked_between("position_base", self.position_base, 0, 2**31 - 1)
        checked_at_least("seq_len", self.seq_len, 2)
        checked_at_least("block_size", self.block_size, 2)
        checked_layer_ids(self.target_layer_ids, self.num_target_layers)
        checked_mask_token(self.mask_token_id, None, self.vocab_size)
        check_objective(self.kl_weight, self.gamma)
        check_window(self.drafter_config(), self.block_size)

    def drafter_config(self, **changed: object) -> DrafterConfig:
        """Return the drafter's configuration; fields of the same name are taken over, unless changed.

        Raises:
            ValueError: the numbers do not make one.
        """
        shared = {field.name for field in fields(DrafterConfig)} & {field.name for field in fields(self)}
        settings = {name: getattr(self, name) for name in shared} | changed
        return create_drafter_config(num_draft_layers=self.num_draft_layers, **settings)


@dataclass(frozen=True, kw_only=True, slots=True)
class TwoRows(DrafterSize):
    """A row that is one document, a packed row, and the number of steps to take on them."""

    max_anchors: int = 1024
    packed_lengths: tuple[int, ...] = (3000, 4000, 5000)
    iterations: int = 3

    def __post_init__(self) -> None:
        DrafterSize.__post_init__(self)  # super() does not find its class where there are slots
        require_positive(self, "iterations")
        checked_at_least("max_anchors", self.max_anchors, 1)
        check_counts("packed_lengths", self.packed_lengths, least=2)


def check_device(device: str, memory_limit_gib: float | None) -> None:
    """Refuse what names no device, and a memory limit where nothing can keep it."""
    if not re.fullmatch(r"cpu|cuda(:\d{1,4})?", device):
        raise ValueError(f"device is {device!r}; it must be cpu, cuda or cuda:N")
    if memory_limit_gib is None:
        return
    if memory_limit_gib <= 0:
        raise ValueError(f"memory_limit_gib is {memory_limit_gib}; it must be greater than 0")
    if device == "cpu":
        raise ValueError(f"memory_limit_gib is {memory_limit_gib}, but device cpu has no such limit")


def check_counts(name: str, counts: Sequence[int], *, least: int) -> None:
    """Refuse an empty list, and a number in it that is too small."""
    if not counts:
        raise ValueError(f"{name} is empty; name at least one")
    for count in counts:
        checked_at_least(f"a number in {name}", count, least)


def check_choices(name: str, chosen: Sequence[str], known: Collection[str]) -> None:
    """Refuse an empty list, one that repeats itself, and a name in it that is not known."""
    if not chosen or len(set(chosen)) != len(chosen):
        raise ValueError(f"{name} is {list(chosen)}; name one or more, each once")
    for choice in chosen:
        require_choice(name, choice, known)
