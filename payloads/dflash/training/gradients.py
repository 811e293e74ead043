"""Gradients of one optimizer step: summed over micro-batches and drafters first, divided last.

What a micro-batch adds is the gradient of loss·weight_sum, which knows no denominator. The denominator, the
sum of all weight_sums, is known when all have been added, and goes to the optimizer as a divisor. So how a
step's micro-batches are split over accumulation and drafters changes gradients by the order of float32 sums
alone: within 1e-6 of the largest. (An order that no split changes would need a buffer for each level of a
tree; between runs of one split the order is fixed.)

Where more than one micro-batch is summed, gradients of narrow parameters are summed in float32 beside them;
else they stay what and where autograd leaves them. No DistributedDataParallel: it divides by ranks at once,
and waits for a backward that a skipped or missing micro-batch does not have.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dflash.metrics import Metrics
from dflash.training.ranks import Ranks
from dflash.training.sums import Sums


@dataclass(frozen=True, kw_only=True, slots=True)
class Combined:
    """All drafters' undivided gradients and figures; `divisor` is a scalar on the device."""

    gradients: dict[nn.Parameter, Tensor]
    sums: Sums

    @property
    def divisor(self) -> Tensor:
        """What the gradients are still to be divided by: 0 where no slot of any drafter carries loss."""
        return self.sums.weight_sum


class GradientSums:
    """One drafter's gradients and figures of the step that is under way."""

    def __init__(self, parameters: Iterable[nn.Parameter], *, is_single: bool) -> None:
        """`is_single` says that a step is one micro-batch of one drafter."""
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._wide = {} if is_single else _wide_sums(self._parameters)
        self._device = self._parameters[0].device
        self.clear()

    def clear(self) -> None:
        """Begin a step with nothing."""
        self._sums = Sums(self._device)
        for parameter in self._parameters:
            parameter.grad = None
        for total in self._wide.values():
            total.zero_()

    def add(self, loss: Tensor, metrics: Metrics, *, tokens: int) -> None:
        """Add a micro-batch of that many tokens, given the drafter's mean loss and metrics.

        One that is not finite is counted and has no backward, nor has one without loss. The host waits for
        the loss: what is not finite must not reach the sums.
        """
        found, weight_sum = torch.stack([loss.detach(), metrics["weight_sum"].to(loss.dtype)]).tolist()
        if not (abs(found) < torch.inf and abs(weight_sum) < torch.inf):
            self._sums.add_nonfinite(tokens=tokens)
            return
        self._sums.add(metrics, tokens=tokens)
        if weight_sum > 0:
            torch.autograd.backward(loss * metrics["weight_sum"])
            self._widen()

    def combine(self, ranks: Ranks) -> Combined:
        """Return the sums over all drafters; one that added nothing takes part with zeros."""
        gradients = {parameter: self._total(parameter) for parameter in self._parameters}
        if ranks.size > 1:
            ranks.sum([*gradients.values(), self._sums.vector])
        return Combined(gradients=gradients, sums=self._sums)

    @torch.no_grad()
    def _widen(self) -> None:
        for parameter, total in self._wide.items():
            assert parameter.grad is not None
            total.add_(parameter.grad)
            parameter.grad = None

    def _total(self, parameter: nn.Parameter) -> Tensor:
        if parameter in self._wide:
            return self._wide[parameter]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return parameter.grad


def _wide_sums(parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
    narrow = [p for p in parameters if torch.promote_types(p.dtype, torch.float32) != p.dtype]
    return {parameter: torch.zeros_like(parameter, dtype=torch.float32) for parameter in narrow}
