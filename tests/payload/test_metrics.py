"""Accuracy and streak, counted by hand: labels and teachers are planted so that chosen slots hit or miss."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.payload.cases import Bench, Case, architecture_of, build, leaves, numbers
from tests.payload.reference import Objective, ReferenceDrafter

# Blocks that cover no other's anchor, and a vocabulary smaller than hidden, so that any teacher can be made.
THREE = Case(lengths=(13, 12), padding=0, anchors=(2, 7, 15), block_size=5, vocab_size=8, mask_token_id=7)


def planted(case: Case, labels: tuple[str, ...], teachers: tuple[str, ...]) -> Bench:
    """Return a bench whose slots 1, 2, … hit (`1`) or miss (`0`) as drawn, one string per block."""
    bench = build(case)
    assert case.anchors is not None
    weights = leaves(bench.drafter)
    slow = ReferenceDrafter(weights, architecture_of(case), bench.row)
    states = torch.linalg.pinv(weights["lm_head.weight"]).T
    for anchor, label_hits, teacher_hits in zip(case.anchors, labels, teachers, strict=True):
        guesses = [int(logits.argmax()) for logits in slow.block_logits(anchor)]
        for k, (label_hit, teacher_hit) in enumerate(zip(label_hits, teacher_hits, strict=True), start=1):
            bench.arguments["input_ids"][0, anchor + k] = (guesses[k] + (label_hit == "0")) % 8
            taught = (guesses[k] + (teacher_hit == "0")) % 8
            bench.arguments["verifier_last_hidden"][0, anchor + k - 1] = 3.0 * states[taught].detach()
    return bench


def counted(bench: Bench) -> dict[str, float]:
    with torch.no_grad():
        return numbers(bench.run()[1])


def some(metrics: dict[str, float], **expected: Any) -> bool:
    return {name: metrics[name] for name in expected} == pytest.approx(expected)


def test_streak_is_the_matching_prefix_without_given_token_or_bonus() -> None:
    metrics = counted(planted(THREE, labels=("1101", "0111", "1111"), teachers=("0000",) * 3))
    assert some(metrics, correct_slots=10, valid_slots=12, accuracy=10 / 12)
    assert some(metrics, streak_sum=2 + 0 + 4, blocks=3, avg_streak=2.0)


def test_by_slot_counts_the_blocks_that_are_right_up_to_each() -> None:
    bench = planted(THREE, labels=("1101", "0111", "1111"), teachers=("1000", "1100", "0111"))
    with torch.no_grad():
        metrics = bench.run(by_slot=True)[1]
    assert metrics["accepted_blocks"].tolist() == [2, 2, 1, 1]
    assert metrics["teacher_accepted_blocks"].tolist() == [2, 1, 0, 0]
    assert int(metrics["accepted_blocks"].sum()) == int(metrics["streak_sum"])


def test_nothing_right_counts_nothing() -> None:
    metrics = counted(planted(THREE, labels=("0000",) * 3, teachers=("0000",) * 3))
    assert some(metrics, correct_slots=0, accuracy=0, streak_sum=0, avg_streak=0, teacher_streak_sum=0)


def test_teacher_agreement_is_counted_apart_from_the_labels() -> None:
    metrics = counted(planted(THREE, labels=("1000", "0000", "0001"), teachers=("1110", "1011", "0111")))
    assert some(metrics, correct_slots=2, streak_sum=1, avg_streak=1 / 3)
    assert some(metrics, teacher_correct_slots=9, teacher_accuracy=9 / 12)
    assert some(metrics, teacher_streak_sum=3 + 1 + 0, teacher_avg_streak=4 / 3)


def test_slot_outside_the_loss_mask_ends_the_prefix_and_is_not_counted() -> None:
    case = replace(THREE, holes=(4,))  # slot 2 of the first block
    metrics = counted(planted(case, labels=("1111",) * 3, teachers=("1111",) * 3))
    assert some(metrics, valid_slots=11, correct_slots=11, accuracy=1, streak_sum=1 + 4 + 4)
    assert some(metrics, teacher_correct_slots=11, teacher_streak_sum=1 + 4 + 4)


def test_slots_past_the_documents_end_end_the_prefix_and_are_not_counted() -> None:
    case = replace(THREE, lengths=(13, 7, 5))  # the third block starts at 15 and its document ends at 20
    metrics = counted(planted(case, labels=("1111",) * 3, teachers=("1111",) * 3))
    assert some(metrics, valid_slots=12, streak_sum=12)
    case = replace(THREE, lengths=(13, 5, 7))  # and here at 18
    metrics = counted(planted(case, labels=("1111",) * 3, teachers=("1111",) * 3))
    assert some(metrics, valid_slots=10, correct_slots=10, streak_sum=4 + 4 + 2, avg_streak=10 / 3)


def test_without_soft_labels_no_teacher_figure_is_reported() -> None:
    metrics = counted(build(replace(THREE, objective=Objective(use_soft_labels=False))))
    assert not [name for name in metrics if name.startswith("teacher_")]


def test_counts_are_integers_and_sums_are_wide_floats() -> None:
    _, metrics = build(replace(THREE, dtype=torch.float32)).run()
    for name in ("valid_slots", "blocks", "correct_slots", "streak_sum", "rows_without_loss"):
        assert metrics[name].dtype == torch.int64, name
    for name in ("loss_sum", "weight_sum"):
        assert metrics[name].dtype == torch.float32, name
    assert not any(value.requires_grad for value in metrics.values())
