"""An answer of a payload's shapes program, which is somebody's code, is checked before it is used."""

from typing import Any

import pytest
from dflash.shapes import set_of

from orchestrator.errors import UsageError
from orchestrator.forensics.shapes import MOST_COUNT, read_shape_set, read_shape_sets


def tensor(**changed: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "name": "scores",
        "category": "scores",
        "dtype": "float32",
        "dims": [
            {"name": "heads", "expression": "heads", "value": 4},
            {
                "name": "keys",
                "expression": "seq_len + 8",
                "numbers": "92 + 8",
                "value": 100,
                "free": {
                    "name": "tokens",
                    "value": 92,
                    "least": 1,
                    "most": 200,
                    "factor": 1,
                    "offset": 8,
                },
            },
        ],
        "bytes": 1600,
        "applies": True,
        "when": "always",
        "count": 1,
        "born": "a.b",
        "remedy": {"attention": "flex", "compile": True},
        "notes": ["why"],
    }
    return values | changed


def read(entry: Any) -> Any:
    return read_shape_set({"tensors": [entry]}, label="run", params={"seq_len": 92}).tensors[0]


def test_a_set_becomes_values() -> None:
    scores = read(tensor())
    assert (scores.shape, scores.size_bytes, scores.dtype) == ((4, 100), 1600, "float32")
    assert scores.dimensions[1].free.most == 200
    assert (scores.remedy, scores.notes) == ({"attention": "flex", "compile": True}, ("why",))


def test_what_is_said_of_all_tensors_is_kept() -> None:
    answer = {"tensors": [tensor()], "notes": ["ignored: x"]}
    assert read_shape_set(answer, label="run", params={}).notes == ("ignored: x",)
    with pytest.raises(UsageError, match="notes has 9 entries"):
        read_shape_set({"tensors": [], "notes": ["x"] * 9}, label="run", params={})


@pytest.mark.parametrize(
    ("params", "is_foreign"), [({"x": 1, "y": 2}, True), ({"x": 1, "max_anchors": 2}, False), ({}, False)]
)
def test_parameters_none_of_which_is_the_payload_s_are_foreign(
    params: dict[str, int], is_foreign: bool
) -> None:
    answer = {"tensors": [], "unknown": ["x", "y", 3, ["z"]]}
    assert read_shape_set(answer, label="file", params=params).is_foreign == is_foreign


def test_what_may_be_left_out_may_be_left_out() -> None:
    dims = [{"name": "rows", "expression": "rows", "value": 400}]
    scores = read({**tensor(dims=dims, remedy=None), "notes": [], "more": "is ignored"})
    assert (scores.remedy, scores.notes, scores.dimensions[0].free) == (None, (), None)


def test_what_the_payload_prints_is_read_as_it_is() -> None:
    given = {"attention": "sdpa_math"}
    sets = read_shape_sets([set_of(given), set_of({})], labels=["a", "b"], params=[given, {}])
    assert [part.label for part in sets] == ["a", "b"]
    assert sets[0].params == given
    assert [found.name for found in sets[0].tensors] == [part["name"] for part in set_of(given)["tensors"]]


def test_texts_are_shown_safely_and_cut() -> None:
    scores = read(tensor(name="a\x1b[31m\nb", when="x" * 5000))
    assert scores.name == r"a\x1b[31m\nb"
    assert len(scores.when) == 300


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"bytes": 1601}, r"tensors\[0\].bytes is 1601; its dimensions make 1600"),
        ({"bytes": True}, "bytes is True; it must be a whole number"),
        ({"count": -1}, "count is -1; it must be a whole number of at least 0"),
        ({"count": 10**400}, "it must be a whole number of at least 0"),
        ({"dtype": "complex64"}, "dtype is 'complex64'; known: float64"),
        ({"name": 7}, "name is 7; it must be a text"),
        ({"applies": 1}, "applies is 1; it must be true or false"),
        ({"dims": {}}, r"dims is \{\}; it must be a list"),
        ({"dims": [{}] * 9}, "dims has 9 entries; at most 8 are read"),
        ({"dims": [7]}, r"dims\[0\] is 7; it must be a JSON object"),
        ({"remedy": {"compile": [1]}}, r"remedy.compile is \[1\]; it must be one value"),
        ({"notes": [1]}, "notes is 1; it must be a text"),
    ],
)
def test_an_answer_of_another_form_is_refused_with_its_place(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read(tensor(**changed))


@pytest.mark.parametrize(("name", "value"), [("factor", 0), ("least", 201), ("most", -1), ("offset", None)])
def test_bounds_that_bound_nothing_are_refused(name: str, value: Any) -> None:
    entry = tensor()
    entry["dims"][1]["free"][name] = value
    with pytest.raises(UsageError, match=r"dims\[1\].free"):
        read(entry)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ([], r"a set is \[\]; it must be a JSON object"),
        ({"tensors": [{}] * 5001}, "tensors has 5001 entries; at most 5000"),
    ],
)
def test_a_set_of_another_form_is_refused(part: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_shape_sets([part], labels=["a"], params=[{}])


def test_numbers_end_where_a_float_stops_counting() -> None:
    largest = [{"name": "rows", "expression": "rows", "value": MOST_COUNT}]
    with pytest.raises(UsageError, match="bytes"):
        read(tensor(dims=largest, bytes=4 * MOST_COUNT))
