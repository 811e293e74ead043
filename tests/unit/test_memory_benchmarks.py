"""How the benchmarks of memory judge: what names a tensor, and what contradicts a prediction."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.planted.__main__ import PLANTS, TENSOR, Answer, Plant
from benchmarks.predictions import (
    CASES,
    Owned,
    Ran,
    compare,
    estimate,
    read_measured,
    wrong_owners,
    wrong_verdict,
)

REPOSITORY = Path(__file__).parents[2]
CAUSE = {"name": "too large"}
PEAKS = {"peak_allocated_bytes": 8 * 2**30, "peak_reserved_bytes": 8 * 2**30}


@pytest.mark.parametrize("plant", [plant for plant in PLANTS if plant.causes == TENSOR])
def test_the_name_of_a_planted_script_does_not_name_its_tensor(plant: Plant) -> None:
    text = f"out of memory: 4.00 GiB asked at {plant.file}:5 <module>; too large for what was left"
    assert not _answer(plant, text).is_named


def test_a_planted_tensor_is_named_by_the_words_of_the_answer() -> None:
    (plant,) = (plant for plant in PLANTS if plant.words == ["gradient"])
    text = "out of memory: a gradient of Linear, 4.00 GiB asked at script.py:8 <module>; too large"
    assert _answer(plant, text).is_named


def _answer(plant: Plant, text: str) -> Answer:
    return Answer(plant=plant, printed="", explanation={"answer": text, "cause": CAUSE})


@pytest.mark.parametrize(
    ("verdict", "code", "error", "is_right"),
    [
        ("does not fit", 1, "OutOfMemoryError: CUDA out of memory.", True),
        ("does not fit", 1, "ValueError: no such backend", False),
        ("does not fit", 0, "", False),
        ("fits", 0, "", True),
        ("fits", 1, "OutOfMemoryError: CUDA out of memory.", False),
        ("within the error", 1, "OutOfMemoryError: CUDA out of memory.", True),
    ],
)
def test_only_memory_that_ran_out_bears_out_that_a_case_does_not_fit(
    verdict: str, code: int, error: str, is_right: bool
) -> None:
    predicted = {"verdict": verdict, "capacity_bytes": 4 * 2**30, **PEAKS}
    assert (wrong_verdict(predicted, Ran(code=code, phases={}, error=error)) is None) == is_right


@pytest.mark.parametrize(("more_bytes", "wrong"), [(0, []), (1536, []), (1537, ["gradient"])])
def test_owners_at_the_peak_are_those_of_the_prediction_to_the_allocators_rounding(
    more_bytes: int, wrong: list[str]
) -> None:
    measured = {
        "parameter": Owned(size_bytes=2**20, blocks=3),
        "gradient": Owned(size_bytes=2**20 + more_bytes, blocks=3),
        "activation": Owned(size_bytes=2**10, blocks=1),
    }
    ran = Ran(code=0, phases={"timed": PEAKS}, owners=measured)
    assert [line.partition(":")[0] for line in wrong_owners(_predicted("timed"), ran)] == wrong


def test_a_category_that_was_predicted_and_not_measured_is_wrong() -> None:
    ran = Ran(code=0, phases={"timed": PEAKS}, owners={"parameter": Owned(size_bytes=2**20, blocks=3)})
    assert wrong_owners(_predicted("timed"), ran) == ["gradient: predicted 1048576 B, measured 0 B"]
    assert not wrong_owners(_predicted("packed"), ran)
    assert not wrong_owners(_predicted("timed"), Ran(code=0, phases={"timed": PEAKS}))


def _predicted(phase: str) -> dict[str, Any]:
    sums = {"parameter": 2**20, "gradient": 2**20, "activation": 2**30}
    return {"phases": [{"name": phase, "by_category": sums, **PEAKS}]}


def test_what_an_h200_measured_is_predicted_today(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine, measured = read_measured(REPOSITORY / "benchmarks" / "h200.json")
    assert measured.keys() == {case.name for case in CASES}
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY / "payloads"))
    (case,) = (case for case in CASES if case.name == "eager none")
    found = compare(case, estimate(case, machine.card, tmp_path), measured[case.name])
    assert found.is_good
    assert found.worst_share < 0.001
