"""How fast is the drafter here, beside what the card could do?

    python -m dflash.probes.bench                                # each recompute policy, at the original size
    python -m dflash.probes.bench --set 'policies=["none"]' --set profile=true

In one process: the card's ceilings (matrix products and copies), the construction of the masks, a forward
alone, and forward and backward with each policy, on a row that is one document and on a packed one. The
reference time of a case is its counted operations at the ceiling of matrix products. That is a bound: no
attention kernel gets there, and what a policy computes again is not in it.

Exit codes are those of `dflash.probes.program`; 0 means that at least one case fits.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from dflash.checks import checked_at_least
from dflash.config import RECOMPUTE_POLICIES
from dflash.probes.program import run_program
from dflash.probes.size import REFERENCE, TwoRows, check_choices


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchParams(TwoRows):
    """Every number of the benchmark; `profile` adds where one step's time goes, kernel by kernel."""

    policies: tuple[str, ...] = RECOMPUTE_POLICIES
    attention: str = REFERENCE.attention
    warmups: int = 3
    iterations: int = 5
    profile: bool = False

    def __post_init__(self) -> None:
        TwoRows.__post_init__(self)  # super() does not find its class where there are slots
        check_choices("policies", self.policies, RECOMPUTE_POLICIES)
        checked_at_least("warmups", self.warmups, 0)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and return its exit code."""
    return run_program(
        BenchParams,
        argv,
        program="dflash.probes.bench",
        description="Time the drafter and compare it with what the card could do.",
        work=work,
    )


def work(params: BenchParams) -> int:
    """Do what the probe does and return its exit code."""
    from dflash.probes.work import benchmark  # noqa: PLC0415  loads torch

    return benchmark.run(params)


if __name__ == "__main__":
    sys.exit(main())
