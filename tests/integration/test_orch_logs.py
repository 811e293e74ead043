"""What `orch logs` finds, on a real run: the process behind a line, lines by text and time, the bytes."""

from __future__ import annotations

import json

import pytest

from tests.project import Project

CODE = """
import os, sys
for i in range(50):
    print("step", i, flush=True)
print("\\x1b[31mwarning\\x1b[0m", file=sys.stderr)
sys.stderr.buffer.write(b"\\xff\\r\\n\\0 no line end")
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project with one run that has ended."""
    project = Project(tmp_path_factory.mktemp("logs") / "my project")
    done = project.orch("run", project.experiment(CODE), "--host", "here")
    assert done.code == 0, done.err
    return project


def test_a_line_as_it_was_shown_leads_to_its_process(project: Project) -> None:
    shown = project.orch("logs", "last", "--stream", "stderr", "--long").out.splitlines()[0]
    name = shown.split(" ")[1]
    form = project.orch("logs", "--where", name, "--json").json
    spawn = next(record for record in project.records(form["run"]["run_id"]) if record["kind"] == "spawn")
    assert form["line"]["text"] == "\x1b[31mwarning\x1b[0m"
    assert f" pid {spawn['pid']} 20" in shown
    assert {key: form["process"][key] for key in ("pid", "argv", "identity")} == {
        key: spawn[key] for key in ("pid", "argv", "identity")
    }
    assert form["seal"]["is_right"]
    assert form["seal"]["is_pinned"]
    text = project.orch("logs", "--where", name).out
    assert "\x1b" not in text
    assert spawn["identity"]["boot_id"] in text
    unknown = project.orch("logs", "--where", name.replace(":1", ":99"))
    assert (unknown.code, unknown.out) == (2, "")
    assert "main.stderr has lines 1 to 3" in unknown.err


def test_lines_are_found_by_text_and_time(project: Project) -> None:
    lines = project.orch("logs", "-f", "last", "--grep", "step .*[05]$", "--tail", "2", "--json").out
    assert [json.loads(line)["text"] for line in lines.splitlines()] == ["step 40", "step 45"]
    assert project.orch("logs", "last", "--since", "1h", "--grep", r"\x1b").out.count("\n") == 1
    assert project.orch("logs", "last", "--since", "2100-01-01T00:00:00Z").out == ""


@pytest.mark.parametrize("follow", [[], ["-f"]])
def test_raw_writes_the_payloads_own_bytes(project: Project, follow: list[str]) -> None:
    with project.start("logs", "last", "--raw", "--stream", "stderr", *follow) as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, b"\x1b[31mwarning\x1b[0m\n\xff\r\n\0 no line end"), err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["last", "--grep", "("], "is no regular expression"),
        (["last", "--raw"], "main.stderr, main.stdout"),
        (["last", "--raw", "--json"], "do not go together"),
        (["last", "--where", "last/main.stdout:1"], "do not go together"),
    ],
)
def test_what_cannot_be_meant_is_refused(project: Project, arguments: list[str], says: str) -> None:
    done = project.orch("logs", *arguments)
    assert (done.code, done.out) == (2, "")
    assert says in done.err
