"""Does the peak of memory move with the number of anchors, and by how much?

    python -m dflash.probes.anchors                              # 128 to 1,024 anchors of 32 slots
    python -m dflash.probes.anchors --set 'anchor_counts=[256, 512]' --set recompute=none

A log in which the peak stays the same whatever the anchors are comes from a process that never got them, or
from a tensor that does not depend on them. Each number of anchors runs forward and backward on the same row;
the loss is timed by itself as well. The table at the end says what 1,000 anchors cost.

Exit codes are those of `dflash.probes.program`; 0 means that at least one number of anchors fits.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from dflash.probes.program import run_program
from dflash.probes.size import REFERENCE, DrafterSize, check_counts
from dflash.values import require_positive


@dataclass(frozen=True, kw_only=True, slots=True)
class AnchorSweepParams(DrafterSize):
    """Every number of the probe; `iterations` are timed, after one step that is not."""

    anchor_counts: tuple[int, ...] = (128, 256, 512, 1024)
    attention: str = REFERENCE.attention
    recompute: str = "layer"
    iterations: int = 3

    def __post_init__(self) -> None:
        DrafterSize.__post_init__(self)  # super() does not find its class where there are slots
        check_counts("anchor_counts", self.anchor_counts, least=1)
        require_positive(self, "iterations")
        self._check_order()

    def _check_order(self) -> None:
        if list(self.anchor_counts) != sorted(set(self.anchor_counts)):
            raise ValueError(f"anchor_counts is {list(self.anchor_counts)}; name each once, from few to many")
        if self.anchor_counts[-1] >= self.seq_len:
            raise ValueError(
                f"anchor_counts ends with {self.anchor_counts[-1]}, but a row of {self.seq_len} tokens has "
                f"{self.seq_len - 1} anchors"
            )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the probe and return its exit code."""
    return run_program(
        AnchorSweepParams,
        argv,
        program="dflash.probes.anchors",
        description="Run the drafter's forward and backward with several numbers of anchors.",
        work=work,
    )


def work(params: AnchorSweepParams) -> int:
    """Do what the probe does and return its exit code."""
    from dflash.probes.work import anchor_sweep  # noqa: PLC0415  loads torch

    return anchor_sweep.run(params)


if __name__ == "__main__":
    sys.exit(main())
