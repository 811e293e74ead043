"""YAML files as plain values, and the file and line of whatever is wrong in them."""

import json
import os
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator import yaml_source
from orchestrator.errors import ConfigError, UsageError
from orchestrator.yaml_source import Field, StrictModel, parse_value


class Wheel(StrictModel):
    size_mm: int
    kind: Literal["front", "rear"] = "front"
    spokes: list[int] = Field(default_factory=list)


class Bicycle(StrictModel):
    name: str
    wheels: dict[str, Wheel] = Field(default_factory=dict)
    spare: Wheel | None = None
    lights: list[Wheel] = Field(default_factory=list)
    price: float = 1.0


def _load(folder: Path, text: str | bytes) -> yaml_source.Source:
    path = folder / "file.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return yaml_source.load(path)


def _refused(folder: Path, text: str | bytes) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        _load(folder, text).validate(Bicycle)
    assert str(caught.value).startswith(str(folder / "file.yaml"))
    assert str(caught.value).isprintable()
    return caught.value


# Plain values


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("1E+3", 1000.0),
        ("-.5", -0.5),
        ("1.", 1.0),
        ("3", 3),
        ("-3", -3),
        ("0x1F", 31),
        ("0o17", 15),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("yes", "yes"),
        ("on", "on"),
        ("No", "No"),
        ("12:30:45", "12:30:45"),
        ("1_000", "1_000"),
        ("007", "007"),
        ("2024-01-01", "2024-01-01"),
        ("1e", "1e"),
        ("'1e-5'", "1e-5"),
        ('"true"', "true"),
        ("''", ""),
        ("<<", "<<"),
        ("=", "="),
        ("[1, a, 1e-5]", [1, "a", 1e-5]),
        ("{a: 1, b: {c: true}}", {"a": 1, "b": {"c": True}}),
        ("'hello: world'", "hello: world"),
        ("a b", "a b"),
        ("-x", "-x"),
        ("GPU-5a3c", "GPU-5a3c"),
    ],
)
def test_a_value_is_read_as_in_yaml_1_2(text: str, value: object) -> None:
    parsed = parse_value(text)
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "  ",
            "# note",
            "a: b",
            "- a",
            "[1",
            "{a",
            "'a",
            "@a",
            "*a",
            "!x a",
            "!!timestamp 2024-01-01",
            "!!int a",
        ),
        *(
            ".nan",
            "-.inf",
            "1e999",
            "{1: a}",
            "{a: 1, a: 2}",
            "\x00",
            "\x1b",
            '"\\ud800"',
            '"\\UFFFFFFFF"',
            "a\n---\nb",
        ),
        *(
            pytest.param("9" * 5000, id="digits"),
            pytest.param("[" * 500, id="brackets"),
            "%",
            "&a [*a]",
            "? a",
        ),
    ],
)
def test_what_is_not_one_value_is_refused_with_a_hint(text: str) -> None:
    with pytest.raises(UsageError, match="quotes") as caught:
        parse_value(text)
    assert str(caught.value).isprintable()
    assert not isinstance(caught.value, ConfigError)


@given(st.one_of(st.floats(allow_nan=False, allow_infinity=False), st.integers()))
def test_a_number_as_python_prints_it_comes_back(number: float) -> None:
    parsed = parse_value(repr(number))
    assert parsed == number
    assert type(parsed) is type(number)


@given(st.text(max_size=60))
def test_any_text_gives_a_value_or_a_usage_error(text: str) -> None:
    message = ""
    try:
        parse_value(text)
    except UsageError as error:
        message = str(error)
    assert not message or message.isprintable()


# Files


def test_values_and_their_types_arrive(tmp_path: Path) -> None:
    source = _load(tmp_path, "\ufeffname: a\nprice: 2\nwheels: {f: {size_mm: 3, spokes: [1, 2]}}\n")
    bicycle = source.validate(Bicycle)
    assert bicycle.name == "a"
    assert bicycle.price == 2.0
    wheel = bicycle.wheels["f"]
    assert (wheel.size_mm, wheel.kind, wheel.spokes) == (3, "front", [1, 2])


def test_an_alias_stands_for_its_anchor(tmp_path: Path) -> None:
    source = _load(tmp_path, "name: a\nwheels: {f: &w {size_mm: 3}, r: *w}\n")
    assert source.validate(Bicycle).wheels["r"].size_mm == 3


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("", 1, "is empty"),
        ("# only a note\n", 1, "is empty"),
        ("- a\n", 1, "must be a mapping (key: value), not a list"),
        ("text\n", 1, "must be a mapping (key: value), not text"),
        ("name: a\nname: b\n", 2, "duplicate key 'name', first in line 1"),
        ("name: a\nwheels:\n  f: {}\n  'f': {}\n", 4, "duplicate key 'f', first in line 3"),
        ("name: a\n1: b\n", 2, "key 1 must be text"),
        ("name: a\ntrue: b\n", 2, "key true must be text"),
        ("name: a\n[1]: b\n", 2, "a key must be text"),
        ("name: a\nwheels: &w {}\nx: {<<: *w}\n", 3, "merge keys"),
        ("name: a\nwheels: !!python/object:os.system {}\n", 2, "tag"),
        ("name: a\nwheels: !!set {a}\n", 2, "tag"),
        ("name: [a\n", 2, "not valid YAML"),
        ("name: a\n\tb: c\n", 2, "not valid YAML"),
        ("name: a\n---\nname: b\n", 2, "not valid YAML"),
        ("name: *nothing\n", 1, "not valid YAML"),
        ("name: a\nb: \x1b[2J\n", 2, "control character"),
        ('name: a\nb: "\\ud800"\n', 2, "lone surrogate"),
        (b"name: a\nb: \xff\n", 2, "is not UTF-8"),
        ("name: a\nprice: .nan\n", 2, "no finite number"),
    ],
)
def test_a_file_that_is_no_strict_yaml_is_refused_at_its_line(
    tmp_path: Path, text: str | bytes, line: int, message: str
) -> None:
    error = _refused(tmp_path, text)
    assert message in str(error)
    assert error.line == line


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("name: a\nprise: 2\n", 2, "unknown key 'prise'; did you mean 'price'?"),
        ("name: a\nzzz: 2\n", 2, "unknown key 'zzz'; known are name, wheels, spare, lights, price"),
        ("nam: a\n", 1, "unknown key 'nam'; did you mean 'name'?"),
        (
            "name: a\nwheels:\n  f:\n    size_mm: 1\n    spoke: [1]\n",
            5,
            "wheels.f: unknown key 'spoke'; did you",
        ),
        ("name: a\nspare:\n  size_mm: 1\n  kid: rear\n", 4, "spare: unknown key 'kid'; did you mean 'kind'?"),
        ("name: a\nlights:\n  - size_mm: 1\n  - size_m: 1\n", 4, "lights[1]: unknown key 'size_m'; did you"),
        ("price: 2\n", 1, "name: is missing"),
        ("name: a\nwheels:\n  f: {size_mm: 1}\n  r: {kind: rear}\n", 4, "wheels.r.size_mm: is missing"),
        ("name: 5\n", 1, "name: must be text, not a number"),
        ("name:\n", 1, "name: must be text, not empty"),
        (
            "name: a\nwheels:\n  f:\n    size_mm: true\n",
            4,
            "wheels.f.size_mm: must be an integer, not a boolean",
        ),
        ("name: a\nwheels:\n  f:\n    size_mm:\n      'x'\n", 5, "size_mm: must be an integer, not text"),
        (
            "name: a\nwheels:\n  f:\n    size_mm: 1\n    spokes:\n      - 1\n      - b\n",
            7,
            "wheels.f.spokes[1]: must",
        ),
        (
            "name: a\nwheels:\n  f: {size_mm: 1, kind: rea}\n",
            3,
            "kind: must be 'front' or 'rear', not 'rea'; did you mean 'rear'?",
        ),
        ("name: a\nwheels:\n  - 1\n", 2, "wheels: must be a mapping, not a list"),
        ("name: a\nwheels:\n  'a b': 1\n", 3, "wheels.'a b': must be a mapping, not a number"),
        ("name: a\nprice: '2'\n", 2, "price: must be a number, not text"),
    ],
)
def test_what_does_not_fit_the_model_is_named_with_its_line(
    tmp_path: Path, text: str, line: int, message: str
) -> None:
    error = _refused(tmp_path, text)
    assert message in str(error)
    assert error.line == line
    assert error.exit_code == UsageError.exit_code


def test_a_value_that_is_not_one_of_a_few_words_is_never_shown(tmp_path: Path) -> None:
    assert "s3cret" not in str(_refused(tmp_path, "name: a\nprice: s3cret\n"))


def test_an_error_raised_elsewhere_gets_file_line_and_key(tmp_path: Path) -> None:
    source = _load(tmp_path, "name: a\nwheels:\n  f: {}\n")
    with (
        pytest.raises(ConfigError, match=r"file\.yaml:3: wheels\.f: is bent") as caught,
        source.at("wheels", "f"),
    ):
        raise UsageError("is bent")
    assert caught.value.line == 3
    with pytest.raises(ConfigError, match=r"file\.yaml:2: a: is bent$"), source.at("name"):
        raise ConfigError("a: is bent", file=source.path, line=2)


def _bomb(levels: int) -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, levels)]
    return "\n".join(lines)


def test_aliases_that_multiply_are_refused_before_they_fill_memory(tmp_path: Path) -> None:
    assert "aliases" in str(_refused(tmp_path, _bomb(9)))


def test_an_alias_of_itself_and_deep_nesting_are_refused(tmp_path: Path) -> None:
    assert "too deep" in str(_refused(tmp_path, "a: &a {b: *a}\n"))
    assert "too deep" in str(_refused(tmp_path, "a: " + "[" * 100 + "]" * 100))
    assert "too deeply" in str(_refused(tmp_path, "a: " + "[" * 500))


def test_a_file_that_cannot_be_read_as_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        yaml_source.load(tmp_path / "absent.yaml")
    with pytest.raises(ConfigError, match="not a regular file"):
        yaml_source.load(tmp_path)
    with pytest.raises(ConfigError, match="larger than 256 KiB"):
        _load(tmp_path, "#" * (256 * 1024 + 1))


def test_a_fifo_is_refused_without_waiting_for_a_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ConfigError, match="not a regular file"):
        yaml_source.load(tmp_path / "fifo")


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner, max_size=3),
        max_leaves=8,
    )
)
def test_json_text_means_the_same_as_in_json(value: Any) -> None:
    assert parse_value(json.dumps(value)) == value


@pytest.mark.parametrize(
    "text", ["0x" + "f" * 100_000, "9" * 4000, "9" * 100_000], ids=["hex", "long", "longer"]
)
def test_a_number_that_python_could_not_print_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "huge.yaml"
    path.write_text(f"a: {text}\n")
    with pytest.raises(ConfigError, match="too many digits"):
        yaml_source.load(path)
