"""The queue between target workers and drafters: order, bounds, failures, stalls, ends; with real threads."""

import random
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from dflash.training.failures import MemberFailed, QueueClosed, Stalled
from dflash.training.queue import RowQueue, Sink, start_worker

ROWS, EPOCHS = 23, 2


def queue_of(workers: int, drafters: int, *, capacity: int = 2, timeout_s: float = 10) -> RowQueue[str]:
    return RowQueue(workers=workers, drafters=drafters, capacity=capacity, timeout_s=timeout_s)


def bringing(worker: int, workers: int, *, pause_s: float = 0.0) -> Callable[[Sink[str]], None]:
    def work(sink: Sink[str]) -> None:
        waits = random.Random(worker)
        for epoch in range(EPOCHS):
            for number in range(worker, ROWS, workers):
                time.sleep(waits.random() * pause_s)
                sink.put(epoch, number, f"{epoch}.{number}")
            sink.end_epoch(epoch, ROWS)

    return work


def taking(queue: RowQueue[str], drafter: int, taken: list[str]) -> threading.Thread:
    def take() -> None:
        source = queue.source(drafter)
        for epoch in range(EPOCHS):
            number = drafter
            while (row := source.take(epoch, number)) is not None:
                taken.append(row)
                number += queue.drafters

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize(("workers", "drafters"), [(1, 1), (3, 1), (1, 3), (3, 2), (2, 4)])
@pytest.mark.parametrize("capacity", [1, 4])
def test_each_drafter_gets_its_own_rows_in_order_however_fast_workers_are(
    workers: int, drafters: int, capacity: int
) -> None:
    queue = queue_of(workers, drafters, capacity=capacity)
    threads = [
        start_worker(queue.sink(worker), worker, bringing(worker, workers, pause_s=0.002 * worker))
        for worker in range(workers)
    ]
    taken: list[list[str]] = [[] for _ in range(drafters)]
    threads += [taking(queue, drafter, taken[drafter]) for drafter in range(drafters)]
    for thread in threads:
        thread.join(timeout=10)
        assert not thread.is_alive()
    for drafter in range(drafters):
        assert taken[drafter] == [
            f"{epoch}.{number}" for epoch in range(EPOCHS) for number in range(drafter, ROWS, drafters)
        ]
    assert queue.depth == 0


def test_a_worker_is_at_most_its_capacity_ahead() -> None:
    queue = queue_of(2, 1, capacity=3)
    start_worker(queue.sink(0), 0, bringing(0, 2))
    start_worker(queue.sink(1), 1, bringing(1, 2))
    assert eventually(lambda: queue.depth == 6)
    time.sleep(0.05)
    assert queue.depth == 6
    assert queue.take(0, 0) == "0.0"
    assert eventually(lambda: queue.depth == 6)
    queue.close()


def eventually(claim: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 10
    while not claim() and time.monotonic() < deadline:
        time.sleep(0.002)
    return claim()


def test_what_a_worker_raises_reaches_every_drafter_with_its_name() -> None:
    queue = queue_of(2, 2)

    def work(sink: Sink[str]) -> None:
        sink.put(0, 1, "0.1")
        raise RuntimeError("CUDA out of memory")

    start_worker(queue.sink(1), 1, work)
    for number in (0, 3):
        with pytest.raises(
            MemberFailed, match=r"target worker 1 failed: RuntimeError: CUDA out of memory"
        ) as e:
            queue.take(0, number)
        assert isinstance(e.value.__cause__, RuntimeError)
    with pytest.raises(MemberFailed, match="target worker 1"):
        queue.put(0, 0, "0.0")


def test_a_stall_says_which_row_and_which_worker() -> None:
    queue = queue_of(3, 2, timeout_s=0.05)
    queue.put(4, 5, "4.5")
    with pytest.raises(
        Stalled, match=r"drafter 0 waited 0.05 s for row 8 of epoch 4, .* worker 2 owes"
    ) as caught:
        queue.take(4, 8)
    assert (caught.value.worker, caught.value.epoch, caught.value.number) == (2, 4, 8)
    assert "last handed over row 5 of epoch 4" in str(caught.value)
    with pytest.raises(Stalled, match="target worker 0 owes; it has handed over nothing yet"):
        queue.take(4, 9)


def test_time_runs_for_the_row_that_is_awaited_not_for_others() -> None:
    queue = queue_of(1, 1, capacity=50, timeout_s=0.2)

    def bring_others() -> Iterator[None]:
        for number in range(1, 50):
            queue.put(0, number, "other")
            time.sleep(0.02)
            yield

    threading.Thread(target=lambda: list(bring_others()), daemon=True).start()
    started_s = time.monotonic()
    with pytest.raises(Stalled, match="row 0 of epoch 0"):
        queue.take(0, 0)
    assert time.monotonic() - started_s < 0.8


def test_closing_ends_workers_and_drafters_that_wait() -> None:
    queue = queue_of(1, 1, capacity=1)
    worker = start_worker(queue.sink(0), 0, bringing(0, 1))
    assert eventually(lambda: queue.depth == 1)
    ended: list[type[BaseException]] = []

    def wait_for_a_row() -> None:
        try:
            queue.take(7, 0)
        except QueueClosed as error:
            ended.append(type(error))

    drafter = threading.Thread(target=wait_for_a_row)
    drafter.start()
    queue.source(0).close()
    worker.join(timeout=10)
    drafter.join(timeout=10)
    assert not worker.is_alive()
    assert ended == [QueueClosed]


def test_an_epoch_that_is_shorter_ends_for_each_drafter() -> None:
    queue = queue_of(1, 2)
    queue.end_epoch(0, 3)
    assert queue.source(1).take(0, 3) is None
    assert queue.source(0).take(0, 4) is None


@pytest.mark.parametrize("name", ["workers", "drafters", "capacity", "timeout_s"])
def test_a_queue_of_nothing_is_refused(name: str) -> None:
    numbers = {"workers": 1, "drafters": 1, "capacity": 1, "timeout_s": 1, name: 0}
    with pytest.raises(ValueError, match=f"{name} is 0"):
        RowQueue(**numbers)
