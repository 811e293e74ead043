"""A training step, and what old trainers got wrong in it: packing, noise, anchors, positions, compilation."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from dflash import drafter as drafter_module
from dflash import rope
from dflash.compiling import Compiled
from dflash.config import DrafterConfig
from dflash.drafter import DFlashDrafter
from dflash.execution import Execution
from dflash.optimizer import MasterAdamW
from dflash.training.micro_batch import MicroBatch
from dflash.training.noise import with_noise
from dflash.training.seeds import seed_for
from dflash.training.step import Objective, own_numbers, steps_in_epoch
from torch import Tensor, nn

from tests.payload.cases import relative_error
from tests.payload.test_compiling import BY_POLICY
from tests.payload.training import CASE, LR, MAX_NORM, drafter_of, micro_batch_of, micro_batches, step_of

# Every valid anchor of every document is drawn: 12 of the first one, 8 of the second.
ALL = replace(CASE, max_anchors=1000, dtype=torch.float64)


class Heard(DFlashDrafter):
    """A drafter that notes what its forward is given."""

    def forward(self, **arguments: Any) -> Any:
        self.heard.append(arguments)
        return super().forward(**arguments)

    @property
    def heard(self) -> list[dict[str, Any]]:
        heard: list[dict[str, Any]] = self.__dict__.setdefault("_heard", [])
        return heard


def listening(drafter: DFlashDrafter) -> Heard:
    drafter.__class__ = Heard
    assert isinstance(drafter, Heard)
    return drafter


def stepped(rows: Sequence[MicroBatch], **changed: Any) -> dict[str, Tensor]:
    """Return the gradients, before clipping, that a step on these rows goes by."""
    drafter = drafter_of(ALL, torch.float64)
    step = step_of(drafter, max_norm=math.inf, accumulation=len(rows), **changed)
    step(rows, lr=LR)
    # Without masters the optimizer leaves what it divided.
    return {name: p.grad for name, p in drafter.named_parameters() if p.grad is not None}


def documents_apart(row: MicroBatch) -> list[MicroBatch]:
    """Return a row for each document of a row, unpadded."""
    starts = [sum(row.lengths[:place]) for place in range(len(row.lengths))]
    spans = [slice(start, start + length) for start, length in zip(starts, row.lengths, strict=True)]
    return [
        replace(
            row,
            number=number,
            lengths=(span.stop - span.start,),
            input_ids_1S=row.input_ids_1S[:, span],
            loss_mask_1S=row.loss_mask_1S[:, span],
            features_1SF=row.features_1SF[:, span],
            last_hidden_1SH=row.last_hidden_1SH[:, span],
        )
        for number, span in enumerate(spans)
    ]


def test_packed_documents_give_the_gradients_of_documents_apart() -> None:
    row = micro_batch_of(ALL)
    packed, apart = stepped([row]), stepped(documents_apart(row))
    for name, gradient in packed.items():
        assert relative_error(gradient, apart[name]) < 1e-6, name


def test_anchors_and_labels_stay_within_their_documents() -> None:
    figures = step_of(drafter_of(ALL, torch.float64))([micro_batch_of(ALL)], lr=LR).read()
    assert figures["blocks"] == (13 - 1) + (9 - 1)
    slots = [min(4, length - 1 - anchor) for length in (13, 9) for anchor in range(length - 1)]
    assert figures["valid_slots"] == sum(slots)
    assert figures["tokens"] == 22


def test_positions_are_counted_from_zero_in_each_document(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    table = rope.rope_table

    def noted(positions_K: Tensor, **settings: Any) -> Any:
        seen.append(positions_K)
        return table(positions_K, **settings)

    monkeypatch.setattr(drafter_module, "rope_table", noted)
    step_of(drafter_of(ALL, torch.float64))([micro_batch_of(ALL)], lr=LR)
    (positions_K,) = seen
    assert positions_K[:26].tolist() == [*range(13), *range(9), 0, 0, 0, 0]
    anchors = [*range(12), *range(8)]
    assert positions_K[26:].tolist() == [anchor + slot for anchor in anchors for slot in range(5)]


def test_noise_is_on_the_features_alone_and_within_its_bounds() -> None:
    drafter = listening(drafter_of())
    row = micro_batches(1)[0]
    step_of(drafter, noise=0.05)([row], lr=LR)
    (given,) = drafter.heard
    difference = given["all_hidden_states"] - row.features_1SF
    assert 0.045 < float(difference.abs().max()) < 0.0501
    assert abs(float(difference.mean())) < 0.005
    assert given["verifier_last_hidden"] is row.last_hidden_1SH
    assert torch.equal(row.features_1SF, micro_batches(1)[0].features_1SF)


def test_noise_and_anchors_are_the_micro_batchs_own() -> None:
    row = micro_batches(1)[0]

    def given(*, epoch: int, number: int, seed: int = 5) -> dict[str, Any]:
        drafter = listening(drafter_of())
        step_of(drafter, noise=0.05, seed=seed)([replace(row, epoch=epoch, number=number)], lr=LR)
        return drafter.heard[0]

    first, again = given(epoch=3, number=7), given(epoch=3, number=7)
    assert torch.equal(first["all_hidden_states"], again["all_hidden_states"])
    assert first["seed"] == again["seed"]
    for other in (given(epoch=4, number=7), given(epoch=3, number=8), given(epoch=3, number=7, seed=6)):
        assert not torch.equal(first["all_hidden_states"], other["all_hidden_states"])
        assert first["seed"] != other["seed"]


def test_noise_of_nothing_is_nothing_and_less_is_refused() -> None:
    features = micro_batches(1)[0].features_1SF
    assert with_noise(features, 0.0, seed=0, epoch=0, number=0) is features
    with pytest.raises(ValueError, match="noise is -1"):
        with_noise(features, -1, seed=0, epoch=0, number=0)


def test_narrow_noise_keeps_the_features_type() -> None:
    features = torch.zeros(1, 50, 40, dtype=torch.bfloat16)
    noisy = with_noise(features, 0.05, seed=0, epoch=0, number=0)
    assert noisy.dtype == torch.bfloat16
    assert float(noisy.abs().max()) <= 0.0501
    assert len(noisy.unique()) > 500


def test_a_step_runs_what_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    called = set()

    def noted(compiled: Compiled, *arguments: Any) -> Any:
        called.add(compiled.plain.__name__)
        return compiled.plain(*arguments)

    def as_on_a_card(config: DrafterConfig, **_: Any) -> Execution:
        return Execution(attention=config.attention, is_compiled=config.compile, chunk_blocks=8)

    monkeypatch.setattr(Compiled, "__call__", noted)
    monkeypatch.setattr(drafter_module, "choose_execution", as_on_a_card)
    step_of(drafter_of())(micro_batches(1), lr=LR)
    assert called == BY_POLICY["none"]


def test_a_step_is_adamw_with_the_given_rate_on_clipped_mean_gradients() -> None:
    rows = micro_batches(2)
    stepping, expected = drafter_of(), drafter_of()
    optimizer = MasterAdamW(stepping.parameters(), lr=1.0)
    result = step_of(stepping, optimizer=optimizer, accumulation=2, max_norm=0.1)(rows, lr=LR).read()
    plain = torch.optim.AdamW(
        [p for p in expected.parameters() if p.requires_grad], lr=LR, betas=(0.9, 0.95), weight_decay=0.0
    )
    losses, weights = [], []
    for row in rows:
        loss, metrics = expected(
            all_hidden_states=row.features_1SF,
            verifier_last_hidden=row.last_hidden_1SH,
            input_ids=row.input_ids_1S,
            loss_mask=row.loss_mask_1S,
            lengths=row.lengths,
            seed=seed_for("anchors", 5, 0, row.number),
        )
        losses.append(loss * metrics["weight_sum"])
        weights.append(metrics["weight_sum"])
    mean = torch.stack(losses).sum() / torch.stack(weights).sum()
    torch.autograd.backward(mean)
    norm = nn.utils.clip_grad_norm_(expected.parameters(), 0.1)
    plain.step()
    assert result["loss"] == pytest.approx(float(mean.detach()), rel=1e-6)
    assert result["grad_norm"] == pytest.approx(float(norm), rel=1e-5)
    assert result["grad_norm"] > MAX_NORM / 10
    for mine, theirs in zip(stepping.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("is_broken", [True, False])
def test_a_step_that_has_nothing_to_learn_from_changes_nothing(is_broken: bool) -> None:
    drafter = drafter_of()
    row = micro_batches(1)[0]
    if is_broken:
        row.features_1SF[0, 2] = torch.inf
    else:
        row = replace(row, loss_mask_1S=torch.zeros_like(row.loss_mask_1S))
    result = step_of(drafter)([row], lr=LR).read()
    assert math.isnan(result["grad_norm"])
    assert result["nonfinite_micro_batches"] == is_broken
    assert result["rows_without_loss"] == (not is_broken)
    for name, value in drafter_of().state_dict().items():
        assert torch.equal(drafter.state_dict()[name], value), name


def test_d_pace_weighs_a_steps_slots_and_divides_by_its_blocks() -> None:
    objective = Objective(use_soft_labels=False, loss_weights="d-pace", alpha=1.0)
    figures = step_of(drafter_of(), objective=objective, accumulation=2)(micro_batches(2), lr=LR).read()
    # Taken wholly for granted, a slot's share is the number of slots from it on: the first of four has 4.
    assert figures["weight_sum"] == figures["blocks"] == 12
    assert figures["loss"] > step_of(drafter_of(), accumulation=2)(micro_batches(2), lr=LR).read()["loss"]


def test_numbers_of_a_step_are_shared_out_by_remainder() -> None:
    shares = [own_numbers(2, drafter=drafter, drafters=3, accumulation=2) for drafter in range(3)]
    assert [list(share) for share in shares] == [[12, 15], [13, 16], [14, 17]]
    assert steps_in_epoch(17, drafters=3, accumulation=2) == 3
    assert steps_in_epoch(18, drafters=3, accumulation=2) == 3
    assert steps_in_epoch(19, drafters=3, accumulation=2) == 4


def test_an_objective_that_makes_no_loss_is_refused() -> None:
    with pytest.raises(ValueError, match="kl_weight is 2"):
        Objective(kl_weight=2.0)
    with pytest.raises(ValueError, match="set kl_weight to 0"):
        Objective(loss_weights="d-pace")
    assert Objective(loss_weights="d-pace", use_soft_labels=False).alpha == 0.5
