"""A payload's own programs are found by name, run apart from everything, and believed only in their form."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from orchestrator import payload_programs, program_folder
from orchestrator.apart import Stopped, execute
from orchestrator.bundle import Bundle, build_bundle, empty_bundle
from orchestrator.errors import NeedsTorch, ProgramFailed, UsageError
from orchestrator.payload_answers import (
    Alternative,
    Card,
    Estimate,
    Failure,
    Malformed,
    Phase,
    Tensor,
    estimate_of,
    read_estimate,
    read_shapes,
)
from orchestrator.payload_programs import ESTIMATE, SHAPES, Question, has_program
from orchestrator.strict_model import StrictModel
from orchestrator.workspace import Workspace
from tests.estimates import GIB, open_with_programs
from tests.project import Project, wait_until

ENTRY = "probe.trial"


@pytest.fixture
def workspace(project: Project) -> Iterator[Workspace]:
    with open_with_programs(project) as opened:
        yield opened


@pytest.fixture
def bundle(project: Project, workspace: Workspace) -> Bundle:
    return build_bundle(project.folder / "payloads" / "probe", workspace.store)


@pytest.fixture
def calls(tmp_path: Path) -> Path:
    """Where the program writes down how it was called."""
    path = tmp_path / "calls"
    path.touch()
    return path


def _question(calls: Path | None = None, **changes: Any) -> Question:
    params = {"size_gib": 4, **({} if calls is None else {"log": str(calls)}), **changes.pop("params", {})}
    return Question(entry=ENTRY, params=params, **changes)


def _calls(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class TestFinding:
    def test_a_program_belongs_to_the_package_of_the_module(
        self, bundle: Bundle, workspace: Workspace
    ) -> None:
        assert has_program(bundle, "probe.deep.trial", ESTIMATE)
        assert has_program(bundle, ENTRY, SHAPES)
        assert not has_program(bundle, "other.trial", ESTIMATE)
        assert not has_program(bundle, None, ESTIMATE)
        assert not has_program(empty_bundle(workspace.store), ENTRY, ESTIMATE)


class TestAnEstimate:
    def test_is_asked_by_words_with_a_bare_environment_in_the_bundles_own_files(
        self, workspace: Workspace, bundle: Bundle, calls: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SECRET_OF_MINE", "hunter22")
        question = _question(
            calls, card="96GiB:sm_120", alloc_conf="expandable_segments:True", memory_limit_bytes=90 * GIB
        )
        found = payload_programs.estimate(workspace, bundle, question)
        assert (found.peak_allocated_bytes, found.verdict, found.capacity_bytes) == (
            4 * GIB,
            "fits",
            89 * GIB,
        )
        assert found.highest is not None
        assert found.highest.name == "timed"
        ((words, env, cwd, python),) = _calls(calls)
        *asked, params = words
        assert asked == [
            *("--entry", ENTRY, "--json", "--card", "96GiB:sm_120"),
            *("--alloc-conf", "expandable_segments:True", "--memory-limit-bytes", str(90 * GIB), "--params"),
        ]
        assert set(env) <= {"HOME", "PATH", "LANG", "LC_CTYPE", "TMPDIR", "CUDA_VISIBLE_DEVICES"}
        assert env["CUDA_VISIBLE_DEVICES"] == ""
        assert Path(cwd) == workspace.home / "estimates" / bundle.id / "code"
        assert python == sys.executable
        assert not Path(params).exists()

    def test_is_kept_until_something_that_it_depends_on_changes(
        self, workspace: Workspace, bundle: Bundle, calls: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        questions = [
            *(_question(), _question(card="h200"), _question(alloc_conf="backend:native")),
            *(_question(has_alternatives=True), _question(memory_limit_bytes=GIB)),
            *(_question(params={"size_gib": 5}), Question(entry="probe.other", params=_question().params)),
        ]
        assert len({payload_programs.answer_key(question, None) for question in questions}) == len(questions)
        for _ in range(2):
            payload_programs.estimate(workspace, bundle, _question(calls))
        assert len(_calls(calls)) == 1
        monkeypatch.setattr(payload_programs, "_about", lambda *_: ("python", "3.12.0", "2.14.0"))
        payload_programs.estimate(workspace, bundle, _question(calls))
        assert len(_calls(calls)) == 2

    def test_what_is_kept_is_for_this_user_alone_and_checked_when_it_is_read(
        self, workspace: Workspace, bundle: Bundle, calls: Path
    ) -> None:
        payload_programs.estimate(workspace, bundle, _question(calls))
        root = workspace.home / "estimates"
        for path in (root, *root.rglob("*")):
            if path.name != "__pycache__" and path.parent.name != "__pycache__":
                assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
        (answer,) = (root / bundle.id / "answers").iterdir()
        answer.write_text('{"format": 2}')
        assert payload_programs.estimate(workspace, bundle, _question(calls)).peak_allocated_bytes == 4 * GIB
        assert len(_calls(calls)) == 2

    def test_code_that_was_altered_since_is_put_back(self, workspace: Workspace, bundle: Bundle) -> None:
        payload_programs.estimate(workspace, bundle, _question())
        code = workspace.home / "estimates" / bundle.id / "code"
        altered, added = code / "probe" / "estimate.py", code / "json.py"
        for number, path in enumerate((altered, added)):
            path.write_text("raise SystemExit('not what was shipped')")
            payload_programs.estimate(workspace, bundle, _question(params={"size_gib": 6 + number}))
        assert not added.exists()

    def test_two_that_find_no_code_yet_run_at_the_same_time(
        self, workspace: Workspace, bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        look, both, have_looked = program_folder._is_as_shipped, threading.Barrier(2), threading.local()

        def look_together(code: Path, shipped: Bundle) -> bool:
            found = look(code, shipped)
            if not hasattr(have_looked, "once"):
                have_looked.once = True
                both.wait(10)
            return found

        monkeypatch.setattr(program_folder, "_is_as_shipped", look_together)
        marks = tmp_path / "marks"
        marks.mkdir()
        shared = {"fault": "together", "marks": str(marks)}
        questions = [_question(params={"size_gib": size, **shared}) for size in (1, 2)]
        with ThreadPoolExecutor(2) as pool:
            ask = partial(payload_programs.estimate, workspace, bundle)
            assert [found.peak_allocated_bytes for found in pool.map(ask, questions)] == [GIB, 2 * GIB]

    def test_only_so_many_answers_and_bundles_are_kept(
        self, workspace: Workspace, project: Project, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(program_folder, "MOST_BUNDLES", 2)
        monkeypatch.setattr(program_folder, "MOST_ANSWERS", 3)
        made = []
        for number in range(3):
            (project.folder / "payloads" / "probe" / "other.py").write_text(f"# {number}")
            made.append(build_bundle(project.folder / "payloads" / "probe", workspace.store))
            payload_programs.shapes(workspace, made[-1], ENTRY, [{"n": 1}])
        assert {path.name for path in (workspace.home / "estimates").iterdir()} == {it.id for it in made[1:]}
        for number in range(5):
            payload_programs.shapes(workspace, made[2], ENTRY, [{"n": number}])
        assert len(list((workspace.home / "estimates" / made[2].id / "answers").iterdir())) == 3

    def test_they_may_be_few_and_too_large(
        self, workspace: Workspace, bundle: Bundle, project: Project, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(program_folder, "MOST_BYTES", 1)
        payload_programs.shapes(workspace, bundle, ENTRY, [{"n": 1}])
        (project.folder / "payloads" / "probe" / "other.py").touch()
        other = build_bundle(project.folder / "payloads" / "probe", workspace.store)
        payload_programs.shapes(workspace, other, ENTRY, [{"n": 1}])
        assert [path.name for path in (workspace.home / "estimates").iterdir()] == [other.id]

    def test_others_that_change_meanwhile_do_not_keep_one_from_being_used(
        self, workspace: Workspace, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def gone(*_: object, **__: object) -> list[Path]:
            raise FileNotFoundError(2, "No such file", "__pycache__")

        monkeypatch.setattr(program_folder, "_newest", gone)
        with program_folder.ProgramFolder.open(workspace.home, bundle, workspace.store) as held:
            assert (held.code / "probe" / "shapes.py").exists()

    def test_a_folder_in_use_is_not_removed(
        self, workspace: Workspace, bundle: Bundle, project: Project, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(program_folder, "MOST_BUNDLES", 1)
        (project.folder / "payloads" / "probe" / "other.py").touch()
        other = build_bundle(project.folder / "payloads" / "probe", workspace.store)
        with program_folder.ProgramFolder.open(workspace.home, bundle, workspace.store) as held:
            payload_programs.shapes(workspace, other, ENTRY, [{"n": 1}])
            assert (held.code / "probe" / "shapes.py").exists()


class TestFailures:
    @pytest.mark.parametrize(
        ("fault", "kind", "said"),
        [
            ("refused", UsageError, "probe.estimate: seq_len is -1; it must be at least 2"),
            ("refused by its file", UsageError, "probe.estimate: the parameters: seq_len is -1"),
            ("old torch", NeedsTorch, "this needs torch 2.9, here is 2.4"),
            ("silent", NeedsTorch, "probe.estimate: it does not say why (/"),
            ("no torch", NeedsTorch, "estimate: {python: PATH}"),
            ("crash", ProgramFailed, "RuntimeError: a \\x1b[31mred"),
            ("endless", ProgramFailed, "printed more than 8.0 MiB"),
            ("shapeless", ProgramFailed, "phases.0.largest.0.shape: must be a list, not text"),
            ("no number", ProgramFailed, "NaN is no number"),
        ],
    )
    def test_each_is_one_line_that_says_what_it_was(
        self, fault: str, kind: type[Exception], said: str, workspace: Workspace, bundle: Bundle
    ) -> None:
        with pytest.raises(kind) as failed:
            payload_programs.estimate(workspace, bundle, _question(params={"fault": fault}))
        assert said in str(failed.value)
        assert str(failed.value).isprintable()
        if kind is ProgramFailed:
            assert str(failed.value).endswith("; run it by hand: python -m probe.estimate … in payloads/")

    def test_a_program_that_takes_too_long_is_killed(
        self, workspace: Workspace, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(payload_programs, "ESTIMATE_LIMIT_S", 0.3)
        with pytest.raises(ProgramFailed, match=r"probe\.estimate: no answer within 0\.3 s; run it by hand"):
            payload_programs.estimate(workspace, bundle, _question(params={"fault": "slow"}))
        assert not _children()

    def test_what_a_program_leaves_behind_holds_nobody_up_and_is_ended(
        self, workspace: Workspace, bundle: Bundle, tmp_path: Path
    ) -> None:
        left = tmp_path / "left"
        payload_programs.estimate(workspace, bundle, _question(params={"fault": "holder", "left": str(left)}))
        wait_until(lambda: not _lives(left.read_text()), "what the program left behind")

    @pytest.mark.parametrize("fault", ["escapes", "escapes and waits"])
    def test_also_what_left_its_session(
        self,
        fault: str,
        workspace: Workspace,
        bundle: Bundle,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        left = tmp_path / "left"
        monkeypatch.setattr(payload_programs, "ESTIMATE_LIMIT_S", 1.0)
        question = _question(params={"fault": fault, "left": str(left)})
        if fault == "escapes":
            payload_programs.estimate(workspace, bundle, question)
        else:
            with pytest.raises(ProgramFailed, match="no answer within 1 s"):
                payload_programs.estimate(workspace, bundle, question)
        assert not _lives(left.read_text())

    def test_all_of_it_ends_when_orch_is_killed(self, tmp_path: Path) -> None:
        child = "import os, time; open('pid', 'w').write(str(os.getpid())); time.sleep(100)"
        asks = (
            "import sys; from pathlib import Path; from orchestrator.apart import *\n"
            f"execute([sys.executable, '-c', {child!r}], name='x', cwd=Path({str(tmp_path)!r}), env={{}},"
            " limit_s=60, most_bytes=1)"
        )
        pid = tmp_path / "pid"
        with subprocess.Popen([sys.executable, "-c", asks]) as orch:
            wait_until(lambda: pid.exists() and pid.read_text() != "", "the program")
            orch.kill()
        wait_until(lambda: not _lives(pid.read_text()), "the program's end")

    def test_a_keeper_that_is_killed_leaves_nothing_either(self, tmp_path: Path) -> None:
        kills = (
            "import os, signal, subprocess; left = subprocess.Popen(['sleep', '100']);"
            "open('left', 'w').write(str(left.pid)); os.kill(os.getppid(), signal.SIGKILL)"
        )
        argv = [sys.executable, "-c", kills]
        code, *_ = execute(argv, name="x", cwd=tmp_path, env={**os.environ}, limit_s=60, most_bytes=1)
        assert code == -9
        wait_until(lambda: not _lives((tmp_path / "left").read_text()), "what was left")

    def test_a_program_that_died_of_a_signal_says_so(self, tmp_path: Path) -> None:
        dies = [sys.executable, "-c", "import os; os.kill(os.getpid(), 11)"]
        code, *_ = execute(dies, name="x", cwd=tmp_path, env={}, limit_s=60, most_bytes=1)
        assert code == -11

    def test_what_a_killed_orch_left_is_swept(self, workspace: Workspace, bundle: Bundle) -> None:
        folder = workspace.home / "estimates" / bundle.id
        payload_programs.shapes(workspace, bundle, ENTRY, [{"n": 1}])
        old, new = folder / "scratch-old", folder / "scratch-new"
        for path in (old, new):
            (path / "deep").mkdir(parents=True)
        os.utime(old, (1, 1))
        payload_programs.shapes(workspace, bundle, ENTRY, [{"n": 1}])
        assert (old.exists(), new.exists()) == (False, True)

    def test_whoever_does_not_wait_any_more_ends_it(self, workspace: Workspace, bundle: Bundle) -> None:
        stopping = threading.Event()
        stopping.set()
        with pytest.raises(Stopped):
            payload_programs.estimate(workspace, bundle, _question(params={"fault": "slow"}), stopping)
        assert not _children()

    def test_an_interpreter_that_is_none_is_named_with_its_setting(
        self, bundle: Bundle, project: Project, tmp_path: Path
    ) -> None:
        nothing = tmp_path / "no $(python)"
        (project.folder / "inventory.yaml").write_text(
            json.dumps({"hosts": {"here": {"transport": "local"}}, "estimate": {"python": str(nothing)}})
        )
        again = Workspace.open(project.folder / "inventory.yaml")
        try:
            with pytest.raises(ProgramFailed, match="cannot be started: No such file") as failed:
                payload_programs.estimate(again, bundle, _question())
            assert str(nothing) in str(failed.value)
            assert "see estimate: {python: PATH} in inventory.yaml" in str(failed.value)
        finally:
            again.close()

    @pytest.mark.parametrize("said", ["5", '{"a": 1, "b": 2, "c": 3}', "[1, 2, 3]", "[]", "[" * 100_000, ""])
    def test_one_that_tells_no_version_is_named_with_its_setting(self, said: str, tmp_path: Path) -> None:
        (tmp_path / "said").write_text(said)
        other = tmp_path / "python"
        other.write_text(f'#!/bin/sh\nexec cat "{tmp_path}/said"\n')
        other.chmod(0o755)
        with pytest.raises(ProgramFailed, match=r"cannot tell its version .* see estimate: \{python: PATH\}"):
            payload_programs._about(str(other))

    def test_the_interpreter_of_the_inventory_is_the_one_that_runs(
        self, project: Project, bundle: Bundle, calls: Path, tmp_path: Path
    ) -> None:
        other = tmp_path / "another python"
        other.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        other.chmod(0o755)
        (project.folder / "inventory.yaml").write_text(
            json.dumps({"hosts": {"here": {"transport": "local"}}, "estimate": {"python": str(other)}})
        )
        again = Workspace.open(project.folder / "inventory.yaml")
        try:
            payload_programs.estimate(again, bundle, _question(calls))
        finally:
            again.close()
        assert len(_calls(calls)) == 1


class TestShapes:
    def test_each_set_of_parameters_has_its_answer_in_order(
        self, workspace: Workspace, bundle: Bundle
    ) -> None:
        for _ in range(2):
            sets = payload_programs.shapes(workspace, bundle, ENTRY, [{"n": 3}, {"n": 5}])
            assert [each["tensors"][0]["bytes"] for each in sets] == [12, 20]
            (kept,) = (workspace.home / "estimates" / bundle.id / "answers").iterdir()
            kept.write_text("{}")

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            (b'{"format": 1, "sets": []}', "there are 0 for 2"),
            (b'{"format": 1, "sets": [{}, {}, {}]}', "there are 3 for 2"),
            (b'{"format": 2, "sets": [{}, {}]}', "no 'format' 1"),
            (b'{"format": 1, "sets": {}}', "with 'sets'"),
            (b"[]", "no 'format' 1"),
        ],
    )
    def test_an_answer_of_another_format_or_number_is_refused(self, text: bytes, said: str) -> None:
        with pytest.raises(Malformed, match=said):
            read_shapes(text, 2)


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (("format",), 2),
        (("peak_allocated_bytes",), -1),
        (("peak_allocated_bytes",), 2**63),
        (("peak_allocated_bytes",), True),
        (("peak_allocated_bytes",), "15 GiB"),
        (("verdict",), "maybe"),
        (("phases",), {}),
        (("phases", 0, "by_category", "scores"), 1.5),
        (("phases", 0, "largest", 0, "shape"), [1, -1]),
        (("card",), []),
        (("notes", 0), None),
        (("error_share",), -5.0),
        (("error_share",), 1),
        (("seconds",), -0.1),
        (("seconds",), 1e300),
        (("seconds",), 10**400),
        (("error_share",), 10**400),
        (("error_share",), 1e300),
        (("verdict",), "fits"),
        (("phases",), []),
        (("card", "capability"), [9]),
        (("card", "capability"), [9, 0, 0]),
        (("card", "total_bytes"), -1),
    ],
)
def test_an_answer_of_another_form_is_named_by_its_place(keys: tuple[Any, ...], value: Any) -> None:
    answer = json.loads(_answer())
    answer["card"] = {"name": "NVIDIA H200", "total_bytes": 2**37, "capability": [9, 0]}
    assert estimate_of(answer) is not None
    place = answer
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    with pytest.raises(Malformed, match=r"\.".join(map(str, keys))):
        read_estimate(json.dumps(answer).encode())
    assert estimate_of(answer) is None


@pytest.mark.parametrize(
    ("verdict", "capacity", "is_believed"),
    [("fits", 1, True), ("fits", 0, False), ("within the error", 0, True), ("does not fit", 0, True)],
)
def test_a_verdict_agrees_with_peak_and_capacity(verdict: str, capacity: int, is_believed: bool) -> None:
    answer = {**json.loads(_answer()), "capacity_bytes": capacity}
    peaks = {"peak_allocated_bytes": 1, "peak_reserved_bytes": 2}
    way = {"label": "a way", "set": {}, **peaks, "verdict": verdict}
    assert (estimate_of({**answer, "verdict": verdict}) is not None) == is_believed
    assert (estimate_of({**answer, "alternatives": [way]}) is not None) == is_believed


@pytest.mark.parametrize(
    ("changes", "of_phase", "says"),
    [
        ({}, {}, None),
        (
            {"peak_allocated_bytes": 2**40},
            {},
            "peak_allocated_bytes: is 1099511627776, but the largest phase has",
        ),
        ({"peak_reserved_bytes": 1}, {}, "peak_reserved_bytes: is 1, but the largest phase has"),
        (
            {},
            {"by_category": {"scores": 2**40, "logits": 1}},
            "phases.0.by_category: adds up to 1099511627777",
        ),
        ({}, {"by_category": dict.fromkeys(map(str, range(5000)), 0)}, "has 5000 categories; at most 64"),
        ({}, {"by_category": {"x" * 81: 0}}, "a name of more than 80 characters"),
    ],
)
def test_an_answer_that_contradicts_itself_is_refused(
    changes: dict[str, Any], of_phase: dict[str, Any], says: str | None
) -> None:
    answer = {**json.loads(_answer()), **changes}
    answer["phases"][0].update(of_phase)
    if says is None:
        assert estimate_of(answer) is not None
        return
    with pytest.raises(Malformed, match=says):
        read_estimate(json.dumps(answer).encode())


@pytest.mark.parametrize("name", ["seconds", "error_share"])
def test_a_number_that_is_none_is_no_estimates(name: str) -> None:
    assert estimate_of({**json.loads(_answer()), name: float("nan")}) is None


@pytest.mark.parametrize("text", [b"", b"[" * 100_000, b"\xff\xfe", b'{"a": 1e999}', b"{} {}"])
def test_an_answer_that_is_no_json_is_one(text: bytes) -> None:
    with pytest.raises(Malformed, match="no JSON"):
        read_estimate(text)


@pytest.mark.parametrize(
    ("row", "model"),
    [
        ("the answer", Estimate),
        ("`card`", Card),
        ("each of `phases`", Phase),
        ("a tensor", Tensor),
        ("`failure`", Failure),
        ("each of `alternatives`", Alternative),
    ],
)
def test_decision_0017_lists_the_fields_that_are_read(row: str, model: type[StrictModel]) -> None:
    (line,) = [line for line in DECISION.read_text().splitlines() if line.startswith(f"| {row} | ")]
    named = re.findall(r"`(\w+)(\??)`", line.removeprefix(f"| {row} | "))
    assert {name: bool(mark) for name, mark in named} == {
        name: hasattr(model, name) for name in model.fields()
    }


DECISION = Path(__file__).parents[2] / "docs/decisions/0017-a-payload-brings-its-own-estimate.md"
ANSWER = """
{"format": 1, "entry": "probe.trial", "torch": "2.13", "seconds": 1, "card": null, "capacity_bytes": null,
 "outside_bytes": 0, "error_share": 0.01, "peak_allocated_bytes": 1, "peak_reserved_bytes": 2,
 "verdict": "no card", "failure": null, "execution": "eager", "notes": ["a note"],
 "phases": [{"name": "timed", "peak_allocated_bytes": 1, "peak_reserved_bytes": 2,
             "by_category": {"scores": 1},
             "largest": [{"bytes": 1, "shape": [1], "dtype": "float32", "category": "scores"}]}]}
"""


def _answer() -> bytes:
    return ANSWER.encode()


def _lives(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _children() -> list[str]:
    """Returns what this process has started and not ended."""
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
