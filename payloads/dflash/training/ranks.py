"""Sums over the drafters of a training, by whatever way they can hear of each other.

Every drafter must call `sum` the same number of times with tensors of the same shapes. The order of the
terms is fixed, and all get the same bits: so replicas that step by the sums stay equal.

    Alone         one drafter
    ThreadRanks   several threads of one process, which read each other's tensors
    ProcessRanks  one drafter in each process, through torch.distributed: gloo on the CPU, NCCL on cards
"""

import threading
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, distributed

from dflash.training.failures import RankLost, reason_of
from dflash.training.transfer import Carrier, carrier_between

BUCKET_BYTES = 32 * 2**20  # what is exchanged at a time; a larger tensor goes alone and is not copied


class Ranks(Protocol):
    """What a drafter knows of the others."""

    @property
    def rank(self) -> int:
        """Which of them this one is, from 0."""

    @property
    def size(self) -> int:
        """How many there are."""

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over all drafters.

        Raises:
            RankLost: one of them does not take part any more.
        """


class Alone:
    """The only drafter."""

    rank = 0
    size = 1

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Leave everything as it is."""


class ThreadRanks:
    """One of the drafters of one process; `thread_ranks` makes all of them."""

    def __init__(self, rank: int, meeting: "_Meeting") -> None:
        self.rank, self.size = rank, len(meeting.devices)
        self._meeting = meeting

    @torch.no_grad()
    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum in the order of ranks; each adds up for itself."""
        for bucket in buckets(tensors):
            self._meeting.offered[self.rank] = bucket
            self._meeting.wait(self.rank)
            totals, arrivals = self._totals(len(bucket))
            self._meeting.reads[self.rank] = arrivals
            self._meeting.wait(self.rank)
            # Only now has everybody read, or asked their card to.
            self._await_reads()
            for tensor, total in zip(bucket, totals, strict=True):
                tensor.copy_(total)

    def abandon(self, reason: str) -> None:
        """Let the others know that this one has failed, now or when they next wait for it."""
        self._meeting.abandon(self.rank, reason)

    def _totals(self, count: int) -> tuple[list[Tensor], list[Any]]:
        totals, arrivals = [], []
        for place in range(count):
            total: Tensor | None = None
            for other, offered in enumerate(self._meeting.offered):
                moved = self._meeting.carrier(other, self.rank).send(offered[place])
                term = moved.receive()
                arrivals.append(moved)
                total = term.clone() if total is None else total.add_(term)
            assert total is not None
            totals.append(total)
        return totals, arrivals

    def _await_reads(self) -> None:
        for arrivals in self._meeting.reads:
            for moved in arrivals:
                moved.release(self._meeting.devices[self.rank])


def thread_ranks(devices: Sequence[torch.device], *, timeout_s: float) -> list[ThreadRanks]:
    """Return what each drafter of a process knows of the others; one that is awaited longer is lost."""
    meeting = _Meeting(devices, timeout_s)
    return [ThreadRanks(rank, meeting) for rank in range(len(devices))]


class _Meeting:
    """Where the threads of one process wait for each other and lay out what they have."""

    def __init__(self, devices: Sequence[torch.device], timeout_s: float) -> None:
        self.devices, self._timeout_s = devices, timeout_s
        self.offered: list[Sequence[Tensor]] = [()] * len(devices)
        self.reads: list[Sequence[Any]] = [()] * len(devices)
        self._barrier = threading.Barrier(len(devices))
        self._rounds = [0] * len(devices)
        self._abandoned: dict[int, str] = {}

    def carrier(self, source: int, target: int) -> Carrier:
        return carrier_between(self.devices[source], self.devices[target])

    def wait(self, rank: int) -> None:
        self._rounds[rank] += 1
        try:
            self._barrier.wait(self._timeout_s)
        except threading.BrokenBarrierError:
            raise RankLost(self._why(rank)) from None

    def abandon(self, rank: int, reason: str) -> None:
        self._abandoned[rank] = reason
        self._barrier.abort()

    def _why(self, rank: int) -> str:
        if self._abandoned:
            other, reason = next(iter(self._abandoned.items()))
            return f"drafter {other} failed: {reason}"
        missing = [other for other, rounds in enumerate(self._rounds) if rounds < self._rounds[rank]]
        names = " and ".join(f"drafter {other}" for other in missing) or "another drafter"
        return (
            f"drafter {rank} waited {self._timeout_s:g} s to sum gradients with {names}; look at what it does"
        )


class ProcessRanks:
    """This process's drafter among those of a group of torch.distributed."""

    def __init__(self, group: distributed.ProcessGroup | None = None) -> None:
        self.rank, self.size = distributed.get_rank(group), distributed.get_world_size(group)
        self._group = group

    @torch.no_grad()
    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum, by one all-reduce for each bucket."""
        try:
            pending = [self._start(bucket) for bucket in buckets(tensors)]
            for work, bucket, flat in pending:
                work.wait()
                _unpack(flat, bucket)
        except RuntimeError as error:
            raise RankLost(
                f"drafter {self.rank} of {self.size} cannot sum gradients with the others: "
                f"{reason_of(error)}; look for the rank that ended first"
            ) from error

    def _start(self, bucket: Sequence[Tensor]) -> tuple[Any, Sequence[Tensor], Tensor]:
        is_single = len(bucket) == 1 and bucket[0].is_contiguous()
        flat = bucket[0].view(-1) if is_single else torch.cat([tensor.reshape(-1) for tensor in bucket])
        work: Any = distributed.all_reduce(flat, group=self._group, async_op=True)
        return work, bucket, flat


def buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield neighbours of one type whose bytes do not exceed a bucket, in order; large ones alone."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        size_bytes = sum(part.nbytes for part in bucket) + tensor.nbytes
        if bucket and (tensor.dtype != bucket[0].dtype or size_bytes > BUCKET_BYTES):
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket


def _unpack(flat: Tensor, bucket: Sequence[Tensor]) -> None:
    parts = flat.split([tensor.numel() for tensor in bucket])
    for tensor, part in zip(bucket, parts, strict=True):
        if tensor.data_ptr() != part.data_ptr():
            tensor.copy_(part.view_as(tensor))
