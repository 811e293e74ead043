"""A matrix: which cases it makes, how they are called, and what is refused at which line."""

from pathlib import Path

import pytest

from orchestrator.errors import ConfigError, UsageError
from orchestrator.experiment import Experiment, load_experiment
from orchestrator.matrix import MOST_CASES

BASE = """\
payload: dflash
run: dflash.probe
params: {anchors: 1024, loss: {chunk: 64, kind: ce}, note: null}
env: {MODE: plain, TOKEN_FILE: {secret: true, from_env: TOKEN_FILE}}
alloc_conf: {expandable_segments: true}
profiles:
  small: {params: {loss: {kind: kl}}, alloc_conf: {pinned_use_background_threads: true}}
"""
MATRIX_LINE = BASE.count("\n") + 1


def _load(folder: Path, matrix: str, *overrides: str, profile: str | None = None) -> Experiment:
    path = folder / "probe.yaml"
    path.write_text(BASE + matrix)
    return load_experiment(path, profile=profile, overrides=overrides)


def _refusal(folder: Path, matrix: str) -> tuple[str, int | None]:
    with pytest.raises(ConfigError) as caught:
        _load(folder, matrix)
    return str(caught.value), caught.value.line


def test_every_combination_is_a_case_and_the_last_axis_varies_fastest(tmp_path: Path) -> None:
    cases = _load(
        tmp_path, "matrix:\n  env: {MODE: [a, b]}\n  params: {loss.chunk: [1, 2], anchors: [[8], null]}\n"
    ).cases()
    assert [(case.env["MODE"], case.params["loss"]["chunk"], case.params["anchors"]) for case in cases] == [
        ("a", 1, [8]),
        ("a", 1, None),
        ("a", 2, [8]),
        ("a", 2, None),
        ("b", 1, [8]),
        ("b", 1, None),
        ("b", 2, [8]),
        ("b", 2, None),
    ]
    assert cases[1].case == "MODE=a, loss.chunk=1, anchors=null"
    assert {case.params["loss"]["kind"] for case in cases} == {"ce"}
    assert {case.matrix for case in cases} == {None}


def test_without_a_matrix_there_is_one_case_without_a_label(tmp_path: Path) -> None:
    experiment = _load(tmp_path, "")
    assert experiment.cases() == (experiment,)
    assert experiment.case is None


def test_the_chosen_profile_lies_under_the_matrix(tmp_path: Path) -> None:
    matrix = (
        'matrix: {params: {anchors: [1]}, alloc_conf: [{max_non_split_rounding_mb: 32}, ""], at_once: 3}\n'
    )
    experiment = _load(tmp_path, matrix, profile="small")
    changed, cleared = experiment.cases()
    assert changed.params == {"anchors": 1, "loss": {"chunk": 64, "kind": "kl"}, "note": None}
    assert changed.alloc_conf == (
        "expandable_segments:True,max_non_split_rounding_mb:32,pinned_use_background_threads:True"
    )
    assert (cleared.alloc_conf, cleared.case) == (None, "anchors=1, alloc_conf=none")
    assert experiment.matrix is not None
    assert experiment.matrix.at_once == 3


def test_a_set_of_another_parameter_holds_for_every_case(tmp_path: Path) -> None:
    cases = _load(tmp_path, "matrix: {params: {anchors: [1, 2]}}\n", "loss.chunk=7").cases()
    assert [case.params["loss"]["chunk"] for case in cases] == [7, 7]


@pytest.mark.parametrize("override", ["anchors=3", "loss.chunk=3", "loss={chunk: 3}"])
def test_a_set_of_what_is_varied_is_refused(tmp_path: Path, override: str) -> None:
    with pytest.raises(UsageError, match="the matrix varies"):
        _load(tmp_path, "matrix: {params: {anchors: [1], loss.chunk: [2]}}\n", override)


def test_labels_of_long_values_are_cut_and_stay_distinct(tmp_path: Path) -> None:
    cases = _load(tmp_path, f"matrix: {{env: {{MODE: [{'x' * 60}a, {'x' * 60}b]}}}}\n").cases()
    labels = [case.case or "" for case in cases]
    assert len(set(labels)) == 2
    assert max(map(len, labels)) < 60


def test_a_label_is_one_line_whatever_a_value_holds(tmp_path: Path) -> None:
    (case,) = _load(tmp_path, 'matrix: {env: {MODE: ["a\\nb\\e[31m"]}}\n').cases()
    assert case.case is not None
    assert case.case.isprintable()


@pytest.mark.parametrize(
    ("matrix", "message", "line"),
    [
        ("matrix: {}\n", "varies nothing", 0),
        ("matrix:\n  at_once: 2\n", "varies nothing", 0),
        ("matrix:\n  params:\n    anchor: [1]\n", "'anchor' is not declared.*did you mean 'anchors'", 2),
        ("matrix:\n  params:\n    loss.chunks: [1]\n", "'loss.chunks' is not declared.*'chunk'", 2),
        ("matrix:\n  params:\n    anchors: []\n", "at least one value", 2),
        ("matrix:\n  params:\n    anchors: 3\n", "must be a list", 2),
        ("matrix:\n  params:\n    anchors:\n    - 1\n    - 2\n    - 1\n", "value 1 of this list again", 5),
        ("matrix:\n  params:\n    loss: [{}]\n    loss.chunk: [1]\n", "varies loss too", 3),
        ("matrix:\n  env:\n    MODE:\n    - a\n    - 1\n", "must be text", 4),
        ("matrix:\n  env:\n    CUDA_VISIBLE_DEVICES: [a]\n", "use devices:", 2),
        ("matrix:\n  env:\n    TOKEN_FILE: [a]\n", "secrets cannot vary", 2),
        ("matrix:\n  env:\n    X: [{secret: true, from_env: Y}]\n", "secrets cannot vary", 2),
        ("matrix:\n  alloc_conf:\n  - {expandable: true}\n", "'expandable' is no allocator setting", 2),
        (
            "matrix:\n  alloc_conf:\n  - ''\n  - {max_split_size_mb: 64}\n",
            "works against expandable_segments",
            3,
        ),
        ("matrix:\n  alloc_conf:\n  - {}\n  - expandable_segments:True\n", "value 1 of this list again", 3),
        ("matrix:\n  alloc_conf: []\n", "at least one value", 1),
        ("matrix:\n  params: {anchors: [1]}\n  at_once: 0\n", "from 1 to", 2),
        ("matrix:\n  params: {anchors: [1]}\n  at_one: 1\n", "unknown key 'at_one'.*'at_once'", 2),
    ],
)
def test_what_cannot_be_meant_is_refused_at_its_line(
    tmp_path: Path, matrix: str, message: str, line: int
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        _load(tmp_path, matrix)
    assert caught.value.line == MATRIX_LINE + line, str(caught.value)


def test_a_thousand_cases_are_allowed_and_one_more_is_not(tmp_path: Path) -> None:
    values = list(range(MOST_CASES))
    assert len(_load(tmp_path, f"matrix: {{params: {{anchors: {values}}}}}\n").cases()) == MOST_CASES
    values.append(MOST_CASES)
    message, line = _refusal(tmp_path, f"matrix: {{params: {{anchors: {values}}}}}\n")
    assert "makes 1001 cases" in message
    assert line == MATRIX_LINE
