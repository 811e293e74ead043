"""The drafter that a probe runs, its random rows, its steps, and their times.

A step is forward and backward, that and an optimizer's step, or a forward alone.
"""

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from dflash.anchors import draw_anchors
from dflash.blocks import Blocks, lay_out
from dflash.config import DrafterConfig
from dflash.drafter import DFlashDrafter
from dflash.execution import Execution, choose_execution
from dflash.loss import largest_chunk
from dflash.metrics import Metrics
from dflash.optimizer import MasterAdamW
from dflash.packing import HOST, pack
from dflash.platforms import simulation
from dflash.probes.size import DrafterSize
from dflash.probes.work.machine import Machine, open_machine

Arguments = dict[str, Any]

# Neither changes what is allocated, nor do such small steps of a random drafter show in its loss.
LEARNING_RATE = 1e-5
MAX_NORM = 1.0
MOST_COMPARED = 64  # steps, of which a simulation takes one


class Step(Protocol):
    """One step on a row; returns loss and metrics, still on the device."""

    def __call__(self, drafter: DFlashDrafter, row: Arguments, *, seed: int) -> tuple[Tensor, Metrics]:
        """Take the step."""


def forward_backward(drafter: DFlashDrafter, row: Arguments, *, seed: int) -> tuple[Tensor, Metrics]:
    """Take a step that leaves gradients."""
    loss, metrics = drafter(**row, seed=seed)
    torch.autograd.backward(loss)
    return loss.detach(), metrics


def forward_only(drafter: DFlashDrafter, row: Arguments, *, seed: int) -> tuple[Tensor, Metrics]:
    """Take a step without gradients."""
    with torch.no_grad():
        loss, metrics = drafter(**row, seed=seed)
    return loss, metrics


class TrainingStep:
    """Steps of one drafter and its optimizer, as the trainer takes them; metrics gain the gradients' norm."""

    def __init__(self, drafter: DFlashDrafter) -> None:
        self._optimizer = MasterAdamW(drafter.parameters(), lr=LEARNING_RATE)

    def __call__(self, drafter: DFlashDrafter, row: Arguments, *, seed: int) -> tuple[Tensor, Metrics]:
        """Take a step that leaves gradients and stepped weights."""
        loss, metrics = forward_backward(drafter, row, seed=seed)
        return loss, metrics | {"grad_norm": self._optimizer.step(MAX_NORM)}


def step_name(step: Step) -> str:
    """Return in words what a step is."""
    if step is forward_only:
        return "forward"
    return "forward + backward + optimizer" if isinstance(step, TrainingStep) else "forward + backward"


def open_workplace(size: DrafterSize, *, title: str) -> Machine:
    """Open the device, say on what and with which numbers the probe runs, and set torch's defaults.

    Raises:
        CannotStart: there is no such device, or its memory limit cannot be simulated.
    """
    machine = open_machine(size.device)
    print(f"DFlash {title} · torch {torch.__version__} · {machine.describe()}")
    print(f"parameters: {json.dumps(asdict(size))}")
    if size.memory_limit_gib is not None:
        print(machine.limit_memory(size.memory_limit_gib))
    torch.set_default_dtype(getattr(torch, size.dtype))
    torch.manual_seed(size.seed)
    return machine


def build_drafter(
    size: DrafterSize, machine: Machine, *, max_anchors: int, **changed: object
) -> DFlashDrafter:
    """Return a drafter with random weights; `changed` are fields of its configuration."""
    started_s = machine.now_s()
    with machine.device:
        drafter = DFlashDrafter(
            config=size.drafter_config(**changed),
            target_layer_ids=size.target_layer_ids,
            block_size=size.block_size,
            max_anchors=max_anchors,
            mask_token_id=size.mask_token_id,
        )
    trainable = sum(parameter.numel() for parameter in drafter.parameters() if parameter.requires_grad)
    print(f"[build] {trainable:,} trainable parameters in {machine.now_s() - started_s:.1f} s", flush=True)
    return drafter


def execution_of(config: DrafterConfig, machine: Machine, step: Step) -> Execution:
    """Return how a drafter of a `DrafterSize` will really compute such a step."""
    assert config.dtype is not None
    return choose_execution(
        config,
        device=machine.device,
        dtype=getattr(torch, config.dtype),
        needs_gradients=step is not forward_only,
    )


def random_row(size: DrafterSize, lengths: Sequence[int], device: torch.device) -> Arguments:
    """Return a forward's arguments: random states and tokens, documents of those lengths, every label."""
    generator = torch.Generator(device=device).manual_seed(size.seed)
    row_length, width = sum(lengths), size.hidden_size
    features = len(size.target_layer_ids) * width
    positions = [torch.arange(length, device=device) + size.position_base for length in lengths]
    return {
        "all_hidden_states": torch.randn(1, row_length, features, generator=generator, device=device),
        "verifier_last_hidden": torch.randn(1, row_length, width, generator=generator, device=device),
        "input_ids": torch.randint(size.vocab_size, (1, row_length), generator=generator, device=device),
        "loss_mask": torch.ones(1, row_length, dtype=torch.int64, device=device),
        "lengths": torch.tensor(lengths),
        "position_ids": torch.cat(positions)[None],
        "use_soft_labels": True,
        "kl_weight": size.kl_weight,
        "gamma": size.gamma,
    }


def blocks_of(size: DrafterSize, lengths: Sequence[int], *, max_anchors: int) -> Blocks:
    """Return the blocks that the first step on `random_row` draws."""
    return _drawn(lengths, max_anchors=max_anchors, block_size=size.block_size, seed=size.seed)


def _drawn(lengths: Sequence[int], *, max_anchors: int, block_size: int, seed: int) -> Blocks:
    packing = pack(lengths, sum(lengths))
    loss_mask = torch.ones(packing.row_length, dtype=torch.bool, device=HOST)
    anchors = draw_anchors(packing, loss_mask, max_anchors=max_anchors, seed=seed)
    return lay_out(packing, loss_mask, anchors, block_size=block_size)


def steps_to_take(drafter: DFlashDrafter, row: Arguments, seed: int, numbers: range) -> Sequence[int]:
    """Return which of the steps on a row to take: all, or in a simulation the one that holds the most.

    Steps differ in their anchors alone, which decide how many rows of logits there are at once.
    """
    if not simulation() or not numbers:
        return numbers

    def logits(number: int) -> int:
        blocks = _drawn(
            row["lengths"].tolist(),
            max_anchors=drafter.max_anchors,
            block_size=drafter.block_size,
            seed=seed + number,
        )
        return sum(largest_chunk(blocks.teachers_R, drafter.config.loss_chunk_rows))

    return [max(numbers[:MOST_COMPARED], key=logits)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Durations:
    """What each repetition took, in milliseconds."""

    each_ms: tuple[float, ...]

    @property
    def mean_ms(self) -> float:
        """The mean."""
        return statistics.fmean(self.each_ms)

    @property
    def median_ms(self) -> float:
        """The median."""
        return statistics.median(self.each_ms)


def time_repeated(
    machine: Machine, action: Callable[[int], object], *, warmups: int, iterations: int
) -> Durations:
    """Repeat an action, which is given its number; times and peaks are those after the warm-ups.

    Repetitions allocate the same, so a simulation takes one.
    """
    numbers = range(warmups, warmups + iterations)
    return _time_each(machine, action, range(warmups), numbers[:1] if simulation() else numbers)


def _time_each(
    machine: Machine, action: Callable[[int], object], warmups: Sequence[int], timed: Sequence[int]
) -> Durations:
    for number in () if simulation() else warmups:
        action(number)
    machine.now_s()
    machine.forget_peaks()
    each_ms = []
    for number in timed:
        started_s = machine.now_s()
        action(number)
        each_ms.append((machine.now_s() - started_s) * 1e3)
    return Durations(each_ms=tuple(each_ms))


def time_steps(
    machine: Machine,
    drafter: DFlashDrafter,
    row: Arguments,
    step: Step,
    *,
    seed: int,
    warmups: int,
    iterations: int,
) -> Durations:
    """Time steps, each with anchors of its own and gradients that start from nothing."""

    def one(number: int) -> None:
        drafter.zero_grad(set_to_none=True)
        step(drafter, row, seed=seed + number)

    timed = steps_to_take(drafter, row, seed, range(warmups, warmups + iterations))
    durations = _time_each(machine, one, range(warmups), timed)
    drafter.zero_grad(set_to_none=True)
    return durations
