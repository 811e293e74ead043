"""What `orch explain` refuses, and what it makes of files, in this process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from orchestrator import explaining
from orchestrator.cli import explain as command
from orchestrator.cli.explain import explain
from orchestrator.cli.explaining import explain_shortly
from orchestrator.cli.terminal import Screen
from orchestrator.errors import ConfigError, OrchError, UsageError

DRAFTER = Path(__file__).parents[2] / "payloads" / "dflash"


@pytest.fixture
def inventory(tmp_path: Path) -> Path:
    path = tmp_path / "inventory.yaml"
    path.write_text(yaml.safe_dump({"hosts": {"here": {"transport": "local"}}}))
    return path


def explained(inventory: Path, *words: str, text: str | bytes = "") -> Result:
    return CliRunner().invoke(explain, ["--inventory", str(inventory), *words], input=text)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "name one of: a run (or `last`), --message FILE, --snapshot FILE"),
        (["last", "--message", "x"], "only one of: a run"),
        (["last", "--snapshot", "x"], "only one of: a run"),
        (["last", "--params", "x"], "--params goes with --message: a run has its own"),
        (["--message", "x", "--profile", "p"], "--profile needs --experiment"),
    ],
)
def test_words_that_do_not_go_together_are_refused(inventory: Path, words: list[str], says: str) -> None:
    done = explained(inventory, *words)
    assert done.exit_code == 2
    assert says in done.output


@pytest.mark.parametrize(
    ("words", "kind", "says"),
    [
        (["--message", "no such file"], UsageError, "no such file: cannot be read: No such file"),
        (["--message", "-", "--params", "no such file"], UsageError, "no such file: cannot be read"),
        (["--message", "-", "--params", __file__], ConfigError, "test_explain_command.py: no JSON"),
        (["--message", "-", "--params", "/proc/self/oom_adj"], ConfigError, "must be one JSON object"),
        (["last"], OrchError, "there is no last run"),
    ],
)
def test_files_that_cannot_be_used_are_named(
    inventory: Path, words: list[str], kind: type[OrchError], says: str
) -> None:
    done = explained(inventory, *words)
    assert isinstance(done.exception, kind)
    assert says in str(done.exception)


def test_a_message_of_a_project_without_shapes_asks_for_its_experiment(inventory: Path) -> None:
    done = explained(inventory, "--message", "-", text="CUDA out of memory. Tried to allocate 2.00 GiB.")
    assert done.output.startswith("out of memory: 2.00 GiB asked; ")
    assert "none here does: name its experiment with --experiment" in done.output


@pytest.fixture
def drafter(inventory: Path) -> Path:
    folder = inventory.parent / "payloads" / "dflash"
    shutil.copytree(DRAFTER, folder, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def test_without_parameters_nothing_is_said_that_nobody_checked(inventory: Path, drafter: Path) -> None:
    words = ["--message", "-", "--no-estimate"]
    done = explained(inventory, *words, text="CUDA out of memory. Tried to allocate 15.09 GiB.")
    assert done.output.startswith("out of memory: 15.09 GiB asked; ")
    assert "no parameters are known: give --params FILE or --experiment FILE" in done.output
    assert "the size of no" not in done.output


def test_parameters_that_no_program_has_name_nothing(inventory: Path, drafter: Path, tmp_path: Path) -> None:
    path = tmp_path / "params.json"
    path.write_text('{"learning_rate": 1e-4, "epochs": 3}')
    words = ["--message", "-", "--params", str(path)]
    done = explained(inventory, *words, text="CUDA out of memory. Tried to allocate 2.37 GiB.")
    says = "none of these parameters is one of the payload's (epochs, learning_rate), so nothing is named; "
    assert done.output.startswith(f"{says}out of memory: 2.37 GiB asked; ")
    assert "lm_head" not in done.output
    path.write_text('{"epochs": 3, "max_anchors": 512}')
    done = explained(
        inventory, *words, "--no-estimate", text="CUDA out of memory. Tried to allocate 2.37 GiB."
    )
    assert "lm_head" in done.output, "one that it knows is enough"


def test_a_text_without_a_message_says_so(inventory: Path) -> None:
    done = explained(inventory, "--message", "-", text="all went well")
    assert done.output == "the text holds nothing that says that memory was out\n"


def test_what_was_tried_alone_is_enough(inventory: Path) -> None:
    done = explained(inventory, "--message", "-", text="it says: Tried to allocate 15.09 GiB\n")
    assert done.exit_code == 0
    assert done.output.startswith("out of memory: 15.09 GiB asked; ")


def test_bytes_that_are_no_text_are_no_hindrance(inventory: Path) -> None:
    text = b"\xff\xfe CUDA out of memory. Tried to allocate 2.00 GiB."
    done = explained(inventory, "--message", "-", "--json", text=text)
    assert done.exception is None
    assert json.loads(done.output)["balance"]["asked_bytes"] == 2 * 2**30


def test_a_standard_input_that_is_closed_is_said(inventory: Path) -> None:
    code = (
        "import sys\nfrom orchestrator.cli.main import main\n"
        f"sys.argv[1:] = ['explain', '--inventory', {str(inventory)!r}, '--message', '-']\nsys.exit(main())"
    )
    argv = ["sh", "-c", 'exec "$0" -c "$1" <&-', sys.executable, code]
    done = subprocess.run(
        argv,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "ORCH_HOME": str(inventory.parent)},
    )
    assert done.returncode == 2, done.stderr
    assert "standard input is closed: give the message's file" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_cannot_be_explained_keeps_nobody_from_the_summary(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a size\x1b[31m of nothing")

    monkeypatch.setattr(explaining, "may_have_died_of_memory", lambda *_: True)
    monkeypatch.setattr(explaining, "explain_run", fails)
    report: Any = SimpleNamespace(row=SimpleNamespace(run_id="r"), outcome=None)
    nothing: Any = None
    assert not explain_shortly(nothing, report, Screen())
    says = r"cannot explain why memory was out: ZeroDivisionError: a size\x1b[31m of nothing"
    assert says in capsys.readouterr().err


def test_a_name_that_stands_twice_in_the_parameters_is_refused(inventory: Path, tmp_path: Path) -> None:
    path = tmp_path / "params.json"
    path.write_text('{"max_anchors": 512, "max_anchors": 256}')
    done = explained(inventory, "--message", "-", "--params", str(path), text="x")
    assert "'max_anchors' stands there twice" in str(done.exception)


@pytest.mark.parametrize(("quiet_s", "is_told"), [(0.0, True), (60.0, False)])
def test_whoever_waits_long_is_told_for_what_and_how_to_do_without(
    inventory: Path, monkeypatch: pytest.MonkeyPatch, quiet_s: float, is_told: bool
) -> None:
    def takes_long(_: object, found: explaining.Explained) -> explaining.Explained:
        time.sleep(0.2)
        return found

    monkeypatch.setattr(command, "QUIET_S", quiet_s)
    monkeypatch.setattr(explaining, "can_be_predicted", lambda _: True)
    monkeypatch.setattr(explaining, "with_outlook", takes_long)
    done = explained(inventory, "--message", "-", text="CUDA out of memory. Tried to allocate 2.00 GiB.")
    says = "orch: asking the payload what would fit; --no-estimate leaves that out\n"
    assert done.stderr == (says if is_told else "")


def test_without_an_experiment_the_program_to_predict_is_asked_for(inventory: Path, tmp_path: Path) -> None:
    folder = tmp_path / "payloads" / "probe"
    folder.mkdir(parents=True)
    for name in ("__init__", "estimate", "shapes"):
        (folder / f"{name}.py").touch()
    text = "CUDA out of memory. Tried to allocate 22.00 GiB. GPU 0 has a total capacity of 94.97 GiB of which"
    params = tmp_path / "params.json"
    params.write_text("{}")
    done = explained(inventory, "--message", "-", "--params", str(params), text=text)
    assert "nothing is predicted: name the program with --experiment" in done.output
