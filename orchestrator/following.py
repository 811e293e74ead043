"""Follows a run: its bytes are copied into the mirror in the background, and the caller looks at the mirror.

Knows how to come back after a cut connection and how several processes share one puller. What the records
mean, and what the ledger says of the run, is the caller's.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Self

from orchestrator import remote
from orchestrator.conversation import Conversation, Cursor, Piece
from orchestrator.errors import OrchError, Unreachable
from orchestrator.inventory import Host
from orchestrator.mirror import Mirror
from orchestrator.mirror_reader import READ_BYTES, arriving_batches
from orchestrator.run_folder import Record, RunFolder
from orchestrator.transports import Transport, connect

BACKOFF_FIRST_S = 0.5
BACKOFF_MAX_S = 30.0
VIEW_WAIT_S = 0.25
LOCK_WAIT_S = 0.5
_STOPPED = (
    "run {run_id} is mirrored by another orch here, process {pid}, which is stopped: nothing new is seen "
    "until it goes on (kill -CONT {pid}) or ends"
)
FLOOD_PIECE_BYTES = 256 * 1024
LULL_S = 0.05
GIVE_WAY_S = 1.0


class Watcher:
    """What a caller may want to see of a follow; the default sees nothing."""

    def unreachable(self, message: str, retry_in_s: float) -> None:
        """The host cannot be reached; the run goes on over there."""

    def reachable(self) -> None:
        """The host answers again."""

    def shipped(self, started: remote.Started) -> None:
        """The host has the code and the run is started."""

    def preparing(self, run_id: str, what: str) -> None:
        """The host lacks ``what``; the run ``run_id`` prepares it there, and this one waits for that."""

    def waiting(self) -> None:
        """Nothing has arrived for a moment; called a few times a second."""


class Following:
    """A run being mirrored in the background while the caller looks at it; a context manager.

    One process pulls a run at a time; others wait for the lock and look at the same mirror. Leaving the block
    early stops looking and pulling, never the run.
    """

    def __init__(
        self,
        folder: RunFolder,
        host: Host | None,
        talk: Conversation | None = None,
        transport: Transport | None = None,
        changed: threading.Event | None = None,
    ) -> None:
        """No host: all is mirrored. ``talk`` and ``transport`` stream the run from its first record.

        ``changed`` is set when something arrives: several runs may share one.
        """
        self._folder = folder
        self._changed = changed or threading.Event()
        self._puller = None if host is None else _Puller(folder, host, talk, transport, self._changed)

    def __enter__(self) -> Self:
        if self._puller is not None:
            self._puller.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._puller is not None:
            self._puller.leave()

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come: the run has ended and all of it is here, or the follow failed."""
        return self._puller is None or self._puller.is_over

    def records(self, watcher: Watcher, start: Cursor | None = None) -> Iterator[Record]:
        """Yields the run's records from ``start`` on, as they arrive, until the run has ended.

        Raises:
            OrchError: the follow cannot go on (a changed host key, a full disk here, records that do not
            agree).
        """
        for batch in self.batches(watcher, start):
            yield from batch
            if not batch:
                self._changed.wait(VIEW_WAIT_S)
                self._changed.clear()

    def batches(
        self, watcher: Watcher, start: Cursor | None = None, read_bytes: int = READ_BYTES
    ) -> Iterator[list[Record]]:
        """Yields the same in batches, an empty one where nothing is new: the caller waits as it likes."""
        puller = self._puller
        if puller is None:
            yield from arriving_batches(self._folder, lambda: True, start, read_bytes)
            return
        for batch in arriving_batches(self._folder, lambda: puller.is_over, start, read_bytes):
            if not batch:
                for message, pause_s in puller.take_notes():
                    if message is None:
                        watcher.reachable()
                    else:
                        watcher.unreachable(message, pause_s)
                watcher.waiting()  # before the caller waits: what was shown must be out by then
            yield batch
            if batch:
                puller.wait_for_lull()
        if puller.error is not None:
            raise puller.error


class _Puller(threading.Thread):
    """Copies a run's bytes into the mirror until it has ended, reconnecting as often as needed."""

    def __init__(
        self,
        folder: RunFolder,
        host: Host,
        talk: Conversation | None,
        transport: Transport | None,
        changed: threading.Event,
    ) -> None:
        super().__init__(name=f"orch-pull-{folder.run_id}", daemon=True)
        self._folder = folder
        self._host = host
        self._talk = talk
        self._transport = transport
        self._leaving = threading.Event()
        self._busy_until = 0.0
        self._notes: SimpleQueue[tuple[str | None, float]] = SimpleQueue()
        self.changed = changed
        self.is_over = False
        self.error: OrchError | None = None

    def leave(self) -> None:
        """Ends the thread, wherever it waits, and closes what it opened."""
        self._leaving.set()
        self._close()
        if self.is_alive():
            self.join(10.0)

    def wait_for_lull(self) -> None:
        """Returns when bytes no longer arrive in floods, or after `GIVE_WAY_S`.

        To show lines takes ten times as long as to mirror them, and the two take turns in one interpreter.
        """
        give_up_at = time.monotonic() + GIVE_WAY_S
        while (rest_s := min(self._busy_until, give_up_at) - time.monotonic()) > 0:
            if self._leaving.wait(rest_s):
                return

    def take_notes(self) -> list[tuple[str | None, float]]:
        """Returns what happened to the connection since the last call.

        (message, pause) says that it broke and when it is tried again, (None, 0) that it is back.
        """
        notes = []
        while not self._notes.empty():
            notes.append(self._notes.get())
        return notes

    def run(self) -> None:
        """Runs in the thread."""
        try:
            try:
                with self._acquire() as mirror:
                    self._pull(mirror)
            finally:
                self._close()
        except OrchError as error:
            if not self._leaving.is_set():
                self.error = error
        except Exception as error:  # noqa: BLE001  (a thread's error must reach the caller)
            if not self._leaving.is_set():
                self.error = OrchError(f"the follow failed: {type(error).__name__}: {error}")
        finally:  # whatever else fails: the caller waits for this
            self.is_over = True
            self.changed.set()

    @contextmanager
    def _acquire(self) -> Iterator[Mirror]:
        stopped = None
        while (mirror := Mirror.acquire(self._folder, self._host.name)) is None:
            self.changed.set()  # somebody else pulls: what they append is to be looked at
            before, stopped = stopped, self._folder.stopped_puller()
            if stopped is not None and before is None:
                self._note(_STOPPED.format(pid=stopped, run_id=self._folder.run_id), LOCK_WAIT_S)
            elif before is not None and stopped is None:
                self._note(None, 0.0)
            if self._leaving.wait(LOCK_WAIT_S):
                raise OrchError("left")
        if stopped is not None:
            self._note(None, 0.0)
        with mirror:
            yield mirror

    def _pull(self, mirror: Mirror) -> None:
        was_cut = False
        pauses = backoff()
        while not self._leaving.is_set():
            try:
                talk = (
                    self._talk if self._talk and mirror.cursor == Cursor() else self._reconnect(mirror.cursor)
                )
                self._talk = talk
                if was_cut:
                    was_cut, pauses = False, backoff()
                    self._note(None, 0.0)
                for piece in talk.pieces():
                    if piece is not None:
                        mirror.append(piece)
                        self.changed.set()
                        if isinstance(piece, Piece) and len(piece.data) >= FLOOD_PIECE_BYTES:
                            self._busy_until = time.monotonic() + LULL_S
                mirror.compare_end(*talk.host_end)
            except Unreachable as error:
                self._close()
                if self._leaving.is_set():
                    return
                if not was_cut:
                    self._folder.observe("unreachable", message=str(error))
                was_cut = True
                pause_s = next(pauses)
                self._note(f"UNREACHABLE {error}", pause_s)
                self._leaving.wait(pause_s)
            else:
                return

    def _reconnect(self, cursor: Cursor) -> Conversation:
        self._close()
        self._transport = connect(self._host)
        if self._leaving.is_set():
            raise OrchError("left")
        return remote.read(self._transport, self._folder.run_id, cursor, follow=True)

    def _note(self, message: str | None, pause_s: float) -> None:
        self._notes.put((message, pause_s))
        self.changed.set()

    def _close(self) -> None:
        talk, self._talk = self._talk, None
        transport, self._transport = self._transport, None
        if talk is not None:
            talk.close()
        if transport is not None:
            transport.close()


def backoff() -> Iterator[float]:
    """Yields pauses in seconds: doubling, capped, each drawn from its upper half."""
    pause_s = BACKOFF_FIRST_S
    while True:
        yield pause_s * random.uniform(0.5, 1.0)  # noqa: S311  (jitter)
        pause_s = min(pause_s * 2, BACKOFF_MAX_S)
