"""Models of YAML files: what fits, what does not, and in which order it is told."""

from typing import Annotated, Any, Literal

import pytest

from orchestrator.strict_model import Field, Problem, Range, StrictModel


class Inner(StrictModel):
    port: Annotated[int, Range(least=1, most=10)] | None = None


class Outer(StrictModel):
    name: str
    kind: Literal["a", "b", "c"] = "a"
    inner: Inner = Inner()
    many: dict[str, Inner] = Field(default_factory=dict)
    anything: Any = None


class Wider(Outer):
    weight: float = 1.0


def _problems(value: Any) -> list[Problem]:
    found = Wider.check(value)
    assert isinstance(found, list)
    return found


def test_fields_of_a_base_class_come_first_and_defaults_are_not_shared() -> None:
    assert list(Wider.fields()) == ["name", "kind", "inner", "many", "anything", "weight"]
    one, two = Wider.check({"name": "n"}), Wider.check({"name": "n"})
    assert isinstance(one, Wider)
    assert isinstance(two, Wider)
    one.many["x"] = Inner()
    assert two.many == {}


def test_a_model_knows_which_fields_were_given_and_does_not_change() -> None:
    model = Wider.check({"name": "n", "weight": 2, "many": {"x": {"port": 10}}})
    assert isinstance(model, Wider)
    assert model.model_fields_set == {"name", "weight", "many"}
    assert (model.weight, model.many["x"].port, model.inner.port) == (2, 10, None)
    with pytest.raises(AttributeError, match=r"Wider\.weight"):
        model.weight = 3  # type: ignore[misc]  # what is shown to be refused


@pytest.mark.parametrize("port", [0, 11, True, 1.0, "1"])
def test_a_range_takes_whole_numbers_between_its_ends(port: Any) -> None:
    assert [problem.keys for problem in _problems({"name": "n", "inner": {"port": port}})] == [
        ("inner", "port")
    ]


def test_everything_wrong_is_told_in_the_order_of_the_fields_and_strange_keys_last() -> None:
    found = _problems({"oops": 1, "weight": True, "kind": "d", "many": {"x": {"prt": 1}}})
    assert [(problem.keys, problem.is_key) for problem in found] == [
        (("name",), False),
        (("kind",), False),
        (("many", "x", "prt"), True),
        (("weight",), False),
        (("oops",), True),
    ]
    assert found[1].message == "must be 'a', 'b' or 'c', not 'd'"
