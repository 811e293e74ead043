"""Runs the benchmarks and prints what they found beside what they must reach.

``python -m benchmarks [--only NAME]… [--quick] [--json FILE]``; exits with 1 when a bar is missed.
Everything is made in a temporary folder (``TMPDIR``) and removed. Figures of a machine that does something
else at the same time say little: the load before and after stands in the JSON file.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from benchmarks import crowd, history, latency, resting, results, shipping, throughput
from benchmarks.results import Figure
from benchmarks.rig import Rig

GB = 10**9
Benchmark = Callable[[Rig], Iterator[Figure]]


def benchmarks(*, is_quick: bool) -> Mapping[str, Benchmark]:
    """Returns the benchmarks by name, in their order; quick ones only show that they work."""
    if is_quick:
        return {
            "first-line": lambda rig: latency.first_line(rig, 1),
            "to-mirror": lambda rig: throughput.to_mirror(rig, 800_000),
            "unbuffered": lambda rig: throughput.unbuffered(rig, 80_000),
            "display": lambda rig: latency.display(rig, 1.0),
            "shipping": shipping.second_ship,
            "resting": lambda rig: resting.at_rest(rig, 0.5),
            "many-runs": lambda rig: history.many_runs(rig, 100, 1),
            "long-log": lambda rig: history.long_log(rig, 5_000_000, 1),
            "crowd": lambda rig: crowd.crowd(rig, 2),
        }
    return {
        "first-line": lambda rig: latency.first_line(rig, 9),
        "to-mirror": lambda rig: throughput.to_mirror(rig, 100_000_000),
        "unbuffered": lambda rig: throughput.unbuffered(rig, 100_000_000),
        "display": lambda rig: latency.display(rig, 10.0),
        "shipping": shipping.second_ship,
        "resting": lambda rig: resting.at_rest(rig, 60.0),
        "many-runs": lambda rig: history.many_runs(rig, 100_000, 5),
        "long-log": lambda rig: history.long_log(rig, _longest_log_bytes(rig.folder), 5),
        "crowd": lambda rig: crowd.crowd(rig, 20),
    }


def main() -> int:
    """Runs what the command line names."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", action="append", choices=[*benchmarks(is_quick=True)], help="repeatable")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that it works")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results.json"), metavar="FILE")
    options = parser.parse_args()
    load_before, begin = os.getloadavg()[0], time.monotonic()
    figures: list[Figure] = []
    for name, benchmark in benchmarks(is_quick=options.quick).items():
        if options.only and name not in options.only:
            continue
        sys.stderr.write(f"{time.monotonic() - begin:6.1f} s  {name}\n")
        with tempfile.TemporaryDirectory(prefix="orch-bench-") as folder, Rig(Path(folder)) as rig:
            figures += benchmark(rig)
    results.save(figures, options.json, load_before=load_before)
    print(results.table(figures))
    return int(any(figure.is_met is False for figure in figures))


def _longest_log_bytes(folder: Path) -> int:
    """10 GB, or a third of what the disk has free."""
    return min(10 * GB, shutil.disk_usage(folder).free // 3)


if __name__ == "__main__":
    sys.exit(main())
