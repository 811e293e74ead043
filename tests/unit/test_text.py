"""Names and texts: which are accepted, and how what is not is shown."""

import subprocess
import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.errors import UsageError
from orchestrator.text import check_name, check_text, did_you_mean, printable, quoted

AWKWARD_NAMES = [
    "",
    " ",
    "a b",
    "a\n",
    "\na",
    "-a",
    "--help",
    ".a",
    "..",
    "../a",
    "/a",
    "a/b",
    'a"b',
    "a'b",
    "a;b",
    "$(a)",
    "ä",
    "a\0b",
    "a\u202eb",
    "٣",
    "a" * 65,
]


def _imported_by(module: str) -> set[str]:
    code = f"import sys; before = set(sys.modules); import {module}; print(*set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {name.partition(".")[0] for name in done.stdout.split()}


@pytest.mark.parametrize("module", ["text", "fields", "allocator", "bundle"])
def test_what_runs_on_every_command_line_imports_only_the_standard_library(module: str) -> None:
    assert _imported_by(f"orchestrator.{module}") <= sys.stdlib_module_names | {"orchestrator"}


@pytest.mark.parametrize("name", ["a", "0", "pve-200", "oom_probe.v2", "A" * 64])
def test_plain_names_are_accepted(name: str) -> None:
    assert check_name("host", name) == name


@pytest.mark.parametrize("name", AWKWARD_NAMES)
def test_names_that_could_leave_a_folder_or_look_like_an_option_are_refused(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_name("host", name)
    assert str(caught.value).isprintable()
    assert "host" in str(caught.value)


def test_a_huge_name_gives_a_short_message() -> None:
    with pytest.raises(UsageError) as caught:
        check_name("host", "x" * 10_000_000)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("text", ["/opt/my tools/bin/python3", "it's", 'a "b"', "ünï"])
def test_free_text_may_hold_spaces_and_quotes(text: str) -> None:
    assert check_text("a path", text) == text


@pytest.mark.parametrize("text", ["", " a", "a ", "-a", "a\nb", "a\x1b[2Jb", "a\u202eb", "a\udc80b", "a\tb"])
def test_free_text_that_a_terminal_or_command_line_misreads_is_refused(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_text("a path", text)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain äß 日本 🙂", "plain äß 日本 🙂"),
        ("\x1b[31mred", r"\x1b[31mred"),
        ("a\nb\tc\r\0", r"a\nb\tc\r\x00"),
        ("\x9b31m", r"\x9b31m"),
        ("\u202egpj.exe", r"\u202egpj.exe"),
        ("zero\u200bwidth", r"zero\u200bwidth"),
        ("\ud800\udcff", r"\ud800\udcff"),
        ("line\u2028end", r"line\u2028end"),
        ("no\xa0break", "no\xa0break"),
    ],
)
def test_hidden_characters_are_shown_as_escapes(text: str, shown: str) -> None:
    assert printable(text) == shown


@given(st.text(st.characters(codec=None)))
def test_what_is_shown_never_holds_a_character_that_acts_on_a_terminal(text: str) -> None:
    shown = printable(text)
    assert not {unicodedata.category(character) for character in shown} & {"Cc", "Cf", "Cs", "Zl", "Zp"}
    assert printable(shown) == shown


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("expandable_segment", "; did you mean 'expandable_segments'?"),
        ("BACKEND", "; did you mean 'backend'?"),
    ],
)
def test_the_nearest_known_word_is_offered(word: str, hint: str) -> None:
    assert did_you_mean(word, ["backend", "expandable_segments", "root", "port"]) == hint


def test_nothing_is_offered_when_nothing_is_near() -> None:
    assert did_you_mean("xyz", ["backend"]) == ""
    assert did_you_mean("xyz", []) == ""


@pytest.mark.parametrize(
    ("value", "shown"), [("a'b", '"a\'b"'), ("\x1b", r"'\x1b'"), (5, "5"), (None, "None"), (["a"], "['a']")]
)
def test_a_value_is_quoted_as_python_spells_it(value: object, shown: str) -> None:
    assert quoted(value) == shown


def test_a_huge_value_is_quoted_with_both_ends_closed() -> None:
    assert quoted("x" * 10_000) == "'" + "x" * 95 + "…'"
    assert quoted("x" * 96) == "'" + "x" * 96 + "'"
