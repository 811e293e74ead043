"""One optimizer step of a drafter, and which micro-batches each drafter takes for it.

Knows the order: noise, forward with the micro-batch's own anchors, gradients, their sum over drafters,
clipping and AdamW. Learning rates, rows and targets come from others.

Shapes are static where that costs nothing: rows come padded to the budget. The number of anchors is not
padded: a row of fewer valid ones has fewer blocks, and one graph serves all numbers after the second or third
(`dflash.compiling`, a test counts the graphs).
"""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from dflash.checks import check_loss_weights, check_objective
from dflash.drafter import DFlashDrafter
from dflash.metrics import Metrics
from dflash.optimizer import MasterAdamW
from dflash.training.gradients import GradientSums
from dflash.training.micro_batch import MicroBatch
from dflash.training.noise import with_noise
from dflash.training.ranks import Ranks
from dflash.training.seeds import seed_for
from dflash.training.sums import Sums


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """What a slot's loss is and how much it counts, as `DFlashDrafter.forward` says.

    Raises:
        ValueError: the numbers make no loss.
    """

    use_soft_labels: bool = True
    kl_weight: float = 0.15
    gamma: float = 10.0
    loss_weights: str = "decay"
    alpha: float = 0.5

    def __post_init__(self) -> None:
        check_objective(self.kl_weight, self.gamma)
        share = self.kl_weight if self.use_soft_labels else 0.0
        check_loss_weights(self.loss_weights, self.alpha, kl_weight=share)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """A step's figures over all drafters, still on the device."""

    grad_norm: Tensor
    sums: Sums

    def read(self) -> dict[str, float]:
        """Return them as numbers, `grad_norm` among them; the host waits for the device.

        A norm that is not finite says that the step changed nothing.
        """
        return {**self.sums.read(), "grad_norm": float(self.grad_norm)}


class DrafterStep:
    """Steps one drafter; each of several drafters has one, and all step alike."""

    def __init__(
        self,
        *,
        drafter: DFlashDrafter,
        optimizer: MasterAdamW,
        ranks: Ranks,
        objective: Objective,
        seed: int,
        accumulation: int,
        max_norm: float,
        noise: float,
    ) -> None:
        self._drafter, self._optimizer, self._ranks = drafter, optimizer, ranks
        self._objective, self._seed = objective, seed
        self._max_norm, self._noise = max_norm, noise
        is_single = accumulation * ranks.size == 1
        self._gradients = GradientSums(drafter.parameters(), is_single=is_single)

    def __call__(self, micro_batches: Iterable[MicroBatch], *, lr: float) -> StepResult:
        """Take a step with this drafter's share of micro-batches, which may be none."""
        self._gradients.clear()
        for micro_batch in micro_batches:
            loss, metrics = self._forward(micro_batch)
            self._gradients.add(loss, metrics, tokens=sum(micro_batch.lengths))
        combined = self._gradients.combine(self._ranks)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        norm = self._optimizer.step(self._max_norm, gradients=combined.gradients, divisor=combined.divisor)
        return StepResult(grad_norm=norm, sums=combined.sums)

    def _forward(self, micro_batch: MicroBatch) -> tuple[Tensor, Metrics]:
        place = {"seed": self._seed, "epoch": micro_batch.epoch, "number": micro_batch.number}
        features_1SF = with_noise(micro_batch.features_1SF, self._noise, **place)
        return forward(
            self._drafter,
            micro_batch,
            self._objective,
            features_1SF=features_1SF,
            seed=seed_for("anchors", **place),
        )


def forward(
    drafter: DFlashDrafter,
    micro_batch: MicroBatch,
    objective: Objective,
    *,
    features_1SF: Tensor,
    seed: int,
    by_slot: bool = False,
) -> tuple[Tensor, Metrics]:
    """Return a micro-batch's loss and metrics; positions are counted in each document by the drafter."""
    loss, metrics = drafter(
        all_hidden_states=features_1SF,
        verifier_last_hidden=micro_batch.last_hidden_1SH,
        input_ids=micro_batch.input_ids_1S,
        loss_mask=micro_batch.loss_mask_1S,
        lengths=micro_batch.lengths,
        use_soft_labels=objective.use_soft_labels,
        kl_weight=objective.kl_weight,
        gamma=objective.gamma,
        loss_weights=objective.loss_weights,
        alpha=objective.alpha,
        seed=seed,
        by_slot=by_slot,
    )
    return loss, metrics


def own_numbers(step: int, *, drafter: int, drafters: int, accumulation: int) -> range:
    """Return the numbers of an epoch's micro-batches that a drafter takes in the epoch's step `step`.

    Steps take `drafters · accumulation` numbers each; the last one of an epoch may find fewer.
    """
    first = step * drafters * accumulation
    return range(first + drafter, first + drafters * accumulation, drafters)


def steps_in_epoch(rows: int, *, drafters: int, accumulation: int) -> int:
    """Return how many steps take all rows of an epoch."""
    return -(-rows // (drafters * accumulation))
