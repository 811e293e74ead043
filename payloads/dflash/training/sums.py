"""The figures of a step or a validation as one vector, which adds up over micro-batches and ranks.

float64 throughout, where counts below 2⁵³ are exact. A drafter that had no micro-batch has zeros.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from dflash.metrics import Metrics

DRAFTED = (
    "loss_sum",
    "weight_sum",
    "valid_slots",
    "blocks",
    "rows_without_loss",
    "correct_slots",
    "streak_sum",
    "teacher_correct_slots",
    "teacher_streak_sum",
)
COUNTED = ("micro_batches", "nonfinite_micro_batches", "tokens")
BY_SLOT = ("accepted_blocks", "teacher_accepted_blocks")


class Sums:
    """Sums on a device; with `slots` also the blocks that are right up to each of that many slots."""

    def __init__(self, device: torch.device, *, slots: int = 0) -> None:
        self._slots = slots
        self.vector = torch.zeros(
            len(DRAFTED) + len(COUNTED) + len(BY_SLOT) * slots, dtype=torch.float64, device=device
        )

    def add(self, metrics: Metrics, *, tokens: int) -> None:
        """Add what a drafter's forward reports of one micro-batch of that many tokens."""
        scalars = [_number(metrics, name, self.vector) for name in DRAFTED]
        self.vector[: len(DRAFTED)] += torch.stack(scalars)
        self._count(micro_batches=1, tokens=tokens)
        if self._slots:
            self.vector[-len(BY_SLOT) * self._slots :] += torch.cat(
                [self._by_slot(metrics, name) for name in BY_SLOT]
            )

    def add_nonfinite(self, *, tokens: int) -> None:
        """Count a micro-batch whose loss is not finite; nothing else of it counts."""
        self._count(micro_batches=1, nonfinite_micro_batches=1, tokens=tokens)

    @property
    def weight_sum(self) -> Tensor:
        """The loss's denominator so far, on the device."""
        return self.vector[DRAFTED.index("weight_sum")]

    def read(self) -> dict[str, float]:
        """Return all sums and their means as numbers; the host waits for the device."""
        values = self.vector.tolist()
        sums = dict(zip(DRAFTED + COUNTED, values, strict=False))
        by_slot = values[len(DRAFTED) + len(COUNTED) :]
        for place, name in enumerate(BY_SLOT):
            for slot in range(self._slots):
                sums[f"{name}.{slot + 1}"] = by_slot[place * self._slots + slot]
        return sums | _means(sums)

    def _count(self, **counts: int) -> None:
        for name, count in counts.items():
            # A number, not a tensor of the host's: no copy that waits for the device.
            self.vector[len(DRAFTED) + COUNTED.index(name)] += count

    def _by_slot(self, metrics: Metrics, name: str) -> Tensor:
        return metrics[name].double() if name in metrics else self.vector.new_zeros(self._slots)


def _number(metrics: Metrics, name: str, like: Tensor) -> Tensor:
    return metrics[name].double() if name in metrics else like.new_zeros(())


def _means(sums: Mapping[str, float]) -> dict[str, float]:
    """Return the means of sums; a mean over nothing is 0."""
    means = {"loss": _ratio(sums["loss_sum"], sums["weight_sum"])}
    for prefix in ("", "teacher_"):
        means[f"{prefix}accuracy"] = _ratio(sums[f"{prefix}correct_slots"], sums["valid_slots"])
        means[f"{prefix}avg_streak"] = _ratio(sums[f"{prefix}streak_sum"], sums["blocks"])
    for name in sums:
        kind, _, slot = name.partition("_blocks.")
        if slot:
            means[f"{kind.replace('accepted', 'acceptance')}.{slot}"] = _ratio(sums[name], sums["blocks"])
    return means


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
