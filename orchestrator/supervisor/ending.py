"""How a run is brought to its end: SIGTERM to all of it, a grace, then SIGKILL until nothing is left.

Knows the order and the deadlines, and what is recorded of them; when a run is to end is the job's business. A
run is given up, and its survivors are named, when killing has not helped for `tree.KILL_S`.
"""

import time
from typing import Iterable, List, Mapping, NamedTuple, Optional

from . import processes
from .records import RecordWriter
from .tree import KILL_S, Tree


class Why(NamedTuple):
    """The outcome of a run that was stopped, and the reason for a person."""

    outcome: str
    reason: str


class Ending:
    """The end of one run; ``left`` are its processes as they were last seen once it should be over."""

    def __init__(self, tree: Tree, writer: RecordWriter, grace_s: float) -> None:
        self._tree = tree
        self._writer = writer
        self._grace_s = grace_s
        self._kill_at: Optional[float] = None
        self._give_up_at: Optional[float] = None
        self.is_stopping = False
        self.why: Optional[Why] = None
        self.left: List[processes.Process] = []

    def stop(self, why: Why, grace_s: Optional[float], has_ended: bool) -> None:
        """SIGTERM to all now, SIGKILL after the grace; a second request can only shorten the grace.

        A run that ``has_ended`` by itself keeps its own outcome.
        """
        grace = self._grace_s if grace_s is None else grace_s
        if not self.is_stopping:
            self.is_stopping = True
            self.why = None if has_ended else why
            self._writer.write("stopping", outcome=why.outcome, reason=why.reason, grace_s=grace)
            self._tree.terminate()
        if self._give_up_at is None:
            kill_at = time.monotonic() + grace
            self._kill_at = kill_at if self._kill_at is None else min(self._kill_at, kill_at)

    def end_leftovers(self, open_pipes: Mapping[str, Iterable[int]]) -> None:
        """What was started has ended and something still runs, or holds a pipe: names it, then ends it.

        ``open_pipes`` are the inodes of those pipes, by the process that they were made for.
        """
        self.look()
        if not self.left and not open_pipes:
            return
        everything = processes.everything() if open_pipes else []
        for proc, inodes in open_pipes.items():
            holders = processes.holders_of(set(inodes), everything)
            self._writer.write("pipe_held", proc=proc, holders=processes.describe(holders))
        self._writer.write("leftover", processes=processes.describe(self.left))
        if self._kill_at is None and self._give_up_at is None:
            self._tree.terminate()
            self._kill_at = time.monotonic() + self._grace_s

    def look(self) -> None:
        """Finds out what is left."""
        self.left = self._tree.members()

    def keep_time(self, now: float) -> None:
        """Does what is due at ``now``."""
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = None
            self._give_up_at = now + KILL_S
        if self._give_up_at is not None:
            self.left = self._tree.kill()

    def deadlines(self) -> List[float]:
        """Returns the moments at which something is due."""
        return [moment for moment in (self._kill_at, self._give_up_at) if moment is not None]

    def is_given_up(self) -> bool:
        """Killing did not help, and time is up."""
        return self._give_up_at is not None and time.monotonic() >= self._give_up_at
