"""Does the drafter fit on this card? One warm-up, a few timed steps, and a packed row, at any size.

    python -m dflash.probes.oom                                  # the original size, on a GPU
    python -m dflash.probes.oom --params params.json --set device=cuda:5 --set recompute=none

Each scenario runs forward and backward on random states, and prints loss, metrics, time and peak memory as
soon as it is done; numbers also go to `dflash.events`. An out-of-memory error is reported and then raised.

Exit codes: 0 all three fit, 1 an error (out of memory included), 2 a parameter is refused, 3 no such device.

This module knows the parameters. `dflash.probes.scenarios` does the work and is what loads torch.
"""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from dflash.checks import (
    check_objective,
    check_window,
    checked_at_least,
    checked_layer_ids,
    checked_mask_token,
)
from dflash.config import DTYPES, DrafterConfig, create_drafter_config
from dflash.probes.params import parse_params
from dflash.values import require_choice, require_positive

PROGRAM = "dflash.probes.oom"
REFERENCE = create_drafter_config()
REFUSED_PARAMETER = 2
NO_DEVICE = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class OomProbeParams:
    """Every number of the probe; the defaults are the original's size, on the reference drafter.

    `dtype` becomes torch's default type and the module's. `position_base` is the position of a document's
    first token. `memory_limit_gib` stands in for a smaller card: the allocator's share of this one is capped.
    """

    device: str = "cuda"
    dtype: str = "bfloat16"
    seed: int = 0
    memory_limit_gib: float | None = None
    attention: str = REFERENCE.attention
    recompute: str = "layer"
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
    max_anchors: int = 1024
    mask_token_id: int = 248070
    seq_len: int = 8000
    packed_lengths: tuple[int, ...] = (3000, 4000, 5000)
    position_base: int = 1
    iterations: int = 3
    kl_weight: float = 0.15
    gamma: float = 10.0

    def __post_init__(self) -> None:
        if not re.fullmatch(r"cpu|cuda(:\d+)?", self.device):
            raise ValueError(f"device is {self.device!r}; it must be cpu, cuda or cuda:N")
        require_choice("dtype", self.dtype, DTYPES)
        require_positive(self, "iterations")
        checked_at_least("seed", self.seed, 0)
        checked_at_least("position_base", self.position_base, 0)
        checked_at_least("seq_len", self.seq_len, 2)
        checked_at_least("block_size", self.block_size, 2)
        checked_at_least("max_anchors", self.max_anchors, 1)
        checked_layer_ids(self.target_layer_ids, self.num_target_layers)
        checked_mask_token(self.mask_token_id, None, self.vocab_size)
        check_objective(self.kl_weight, self.gamma)
        self._check_packed_lengths()
        self._check_memory_limit()
        check_window(self.drafter_config(), self.block_size)

    def _check_packed_lengths(self) -> None:
        if not self.packed_lengths:
            raise ValueError("packed_lengths is empty; the packed row needs at least 1 document")
        for length in self.packed_lengths:
            checked_at_least("a length in packed_lengths", length, 2)

    def _check_memory_limit(self) -> None:
        if self.memory_limit_gib is None:
            return
        require_positive(self, "memory_limit_gib")
        if self.device == "cpu":
            raise ValueError(f"memory_limit_gib is {self.memory_limit_gib}, but device cpu has no such limit")

    def drafter_config(self) -> DrafterConfig:
        """Return the drafter's configuration.

        Raises:
            ValueError: the numbers do not make one.
        """
        return create_drafter_config(
            num_draft_layers=self.num_draft_layers,
            hidden_size=self.hidden_size,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            intermediate_size=self.intermediate_size,
            vocab_size=self.vocab_size,
            sliding_window=self.sliding_window,
            rope_theta=self.rope_theta,
            num_target_layers=self.num_target_layers,
            attention=self.attention,
            recompute=self.recompute,
            loss_chunk_rows=self.loss_chunk_rows,
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the probe and return its exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    description = "Run the drafter's forward and backward at a given size and report peak memory."
    params = parse_params(OomProbeParams, arguments, program=PROGRAM, description=description)

    from dflash.probes import scenarios  # noqa: PLC0415  loads torch, and only now is it needed

    try:
        scenarios.run(params)
    except scenarios.NoSuchDevice as error:
        return _refuse(error, NO_DEVICE)
    except scenarios.LimitTooLarge as error:
        return _refuse(error, REFUSED_PARAMETER)
    return 0


def _refuse(error: Exception, code: int) -> int:
    print(f"{PROGRAM}: {error}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
