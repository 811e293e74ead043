"""Which attention backends fit on this card, and how fast is each?

    python -m dflash.probes.backends                             # all four, at the original size
    python -m dflash.probes.backends --set 'backends=["flex", "sdpa_chunked"]' --set max_anchors=256

Each backend runs forward and backward on the same random row. One that runs out of memory or fails is a line
of the table at the end, and the next one starts with memory as it was.

Exit codes are those of `dflash.probes.program`; 0 means that at least one fits.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from dflash.checks import checked_at_least
from dflash.config import ATTENTION_BACKENDS
from dflash.probes.program import run_program
from dflash.probes.size import DrafterSize, check_choices
from dflash.values import require_positive

BACKENDS = tuple(name for name in ATTENTION_BACKENDS if name != "auto")


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendMatrixParams(DrafterSize):
    """Every number of the probe; `iterations` are timed, after one step that is not."""

    backends: tuple[str, ...] = BACKENDS
    recompute: str = "layer"
    max_anchors: int = 1024
    iterations: int = 3

    def __post_init__(self) -> None:
        DrafterSize.__post_init__(self)  # super() does not find its class where there are slots
        check_choices("backends", self.backends, BACKENDS)
        checked_at_least("max_anchors", self.max_anchors, 1)
        require_positive(self, "iterations")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the probe and return its exit code."""
    return run_program(
        BackendMatrixParams,
        argv,
        program="dflash.probes.backends",
        description="Run the drafter's forward and backward with each attention backend.",
        work=work,
    )


def work(params: BackendMatrixParams) -> int:
    """Do what the probe does and return its exit code."""
    from dflash.probes.work import backend_matrix  # noqa: PLC0415  loads torch

    return backend_matrix.run(params)


if __name__ == "__main__":
    sys.exit(main())
