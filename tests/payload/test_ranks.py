"""Sums over drafters of one process: exact, in order, and with a name when one does not come."""

import threading
import time
from collections.abc import Callable, Sequence

import pytest
import torch
from dflash.training import ranks as ranks_module
from dflash.training.failures import RankLost
from dflash.training.ranks import Alone, ThreadRanks, buckets, thread_ranks
from torch import Tensor

HOST = torch.device("cpu")


def together(members: Sequence[ThreadRanks], work: Callable[[ThreadRanks], None]) -> None:
    threads = [threading.Thread(target=work, args=(ranks,)) for ranks in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def tensors_of(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    shapes = ((7, 5), (3,), (), (400, 3), (5,))
    dtypes = (torch.float32, torch.float32, torch.float64, torch.float32, torch.float32)
    return [
        torch.randn(shape, generator=generator, dtype=dtype)
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]


@pytest.mark.parametrize("bucket_bytes", [1, 200, 2**20])
def test_threads_sum_in_the_order_of_ranks(bucket_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_module, "BUCKET_BYTES", bucket_bytes)
    own = [tensors_of(rank) for rank in range(3)]

    def work(ranks: ThreadRanks) -> None:
        time.sleep(0.01 * ranks.rank)
        for _ in range(5):
            ranks.sum(own[ranks.rank])

    together(thread_ranks([HOST] * 3, timeout_s=10), work)
    expected = [tensors_of(rank) for rank in range(3)]
    for _ in range(5):
        sums = [(a + b) + c for a, b, c in zip(*expected, strict=True)]
        expected = [sums, sums, sums]
    for tensors in own:
        for found, value in zip(tensors, expected[0], strict=True):
            assert torch.equal(found, value)


def test_a_drafter_that_does_not_come_is_named_after_the_time_out() -> None:
    members = thread_ranks([HOST] * 3, timeout_s=0.1)
    told = {}

    def work(ranks: ThreadRanks) -> None:
        if ranks.rank == 1:
            return
        with pytest.raises(RankLost) as caught:
            ranks.sum([torch.ones(1)])
        told[ranks.rank] = str(caught.value)

    together(members, work)
    assert told[0].startswith("drafter 0 waited 0.1 s to sum gradients with drafter 1;")
    assert told[2].startswith("drafter 2 waited 0.1 s to sum gradients with drafter 1;")


def test_a_drafter_that_fails_ends_the_others_at_once_with_its_name() -> None:
    members = thread_ranks([HOST] * 2, timeout_s=60)
    started_s = time.monotonic()

    def work(ranks: ThreadRanks) -> None:
        if ranks.rank == 1:
            ranks.abandon("ValueError: no loss")
            return
        with pytest.raises(RankLost, match="drafter 1 failed: ValueError: no loss"):
            ranks.sum([torch.ones(1)])

    together(members, work)
    assert time.monotonic() - started_s < 10


def test_one_drafter_sums_nothing() -> None:
    value = torch.ones(3)
    Alone().sum([value])
    assert value.tolist() == [1, 1, 1]


def test_buckets_hold_neighbours_of_one_type_up_to_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_module, "BUCKET_BYTES", 100)
    sizes = [
        (10, torch.float32),
        (15, torch.float32),
        (1, torch.float32),
        (1, torch.float64),
        (99, torch.float64),
    ]
    made = list(buckets([torch.zeros(count, dtype=dtype) for count, dtype in sizes]))
    assert [[len(tensor) for tensor in bucket] for bucket in made] == [[10, 15], [1], [1], [99]]
