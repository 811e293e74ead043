r"""Programs on a host that is reached over ssh.

One connection per transport, one channel per program; no fabric ``run``, no sftp. What lies between here and
the host is `ssh_route`'s business, and what becomes of a terminal `ssh_terminal`'s.

sshd hands a command to the user's log-in shell as one string. `shlex.join` quotes it so that sh, bash,
dash, ksh and zsh pass on exactly the given words. fish reads ``\\`` inside single quotes as one backslash,
and csh and tcsh refuse a newline there and may expand ``!``: with such a log-in shell, words that hold
these characters do not arrive.
"""

from __future__ import annotations

import logging
import shlex
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Self

import paramiko

from orchestrator.errors import HostUnfit, Unreachable
from orchestrator.inventory import Host
from orchestrator.transports.base import StderrTail
from orchestrator.transports.ssh_errors import FOREIGN_ERRORS, translate
from orchestrator.transports.ssh_hop import NO_EXIT_STATUS, WINDOW_BYTES
from orchestrator.transports.ssh_route import find_route
from orchestrator.transports.ssh_terminal import Terminal, attach, here, is_terminal

__all__ = ["SshChannel", "SshTransport"]

OPEN_TIMEOUT_S = 30.0
CLOSE_TIMEOUT_S = 2.0
JOIN_TIMEOUT_S = 5.0
DYING_S = 1.0
SLICE_BYTES = 32 * 1024
LONGEST_COMMAND_BYTES = 128 * 1024
SHORTEST_WAIT_S = 0.001

# With no handler at all, Python prints warnings and errors of a library to stderr.
logging.getLogger("paramiko").addHandler(logging.NullHandler())


class SshTransport:
    """A connection through all hops to one host."""

    def __init__(self, host: Host, *, connect_timeout_s: float) -> None:
        self._host = host
        self._channels: list[SshChannel] = []
        self._route = find_route(host)
        deadline_s = time.monotonic() + connect_timeout_s
        try:
            for hop in self._route:
                hop.open(deadline_s)
        except BaseException:
            self.close()
            raise

    @property
    def host(self) -> Host:
        """The inventory entry."""
        return self._host

    def open(self, argv: Sequence[str]) -> SshChannel:
        """Raises `Unreachable`, or `HostUnfit` when the host runs no commands for this user."""
        hop = self._route[-1]
        raw = self._session(_command(argv))
        channel = SshChannel(raw, hop.transport, host=self._host.name, where=hop.where)
        self._channels.append(channel)
        return channel

    def attach(self, argv: Sequence[str] | None) -> int:
        """Raises `Unreachable` when the connection breaks; the terminal here is then as it was."""
        terminal = here() if is_terminal() else None
        raw = self._session(None if argv is None else _command(argv), terminal)
        status = attach(raw, has_terminal=terminal is not None)
        if status == NO_EXIT_STATUS:
            where = self._route[-1].where
            raise Unreachable(f"the connection to {where} broke", host=self._host.name)
        return status

    def close(self) -> None:
        """Drops the connection, and the programs' channels with it."""
        # The first hop first: once its socket is gone, nothing that lies behind it can block.
        for hop in self._route:
            hop.close()
        for channel in self._channels:
            channel.close()
        self._channels.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _session(self, command: bytes | None, terminal: Terminal | None = None) -> paramiko.Channel:
        """Starts a command, or the log-in shell."""
        hop = self._route[-1]
        try:
            with _limited(OPEN_TIMEOUT_S, give_up=hop.transport.close):
                raw = hop.transport.open_session(timeout=OPEN_TIMEOUT_S)
                raw.exit_status = NO_EXIT_STATUS
                if terminal is not None:
                    raw.get_pty(terminal.kind, terminal.columns, terminal.rows)
                self._execute(raw, command)
        except FOREIGN_ERRORS as error:
            raise translate(error, host=self._host.name, where=hop.where) from error
        return raw

    def _execute(self, raw: paramiko.Channel, command: bytes | None) -> None:
        hop = self._route[-1]
        try:
            if command is None:
                raw.invoke_shell()
            else:
                raw.exec_command(command)
        except paramiko.SSHException as error:
            if not hop.transport.is_active():
                raise
            raise HostUnfit(
                f"{hop.where} runs no commands for this user", host=self._host.name, lacking="log-in"
            ) from error


class SshChannel:
    """A session channel with a command on it."""

    def __init__(
        self, raw: paramiko.Channel, transport: paramiko.Transport, *, host: str, where: str
    ) -> None:
        self._raw = raw
        self._transport = transport
        self._host = host
        self._where = where
        self._received = memoryview(b"")
        self._is_closed = False
        self._tail = StderrTail(self._read_stderr)

    def send(self, data: bytes) -> None:
        """Sends as far as the host's window allows, slice by slice."""
        view = memoryview(data)
        while view:
            try:
                # Channel.sendall copies the whole rest for each packet.
                sent = self._raw.send(bytes(view[:SLICE_BYTES]))
            except TimeoutError:
                continue  # the limit that a concurrent recv has set; nothing was sent
            except FOREIGN_ERRORS as error:
                raise self._broken() from error
            if sent == 0:
                raise self._broken()
            view = view[sent:]

    def recv(self, max_bytes: int, timeout_s: float) -> bytes:
        """Returns what arrived before the connection broke, if it did, and raises only then."""
        if not self._received:
            self._received = memoryview(self._receive(timeout_s))
        data = bytes(self._received[:max_bytes])
        self._received = self._received[max_bytes:]
        return data

    def finish_input(self) -> None:
        """Sends EOF."""
        with suppress(*FOREIGN_ERRORS):  # recv and wait will tell
            self._raw.shutdown_write()

    def stderr(self) -> bytes:
        """Returns the end of what arrived so far."""
        if self._raw.eof_received or self._raw.closed:
            self._tail.join(JOIN_TIMEOUT_S)
        return self._tail.bytes_so_far()

    def wait(self, timeout_s: float) -> int:
        """Waits for the message that carries the status."""
        if not self._raw.status_event.wait(timeout_s):
            raise TimeoutError(f"{self._host}: the program still runs after {timeout_s:g} s")
        if self._raw.exit_status == NO_EXIT_STATUS:
            raise self._broken()
        return self._raw.exit_status

    def close(self) -> None:
        """Tells the host; a host that does not listen loses the connection."""
        self._is_closed = True
        with _limited(CLOSE_TIMEOUT_S, give_up=self._transport.close), suppress(*FOREIGN_ERRORS):
            self._raw.close()
        self._tail.join(JOIN_TIMEOUT_S)

    def _receive(self, timeout_s: float) -> bytes:
        """Returns all that has arrived: taking it piecemeal moves paramiko's buffer once per piece."""
        self._raw.settimeout(max(timeout_s, SHORTEST_WAIT_S))
        try:
            data = self._raw.recv(2 * WINDOW_BYTES)
        except TimeoutError:
            raise TimeoutError(f"{self._host}: no output for {timeout_s:g} s") from None
        except FOREIGN_ERRORS as error:
            raise self._broken() from error
        if not data and not self._ended_well():
            raise self._broken()
        return data

    def _ended_well(self) -> bool:
        """True for an end that the program made; a dead connection ends a stream just the same."""
        if self._raw.eof_received or self._is_closed:
            return not self._is_closed
        # Some servers close a channel without EOF. paramiko closes channels before it says that it is dead.
        self._transport.join(DYING_S)
        return self._transport.is_active() and self._raw.exit_status != NO_EXIT_STATUS

    def _broken(self) -> Unreachable:
        if self._is_closed:
            return Unreachable("the channel was closed on this side", host=self._host)
        if self._transport.is_active():
            return Unreachable(f"the program at {self._where} ended and takes no more input", host=self._host)
        return Unreachable(f"the connection to {self._where} broke", host=self._host)

    def _read_stderr(self) -> bytes:
        while True:
            try:
                return self._raw.recv_stderr(2 * WINDOW_BYTES)  # all of it, as for stdout
            except TimeoutError:
                continue
            except FOREIGN_ERRORS:
                return b""


def _command(argv: Sequence[str]) -> bytes:
    command = shlex.join(argv).encode("utf-8", "surrogateescape")
    assert b"\0" not in command, "no program can be given a NUL"
    assert len(command) < LONGEST_COMMAND_BYTES, "send data on stdin"
    return command


@contextmanager
def _limited(timeout_s: float, *, give_up: Callable[[], None]) -> Iterator[None]:
    """Calls ``give_up`` from another thread when the block takes too long; paramiko waits without a limit."""
    timer = threading.Timer(timeout_s, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join(JOIN_TIMEOUT_S)
