"""Validation: figures that add up over rows and drafters, and the same anchors each time."""

import threading
from dataclasses import replace

import pytest
import torch
from dflash.training.micro_batch import MicroBatch
from dflash.training.ranks import Alone, Ranks, ThreadRanks, thread_ranks
from dflash.training.seeds import seed_for
from dflash.training.step import Objective
from dflash.training.validation import validate

from tests.payload.training import drafter_of, micro_batches

SEED = 3


def validated(rows: list[MicroBatch], ranks: Ranks | None = None, **objective: object) -> dict[str, float]:
    settings = replace(Objective(), **objective)  # type: ignore[arg-type]
    return validate(drafter_of(), rows, objective=settings, ranks=ranks or Alone(), seed=SEED)


def test_figures_are_those_of_the_rows_added_up() -> None:
    rows = micro_batches(3)
    found = validated(rows)
    drafter = drafter_of()
    apart = [
        drafter(
            all_hidden_states=row.features_1SF,
            verifier_last_hidden=row.last_hidden_1SH,
            input_ids=row.input_ids_1S,
            loss_mask=row.loss_mask_1S,
            lengths=row.lengths,
            seed=seed_for("validation anchors", SEED, 0, row.number),
        )[1]
        for row in rows
    ]
    sums = {name: sum(float(metrics[name]) for metrics in apart) for name in apart[0]}
    assert found["loss"] == pytest.approx(sums["loss_sum"] / sums["weight_sum"], rel=1e-6)
    for prefix in ("", "teacher_"):
        correct, streaks = sums[f"{prefix}correct_slots"], sums[f"{prefix}streak_sum"]
        assert found[f"{prefix}accuracy"] == pytest.approx(correct / sums["valid_slots"])
        assert found[f"{prefix}avg_streak"] == pytest.approx(streaks / sums["blocks"])


def test_acceptance_by_position_falls_and_sums_up_to_the_streak() -> None:
    found = validated(micro_batches(4))
    for prefix in ("", "teacher_"):
        shares = [found[f"{prefix}acceptance.{slot}"] for slot in range(1, 5)]
        assert shares == sorted(shares, reverse=True)
        assert sum(shares) == pytest.approx(found[f"{prefix}avg_streak"])
    assert found["acceptance.1"] + found["teacher_acceptance.1"] > 0


def test_every_validation_draws_the_same_anchors_whatever_the_epoch() -> None:
    rows = micro_batches(2)
    assert validated(rows) == validated([replace(row, epoch=9) for row in rows])


def test_the_teacher_is_asked_also_where_it_was_not_trained_on() -> None:
    rows = micro_batches(2)
    without = validated(rows, use_soft_labels=False)
    assert without["teacher_accuracy"] == validated(rows)["teacher_accuracy"]
    assert without["loss"] == pytest.approx(validated(rows, kl_weight=0.0)["loss"], rel=1e-6)
    assert without["loss"] != pytest.approx(validated(rows)["loss"], rel=1e-3)


def test_drafters_share_the_rows_and_all_know_the_figures() -> None:
    rows = micro_batches(3)
    found: dict[int, dict[str, float]] = {}

    def work(ranks: ThreadRanks) -> None:
        found[ranks.rank] = validated([row for row in rows if row.number % 4 == ranks.rank], ranks)

    members = thread_ranks([torch.device("cpu")] * 4, timeout_s=30)
    threads = [threading.Thread(target=work, args=(ranks,)) for ranks in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(figures == found[0] for figures in found.values())
    assert found[0] == pytest.approx(validated(rows), rel=1e-9)


def test_validation_leaves_no_gradient() -> None:
    drafter = drafter_of()
    validate(drafter, micro_batches(1), objective=Objective(), ranks=Alone(), seed=SEED)
    assert all(parameter.grad is None for parameter in drafter.parameters())
