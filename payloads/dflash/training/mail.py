"""The queue between processes: rows go from worker to drafter as messages of torch.distributed.

A worker's `MailSink` sends each row to the drafter whose number it is, and is at most `capacity` rows ahead
of what has been received. A drafter's `MailSource` receives in a thread, in the order in which it will be
asked, into a `RowQueue` that keeps order, time-outs and names. Both ends have the same capacity. Host tensors
travel by gloo; states travel by the backend of the device that they are on (`backend="cpu:gloo,cuda:nccl"`
has both).

A row is three messages more than its header of integers: tokens with loss mask and lengths, and two states.

Shape letters: S tokens of the row, F features (target layers × H), H hidden.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, distributed

from dflash.training.failures import MemberFailed, QueueClosed, reason_of
from dflash.training.micro_batch import MicroBatch
from dflash.training.queue import RowQueue, worker_name

ROW, END_OF_EPOCH, FAILURE = range(3)
RECEIVED, CLOSED = range(2)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
HEADER = 8  # kind; epoch; number, or rows, or bytes; and of a row S, documents, F, H, type of the states

# Who has an unfinished message keeps its tensor.
Sent = list[tuple[Any, Tensor]]


class MailSink:
    """A worker's end; `drafter_ranks` are the drafters' ranks in the default group."""

    def __init__(self, *, worker: int, workers: int, drafter_ranks: Sequence[int], capacity: int) -> None:
        self._worker, self._workers = worker, workers
        self._ranks, self._capacity = drafter_ranks, capacity
        self._under_way: deque[tuple[int, Sent]] = deque()
        self._news: Sent = []

    def put(self, epoch: int, number: int, row: MicroBatch) -> None:
        """Send a row; wait while `capacity` others are not received.

        Raises:
            QueueClosed: a drafter takes no more.
        """
        assert number % self._workers == self._worker, f"row {number} is not worker {self._worker}'s"
        assert (row.epoch, row.number) == (epoch, number)
        drafter = number % len(self._ranks)
        try:
            self._make_room()
            self._under_way.append((drafter, self._send(drafter, _messages_of(row))))
        except QueueClosed as closed:
            self._tell(str(closed))  # the other drafters, which else would wait for what does not come
            raise

    def end_epoch(self, epoch: int, rows: int) -> None:
        """Say to all drafters how many rows an epoch has."""
        for drafter in range(len(self._ranks)):
            self._news += self._send(drafter, [_header(END_OF_EPOCH, epoch, rows)])

    def fail(self, reason: str, cause: BaseException | None = None) -> None:  # noqa: ARG002  it stays here
        """Say to all drafters that this worker has failed, and wait until they have ended."""
        self._tell(reason)
        self.finish()

    def finish(self) -> None:
        """Wait until every drafter has closed its end: what they still have to receive is kept until then."""
        for drafter in range(len(self._ranks)):
            try:
                while True:
                    self._await_receipt(drafter)
            except QueueClosed:
                continue

    def _make_room(self) -> None:
        while len(self._under_way) >= self._capacity:
            drafter, sent = self._under_way.popleft()
            self._await_receipt(drafter)
            _wait(sent)

    def _tell(self, reason: str) -> None:
        text = torch.tensor(list(reason.encode()), dtype=torch.uint8)
        for drafter in range(len(self._ranks)):
            with contextlib.suppress(QueueClosed):
                self._news += self._send(drafter, [_header(FAILURE, 0, len(text)), text])

    def _send(self, drafter: int, tensors: Sequence[Tensor]) -> Sent:
        try:
            return [(distributed.isend(tensor, self._ranks[drafter]), tensor) for tensor in tensors]
        except RuntimeError as error:
            raise QueueClosed(f"drafter {drafter} has ended: {reason_of(error)}") from error

    def _await_receipt(self, drafter: int) -> None:
        receipt = torch.empty(1, dtype=torch.int64)
        try:
            distributed.recv(receipt, self._ranks[drafter])
        except RuntimeError as error:
            raise QueueClosed(f"drafter {drafter} has ended: {reason_of(error)}") from error
        if int(receipt) == CLOSED:
            raise QueueClosed(f"drafter {drafter} takes no more rows")


class MailSource:
    """A drafter's end; `worker_ranks` are the workers' ranks in the default group.

    Rows come from the epoch and the drafter's own number that `first` names on; states arrive on `device`.
    """

    def __init__(
        self,
        *,
        drafter: int,
        drafters: int,
        worker_ranks: Sequence[int],
        device: torch.device,
        capacity: int,
        timeout_s: float,
        first: tuple[int, int],
    ) -> None:
        self._ranks, self._device, self._capacity = worker_ranks, device, capacity
        self._drafter, self._drafters = drafter, drafters
        self._queue: RowQueue[MicroBatch] = RowQueue(
            workers=len(worker_ranks), drafters=drafters, capacity=capacity, timeout_s=timeout_s
        )
        self._source = self._queue.source(drafter)
        self._receipts: list[deque[tuple[Any, Tensor]]] = [deque() for _ in worker_ranks]
        self._answering = threading.Lock()
        threading.Thread(target=self._receive, args=first, name="rows by mail", daemon=True).start()

    @property
    def depth(self) -> int:
        """Rows that wait to be taken here."""
        return self._queue.depth

    def take(self, epoch: int, number: int) -> MicroBatch | None:
        """Return that row, or None when the epoch has fewer.

        Raises:
            Stalled, MemberFailed, QueueClosed: it does not come.
        """
        return self._source.take(epoch, number)

    def close(self) -> None:
        """End both sides."""
        self._queue.close()
        for worker in range(len(self._ranks)):
            with contextlib.suppress(RuntimeError):  # one that has ended needs no telling
                self._answer(worker, CLOSED)

    def _receive(self, epoch: int, number: int) -> None:
        try:
            while True:
                self._receive_epoch(epoch, number)
                epoch, number = epoch + 1, self._drafter
        except (QueueClosed, MemberFailed):
            return  # whoever asks for a row is told by the queue

    def _receive_epoch(self, epoch: int, number: int) -> None:
        """Receive the epoch's rows in order, and from every worker that it has ended."""
        rows = None
        while rows is None:
            told = number % len(self._ranks)
            rows = self._receive_from(told)
            number += self._drafters
        for worker in range(len(self._ranks)):
            if worker != told:
                self._receive_from(worker)
        self._queue.end_epoch(epoch, rows)

    def _receive_from(self, worker: int) -> int | None:
        """Take one message of a worker's; return the number of rows where it ends an epoch."""
        rank = self._ranks[worker]
        try:
            header = _received(torch.empty(HEADER, dtype=torch.int64), rank).tolist()
            if header[0] == END_OF_EPOCH:
                return int(header[2])
            if header[0] == FAILURE:
                text = _received(torch.empty(header[2], dtype=torch.uint8), rank)
                self._queue.fail(worker_name(worker), bytes(text.tolist()).decode(errors="replace"))
                raise MemberFailed(worker_name(worker), "as it says itself")
            row = _row_from(header, rank, self._device)
            self._answer(worker, RECEIVED)
        except RuntimeError as error:
            self._queue.fail(worker_name(worker), f"its process has ended: {reason_of(error)}", error)
            raise MemberFailed(worker_name(worker), "its process has ended") from error
        self._queue.put(row.epoch, row.number, row)
        return None

    def _answer(self, worker: int, answer: int) -> None:
        receipt = torch.tensor([answer])
        receipts = self._receipts[worker]
        with self._answering:
            receipts.append((distributed.isend(receipt, self._ranks[worker]), receipt))
            # A worker has read all but the last ones before it sent the row that this one is for.
            while answer == RECEIVED and len(receipts) > self._capacity:
                _wait([receipts.popleft()])


def _header(kind: int, epoch: int, count: int, *numbers: int) -> Tensor:
    values = [kind, epoch, count, *numbers]
    return torch.tensor(values + [0] * (HEADER - len(values)))


def _messages_of(row: MicroBatch) -> list[Tensor]:
    features_1SF, last_hidden_1SH = row.features_1SF, row.last_hidden_1SH
    assert features_1SF.dtype == last_hidden_1SH.dtype
    header = _header(
        ROW,
        row.epoch,
        row.number,
        features_1SF.shape[1],
        len(row.lengths),
        features_1SF.shape[2],
        last_hidden_1SH.shape[2],
        DTYPES.index(features_1SF.dtype),
    )
    integers = torch.cat(
        [torch.tensor(row.lengths), row.input_ids_1S[0].cpu(), row.loss_mask_1S[0].cpu().long()]
    )
    return [header, integers, features_1SF.contiguous(), last_hidden_1SH.contiguous()]


def _row_from(header: Sequence[int], rank: int, device: torch.device) -> MicroBatch:
    _, epoch, number, tokens, documents, features, hidden, dtype = header
    integers = _received(torch.empty(documents + 2 * tokens, dtype=torch.int64), rank)
    lengths, input_ids_S, loss_mask_S = integers.split([documents, tokens, tokens])
    states = [
        _received(torch.empty(1, tokens, width, dtype=DTYPES[dtype], device=device), rank)
        for width in (features, hidden)
    ]
    return MicroBatch(
        epoch=epoch,
        number=number,
        input_ids_1S=input_ids_S[None],
        loss_mask_1S=loss_mask_S[None] != 0,
        lengths=tuple(lengths.tolist()),
        features_1SF=states[0],
        last_hidden_1SH=states[1],
    )


def _received(tensor: Tensor, rank: int) -> Tensor:
    distributed.recv(tensor, rank)
    return tensor


def _wait(sent: Sent) -> None:
    for work, _ in sent:
        work.wait()
