"""Scripts and commands of a command line as experiments."""

from pathlib import Path
from typing import Any

import pytest

from orchestrator.adhoc import ProgramOptions, command_experiment, script_experiment
from orchestrator.errors import UsageError
from orchestrator.experiment import Expectation
from orchestrator.fields import CardCount

ALL = ProgramOptions(
    devices="0,GPU-00000000-0000-0000-0000-000000000000",
    alloc_conf="expandable_segments:True",
    env=("A=1", "B=x=y"),
    timeout="10m",
    grace="0",
)


def _script(folder: Path, name: str = "my script.py") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


def test_a_script_gets_its_arguments_and_what_was_typed(tmp_path: Path) -> None:
    found = script_experiment(_script(tmp_path), ["--lr", "1"], ALL, project=tmp_path)
    assert (found.name, found.payload, found.script) == ("my_script", None, "my script.py")
    assert found.args == ("--lr", "1")
    assert found.devices == ("0", "GPU-00000000-0000-0000-0000-000000000000")
    assert (found.alloc_conf, found.env) == ("expandable_segments:True", {"A": "1", "B": "x=y"})
    assert (found.timeout_s, found.grace_s) == (600.0, 0.0)
    assert found.expect == Expectation()


def test_a_script_can_have_ranks_and_smaller_cards(tmp_path: Path) -> None:
    options = ProgramOptions(processes="2", memory_limit="96GiB")
    found = script_experiment(_script(tmp_path), [], options, project=tmp_path)
    assert (found.processes, found.memory_limit_bytes) == (2, 96 * 1024**3)
    assert options.given() == [("--processes", "processes"), ("--memory-limit", "memory_limit")]
    plain = script_experiment(_script(tmp_path), [], ProgramOptions(), project=tmp_path)
    assert (plain.processes, plain.memory_limit_bytes) == (1, None)


def test_a_script_inside_a_payload_brings_that_payload(tmp_path: Path) -> None:
    inside = _script(tmp_path, "payloads/probe/tools/run.py")
    found = script_experiment(inside, [], ProgramOptions(), project=tmp_path)
    assert (found.payload, found.script) == ("probe", "probe/tools/run.py")
    beside = _script(tmp_path, "payloads/run.py")
    found = script_experiment(beside, [], ProgramOptions(), project=tmp_path)
    assert (found.payload, found.script) == (None, "run.py")


@pytest.mark.parametrize(
    ("options", "verdicts"),
    [
        (ProgramOptions(), ("ok",)),
        (ProgramOptions(devices="none"), ("ok",)),
        (ProgramOptions(devices="0"), ("ok", "unverified")),
        (ProgramOptions(alloc_conf="expandable_segments:True"), ("ok", "unverified")),
    ],
)
def test_a_command_that_can_prove_nothing_need_not(
    options: ProgramOptions, verdicts: tuple[str, ...]
) -> None:
    found = command_experiment(["/usr/bin/nvidia-smi", "-L"], options)
    assert (found.name, found.command) == ("nvidia-smi", ("/usr/bin/nvidia-smi", "-L"))
    assert found.expect.verdicts == verdicts


@pytest.mark.parametrize("program", ["..", "/", "-", "日本"])
def test_whatever_a_command_is_called_its_run_has_a_name(program: str) -> None:
    assert command_experiment([program], ProgramOptions()).name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": "cuda:0"}, "--devices: 'cuda:0' is no device"),
        ({"devices": "0,0"}, "--devices: 0 is listed twice"),
        ({"devices": "count=two"}, "--devices: count must be a number of cards"),
        ({"devices": "count=2,free=1GiB"}, "--devices: unknown key 'free'"),
        ({"alloc_conf": "expandable:1"}, "--alloc-conf: 'expandable'"),
        ({"env": ("A",)}, "--env 'A' must be NAME=VALUE"),
        ({"env": ("CUDA_VISIBLE_DEVICES=0",)}, "--env 'CUDA_VISIBLE_DEVICES': is set by orch"),
        ({"timeout": "soon"}, "--timeout: 'soon' is no duration"),
        ({"grace": "-1"}, "--grace: '-1' is no duration"),
        ({"processes": "0"}, "--processes: '0' is no number of processes"),
        ({"processes": "2", "env": ("RANK=1",)}, "--env: RANK is set by orch for each of 2"),
        ({"memory_limit": "96"}, "--memory-limit: '96' is no size"),
    ],
)
def test_an_option_that_cannot_be_read_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        command_experiment(["x"], ProgramOptions(**options))


def test_what_was_typed_is_known_with_the_key_that_says_the_same() -> None:
    assert ALL.given() == [
        ("--devices", "devices"),
        ("--alloc-conf", "alloc_conf"),
        ("--env", "env"),
        ("--timeout", "timeout"),
        ("--grace", "grace"),
    ]
    assert ProgramOptions().given() == []


def test_no_script_and_an_argument_that_is_no_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is no file"):
        script_experiment(tmp_path / "x.py", [], ProgramOptions(), project=tmp_path)
    with pytest.raises(UsageError, match="not UTF-8"):
        command_experiment(["x", "\udcff"], ProgramOptions())


def test_a_number_of_cards_can_be_typed() -> None:
    found = command_experiment(["true"], ProgramOptions(devices="count=2,free_memory=90GiB"))
    assert found.devices == CardCount(count=2, free_bytes=90 * 1024**3)
