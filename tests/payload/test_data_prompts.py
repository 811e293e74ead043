"""Prompts of docstrings: the same for the same libraries, and all about one docstring under one key."""

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from dflash.data import prompts
from dflash.data.held_out import is_held_out

SOURCE = '''
"""A library."""

print("welcome")

def fold(paper, times=1):
    """fold(paper, times=1) -> Paper

    Folds a sheet
    of paper.

    More about it.
    """

def bend(paper):
    """Folds a sheet of paper."""

def silent(): ...

def _hidden():
    """Says nothing to others."""

class Paper:
    """A sheet."""

    @classmethod
    def cut(cls):
        """Cuts it in two."""

    width = 3

def lost():
    """At <object at 0x7f0123456789>."""

class Odd:
    def __call__(self): ...

    @property
    def __doc__(self):
        raise RuntimeError

odd = Odd()
'''


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "origami.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "origami", raising=False)
    return "origami"


def written(path: Path, *modules: str) -> list[dict[str, str]]:
    arguments = [word for module in modules for word in ("--modules", module)]
    assert prompts.main(["--out", str(path), *arguments]) == 0
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_docstring_gives_its_questions_under_one_name(
    library: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = written(tmp_path / "prompts.jsonl", library, "not_installed_anywhere")
    assert capsys.readouterr().out == f"18 prompts in {tmp_path}/prompts.jsonl\n"
    assert {line["key"] for line in found} == {"Folds a sheet of paper.", "A sheet.", "Cuts it in two."}
    texts = {line["prompt"] for line in found}
    assert len(texts) == 18
    assert "What does origami.bend do in Python? Folds a sheet of paper." in texts
    assert "Write a short example that uses origami.Paper.cut." in texts


def test_same_libraries_give_the_same_file(tmp_path: Path) -> None:
    one = written(tmp_path / "one.jsonl", "json", "textwrap")
    other = written(tmp_path / "other.jsonl", "textwrap", "json")
    assert one == other
    keys = [line["key"] for line in one]
    assert keys != sorted(keys)
    assert {is_held_out(key, 0.5) for key in keys} == {True, False}


def test_nothing_to_ask_about_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prompts.main(["--out", str(tmp_path / "x.jsonl"), "--modules", "not_installed_anywhere"]) == 1
    assert "no docstrings in not_installed_anywhere" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.jsonl"))


def test_standard_modules_need_nothing_installed() -> None:
    assert {"json", "asyncio", "sqlite3"} <= set(prompts.STANDARD)
    assert not {"antigravity", "this", "tkinter"} & set(prompts.STANDARD)
    assert prompts.documented([ModuleType("empty")]) == {}
