"""Puts the lines of several runs into one order: by the time they were written, by this machine's clock.

A host's times are corrected by what is known of its clock. Within a run the order is that of its records,
also where its clock was set back: a line never stands before one that the same run wrote earlier. At the same
time the runs come in the order in which they were named.

What is mirrored is merged as it lies there, each run read once. Of runs that go on a line is held back while
another run may yet have written something older, for `HOLD_S` after it was written or arrived here; what
comes later than that comes out of order. Memory is bounded by one batch of records for each run.
"""

from __future__ import annotations

import heapq
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from orchestrator.errors import OrchError
from orchestrator.log_filter import LineFilter
from orchestrator.log_lines import LineAssembler, LogLine, select
from orchestrator.outcome import Record

HOLD_S = 0.5
LOOK_S = 0.05


class Placed(NamedTuple):
    """A line and its place; ``run`` counts the merged runs, ``t_here`` is its corrected time."""

    order_t: float
    run: int
    t_here: float
    line: LogLine


class RunLines:
    """One run's part of a merge: its records become lines with their places.

    ``wanted`` is by the host's clock, as the lines are. ``heard_t`` is the corrected time up to which
    all that the run wrote has been seen.
    """

    def __init__(
        self,
        run: int,
        lines: LineAssembler,
        *,
        offset_s: float,
        proc: str | None = None,
        stream: str | None = None,
        wanted: LineFilter | None = None,
    ) -> None:
        self._run = run
        self._lines = lines
        self._offset_s = offset_s
        self._proc = proc
        self._stream = stream
        self._wanted = wanted
        self.heard_t = -math.inf

    @property
    def run(self) -> int:
        """Which of the merged runs this is."""
        return self._run

    def read(self, records: Iterable[Record]) -> Iterator[Placed]:
        """Yields all lines of a run that has no more to say than ``records``."""
        for record in records:
            yield from self.feed(record)
        yield from self.flush()

    def feed(self, record: Record) -> Iterator[Placed]:
        """Yields the lines that a record ends."""
        self.heard_t = max(self.heard_t, record["t"] - self._offset_s)
        for output in select([record], proc=self._proc, stream=self._stream):
            yield from self.place(self._lines.feed(output))

    def flush(self) -> Iterator[Placed]:
        """Yields the lines that never ended."""
        return self.place(self._lines.flush())

    def place(self, lines: Iterable[LogLine]) -> Iterator[Placed]:
        """Yields the lines that are wanted with their places."""
        for line in lines:
            t_here = line.t - self._offset_s
            self.heard_t = max(self.heard_t, t_here)
            if self._wanted is None or self._wanted(line):
                yield Placed(self.heard_t, self._run, t_here, line)


def merge(runs: Iterable[Iterable[Placed]]) -> Iterator[Placed]:
    """Yields the lines of runs, each of them in order, in one order."""
    return heapq.merge(*runs)


class LiveMerge:
    """Merges runs that go on; the caller waits `wait_s` between two looks at what is ``ready``."""

    def __init__(
        self, *, now_t: Callable[[], float] = time.time, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._now_t = now_t
        self._now_s = now_s
        self._runs: dict[int, _LiveRun] = {}
        self._heads: list[tuple[float, int]] = []
        self._quiet: dict[int, _LiveRun] = {}
        self._ended: list[tuple[int, OrchError | None]] = []
        self._looked_s = -math.inf

    @property
    def count(self) -> int:
        """How many runs go on, or have lines that are not out."""
        return len(self._runs)

    def add(self, lines: RunLines, batches: Iterator[Sequence[Record]]) -> None:
        """Takes one more run; an empty batch says that nothing is new, the iterator's end that it is over."""
        run = _LiveRun(lines, batches)
        self._runs[lines.run] = run
        self._admit(run)

    def ready(self) -> Iterator[Placed]:
        """Yields the lines for which no older one is waited for any more."""
        self._look_at_quiet()
        while self._heads:
            order_t, index = self._heads[0]
            if not self._may_go(order_t, index):
                return
            heapq.heappop(self._heads)
            run = self._runs[index]
            placed = run.pending.popleft()
            if run.pending:
                heapq.heappush(self._heads, (run.pending[0].order_t, index))
            else:
                self._admit(run)
                if self._now_s() - self._looked_s >= LOOK_S:
                    self._look_at_quiet()
            yield placed

    def take_ended(self) -> list[tuple[int, OrchError | None]]:
        """Returns the runs whose last line is out, with the error where one ended their follow."""
        ended, self._ended = self._ended, []
        return ended

    def wait_s(self, longest_s: float) -> float:
        """Returns after how many seconds a line that is held now may go."""
        if not self._heads:
            return longest_s
        order_t, index = self._heads[0]
        run = self._runs[index]
        due_s = min(order_t + HOLD_S - self._now_t(), run.arrived_s + HOLD_S - self._now_s())
        return min(longest_s, max(0.0, due_s))

    def _may_go(self, order_t: float, index: int) -> bool:
        """No other run can have an older line on its way, or it was waited for long enough."""
        return (
            all((quiet.lines.heard_t, other) > (order_t, index) for other, quiet in self._quiet.items())
            or order_t + HOLD_S <= self._now_t()
            or self._runs[index].arrived_s + HOLD_S <= self._now_s()
        )

    def _look_at_quiet(self) -> None:
        self._looked_s = self._now_s()
        quiet, self._quiet = self._quiet, {}
        for run in quiet.values():
            self._admit(run)

    def _admit(self, run: _LiveRun) -> None:
        """Finds the place of a run without a line: among those that have one, the quiet or the ended."""
        index = run.lines.run
        run.read(self._now_s)
        if run.pending:
            heapq.heappush(self._heads, (run.pending[0].order_t, index))
        elif run.is_over:
            del self._runs[index]
            self._ended.append((index, run.error))
        else:
            self._quiet[index] = run


@dataclass(slots=True, eq=False)
class _LiveRun:
    lines: RunLines
    batches: Iterator[Sequence[Record]]
    pending: deque[Placed] = field(default_factory=deque)
    arrived_s: float = -math.inf
    is_over: bool = False
    error: OrchError | None = None

    def read(self, now_s: Callable[[], float]) -> None:
        """Takes batches until there is a line, nothing is new, or the run has ended."""
        while not self.pending and not self.is_over:
            try:
                batch = next(self.batches, None)
                if batch is None:
                    self.is_over = True
                    self.pending.extend(self.lines.flush())
                    return
                for record in batch:
                    self.pending.extend(self.lines.feed(record))
            except OrchError as error:
                self.is_over, self.error = True, error
                return
            if not batch:
                return
            self.arrived_s = now_s()
