"""Follows the runs of a group, a bounded number a host at a time in the order of their queue.

Each host has as many threads as its queue lets run at once; what they see comes out as one stream of events
for the thread that asks. What the records mean, and what the ledger says of the runs, is the caller's.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from queue import Empty, Full, Queue
from typing import Self

from orchestrator.errors import OrchError
from orchestrator.following import VIEW_WAIT_S, Following, Watcher
from orchestrator.inventory import Host
from orchestrator.ledger import RunRow
from orchestrator.run_folder import Record
from orchestrator.workspace import Workspace

MOST_FOLLOWED_ON_A_HOST = 8
MOST_WAITING_EVENTS = 256  # each at most a chunk of output
JOIN_S = 12.0  # for all threads together


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Something of one run: a ``record``, a ``note`` about its connection, or ``is_end``: it is followed no
    more, with the ``error`` that ended that where there was one.
    """

    run_id: str
    record: Record | None = None
    note: str | None = None
    error: OrchError | None = None
    is_end: bool = False


class GroupFollowing:
    """The follow of ``rows``; a context manager. Leaving early stops looking and pulling, never a run."""

    def __init__(self, workspace: Workspace, rows: Sequence[RunRow]) -> None:
        self._workspace = workspace
        self._events: Queue[Event] = Queue(MOST_WAITING_EVENTS)
        self._leaving = threading.Event()
        self._count = len(rows)
        self._threads: list[threading.Thread] = []
        by_host: dict[str, list[RunRow]] = {}
        for row in sorted(rows, key=lambda row: _turn(row)[0]):
            by_host.setdefault(row.host, []).append(row)
        for name, mine in by_host.items():
            at_once = min(max(_turn(row)[1] for row in mine), len(mine), MOST_FOLLOWED_ON_A_HOST)
            waiting = deque(row.run_id for row in mine)
            host = workspace.inventory.host(name)
            self._threads += [
                threading.Thread(
                    target=self._follow_all, args=(host, waiting), name=f"orch-follow-{name}", daemon=True
                )
                for _ in range(at_once)
            ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._leaving.set()
        give_up_at = time.monotonic() + JOIN_S
        for thread in self._threads:
            if thread.is_alive():
                thread.join(max(0.0, give_up_at - time.monotonic()))

    def events(self) -> Iterator[Event | None]:
        """Yields what happens until all runs have been followed; None when nothing did for a moment."""
        left = self._count
        while left:
            try:
                event = self._events.get(timeout=VIEW_WAIT_S)
            except Empty:
                yield None
                continue
            left -= event.is_end
            yield event

    def _follow_all(self, host: Host, waiting: deque[str]) -> None:
        """Runs in each thread; a deque hands each run to one of them."""
        try:
            while True:
                try:
                    run_id = waiting.popleft()
                except IndexError:
                    return
                self._follow(host, run_id)
        except _Left:
            return

    def _follow(self, host: Host, run_id: str) -> None:
        error: OrchError | None = None
        try:
            folder = self._workspace.folder(run_id)
            folder.wait_for_start(self._leaving)
            self.check_left()
            with Following(folder, host) as following:
                for record in following.records(_Watcher(self, host.name, run_id)):
                    self.put(Event(run_id=run_id, record=record))
        except OrchError as found:
            error = found
        except Exception as found:  # noqa: BLE001  (a thread's error must reach the caller)
            error = OrchError(f"the follow of run {run_id} failed: {type(found).__name__}: {found}")
        self.put(Event(run_id=run_id, error=error, is_end=True))

    def check_left(self) -> None:
        """Ends the calling thread's follow when the caller has left."""
        if self._leaving.is_set():
            raise _Left

    def put(self, event: Event) -> None:
        """Hands an event over; waits while the caller is slow, which never slows a mirror."""
        while True:
            self.check_left()
            try:
                self._events.put(event, timeout=VIEW_WAIT_S)
            except Full:
                continue
            return


class _Left(BaseException):
    """The caller looks no more."""


class _Watcher(Watcher):
    """Tells of a run's connection by events."""

    def __init__(self, group: GroupFollowing, host: str, run_id: str) -> None:
        self._group = group
        self._host = host
        self._run_id = run_id
        self._is_cut = False

    def unreachable(self, message: str, retry_in_s: float) -> None:  # noqa: ARG002  (the interface's)
        """Says it once for each break."""
        if not self._is_cut:
            note = f"{message}; the run goes on over there, trying again"
            self._group.put(Event(run_id=self._run_id, note=note))
        self._is_cut = True

    def reachable(self) -> None:
        """Says that it is over."""
        self._is_cut = False
        self._group.put(Event(run_id=self._run_id, note=f"{self._host} answers again"))

    def waiting(self) -> None:
        """Looks whether to go on."""
        self._group.check_left()


def _turn(row: RunRow) -> tuple[int, int]:
    """Returns a run's place and how many run at once; one without a turn comes first."""
    turn = row.job.get("turn")
    if not isinstance(turn, Mapping):
        return -1, 1
    return int(turn["place"]), int(turn["at_once"])
