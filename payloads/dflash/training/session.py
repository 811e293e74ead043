"""A training from its settings to its end: who is where, what continues, which threads run, who failed first.

In one process every drafter and every target worker is a thread. Under torchrun each process has one target
and one drafter of its own, those at its rank in the settings, and gradients are summed between processes.
"""

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import distributed

from dflash.data.rows import PackedRow
from dflash.flops import count_micro_batch, peak_flops_per_s
from dflash.training.assembly import build_data, build_drafter, build_feeders, build_optimizer
from dflash.training.checkpoint_folder import CheckpointFolder
from dflash.training.checkpoints import Checkpoint, Progress, find_checkpoint
from dflash.training.config import TrainConfig
from dflash.training.failures import TrainingFailure, reason_of
from dflash.training.feeding import Packet, Share, feed
from dflash.training.journal import Journal
from dflash.training.loop import Desk, DrafterLoop
from dflash.training.queue import RowQueue, Sink, start_worker
from dflash.training.ranks import Alone, ProcessRanks, Ranks, ThreadRanks, thread_ranks
from dflash.training.schedule import make_schedule
from dflash.training.seeds import seed_for
from dflash.training.signals import Stop
from dflash.training.step import steps_in_epoch

CHECKPOINTS, TENSORBOARD, SERVED = "checkpoints", "tensorboard", "drafter"
JOIN_S = 30.0  # a worker may be in the middle of a capture when the queue closes


@contextlib.contextmanager
def open_session(config: TrainConfig, stop: Stop) -> Iterator["Session"]:
    """Build a training, or what of it is this process's.

    Raises:
        ValueError: the settings do not fit the target, the documents or the processes.
        CannotResume: the checkpoints in the folder are another training's.
    """
    with _processes() as (rank, size), contextlib.ExitStack() as held:
        cast, folder = _cast(config, rank, size), Path(config.run.folder)
        checkpoints = CheckpointFolder(path=folder / CHECKPOINTS, keep=config.run.checkpoint_keep)
        if cast.is_first:
            held.enter_context(checkpoints.held())
        yield Session(config, stop, cast, checkpoints)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Cast:
    """Who of a training is in this process; `share` is which rows its first target worker brings."""

    targets: tuple[tuple[str, ...], ...]
    drafters: tuple[torch.device, ...]
    share: Share
    has_processes: bool

    @property
    def is_first(self) -> bool:
        """Whether the first drafter is here, which tells and saves."""
        return self.share.first == 0


class Session:
    """A training that is ready to run."""

    def __init__(self, config: TrainConfig, stop: Stop, cast: _Cast, checkpoints: CheckpointFolder) -> None:
        self._config, self._stop, self._cast, self._checkpoints = config, stop, cast, checkpoints
        self._folder = Path(config.run.folder)
        checkpoint = self._found_checkpoint()  # before anything large is loaded
        self._progress = Progress() if checkpoint is None else checkpoint.progress
        self._target, self._feeders = build_feeders(config, cast.targets)
        self._data = build_data(config, self._target)
        self._schedule = make_schedule(config.schedule, config.optimizer, steps_in_epoch=self._steps_in_epoch)
        self._queue: RowQueue[Packet] = RowQueue(
            workers=len(cast.targets),
            drafters=len(cast.drafters),
            capacity=config.workers.queue_size,
            timeout_s=config.workers.timeout_s,
        )
        self._introduce(checkpoint)
        self._journal = self._opened_journal() if cast.is_first else None
        self._loops = self._built_loops(checkpoint)

    def run(self) -> Progress:
        """Train until the last step, or until the end is asked for, and return how far it came.

        Raises:
            TrainingFailure: a member failed; the message names the first one.
            CannotSave: the disk does not take a checkpoint.
        """
        workers = [
            start_worker(self._queue.sink(number), number, partial(self._feed, number=number))
            for number in range(len(self._feeders))
        ]
        try:
            return self._train_all()
        finally:
            self._queue.close()
            for worker in workers:
                worker.join(JOIN_S)
            if self._journal is not None:
                self._journal.close()

    def _train_all(self) -> Progress:
        """Run the drafters but the first in threads of their own; raise what went wrong first."""
        errors: list[BaseException] = []
        results: dict[int, Progress] = {}

        def one(number: int) -> None:
            try:
                results[number] = self._loops[number][1].run(self._progress)
            except BaseException as error:  # noqa: BLE001  raised below
                errors.append(error)
                self._abandon(number, error)

        threads = [
            threading.Thread(target=one, args=(number,), name=f"drafter {number}", daemon=True)
            for number in range(1, len(self._loops))
        ]
        for thread in threads:
            thread.start()
        one(0)
        for thread in threads:
            thread.join()
        if errors:
            raise next((error for error in errors if not isinstance(error, TrainingFailure)), errors[0])
        return results[0]

    def _abandon(self, number: int, error: BaseException) -> None:
        ranks, _ = self._loops[number]
        if isinstance(ranks, ThreadRanks):
            ranks.abandon(reason_of(error))
        self._queue.fail(f"drafter {number}", reason_of(error), error)

    def _feed(self, sink: Sink[Packet], number: int) -> None:
        """Bring the rows of this process's worker `number` from where the training is, without end."""
        cast = self._cast
        members = cast.share.members if cast.has_processes else len(cast.targets)
        feed(
            sink,
            self._feeders[number],
            self._data.train,
            Share(first=cast.share.first + number, members=members),
            epoch=self._progress.epoch,
            number=self._progress.number,
            devices=cast.drafters,
            seen=self._count_flops,
        )

    def _count_flops(self, row: PackedRow) -> None:
        """Count the drafter's work on a row, in the worker's thread, whose host has time."""
        if self._journal is not None:
            seed = seed_for("anchors", self._config.run.seed, row.epoch, row.number)
            drafter = self._loops[0][1].drafter
            flops = count_micro_batch(drafter, loss_mask_1S=row.loss_mask_1S, lengths=row.lengths, seed=seed)
            self._journal.add_flops(flops.both)

    def _steps_in_epoch(self, epoch: int) -> int:
        drafters = len(self._config.workers.drafters)
        rows = self._data.train.number_of_rows(epoch)
        return steps_in_epoch(rows, drafters=drafters, accumulation=self._config.accumulation)

    def _found_checkpoint(self) -> Checkpoint | None:
        if self._config.run.resume:
            return find_checkpoint(self._checkpoints, self._config)
        self._checkpoints.require_none()
        return None

    def _introduce(self, checkpoint: Checkpoint | None) -> None:
        if not self._cast.is_first:
            return
        data, epoch = self._data, self._progress.epoch
        print(data.loaded.report.as_text())
        fill = data.train.fill_share(epoch)
        print(f"[data] {data.train.number_of_rows(epoch)} rows an epoch, {fill:.1%} filled")
        print(f"[train] {self._schedule.total_steps} steps", flush=True)
        if checkpoint is not None:
            print(f"[resume] after step {self._progress.step}, from {checkpoint.path}", flush=True)

    def _opened_journal(self) -> Journal:
        run, devices = self._config.run, self._cast.drafters
        peaks = [peak_flops_per_s(device) for device in devices]
        return Journal(
            every=run.log_every,
            total_steps=self._schedule.total_steps,
            steps_done=self._progress.step,
            counters=self._progress.counters,
            devices=devices,
            peak_flops_per_s=None if None in peaks else sum(filter(None, peaks)),
            tensorboard=self._folder / TENSORBOARD if run.tensorboard else None,
        )

    def _built_loops(self, checkpoint: Checkpoint | None) -> list[tuple[Ranks, DrafterLoop]]:
        devices = self._cast.drafters
        loops = [
            (ranks, self._loop(number, device, ranks, checkpoint))
            for number, (device, ranks) in enumerate(zip(devices, self._ranks(), strict=True))
        ]
        if checkpoint is not None:
            checkpoint.restore_generators(devices[0])
        return loops

    def _loop(
        self, number: int, device: torch.device, ranks: Ranks, checkpoint: Checkpoint | None
    ) -> DrafterLoop:
        feeder = self._feeders[number % len(self._feeders)]
        drafter = build_drafter(self._config, self._target, feeder, device)
        optimizer = build_optimizer(self._config, drafter)
        if checkpoint is not None:
            checkpoint.restore(drafter, optimizer)
        desk = None
        if number == 0 and self._journal is not None:
            served = self._folder / SERVED
            desk = Desk(journal=self._journal, checkpoints=self._checkpoints, served=served)
        return DrafterLoop(
            config=self._config,
            drafter=drafter,
            optimizer=optimizer,
            ranks=ranks,
            source=self._queue.source(number),
            data=self._data,
            feeder=feeder,
            schedule=self._schedule,
            stop=self._stop,
            desk=desk,
        )

    def _ranks(self) -> Sequence[Ranks]:
        if self._cast.has_processes:
            return [ProcessRanks()]
        if len(self._cast.drafters) == 1:
            return [Alone()]
        return thread_ranks(self._cast.drafters, timeout_s=self._config.workers.timeout_s)


def _cast(config: TrainConfig, rank: int | None, size: int) -> _Cast:
    """Return who is in this process; without processes everybody is."""
    workers = config.workers
    targets, drafters = workers.target_devices, tuple(torch.device(name) for name in workers.drafters)
    if rank is None:
        return _Cast(targets=targets, drafters=drafters, share=Share(), has_processes=False)
    if not size == len(targets) == len(drafters):
        raise ValueError(
            f"torchrun started {size} processes, workers.targets names {len(targets)} and workers.drafters "
            f"{len(drafters)}; each process has one of both, so let all three be equal, or run one process"
        )
    return _Cast(
        targets=(targets[rank],),
        drafters=(drafters[rank],),
        share=Share(first=rank, members=size),
        has_processes=True,
    )


@contextlib.contextmanager
def _processes() -> Iterator[tuple[int | None, int]]:
    """Join the other processes that torchrun has started, if it has; yield this one's rank, None alone."""
    if "WORLD_SIZE" not in os.environ or int(os.environ["WORLD_SIZE"]) == 1:
        yield None, 1
        return
    distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield distributed.get_rank(), distributed.get_world_size()
    finally:
        distributed.destroy_process_group()
