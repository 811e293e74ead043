"""`orch shell`: a terminal there for a terminal here, bytes for a pipe; here, over ssh, in a container."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest

from tests.project import ORCH, Project, wait_until
from tests.sshd import Sshd

LOG_IN = "import os, sys; os.login_tty(0); os.execv(sys.argv[1], sys.argv[1:])"
NASTY = ["a b", "$(id)", "`id`", "'\"", "*", "-n", "a\nb", ""]


@pytest.fixture(params=["local", "ssh"])
def any_project(request: pytest.FixtureRequest, tmp_path: Path) -> Project:
    entry: dict[str, Any] = {"transport": "local"}
    if request.param == "ssh":
        entry = request.getfixturevalue("sshd").inventory_entry()
    return Project(tmp_path / "my project", {"here": entry})


class Screen:
    """A terminal of its own with a program on it, and what stands on it."""

    def __init__(self, project: Project, *arguments: str) -> None:
        self.controller, terminal = pty.openpty()
        self.resize(24, 80)
        self.before = termios.tcgetattr(terminal)
        self._terminal = terminal
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), terminal)
        program = [sys.executable, "-c", LOG_IN, ORCH]
        env = {"TERM": "vt100", "PS1": "$ "}
        self.process = project.start(*arguments, program=program, env=env, **streams)
        self.seen = b""
        os.set_blocking(self.controller, False)

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.controller, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, text: str) -> None:
        os.write(self.controller, text.encode())

    def shows(self, text: str) -> bool:
        with contextlib.suppress(OSError):
            self.seen += os.read(self.controller, 65536)
        return text.encode() in self.seen

    def wait_for(self, text: str) -> None:
        wait_until(lambda: self.shows(text), f"{text!r} in {self.seen!r}")

    def end(self) -> int:
        code = self.process.wait(30)
        assert termios.tcgetattr(self._terminal) == self.before
        os.close(self._terminal)
        os.close(self.controller)
        return code


def test_a_shell_has_a_terminal_of_the_right_size_and_its_exit_code_is_passed_on(
    any_project: Project,
) -> None:
    screen = Screen(any_project, "shell", "here")
    screen.type("echo $((6*7))-$TERM; tty; pwd; stty size\r")
    screen.wait_for("42-vt100")
    screen.wait_for("/dev/pts/")
    screen.wait_for("24 80")
    screen.resize(30, 100)

    def has_new_size() -> bool:
        screen.type("stty size\r")
        return screen.shows("30 100")

    wait_until(has_new_size, "the new size")
    # One program that says so itself: between two of a line's programs the shell would get it.
    screen.type("sh -c 'echo be$((1))gun; exec sleep 600'\r")
    screen.wait_for("be1gun")
    screen.type("\x03")  # for what runs there, not for orch
    screen.type("echo after=$?\r")
    screen.wait_for("after=130")
    screen.type("exit 7\r")
    assert screen.end() == 7


def test_ctrl_c_is_for_the_command_and_not_for_orch(any_project: Project) -> None:
    caught = "trap 'echo caught; exit 4' INT; echo re$((1))dy; while :; do sleep 0.05; done"
    screen = Screen(any_project, "shell", "here", "--", "sh", "-c", caught)
    screen.wait_for("re1dy")
    screen.type("\x03")
    screen.wait_for("caught")
    assert screen.end() == 4


def test_a_command_gets_its_words_and_bytes_as_they_are(any_project: Project) -> None:
    data = os.urandom(2 * 1024**2)
    code = "import sys; sys.stdout.write(repr(sys.argv[1:])); sys.stderr.write('bad'); sys.exit(5)"
    done = any_project.orch("shell", "here", "--", sys.executable, "-c", code, *NASTY)
    assert (done.code, done.out, done.err) == (5, repr(NASTY), "bad")
    with any_project.start("shell", "here", "--", "cat", stdin=subprocess.PIPE) as process:
        out, err = process.communicate(data, timeout=60)
    assert (process.returncode, out == data, err) == (0, True, b"")


def test_without_a_terminal_the_log_in_shell_reads_what_comes_and_a_signal_s_end_is_passed_on(
    sshd: Sshd, tmp_path: Path
) -> None:
    project = Project(tmp_path / "p", {"here": sshd.inventory_entry()})
    with project.start("shell", "here", stdin=subprocess.PIPE) as process:
        out, _ = process.communicate(b"echo in=$((6*7)); kill -9 $$\n", timeout=60)
    assert (process.returncode, b"in=42" in out) == (137, True)


def test_a_connection_that_breaks_says_so_and_gives_the_terminal_back(sshd: Sshd, tmp_path: Path) -> None:
    screen = Screen(Project(tmp_path / "p", {"here": sshd.inventory_entry()}), "shell", "here")
    screen.type("echo $((6*7))\r")
    screen.wait_for("42")
    sshd.kill_sessions()
    screen.wait_for("broke")
    assert screen.end() == 3


@pytest.mark.usefixtures("container")
def test_a_container_has_a_shell_too(tmp_path: Path) -> None:
    entry = {"transport": "proxmox", "node": {"transport": "local"}, "vmid": 200}
    project = Project(tmp_path / "p", {"here": entry})
    screen = Screen(project, "shell", "here")
    screen.wait_for("# ")  # lxc-attach forgets what was typed before
    screen.type("echo $((6*7))-$TERM-$LEAK_OF_NODE; hostname; pwd; stty size\r")
    screen.wait_for("42-vt100-\r")
    screen.wait_for("container-200")
    screen.wait_for("24 80")
    screen.type("exit 7\r")
    assert screen.end() == 7
