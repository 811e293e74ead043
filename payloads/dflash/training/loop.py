"""One drafter's training: its steps, validations and checkpoints, in step with the other drafters.

All drafters take the same decisions at the same steps, so every collective finds all of them. The first one
also tells and saves; replicas hold the same weights.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from dflash.drafter import DFlashDrafter
from dflash.optimizer import MasterAdamW
from dflash.serving import save_drafter
from dflash.training.assembly import Data, build_objective
from dflash.training.checkpoint_folder import CheckpointFolder
from dflash.training.checkpoints import Progress, save_checkpoint
from dflash.training.config import TrainConfig
from dflash.training.feeding import Feeder, Packet, Share, held_out
from dflash.training.journal import Journal
from dflash.training.micro_batch import MicroBatch
from dflash.training.queue import Source
from dflash.training.ranks import Ranks
from dflash.training.schedule import Schedule
from dflash.training.signals import Stop
from dflash.training.step import DrafterStep
from dflash.training.validation import validate


@dataclass(frozen=True, kw_only=True, slots=True)
class Desk:
    """Where the first drafter tells and saves."""

    journal: Journal
    checkpoints: CheckpointFolder
    served: Path


class DrafterLoop:
    """One drafter among `ranks`, which takes its rows from `source`; the first one has a `desk`."""

    def __init__(
        self,
        *,
        config: TrainConfig,
        drafter: DFlashDrafter,
        optimizer: MasterAdamW,
        ranks: Ranks,
        source: Source[Packet],
        data: Data,
        feeder: Feeder,
        schedule: Schedule,
        stop: Stop,
        desk: Desk | None,
    ) -> None:
        self.drafter = drafter
        self._config, self._optimizer, self._ranks = config, optimizer, ranks
        self._source, self._data, self._feeder = source, data, feeder
        self._schedule, self._stop, self._desk = schedule, stop, desk
        self._rows_of_step = config.optimizer.micro_batches
        self._objective = build_objective(config)
        self._device = drafter.fc.weight.device
        self._saved_step: int | None = None
        self._take = DrafterStep(
            drafter=drafter,
            optimizer=optimizer,
            ranks=ranks,
            objective=self._objective,
            seed=config.run.seed,
            accumulation=config.accumulation,
            max_norm=config.optimizer.clip,
            noise=config.loss.noise,
        )

    def run(self, progress: Progress) -> Progress:
        """Train until the last step or until somebody asks for the end; save then.

        Raises:
            TrainingFailure: a target worker or another drafter failed, or rows do not come.
            CannotSave: the disk does not take a checkpoint.
        """
        run = self._config.run
        while progress.step < self._schedule.total_steps and not self._is_stop_agreed():
            progress = self._step(progress)
            if run.validate_every and progress.step % run.validate_every == 0:
                self._validate(progress)
            if progress.step % run.checkpoint_every == 0:
                self._save(progress)
        is_done = progress.step >= self._schedule.total_steps
        if is_done and run.validate_every and progress.step % run.validate_every:
            self._validate(progress)
        self._save(progress)
        if is_done and self._desk is not None:
            save_drafter(self.drafter, self._desk.served)
        return progress

    def _step(self, progress: Progress) -> Progress:
        epoch, number = progress.epoch, progress.number
        numbers = range(number + self._ranks.rank, number + self._rows_of_step, self._ranks.size)
        lr = self._schedule.lr(progress.step)
        result = self._take(self._micro_batches(epoch, numbers), lr=lr)
        step = progress.step + 1
        if self._desk is not None:
            self._desk.journal.end_step(step, result, lr=lr, queue_depth=self._source.depth)
        number += self._rows_of_step
        if number >= self._data.train.number_of_rows(epoch):
            epoch, number = epoch + 1, 0
        return Progress(step=step, epoch=epoch, number=number)

    def _micro_batches(self, epoch: int, numbers: range) -> Iterator[MicroBatch]:
        for number in numbers:
            packet = self._source.take(epoch, number)
            if packet is not None:
                yield packet.receive()

    def _is_stop_agreed(self) -> bool:
        """Return whether any drafter was asked to stop, the same for all of them."""
        if self._ranks.size == 1:
            return self._stop.is_asked
        asked = torch.full((1,), float(self._stop.is_asked), device=self._device)
        self._ranks.sum([asked])
        return bool(asked.item())

    def _validate(self, progress: Progress) -> None:
        if self._data.held_out is None:
            return
        share = Share(first=self._ranks.rank, members=self._ranks.size)
        most = self._config.run.validate_rows
        micro_batches = held_out(self._feeder, self._data.held_out, share, most=most, device=self._device)
        with contextlib.nullcontext() if self._desk is None else self._desk.journal.aside():
            figures = validate(
                self.drafter,
                micro_batches,
                objective=self._objective,
                ranks=self._ranks,
                seed=self._config.run.seed,
            )
        if self._desk is not None:
            self._desk.journal.end_validation(progress.step, figures)

    def _save(self, progress: Progress) -> None:
        if self._desk is None or self._saved_step == progress.step:
            return
        with self._desk.journal.aside():
            save_checkpoint(
                self._desk.checkpoints,
                drafter=self.drafter,
                optimizer=self._optimizer,
                progress=replace(progress, counters=self._desk.journal.counters),
                config=self._config,
            )
        self._saved_step = progress.step
