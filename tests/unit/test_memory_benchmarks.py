"""How the benchmarks of memory judge: what names a tensor, and what contradicts a prediction."""

import json
import re
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from benchmarks import predictions
from benchmarks.planted.__main__ import PLANTS, TENSOR, Answer, Plant, refuse_without_a_card
from benchmarks.predictions import (
    CASES,
    Owned,
    Ran,
    compare,
    estimate,
    main,
    read_measured,
    table,
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


def test_without_a_card_nothing_is_planted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(SystemExit, match="no card can be used here"):
        refuse_without_a_card()


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
    assert not wrong_owners(_predicted("timed"), Ran(code=0, phases={"timed": PEAKS}))


def test_owners_are_those_predicted_of_the_phase_that_was_measured_the_highest() -> None:
    lower = {**PEAKS, "peak_allocated_bytes": 7 * 2**30}
    whole = {"parameter": Owned(size_bytes=2**20, blocks=3), "gradient": Owned(size_bytes=2**20, blocks=3)}
    ran = Ran(code=0, phases={"timed": PEAKS, "packed": lower}, owners=whole)
    phases = [*_predicted("timed", lower)["phases"], *_predicted("packed", gradient=2**21)["phases"]]
    assert wrong_owners({"phases": phases}, ran) == []
    other = Ran(code=0, phases={"timed": lower, "packed": PEAKS}, owners=whole)
    assert wrong_owners({"phases": phases}, other) == ["gradient: predicted 2097152 B, measured 1048576 B"]
    assert wrong_owners(_predicted("packed"), ran) == ["timed was measured and not predicted"]


def test_a_phase_that_was_predicted_and_not_measured_is_wrong() -> None:
    phases = [*_predicted("setup")["phases"], *_predicted("timed")["phases"], *_predicted("packed")["phases"]]
    found = compare(CASES[0], {"phases": phases}, Ran(code=0, phases={"timed": PEAKS}))
    assert found.wrong == ["packed was predicted and not measured"]
    assert not found.is_good


def test_a_table_has_one_row_for_a_case_with_its_worst_phase_and_says_what_was_missed() -> None:
    near = {**PEAKS, "peak_allocated_bytes": int(8.008 * 2**30)}
    phases = [*_predicted("timed")["phases"], *_predicted("packed")["phases"]]
    ran = Ran(code=0, phases={"timed": PEAKS, "packed": near})
    eager = next(case for case in CASES if not case.is_compiled)
    good = compare(CASES[0], {"phases": phases}, ran)
    assert table([good]).splitlines()[2:] == [
        "| flex none | 8.000 | 8.008 | −0.10 % (packed) | 8.00 / 8.00 |"
    ]
    ran = Ran(code=0, phases={"timed": PEAKS, "packed": {**PEAKS, "peak_allocated_bytes": 2**32}})
    bad = compare(eager, {"phases": phases}, ran)
    said = f"MISSED {eager.name}: +100.00 % (packed) is more than 1%"
    assert table([good, bad]).splitlines()[-1] == said


def test_what_cannot_be_held_against_a_file_is_said_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong, empty = tmp_path / "wrong.json", tmp_path / "empty.json"
    wrong.write_text("[]")
    machine = {"name": "a", "card": "1GiB:sm_90", "torch": "2"}
    empty.write_text(json.dumps({"machine": machine, "cases": {}}))
    for path, words in (
        (wrong, "is not what --json of this program writes"),
        (tmp_path / "none.json", "name such a file, as benchmarks/h200.json"),
        (empty, "has no measurement of flex none (it has: none); measure on a card, without --measured"),
    ):
        monkeypatch.setattr(sys, "argv", ["predictions", "--only", "flex none", "--measured", str(path)])
        with pytest.raises(SystemExit, match=re.escape(words)):
            main()


def _predicted(phase: str, peaks: Mapping[str, int] = PEAKS, *, gradient: int = 2**20) -> dict[str, Any]:
    sums = {"parameter": 2**20, "gradient": gradient, "activation": 2**30}
    return {"phases": [{"name": phase, "by_category": sums, **peaks}]}


def test_each_case_is_told_as_soon_as_it_is_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told: list[int] = []

    def predicts(*_: object) -> dict[str, Any]:
        told.append(capsys.readouterr().err.count("\n"))
        return {"verdict": "no card", "capacity_bytes": None, "torch": "2.13", "phases": [], **PEAKS}

    class OneAfterTheOther(ThreadPoolExecutor):
        map = staticmethod(map)  # type: ignore[assignment]

    monkeypatch.setattr(predictions, "estimate", predicts)
    file, names = REPOSITORY / "benchmarks" / "h200.json", ["eager none", "uncompiled flex layer"]
    with OneAfterTheOther(1) as pool:
        predictions.hold_against(file, names, pool, tmp_path)
    assert told == [0, 1]
    assert capsys.readouterr().err.startswith("| ")


def test_what_an_h200_measured_is_predicted_today(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine, measured = read_measured(REPOSITORY / "benchmarks" / "h200.json")
    assert measured.keys() == {case.name for case in CASES}
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY / "payloads"))
    (case,) = (case for case in CASES if case.name == "eager none")
    found = compare(case, estimate(case, machine.card, tmp_path), measured[case.name])
    assert found.is_good
    assert found.worst_share < 0.001
