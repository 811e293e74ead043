"""Rows on their way from M target workers to N drafters, all threads of one process.

Row `number` of an epoch is brought by worker `number mod M` and taken by drafter `number mod N`, each in
ascending order. So who gets what, and when, does not depend on who is fast. Each worker may be `capacity`
rows ahead of those who take them; a bound on the sum would let fast workers fill the queue while the row
that everybody waits for finds no place.

What a row is, and how it gets to another card, is others' business.
"""

import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from dflash.training.failures import MemberFailed, QueueClosed, Stalled, reason_of
from dflash.values import require_positive

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)
T_co = TypeVar("T_co", covariant=True)


class Sink(Protocol[T_contra]):
    """A target worker's end."""

    def put(self, epoch: int, number: int, row: T_contra) -> None:
        """Hand over a row; wait while too many are not taken yet."""

    def end_epoch(self, epoch: int, rows: int) -> None:
        """Say that the epoch has that many rows; every worker says the same."""

    def fail(self, reason: str, cause: BaseException | None = None) -> None:
        """Let the drafters know that this worker has failed."""


class Source(Protocol[T_co]):
    """A drafter's end."""

    @property
    def depth(self) -> int:
        """Rows that wait to be taken."""

    def take(self, epoch: int, number: int) -> T_co | None:
        """Return that row, or None when the epoch has fewer."""

    def close(self) -> None:
        """End both sides."""


class RowQueue(Generic[T]):
    """The queue; `sink` and `source` are its ends.

    Raises:
        ValueError: a count or the time-out is not greater than 0.
    """

    def __init__(self, *, workers: int, drafters: int, capacity: int, timeout_s: float) -> None:
        self.workers, self.drafters = workers, drafters
        self.capacity, self.timeout_s = capacity, timeout_s
        require_positive(self, "workers", "drafters", "capacity", "timeout_s")
        self._changed = threading.Condition()
        self._rows: dict[tuple[int, int], T] = {}
        self._held = [0] * workers
        self._brought: list[tuple[int, int] | None] = [None] * workers
        self._asked: list[tuple[int, int] | None] = [None] * drafters
        self._lengths: dict[int, int] = {}
        self._failed: tuple[str, str, BaseException | None] | None = None
        self._is_closed = False

    def sink(self, worker: int) -> "QueueSink[T]":
        """Return that worker's end."""
        return QueueSink(self, worker)

    def source(self, drafter: int) -> "QueueSource[T]":
        """Return that drafter's end."""
        return QueueSource(self, drafter)

    @property
    def depth(self) -> int:
        """Rows that wait to be taken, of all workers."""
        return len(self._rows)

    def put(self, epoch: int, number: int, row: T) -> None:
        """Hand over a row; wait while its worker has `capacity` rows that nobody took.

        Raises:
            QueueClosed: nobody takes rows any more.
            MemberFailed: another worker or a drafter failed.
        """
        worker, key = number % self.workers, (epoch, number)
        with self._changed:
            before = self._brought[worker]
            assert before is None or before < key, f"row {key} after {before}"
            self._changed.wait_for(lambda: self._is_over or self._held[worker] < self.capacity)
            self._raise_if_over()
            self._rows[key] = row
            self._held[worker] += 1
            self._brought[worker] = key
            self._changed.notify_all()

    def end_epoch(self, epoch: int, rows: int) -> None:
        """Say how many rows an epoch has."""
        with self._changed:
            known = self._lengths.setdefault(epoch, rows)
            assert known == rows, f"epoch {epoch} has {known} rows for one worker and {rows} for another"
            self._changed.notify_all()

    def take(self, epoch: int, number: int) -> T | None:
        """Return that row as soon as it is there, or None when the epoch has fewer.

        Raises:
            Stalled: it did not come within the time-out.
            QueueClosed, MemberFailed: it will not come.
        """
        drafter, key = number % self.drafters, (epoch, number)
        with self._changed:
            before = self._asked[drafter]
            assert before is None or before < key, f"row {key} asked for after {before}"
            self._asked[drafter] = key
            self._changed.wait_for(
                lambda: self._is_over or key in self._rows or self._is_past(epoch, number), self.timeout_s
            )
            self._raise_if_over()
            if self._is_past(epoch, number):
                return None
            if key not in self._rows:
                raise self._stalled(epoch, number)
            self._held[number % self.workers] -= 1
            self._changed.notify_all()
            return self._rows.pop(key)

    def fail(self, who: str, reason: str, cause: BaseException | None = None) -> None:
        """Let everybody know who failed; the first to fail is the one that is named."""
        with self._changed:
            self._failed = self._failed or (who, reason, cause)
            self._rows.clear()
            self._changed.notify_all()

    def close(self) -> None:
        """End both sides; rows that wait are dropped."""
        with self._changed:
            self._is_closed = True
            self._rows.clear()
            self._changed.notify_all()

    @property
    def _is_over(self) -> bool:
        return self._is_closed or self._failed is not None

    def _raise_if_over(self) -> None:
        if self._failed is not None:
            who, reason, cause = self._failed
            raise MemberFailed(who, reason) from cause
        if self._is_closed:
            raise QueueClosed("the queue is closed; nobody takes or brings rows any more")

    def _is_past(self, epoch: int, number: int) -> bool:
        return number >= self._lengths.get(epoch, number + 1)

    def _stalled(self, epoch: int, number: int) -> Stalled:
        worker = number % self.workers
        brought = self._brought[worker]
        return Stalled(
            drafter=number % self.drafters,
            epoch=epoch,
            number=number,
            worker=worker,
            timeout_s=self.timeout_s,
            seen=last_seen(brought),
        )


class QueueSink(Generic[T]):
    """A worker's end of a `RowQueue`."""

    def __init__(self, queue: RowQueue[T], worker: int) -> None:
        self._queue, self._worker = queue, worker

    def put(self, epoch: int, number: int, row: T) -> None:
        """Hand over a row of this worker's."""
        assert number % self._queue.workers == self._worker, f"row {number} is not worker {self._worker}'s"
        self._queue.put(epoch, number, row)

    def end_epoch(self, epoch: int, rows: int) -> None:
        """Say how many rows an epoch has."""
        self._queue.end_epoch(epoch, rows)

    def fail(self, reason: str, cause: BaseException | None = None) -> None:
        """Let everybody know that this worker has failed."""
        self._queue.fail(worker_name(self._worker), reason, cause)


class QueueSource(Generic[T]):
    """A drafter's end of a `RowQueue`."""

    def __init__(self, queue: RowQueue[T], drafter: int) -> None:
        self._queue, self._drafter = queue, drafter

    @property
    def depth(self) -> int:
        """Rows that wait to be taken, of all workers."""
        return self._queue.depth

    def take(self, epoch: int, number: int) -> T | None:
        """Return that row of this drafter's, or None when the epoch has fewer."""
        assert number % self._queue.drafters == self._drafter, (
            f"row {number} is not drafter {self._drafter}'s"
        )
        return self._queue.take(epoch, number)

    def close(self) -> None:
        """End both sides."""
        self._queue.close()


def start_worker(sink: Sink[T], worker: int, work: Callable[[Sink[T]], None]) -> threading.Thread:
    """Start a worker's thread; what it raises reaches the drafters with its name.

    A closed queue ends it.
    """

    def run() -> None:
        try:
            work(sink)
        except QueueClosed:
            pass
        except BaseException as error:  # noqa: BLE001  whoever waits for its rows raises it
            sink.fail(reason_of(error), error)

    thread = threading.Thread(target=run, name=worker_name(worker), daemon=True)
    thread.start()
    return thread


def worker_name(worker: int) -> str:
    """Return what messages call a worker."""
    return f"target worker {worker}"


def last_seen(brought: tuple[int, int] | None) -> str:
    """Return in words what a worker handed over last."""
    if brought is None:
        return "it has handed over nothing yet"
    return f"it last handed over row {brought[1]} of epoch {brought[0]}"
