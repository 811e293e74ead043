"""Names of artifacts that a host sends, and the patterns that choose among them."""

import time

import pytest

from orchestrator.artifact_names import check_path, is_chosen, parse_pattern, parse_patterns
from orchestrator.errors import UsageError


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("", "empty"),
        ("/etc/passwd", "absolute"),
        ("//x", "absolute"),
        (".", "'..'"),
        ("..", "'..'"),
        ("../x", "'..'"),
        ("a/../../x", "'..'"),
        ("a//b", "empty"),
        ("a/", "empty"),
        ("a/./b", "'.'"),
        ("a\0b", "control"),
        ("a\nb", "control"),
        ("\x1b]0;owned\a", "control"),
        ("\u202egnp.exe", "control"),
        ("\udcff\udcfe", "not UTF-8"),
        ("x" * 256, "longer"),
        ("é" * 128, "longer"),
        ("d/" * 1100 + "x", "longer"),
        (".part/0123", "not whole"),
        (".PART/0123", "not whole"),
    ],
)
def test_a_name_that_is_not_safe_here_is_refused(path: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        check_path(path)


@pytest.mark.parametrize(
    "path", ["a", "a b/c'\"$(x)", "~", "-rf", "...", ".hidden", "C:\\x", "größe/数.json", "a/.part"]
)
def test_a_name_that_only_looks_odd_is_taken_as_it_is(path: str) -> None:
    assert "/".join(check_path(path)) == path


PATHS = ["a.json", ".b.json", "results/a.json", "results/deep/er/a.json", "results.csv", "[x]", "A.JSON"]


@pytest.mark.parametrize(
    ("pattern", "chosen"),
    [
        ("a.json", ["a.json"]),
        ("*.json", ["a.json", ".b.json"]),
        ("results/*", ["results/a.json"]),
        ("results/", ["results/a.json", "results/deep/er/a.json"]),
        ("results/**", ["results/a.json", "results/deep/er/a.json"]),
        ("**/a.json", ["a.json", "results/a.json", "results/deep/er/a.json"]),
        ("results/**/a.json", ["results/a.json", "results/deep/er/a.json"]),
        ("**/er/**/*.json", ["results/deep/er/a.json"]),
        ("**", PATHS),
        ("r*", ["results.csv"]),
        ("[[]x]", ["[x]"]),
        ("[!r.]*.json", ["a.json"]),
        ("?.json", ["a.json"]),
        ("results", []),
    ],
)
def test_a_pattern_chooses_files_name_by_name(pattern: str, chosen: list[str]) -> None:
    assert [path for path in PATHS if is_chosen(path, [parse_pattern(pattern)])] == chosen


def test_one_of_several_patterns_is_enough_and_none_chooses_nothing() -> None:
    assert is_chosen("a.csv", ["*.json", "*.csv"])
    assert not is_chosen("a.csv", [])


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("/etc/*", "path below"),
        ("../*", "path below"),
        ("a/../b", "path below"),
        ("./a", "path below"),
        ("a//b", "path below"),
        ("/", "path below"),
        ("a**", "whole folders"),
        ("**.json/x", "whole folders"),
        ("", "empty"),
        ("a\nb", "control"),
        (3, "quote it"),
        (None, "quote it"),
        ("x" * 3000, "longer"),
    ],
)
def test_a_pattern_that_leads_out_or_means_nothing_is_refused(pattern: object, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        parse_pattern(pattern)


@pytest.mark.parametrize("value", ["*.json", {"a": 1}, ["a"] * 101])
def test_patterns_are_a_list(value: object) -> None:
    with pytest.raises(UsageError, match="list"):
        parse_patterns(value)


def test_no_name_makes_a_match_take_long() -> None:
    began = time.process_time()
    is_chosen("/".join("a" * 1000), ["/".join(["**", "a*"] * 20) + "/b"])
    assert time.process_time() - began < 1


@pytest.mark.parametrize(
    ("pattern", "is_meant"),
    [
        ("**", False),
        ("**/*.json", False),
        ("*/main-1.json", False),
        ("orch-*/main-1.json", False),
        ("orch-memory/", True),
        ("orch-memory/*", True),
        ("orch-memory/**", True),
        ("orch-memory/main-1.json", True),
        ("orch-memory", False),
    ],
)
def test_what_is_kept_of_memory_is_meant_by_its_folders_name_alone(pattern: str, is_meant: bool) -> None:
    assert is_chosen("orch-memory/main-1.json", ["x.json", parse_pattern(pattern)]) is is_meant
    assert is_chosen("results/orch-memory/x", ["**"])
