"""What benchmarks run on: a project, a real sshd on this machine, a slow way to it, and a plain ``ssh``.

All of it lies in one temporary folder and ends with the rig; payloads are made here, word by word.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, Self

from tests.project import Project
from tests.sshd import Sshd, require_sshd

__all__ = ["ONE_WAY_S", "Rig", "Slow", "first_line_s"]

ONE_WAY_S = 0.05
HERE = Path(__file__).resolve().parent.parent


class Slow:
    """A way to the rig's sshd that takes `ONE_WAY_S` each way; ``trips`` has what its connections needed."""

    def __init__(self, port: int) -> None:
        argv = [sys.executable, "-m", "benchmarks.delay", str(port), str(ONE_WAY_S)]
        self._process = subprocess.Popen(argv, cwd=HERE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self._said: IO[str] = self._process.stdout
        self.port = int(self._said.readline())

    def trips(self) -> int:
        """Waits for the next connection to end and returns its round trips, after the TCP handshake."""
        return int(self._said.readline())

    def close(self) -> None:
        """Ends the process."""
        self._process.terminate()
        self._process.wait()
        self._said.close()


class Rig:
    """A context manager; host ``near`` is sshd itself, ``far`` and ``counted`` lie behind a slow way each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        require_sshd()
        with self._stack:  # what has started is ended when the next does not
            self._start()
            self._stack = self._stack.pop_all()
        return self

    def _start(self) -> None:
        home = self.folder / "home"
        home.mkdir(parents=True)
        os.environ["HOME"] = str(home)  # no start-up file, no ssh_config and no key of anybody's
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # orch starts from its byte code, as an installed one
        self.sshd = self._stack.enter_context(Sshd(self.folder / "sshd"))
        self.far = self._slow()
        self.counted = self._slow()
        ports = {"near": self.sshd.port, "far": self.far.port, "counted": self.counted.port}
        self.project = Project(
            self.folder / "project",
            {name: self.sshd.inventory_entry(port=port) for name, port in ports.items()},
        )
        self._ports = ports

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _slow(self) -> Slow:
        slow = Slow(self.sshd.port)
        self._stack.callback(slow.close)
        return slow

    def ssh(self, command: str, host: str = "near") -> list[str]:
        """Returns the argument vector of a plain ``ssh`` that runs ``command``."""
        known = self.folder / f"known-{host}"
        port = self._ports[host]
        known.write_text(f"[{self.sshd.address}]:{port} {self.sshd.host_key()}\n")
        options = ["-F", "/dev/null", "-o", f'UserKnownHostsFile="{known}"', "-o", "IdentitiesOnly=yes"]
        login = ["-i", str(self.sshd.client_key), "-p", str(port), f"{self.sshd.user}@{self.sshd.address}"]
        return ["ssh", *options, *login, command]

    @contextmanager
    def running(self, argv: list[str], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
        """Starts a program in the project and ends it with the block."""
        settings = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        with subprocess.Popen(argv, cwd=self.project.folder, **{**settings, **options}) as process:
            try:
                yield process
            finally:
                if process.poll() is None:
                    process.kill()

    def detached(self, experiment: Path, host: str = "near") -> str:
        """Starts a run and returns its id."""
        return self.project.orch("run", experiment, "--host", host, "--detach").out.split()[-1]


def first_line_s(rig: Rig, argv: list[str], word: bytes) -> float:
    """Returns the seconds from a program's start to the first line of its output that holds ``word``."""
    begin = time.perf_counter()
    with rig.running(argv) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if word in line:
                took_s = time.perf_counter() - begin
                process.stdout.read()
                process.wait()
                return took_s
    raise AssertionError(f"{argv} never said {word!r}")
