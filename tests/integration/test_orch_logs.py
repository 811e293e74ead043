"""What `orch logs` finds, on a real run: the process behind a line, lines by text and time, the bytes."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import termios
from io import RawIOBase

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


def test_two_views_of_one_terminal_write_rows_that_say_whose_they_are(project: Project) -> None:
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
    views = [project.start("logs", "-f", "last", stdout=terminal, stderr=terminal) for _ in range(2)]
    os.close(terminal)
    with os.fdopen(controller, "rb", buffering=0) as file:
        written = b"".join(iter(lambda: _read(file), b"")).decode()
    assert [view.wait(60) for view in views] == [0, 0]
    assert "\x1b[2J" not in written
    rows = [re.sub(r"\x1b\[\d*[mK]", "", row).split("\r")[-1] for row in written.split("\r\n")[:-1]]
    assert all(re.match("here [a-z0-9]{8}/main.std|    |orch: run", row) for row in rows)
    assert all(len(row) <= 40 for row in rows if not row.startswith("orch: "))
    assert sum(row.startswith("here ") for row in rows) == 2 * 53
    assert any(row.startswith("    ") for row in rows)


def _read(file: RawIOBase) -> bytes:
    try:
        return file.read(65536) or b""
    except OSError:  # all that had the terminal have closed it
        return b""


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
