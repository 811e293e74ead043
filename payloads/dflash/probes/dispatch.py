"""Which kernel does scaled_dot_product_attention take on this card, and why none of the others?

    python -m dflash.probes.dispatch                             # the forms that a drafter's attention has
    python -m dflash.probes.dispatch --set 'dtypes=["float32"]' --set chunk_blocks=64

torch is asked with small tensors: the choice depends on types, heads, mask and card, not on the length. For
each form the table names the kernel that torch chooses, the one that then ran, and what the math path would
hold at the size that the parameters give: keys in float32, expanded to all query heads. Under the table
stand the reasons for which each kernel refuses a form, in torch's own words.

Exit codes are those of `dflash.probes.program`.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from dflash.checks import checked_at_least
from dflash.config import DTYPES
from dflash.probes.program import run_program
from dflash.probes.size import REFERENCE, check_choices, check_device
from dflash.values import require_positive


@dataclass(frozen=True, kw_only=True, slots=True)
class DispatchParams:
    """Heads, types, and the size that the math path is computed for; 182 blocks made 22.31 GiB once."""

    device: str = "cuda"
    dtypes: tuple[str, ...] = ("bfloat16", "float32")
    num_attention_heads: int = REFERENCE.num_attention_heads
    num_key_value_heads: int = REFERENCE.num_key_value_heads
    head_dim: int = REFERENCE.head_dim
    block_size: int = 32
    chunk_blocks: int = 182
    seq_len: int = 8000

    def __post_init__(self) -> None:
        check_device(self.device, None)
        check_choices("dtypes", self.dtypes, DTYPES)
        require_positive(
            self, "num_attention_heads", "num_key_value_heads", "head_dim", "chunk_blocks", "seq_len"
        )
        checked_at_least("block_size", self.block_size, 2)
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the probe and return its exit code."""
    return run_program(
        DispatchParams,
        argv,
        program="dflash.probes.dispatch",
        description="Ask torch which attention kernel it takes, and why not another.",
        work=_work,
    )


def _work(params: DispatchParams) -> int:
    from dflash.probes.work import sdpa_dispatch  # noqa: PLC0415  loads torch

    return sdpa_dispatch.run(params)


if __name__ == "__main__":
    sys.exit(main())
