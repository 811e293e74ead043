"""Who wrote a line, and whether what says so was sealed, pinned, changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from orchestrator.errors import UsageError
from orchestrator.ledger import RunRow
from orchestrator.lifecycle import State
from orchestrator.line_origin import LineName, Origin, find_origin, origin_json, origin_table, seal_over
from orchestrator.run_folder import RunFolder
from orchestrator.supervisor.records import RecordWriter
from orchestrator.supervisor.seals import SealChecker

RUN = "k3m9x2qa7bcd"
IDENTITY = {"pid": 41, "started": 977, "boot_id": "b007-1d", "pid_namespace": "pid:[1]", "init_started": 1}
ROW = RunRow(
    run_id=RUN,
    group_id=RUN,
    experiment="trial",
    host="pve-200",
    bundle="b" * 64,
    commit_id="c" * 40,
    dirty=True,
    state=State.SUCCEEDED,
    created_t=1.0,
    job={},
)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run of two sealed lines on stdout, in two records, and one on stderr that no seal covers yet."""
    folder = RunFolder(tmp_path, RUN)
    folder.make()
    writer = RecordWriter(str(folder.records), RUN, {"job": {}}, clock=lambda: 1764435123.5)
    writer.write("start", identity=IDENTITY, python="3.11.7")
    argv = ["python3", "instrument.py", "it's"]
    identity = {**IDENTITY, "pid": 42}
    writer.write("spawn", proc="main", pid=42, argv=argv, env_digest="e" * 64, identity=identity)
    writer.write_output("main", 42, "stdout", 0, 0, "text", "one\ntw")
    writer.seal()
    writer.write_output("main", 42, "stdout", 6, 1, "text", "o\n")
    writer.seal()
    writer.write_output("main", 42, "stderr", 0, 0, "text", "unended")
    return folder


def pin_all(folder: RunFolder) -> None:
    for seal in SealChecker(RUN).feed(folder.segment(0).read_bytes()):
        pin(folder, seal.seq, seal.sha256)


def origin(folder: RunFolder, line: str) -> Origin:
    return find_origin(ROW, folder, LineName.parse(f"{RUN}/{line}"))


def pin(folder: RunFolder, seq: int, sha256: str) -> None:
    folder.observe("seal", seq=seq, sha256=sha256, segment=0, line_start=0, line_end=1)


def test_a_line_is_traced_to_its_process_and_the_seal_over_its_last_byte(folder: RunFolder) -> None:
    pin_all(folder)
    found = origin(folder, "main.stdout:2")
    form: dict[str, Any] = json.loads(json.dumps(origin_json(found)))
    assert (form["line"]["text"], form["line"]["seq"]) == ("two", 5)
    assert form["run"]["commit"] == "c" * 40
    assert form["run"]["dirty"]
    assert form["process"]["argv"] == ["python3", "instrument.py", "it's"]
    assert form["process"]["env_digest"] == "e" * 64
    assert form["process"]["identity"]["boot_id"] == "b007-1d"
    assert form["supervisor"]["identity"]["pid"] == 41
    assert (form["seal"]["seq"], form["seal"]["is_right"], form["seal"]["is_pinned"]) == (6, True, True)
    assert origin(folder, "main.stdout:1").standing.seal != found.standing.seal


def test_the_table_says_all_of_it(folder: RunFolder) -> None:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(origin_table(origin(folder, "main.stdout:1")))
    text = captured.get()
    facts = (
        f"{RUN}/main.stdout:1",
        "seq 3, 2025-11-29T16:52:03.500Z",
        "pve-200",
        "trial",
        "pid 42",
        '"it\'s"',
        "e" * 64,
        "tick 977 of boot b007-1d",
        "pid 41",
        "b" * 64,
        "c" * 40 + " (dirty)",
        "right from the run's first byte on, not pinned here",
    )
    assert [fact for fact in facts if fact not in text] == []


def test_a_line_that_no_seal_covers_yet_is_no_finding(folder: RunFolder) -> None:
    found = origin(folder, "main.stderr:1")
    assert (found.line.text, found.line.is_finished) == ("unended", False)
    assert found.standing.seal is None
    assert origin_json(found)["seal"]["is_right"] is None


def test_a_change_before_the_seal_shows_and_one_after_it_does_not(folder: RunFolder) -> None:
    path = folder.segment(0)
    path.write_bytes(path.read_bytes().replace(b'"o\\n"', b'"0\\n"'))
    assert "does not match" in (origin(folder, "main.stdout:2").standing.problem or "")
    assert origin(folder, "main.stdout:1").standing.problem is None


def test_a_seal_that_is_not_the_pinned_one_shows(folder: RunFolder) -> None:
    pin(folder, 4, "0" * 64)
    assert "not the one that was pinned" in (seal_over(folder, 3).problem or "")


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("main.stdout:3", r"no line main\.stdout:3: main\.stdout has lines 1 to 2"),
        ("rank1.stdout:1", r"no line of rank1\.stdout; it has output on: main\.stderr, main\.stdout"),
    ],
)
def test_an_unknown_line_is_refused_with_those_that_exist(folder: RunFolder, line: str, answer: str) -> None:
    with pytest.raises(UsageError, match=answer):
        origin(folder, line)


@pytest.mark.parametrize(
    "text", ["", "run", "run/main.stdout", "run/main.stdout:0", "run/main.log:1", "/a.stdout:1"]
)
def test_what_is_no_name_of_a_line_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="names no line: write it as it is shown"):
        LineName.parse(text)


def test_a_process_may_have_dots_in_its_name() -> None:
    assert LineName.parse("last/a.b.stderr:7") == LineName(run="last", proc="a.b", stream="stderr", number=7)
