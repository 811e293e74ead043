"""A small real training with everything that a resume must bring back; it can be left at any micro-batch."""

import dataclasses
import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dflash.optimizer import MasterAdamW
from dflash.packing import HOST
from dflash.training.checkpoint_folder import CheckpointFolder
from dflash.training.checkpoints import Progress, find_checkpoint, save_checkpoint
from dflash.training.config import TrainConfig
from dflash.training.config_file import load_config
from dflash.training.schedule import make_schedule
from torch import Tensor

from tests.payload.cases import FULL, SLIDING, Case, arguments_of, build_row, fresh_drafter, random_weights

STEPS, EPOCH_ROWS, MICRO_BATCHES = 8, 5, 2
CASE = Case(layer_types=(SLIDING, FULL), attention="sdpa_chunked", anchors=None, compile=False)


class Interrupted(Exception):
    pass


@functools.cache
def row_arguments(epoch: int, number: int, dtype: torch.dtype) -> dict[str, Any]:
    case = dataclasses.replace(CASE, seed=100 * epoch + number, dtype=dtype)
    return arguments_of(case, build_row(case))


@dataclass
class Training:
    """A small real training: the drafter, masters, a schedule, accumulation, and what draws at random."""

    folder: Path
    dtype: torch.dtype = torch.bfloat16
    device: torch.device = HOST
    every: int = 1
    keep: int = 2

    def __post_init__(self) -> None:
        self.config = config_of(self.folder)
        self.checkpoints = CheckpointFolder(path=self.folder, keep=self.keep)
        self.drafter = fresh_drafter(CASE).to(self.device, self.dtype)
        self.drafter.load_state_dict(random_weights(self.drafter, seed=0))
        self.optimizer = MasterAdamW(self.drafter.parameters(), lr=1.0, weight_decay=0.1)
        self.schedule = make_schedule(self.config.schedule, self.config.optimizer, steps_in_epoch=abs)
        self.progress = Progress(counters={"tokens": 0})
        seed_generators()
        found = find_checkpoint(self.checkpoints, self.config)
        if found is not None:
            found.restore(self.drafter, self.optimizer)
            found.restore_generators(self.device)
            self.progress = found.progress

    def run(self, before_micro_batch: Callable[[], object] = lambda: None) -> "Training":
        while self.progress.step < STEPS:
            for _ in range(MICRO_BATCHES):
                before_micro_batch()
                self._micro_batch()
            for group in self.optimizer.param_groups:
                group["lr"] = self.schedule.lr(self.progress.step)
            self.optimizer.step(1.0)
            self.drafter.zero_grad()
            self.progress = dataclasses.replace(self.progress, step=self.progress.step + 1)
            if self.progress.step % self.every == 0:
                self.save()
        return self

    def save(self) -> Path:
        return save_checkpoint(
            self.checkpoints,
            drafter=self.drafter,
            optimizer=self.optimizer,
            progress=self.progress,
            config=self.config,
        )

    def everything(self) -> dict[str, Tensor]:
        found = {name: value.detach().clone() for name, value in self.drafter.named_parameters()}
        for number, parameter in enumerate(self.optimizer.state):
            for name, tensor in self.optimizer.state[parameter].items():
                found[f"{name} {number}"] = tensor.clone()
        found["drawn"] = torch.tensor([random.random(), np.random.random()], dtype=torch.float64)  # noqa: NPY002
        found["drawn by torch"] = torch.rand(2)
        found["drawn there"] = torch.rand(2, device=self.device)
        found["progress"] = torch.tensor(
            [self.progress.step, self.progress.epoch, self.progress.number, *self.progress.counters.values()]
        )
        return found

    def _micro_batch(self) -> None:
        moved = {
            name: value.to(self.device) if isinstance(value, Tensor) else value
            for name, value in row_arguments(self.progress.epoch, self.progress.number, self.dtype).items()
        }
        features = moved["all_hidden_states"]
        noise = 0.05 * (random.random() + np.random.random()) * torch.rand(features.shape, device=self.device)  # noqa: NPY002
        # Without anchors and seed torch's global generator draws the anchors.
        loss, metrics = self.drafter(**moved | {"all_hidden_states": (features + noise).to(self.dtype)})
        torch.autograd.backward(loss * metrics["weight_sum"])
        epoch, number = divmod(self.progress.epoch * EPOCH_ROWS + self.progress.number + 1, EPOCH_ROWS)
        counters = {"tokens": self.progress.counters["tokens"] + CASE.row_length}
        self.progress = dataclasses.replace(self.progress, epoch=epoch, number=number, counters=counters)


def seed_generators() -> None:
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(1)


def config_of(folder: Path, *assignments: str) -> TrainConfig:
    given = ["preset=tiny", "target.path=model", 'data.files=["a"]', f"schedule.steps={STEPS}"]
    return load_config(None, [*given, f'run.folder="{folder.name}"', *assignments])


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    differing = [name for name, value in expected.items() if not torch.equal(found[name], value)]
    assert differing == []
