"""Rows between processes: `python -m tests.payload.mail_program FOLDER`.

For each case forks workers and drafters, which meet over gloo. Each drafter leaves in FOLDER what it took, in
order, and how it ended. Cases: whole, failing (worker 1 raises at row 4), dying (it exits there without a
word).
"""

import multiprocessing
import os
import sys
from dataclasses import fields, replace
from pathlib import Path

import torch
from dflash.training.failures import TrainingFailure
from dflash.training.mail import MailSink, MailSource
from dflash.training.micro_batch import MicroBatch
from dflash.training.queue import Sink, start_worker
from torch import distributed

from tests.payload.training import micro_batches

CASES = ("whole", "failing", "dying")
WORKERS, DRAFTERS, CAPACITY = 3, 2, 2
ROWS, EPOCHS = 11, 2


def row_of(epoch: int, number: int) -> MicroBatch:
    """Return a row that tells itself from all others."""
    row = micro_batches(number % 4 + 1, dtype=torch.bfloat16)[-1]
    return replace(row, epoch=epoch, number=number, features_1SF=row.features_1SF + epoch + number)


def bring(sink: Sink[MicroBatch], case: str, worker: int, workers: int) -> None:
    """Do a worker's work, or a part of it."""
    for epoch in range(EPOCHS):
        for number in range(worker, ROWS, workers):
            if number == 4 and case == "dying":
                os._exit(1)
            if number == 4 and case == "failing":
                raise RuntimeError("CUDA out of memory")
            sink.put(epoch, number, row_of(epoch, number))
        sink.end_epoch(epoch, ROWS)


def work(case: str, worker: int) -> None:
    """Be a worker."""
    ranks = range(WORKERS, WORKERS + DRAFTERS)
    sink = MailSink(worker=worker, workers=WORKERS, drafter_ranks=ranks, capacity=CAPACITY)
    start_worker(sink, worker, lambda end: bring(end, case, worker, WORKERS)).join()
    sink.finish()


def draft(folder: Path, case: str, drafter: int) -> None:
    """Be a drafter."""
    source = MailSource(
        drafter=drafter,
        drafters=DRAFTERS,
        worker_ranks=range(WORKERS),
        device=torch.device("cpu"),
        capacity=CAPACITY,
        timeout_s=60,
        first=(0, drafter),
    )
    taken: list[MicroBatch] = []
    ended = "whole"
    try:
        for epoch in range(EPOCHS):
            number = drafter
            while (row := source.take(epoch, number)) is not None:
                taken.append(row)
                number += DRAFTERS
    except TrainingFailure as error:
        ended = f"{type(error).__name__}: {error}"
    rows = [{field.name: getattr(row, field.name) for field in fields(row)} for row in taken]
    torch.save({"ended": ended, "rows": rows}, folder / f"{case}-{drafter}.pt")
    source.close()


def _member(folder: Path, case: str, rank: int) -> None:
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting-{case}"
    distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=WORKERS + DRAFTERS)
    if rank < WORKERS:
        work(case, rank)
    else:
        draft(folder, case, rank - WORKERS)
    os._exit(0)


def main(folder: Path) -> int:
    """Return how many did not end."""
    context = multiprocessing.get_context("fork")
    members = [
        context.Process(target=_member, args=(folder, case, rank))
        for case in CASES
        for rank in range(WORKERS + DRAFTERS)
    ]
    for member in members:
        member.start()
    for member in members:
        member.join(60)
    hanging = [member for member in members if member.is_alive()]
    for member in hanging:
        member.kill()
    return len(hanging)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
