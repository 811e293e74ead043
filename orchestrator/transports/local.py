"""Programs on this machine, behind the same seam as those on a remote host.

It knows pipes and child processes: no shell, the user's home as working directory, a session of its own
so that a Ctrl-C in the terminal ends the command line and not the run.
"""

from __future__ import annotations

import os
import pwd
import select
import signal
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Self

from orchestrator.errors import HostUnfit, Unreachable
from orchestrator.inventory import Host
from orchestrator.transports.base import StderrTail

__all__ = ["LocalChannel", "LocalTransport"]

READ_BYTES = 64 * 1024
GRACE_S = 1.0


class LocalTransport:
    """Starts programs as children of this process."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._channels: list[LocalChannel] = []
        self._is_closed = False

    @property
    def host(self) -> Host:
        """The inventory entry."""
        return self._host

    def open(self, argv: Sequence[str]) -> LocalChannel:
        """Raises `HostUnfit` when the program cannot be started, and `Unreachable` after `close`."""
        try:
            process = subprocess.Popen(
                list(argv),
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=Path.home(),
                start_new_session=True,
            )
        except OSError as error:
            program = str(error.filename or argv[0])
            raise HostUnfit(
                f"cannot run {program!r}: {error.strerror}; set 'python:' in inventory.yaml",
                host=self._host.name,
                lacking="python",
            ) from error
        channel = LocalChannel(process, host_name=self._host.name)
        self._channels.append(channel)
        if self._is_closed:  # by another thread, which may not have seen this channel
            channel.close()
            raise Unreachable("the way was closed on this side", host=self._host.name)
        return channel

    def attach(self, argv: Sequence[str] | None) -> int:
        """Hands over the streams, and with them the terminal that they may be: it needs no other.

        Raises:
            HostUnfit: the program cannot be started.
        """
        words = list(argv) if argv is not None else [pwd.getpwuid(os.geteuid()).pw_shell or "/bin/sh", "-l"]
        try:
            process = subprocess.Popen(words, cwd=Path.home())
        except OSError as error:
            message = f"cannot run {error.filename or words[0]!r}: {error.strerror}"
            raise HostUnfit(message, host=self._host.name) from error
        before = signal.signal(signal.SIGINT, _pass_over)  # the program gets it too, and decides
        try:
            return process.wait()
        finally:
            signal.signal(signal.SIGINT, before)
            process.terminate()

    def close(self) -> None:
        """Closes every channel, also one that is being opened."""
        self._is_closed = True
        for channel in self._channels:
            channel.close()
        self._channels.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class LocalChannel:
    """A child process and its three pipes."""

    def __init__(self, process: subprocess.Popen[bytes], *, host_name: str) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self._process = process
        self._host_name = host_name
        self._stdin, self._stdout, self._stderr = process.stdin, process.stdout, process.stderr
        self._stdin_fd = process.stdin.fileno()
        self._stdout_fd = process.stdout.fileno()
        self._stderr_fd = process.stderr.fileno()
        self._saw_end = False
        self._is_closed = False
        self._files = threading.Lock()  # no descriptor is closed while a thread is about to use it
        self._wake_r, self._wake_w = os.pipe()
        os.set_blocking(self._stdin_fd, False)
        self._tail = StderrTail(self._read_stderr)

    def send(self, data: bytes) -> None:
        """Writes to the pipe as it takes more."""
        view = memoryview(data)
        while view:
            with self._files:
                self._check_open()
                try:
                    sent = self._stdin.write(view)
                except BrokenPipeError as error:
                    raise Unreachable(
                        "the program takes no more input; see what it said and its exit status",
                        host=self._host_name,
                    ) from error
            view = view[sent or 0 :]
            if not sent:
                self._is_ready(self._stdin_fd, select.POLLOUT, None)

    def recv(self, max_bytes: int, timeout_s: float) -> bytes:
        """Reads from the pipe; its end comes when the last process that holds it is gone."""
        if self._saw_end:
            return b""
        self._check_open()
        if not self._is_ready(self._stdout_fd, select.POLLIN, timeout_s):
            raise TimeoutError(f"{self._host_name}: no output for {timeout_s:g} s")
        with self._files:
            self._check_open()
            data = self._stdout.read(max_bytes)
        self._saw_end = not data
        return data

    def finish_input(self) -> None:
        """Closes the pipe."""
        with self._files:
            self._stdin.close()

    def stderr(self) -> bytes:
        """Returns the end of what was read so far."""
        if self._saw_end:
            self._tail.join(GRACE_S)
        return self._tail.bytes_so_far()

    def wait(self, timeout_s: float) -> int:
        """Reaps the child."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"{self._host_name}: the program still runs after {timeout_s:g} s") from error

    def close(self) -> None:
        """Closes the pipes; a program that outlives them by a second is terminated, then killed."""
        with self._files:
            if self._is_closed:
                return
            self._is_closed = True
            self._stdin.close()
            self._stdout.close()
        os.write(self._wake_w, b"\0")
        self._end_process()
        self._tail.join(GRACE_S)
        self._stderr.close()
        os.close(self._wake_r)
        os.close(self._wake_w)

    def _end_process(self) -> None:
        for end in (self._process.terminate, self._process.kill, lambda: None):
            try:
                self._process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                end()
            else:
                return

    def _check_open(self) -> None:
        if self._is_closed:
            raise Unreachable("the channel was closed on this side", host=self._host_name)

    def _is_ready(self, descriptor: int, event: int, timeout_s: float | None) -> bool:
        """True once ``descriptor`` is, or once the channel was closed: nobody waits on a closed one."""
        poll = select.poll()
        poll.register(descriptor, event)
        poll.register(self._wake_r, select.POLLIN)
        return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))

    def _read_stderr(self) -> bytes:
        self._is_ready(self._stderr_fd, select.POLLIN, None)
        return b"" if self._is_closed else self._stderr.read(READ_BYTES)


def _pass_over(_number: int, _frame: FrameType | None) -> None:
    """Handles a signal by nothing; a program that is started has the default again."""
