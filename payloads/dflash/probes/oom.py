"""Does the drafter fit on this card? One warm-up, a few timed steps, and a packed row, at any size.

    python -m dflash.probes.oom                                  # the original size, on a GPU
    python -m dflash.probes.oom --params params.json --set device=cuda:5 --set recompute=none
    python -m dflash.probes.oom --set optimizer=adamw            # whole steps of training

Each scenario runs forward and backward on random states, and prints loss, metrics, time and peak memory as
soon as it is done; numbers also go to `dflash.events`. With `optimizer` each step ends with one of
`dflash.optimizer`. An out-of-memory error is reported and then raised.

Exit codes are those of `dflash.probes.program`; 0 means that all three fit.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from dflash.probes.program import run_program
from dflash.probes.size import REFERENCE, TwoRows
from dflash.values import require_choice

OPTIMIZERS = ("none", "adamw")


@dataclass(frozen=True, kw_only=True, slots=True)
class OomProbeParams(TwoRows):
    """Every number of the probe; the defaults are the original's size, on the reference drafter."""

    attention: str = REFERENCE.attention
    recompute: str = "layer"
    optimizer: str = "none"

    def __post_init__(self) -> None:
        TwoRows.__post_init__(self)  # super() does not find its class where there are slots
        require_choice("optimizer", self.optimizer, OPTIMIZERS)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the probe and return its exit code."""
    return run_program(
        OomProbeParams,
        argv,
        program="dflash.probes.oom",
        description="Run the drafter's forward and backward at a given size and report peak memory.",
        work=work,
    )


def work(params: OomProbeParams, *, is_brief: bool = False) -> int:
    """Do what the probe does and return its exit code; `is_brief` leaves out the warm-up."""
    from dflash.probes.work import scenarios, workload  # noqa: PLC0415  loads torch

    scenarios.run(
        params,
        workload.forward_backward,
        title="out-of-memory probe",
        optimizer=params.optimizer,
        is_brief=is_brief,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
