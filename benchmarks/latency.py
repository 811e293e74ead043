"""From a command to its first line, and from a line's write to its display."""

from __future__ import annotations

import shlex
import statistics
import sys
import time
from collections.abc import Iterator

from benchmarks.results import Figure, at_most, percentile
from benchmarks.rig import Rig, first_line_s
from tests.project import ORCH

HELLO = "print('hello', flush=True)\n"
STAMPS = """
import sys, time
rate, count = {rate}, {count}
begin = time.monotonic()
for number in range(count):
    time.sleep(max(0.0, begin + number / rate - time.monotonic()))
    print("stamp", time.time(), flush=True)
"""


def first_line(rig: Rig, repeats: int) -> Iterator[Figure]:
    """`orch run` of a one-line payload, whose code is there, beside ``ssh host python3 -c …``."""
    experiment = rig.project.experiment(HELLO, "hello")
    python = shlex.join([sys.executable, "-c", 'print("hello")'])
    for host, limit, name in (("near", 2.2, "first line"), ("far", 1.2, "first line, 100 ms round trip")):
        orch = [str(ORCH), "run", str(experiment), "--host", host]
        rig.project.orch(*orch[1:])
        ours, theirs = [], []
        for _ in range(repeats):  # in turn, so that both meet the same load
            theirs.append(first_line_s(rig, rig.ssh(python, host), b"hello"))
            ours.append(first_line_s(rig, orch, b"| hello"))
        ratio = statistics.median(ours) / statistics.median(theirs)
        yield at_most(
            limit,
            name=name,
            value=ratio,
            unit="x ssh",
            orch_s=statistics.median(ours),
            ssh_s=statistics.median(theirs),
            orch_best_s=min(ours),
            ssh_best_s=min(theirs),
        )


def display(rig: Rig, seconds: float) -> Iterator[Figure]:
    """A line's write to its display in ``orch logs -f``, at 10, 30 and 100 lines a second."""
    for rate in (10, 30, 100):
        code = STAMPS.format(rate=rate, count=int(rate * seconds))
        run_id = rig.detached(rig.project.experiment(code, f"stamps{rate}"))
        with rig.running([str(ORCH), "logs", "-f", run_id]) as process:
            assert process.stdout is not None
            stamps = ((time.time(), float(line.rsplit(b" ", 1)[1])) for line in process.stdout)
            delays_ms = [1000 * (shown_t - written_t) for shown_t, written_t in stamps]
        later = delays_ms[len(delays_ms) // 4 :]  # the first ones came before the view
        worst = percentile(later, 99)
        yield at_most(
            10, name=f"write to display, {rate}/s, median", value=statistics.median(later), unit="ms"
        )
        yield at_most(50, name=f"write to display, {rate}/s, p99", value=worst, unit="ms", most=max(later))
