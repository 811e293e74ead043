"""From a real target's states over queue and steps to a drafter that knows eight documents by heart."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from dflash.training.micro_batch import MicroBatch
from dflash.training.queue import RowQueue, Sink, Source, start_worker
from dflash.training.ranks import Alone
from dflash.training.step import Objective
from dflash.training.validation import validate

from tests.payload.small_targets import captured_row, drafter_for, random_target
from tests.payload.training import step_of

BLOCK, VOCABULARY, STEPS, LR = 4, 61, 200, 1e-2
OBJECTIVE = Objective(use_soft_labels=False)


def test_eight_documents_are_overfitted() -> None:
    torch.manual_seed(0)
    target = random_target(hidden_size=64, vocab_size=VOCABULARY)
    documents = [torch.randint(0, VOCABULARY - 1, (40 - number % 3,)) for number in range(8)]
    row = captured_row(target, documents, budget=324, number=0)
    drafter = drafter_for(target, block_size=BLOCK, max_anchors=64)
    step = step_of(drafter, objective=OBJECTIVE, noise=0.02)
    queue: RowQueue[MicroBatch] = RowQueue(workers=1, drafters=1, capacity=2, timeout_s=30)
    worker = start_worker(queue.sink(0), 0, lambda sink: bring(sink, row))
    for number, micro_batch in enumerate(taken(queue.source(0))):
        step([micro_batch], lr=learning_rate(number))
    worker.join(timeout=30)
    assert not worker.is_alive()
    drafter.max_anchors = 1000  # all there are
    found = validate(drafter, [row], objective=OBJECTIVE, ranks=Alone(), seed=0)
    assert found["blocks"] == sum(len(tokens) - 1 for tokens in documents)
    assert found["accuracy"] >= 0.99
    assert found["avg_streak"] >= 0.95 * (BLOCK - 1)


def learning_rate(step: int) -> float:
    """Rise for ten steps, and end at a tenth."""
    return LR * min(1.0, (step + 1) / 10) * (1.0 if step < 0.7 * STEPS else 0.1)


def bring(sink: Sink[MicroBatch], row: MicroBatch) -> None:
    for epoch in range(STEPS):
        sink.end_epoch(epoch, 1)
        sink.put(epoch, 0, replace(row, epoch=epoch))


def taken(source: Source[MicroBatch]) -> Iterator[MicroBatch]:
    for epoch in range(STEPS):
        row = source.take(epoch, 0)
        assert row is not None
        yield row
    source.close()
