"""The learning rate of each step: linear warm-up, then a cosine down to a floor.

A pure function of the step, so that its whole state is the step itself.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from dflash.training.config import OptimizerSettings, ScheduleSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """The rates of `total_steps` steps, the first `warmup_steps` of which rise to `peak`.

    The last step of the warm-up has the peak. The floor is that of the step after the last one, and of all
    later ones: with a floor of 0 no step is taken in vain.
    """

    peak: float
    floor: float
    warmup_steps: int
    total_steps: int

    def lr(self, step: int) -> float:
        """Return the rate of the step that has `step` steps before it."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        first = max(self.warmup_steps - 1, 0)
        share = min(1.0, (step - first) / (self.total_steps - first))
        return self.floor + (self.peak - self.floor) * 0.5 * (1 + math.cos(math.pi * share))


def make_schedule(
    schedule: ScheduleSettings, optimizer: OptimizerSettings, *, steps_in_epoch: Callable[[int], int]
) -> Schedule:
    """Return the schedule; each epoch's steps are asked for where the settings say epochs.

    Raises:
        ValueError: there is no step to take.
    """
    total = schedule.steps
    if schedule.epochs is not None:
        total = sum(steps_in_epoch(epoch) for epoch in range(schedule.epochs))
    assert total is not None, "the settings say one of the two"
    if total < 1:
        raise ValueError(
            f"schedule.epochs is {schedule.epochs}, but there is no step in them; the data make no row"
        )
    return Schedule(
        peak=optimizer.lr,
        floor=optimizer.lr * schedule.min_lr_share,
        warmup_steps=round(schedule.warmup_share * total),
        total_steps=total,
    )
