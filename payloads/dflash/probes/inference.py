"""Does the drafter's forward alone fit on this card, and how long does it take?

    python -m dflash.probes.inference                            # the original size, on a GPU
    python -m dflash.probes.inference --set device=cuda:5 --set attention=sdpa_chunked

The scenarios are those of `dflash.probes.oom`, without gradients: a warm-up, timed forwards, a packed row.

Exit codes are those of `dflash.probes.program`; 0 means that all three fit.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from dflash.probes.program import run_program
from dflash.probes.size import REFERENCE, TwoRows


@dataclass(frozen=True, kw_only=True, slots=True)
class InferenceProbeParams(TwoRows):
    """Every number of the probe; nothing is recomputed where nothing goes backward."""

    attention: str = REFERENCE.attention


def main(argv: Sequence[str] | None = None) -> int:
    """Run the probe and return its exit code."""
    return run_program(
        InferenceProbeParams,
        argv,
        program="dflash.probes.inference",
        description="Run the drafter's forward without gradients and report time and peak memory.",
        work=work,
    )


def work(params: InferenceProbeParams, *, is_brief: bool = False) -> int:
    """Do what the probe does and return its exit code; `is_brief` leaves out the warm-up."""
    from dflash.probes.work import scenarios, workload  # noqa: PLC0415  loads torch

    scenarios.run(params, workload.forward_only, title="inference probe", is_brief=is_brief)
    return 0


if __name__ == "__main__":
    sys.exit(main())
