"""Does the drafter fit on this card? One warm-up, a few timed steps, and a packed row, at any size.

    python -m dflash.probes.oom                                  # the original size, on a GPU
    python -m dflash.probes.oom --params params.json --set device=cuda:5 --set recompute=none

Each scenario runs forward and backward on random states, and prints loss, metrics, time and peak memory as
soon as it is done; numbers also go to `dflash.events`. An out-of-memory error is reported and then raised.

Exit codes are those of `dflash.probes.program`; 0 means that all three fit.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from dflash.probes.program import run_program
from dflash.probes.size import REFERENCE, TwoRows


@dataclass(frozen=True, kw_only=True, slots=True)
class OomProbeParams(TwoRows):
    """Every number of the probe; the defaults are the original's size, on the reference drafter."""

    attention: str = REFERENCE.attention
    recompute: str = "layer"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the probe and return its exit code."""
    return run_program(
        OomProbeParams,
        argv,
        program="dflash.probes.oom",
        description="Run the drafter's forward and backward at a given size and report peak memory.",
        work=_work,
    )


def _work(params: OomProbeParams) -> int:
    from dflash.probes.work import scenarios, workload  # noqa: PLC0415  loads torch

    scenarios.run(params, workload.forward_backward, title="out-of-memory probe")
    return 0


if __name__ == "__main__":
    sys.exit(main())
