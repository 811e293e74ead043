"""Everything that an exact resume needs, saved and restored bit by bit; nothing in it is pickled.

    weights.safetensors      the trained parameters by their names
    master, exp_avg, exp_avg_sq and step.safetensors
                             the optimizer's state, one file for each of its tensors, by the same names
    generators.safetensors   torch's random state, on the host and on the drafter's card
    state.json               progress, config, and the random states of Python and numpy

The schedule's state is the step. Embedding and head are the target's and are not saved. Replicas of one
drafter have one checkpoint: one of them saves, each restores.
"""

import json
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from dflash.optimizer import MasterAdamW
from dflash.training.checkpoint_folder import CannotResume, CheckpointFolder, read_state
from dflash.training.config import TrainConfig
from dflash.training.config_file import differences, parse_config, render

WEIGHTS = "weights"
GENERATORS = "generators"
HOST = "cpu"
Named = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far a training is.

    `step` steps are done; the next micro-batch is `number` of `epoch`; `counters` go on counting.
    """

    step: int = 0
    epoch: int = 0
    number: int = 0
    counters: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A whole checkpoint that this training can be continued from."""

    path: Path
    progress: Progress

    def restore(self, drafter: nn.Module, optimizer: MasterAdamW) -> None:
        """Bring a drafter and its optimizer to the saved state, bit by bit.

        Raises:
            CannotResume: they have other parameters, or the same in another type.
        """
        weights, trained = self._tensors(WEIGHTS), _trained(drafter)
        try:
            _check_same(trained, weights)
            optimizer.load_state_dict(self._optimizer_state(drafter, optimizer))
        except ValueError as error:
            raise CannotResume(f"{self.path} is of another drafter: {error}") from error
        for name, parameter in trained.items():
            parameter.copy_(weights[name])

    def restore_generators(self, device: torch.device) -> None:
        """Bring the random states of this process to those of the one that saved, on its card too."""
        state, tensors = read_state(self.path), self._tensors(GENERATORS)
        version, values, gauss = state["python"]
        random.setstate((version, tuple(values), gauss))
        _set_numpy_state(state["numpy"])
        torch.set_rng_state(tensors[HOST])
        if device.type in tensors and device.type != HOST:
            torch.cuda.set_rng_state(tensors[device.type], device)

    def _optimizer_state(self, drafter: nn.Module, optimizer: MasterAdamW) -> dict[str, Any]:
        """Return the saved state in the order of this optimizer's parameters."""
        kinds = {kind: self._tensors(kind) for kind in _state_kinds(optimizer)}
        states = {
            number: {kind: kinds[kind][name] for kind in kinds if name in kinds[kind]}
            for number, name in enumerate(_names_in_order(drafter, optimizer))
        }
        return {"param_groups": optimizer.state_dict()["param_groups"], "state": states}

    def _tensors(self, name: str) -> Named:
        path = self.path / f"{name}.safetensors"
        tensors: Named = load_file(path) if path.exists() else {}
        return tensors


def save_checkpoint(
    folder: CheckpointFolder,
    *,
    drafter: nn.Module,
    optimizer: MasterAdamW,
    progress: Progress,
    config: TrainConfig,
) -> Path:
    """Save a training between two steps and return the checkpoint's folder.

    Raises:
        CannotSave: the disk is full or does not take it; earlier checkpoints are as they were.
    """
    groups = {WEIGHTS: _trained(drafter)}
    groups |= {kind: _states(drafter, optimizer, kind) for kind in _state_kinds(optimizer)}
    groups[GENERATORS] = _generators(next(iter(groups[WEIGHTS].values())).device)
    state = {
        "progress": asdict(progress),
        "config": json.loads(render(config)),
        "python": random.getstate(),
        "numpy": _numpy_state(),
    }
    files = {f"{name}.safetensors": tensors for name, tensors in groups.items() if tensors}
    return folder.write(progress.step, files, state)


def find_checkpoint(folder: CheckpointFolder, config: TrainConfig) -> Checkpoint | None:
    """Return the newest whole checkpoint, None where the training has not saved yet.

    Raises:
        CannotResume: it is another training's, whose settings differ in what may not change, or all are
            damaged.
    """
    path = folder.newest()
    if path is None:
        return None
    state = read_state(path)
    try:
        differing = differences(parse_config(state["config"]), config)
        progress = Progress(**state["progress"])
    except (ValueError, KeyError, TypeError) as error:
        raise CannotResume(f"{path} was saved by other code: {error}") from error
    if differing:
        raise CannotResume(
            f"{path} was saved by another training: {'; '.join(differing)}; "
            "take the settings back, or name another run.folder"
        )
    return Checkpoint(path=path, progress=progress)


def _trained(drafter: nn.Module) -> Named:
    return {name: value.detach() for name, value in drafter.named_parameters() if value.requires_grad}


def _names_in_order(drafter: nn.Module, optimizer: MasterAdamW) -> list[str]:
    """Return the names of the optimizer's parameters in its order."""
    names = {id(parameter): name for name, parameter in drafter.named_parameters()}
    return [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]


def _state_kinds(optimizer: MasterAdamW) -> list[str]:
    return sorted({kind for state in optimizer.state.values() for kind in state})


def _states(drafter: nn.Module, optimizer: MasterAdamW, kind: str) -> Named:
    """Return one tensor of each parameter's state, for those that have it."""
    names = {id(parameter): name for name, parameter in drafter.named_parameters()}
    return {names[id(key)]: state[kind] for key, state in optimizer.state.items() if kind in state}


def _check_same(own: Named, saved: Named) -> None:
    if own.keys() != saved.keys():
        only = sorted(own.keys() ^ saved.keys())
        raise ValueError(f"{len(only)} weights are in one of the two alone, {only[0]} for one")
    for name, tensor in own.items():
        if (tensor.shape, tensor.dtype) != (saved[name].shape, saved[name].dtype):
            raise ValueError(
                f"{name} was saved as {list(saved[name].shape)} {saved[name].dtype}, "
                f"this drafter's is {list(tensor.shape)} {tensor.dtype}"
            )


def _generators(device: torch.device) -> Named:
    states = {HOST: torch.get_rng_state()}
    if device.type == "cuda":
        states[device.type] = torch.cuda.get_rng_state(device)
    return states


def _numpy_state() -> dict[str, Any]:
    state = np.random.get_state(legacy=False)  # noqa: NPY002  others may draw from it
    return state | {"state": {name: np.asarray(value).tolist() for name, value in state["state"].items()}}


def _set_numpy_state(state: dict[str, Any]) -> None:
    key = np.array(state["state"]["key"], dtype=np.uint32)
    np.random.set_state(state | {"state": state["state"] | {"key": key}})  # noqa: NPY002  others may draw from it
