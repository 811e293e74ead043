"""One server on the way to an ssh host: the socket, the handshake, the retry, and a close that is complete.

fabric opens the connection or the tunnel to it; the first socket is made here, with Nagle's algorithm off
and a limit on silence, and so are the choice of algorithms and the window. Who is trusted and who logs in
is handed in.
"""

from __future__ import annotations

import random
import signal
import socket
import subprocess
import tempfile
import threading
import time
from contextlib import suppress
from typing import Any

import paramiko

from orchestrator.errors import Unreachable
from orchestrator.text import printable
from orchestrator.transports.eager_auth import auth_publickey
from orchestrator.transports.host_keys import HostKeyPolicy
from orchestrator.transports.identities import Identities
from orchestrator.transports.ssh_errors import FOREIGN_ERRORS, NO_SUCH_CHANNEL, translate

__all__ = ["NO_EXIT_STATUS", "WINDOW_BYTES", "Hop"]

WINDOW_BYTES = 16 * 1024 * 1024
PACKET_BYTES = (
    128 * 1024
)  # OpenSSH's limit is 256 KiB; paramiko's default of 32 KiB costs two thirds of the speed
KEEPALIVE_S = 15
SILENCE_LIMIT_S = 30
FIRST_RETRY_S = 0.1
LONGEST_RETRY_S = 2.0
JOIN_TIMEOUT_S = 5.0

NO_EXIT_STATUS = -1_000_000
_UNNAMED_SIGNAL_STATUS = 255  # what ssh itself exits with


class Hop:
    """One server on the way; `open` after the hop before it, `close` before the hops after it."""

    def __init__(
        self,
        connection: Any,
        *,
        host: str,
        where: str,
        policy: HostKeyPolicy,
        identities: Identities,
        proxy_command: str | None,
        gateway: Hop | None = None,
    ) -> None:
        self.host = host
        self.where = where
        self.connection = connection
        self._identities = identities
        self._policy = policy
        self._proxy_command = proxy_command
        self._gateway = gateway
        self._proxy: _Proxy | None = None
        self._transport: _Transport | None = None
        self._socket: socket.socket | None = None

    @property
    def transport(self) -> paramiko.Transport:
        """The open connection; raises `Unreachable` once it was closed, perhaps by another thread."""
        if self._transport is None:
            raise Unreachable(f"the connection to {self.where} was closed on this side", host=self.host)
        return self._transport

    def open(self, deadline_s: float) -> None:
        """Connects and logs in before ``deadline_s`` on the monotonic clock.

        A connection that is dropped before the server says a word met sshd's MaxStartups: that one case is
        tried again, with growing pauses of random length. Everything else is final.
        """
        pause_s = FIRST_RETRY_S
        is_busy = False
        while True:
            try:
                self._attempt(deadline_s - time.monotonic())
            except FOREIGN_ERRORS as error:
                is_busy = self._was_dropped_unheard(error) or (is_busy and isinstance(error, TimeoutError))
                words = self._proxy_words()
                self.close()
                pause_s = random.uniform(0.5, 1.0) * min(2 * pause_s, LONGEST_RETRY_S)  # noqa: S311  # no secret
                if not is_busy or time.monotonic() + pause_s >= deadline_s:
                    raise self._refusal(error, is_busy=is_busy, words=words) from error
                time.sleep(pause_s)
            else:
                self.transport.set_keepalive(KEEPALIVE_S)
                return

    def close(self) -> None:
        """Drops the connection; whoever waits on it wakes up, and its thread is gone afterwards."""
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # a thread that polls a closed descriptor sleeps on
        if self._transport is not None:
            self._transport.packetizer.complete_handshake()  # ends the timer of a handshake cut short
            with suppress(*FOREIGN_ERRORS):  # a tunnel says goodbye through a hop that is gone
                self.connection.client.close()
                self._transport.close()
            if self._transport.is_alive():
                self._transport.join(JOIN_TIMEOUT_S)
        if self._socket is not None:
            self._socket.close()
        if self._proxy is not None:
            self._proxy.close()
        self._socket = self._transport = self._proxy = None

    def _attempt(self, timeout_s: float) -> None:
        if timeout_s <= 0:
            raise TimeoutError("no time was left to connect")
        start_s = time.monotonic()
        self.connection.connect_kwargs = {
            "transport_factory": self._make_transport,
            "auth_strategy": self._identities,
            "timeout": timeout_s,
            "banner_timeout": timeout_s,
            "auth_timeout": timeout_s,
            "channel_timeout": timeout_s,
        }
        if not self.connection.gateway:
            self._socket = self._make_socket(timeout_s)
            self.connection.connect_kwargs["sock"] = self._socket
        try:
            self.connection.open()
        except paramiko.SSHException as error:
            if time.monotonic() - start_s >= timeout_s:
                raise TimeoutError(f"no answer in {timeout_s:.0f} s") from error
            raise

    def _make_socket(self, timeout_s: float) -> socket.socket:
        if self._proxy_command is not None:
            self._proxy = _Proxy(self._proxy_command)
            return self._proxy.socket
        return _connect_tcp(self.connection.host, self.connection.port, timeout_s)

    def _make_transport(self, sock: Any, **options: Any) -> _Transport:
        transport = _Transport(
            sock, default_window_size=WINDOW_BYTES, default_max_packet_size=PACKET_BYTES, **options
        )
        security = transport.get_security_options()
        security.key_types = self._policy.order(security.key_types)
        # AES-GCM needs no separate MAC: twice as fast as paramiko's first choice.
        security.ciphers = tuple(sorted(security.ciphers, key=lambda cipher: "gcm" not in cipher))
        self._transport = transport
        return transport

    def _was_dropped_unheard(self, error: Exception) -> bool:
        is_unheard = self._transport is not None and not self._transport.remote_version
        return (
            is_unheard and isinstance(error.__context__, EOFError | ConnectionError) and self._proxy is None
        )

    def _proxy_words(self) -> str:
        return self._proxy.last_words() if self._proxy is not None else ""

    def _refusal(self, error: Exception, *, is_busy: bool, words: str) -> Exception:
        if is_busy:
            return Unreachable(
                f"{self.where} drops connections before a word is said, until the time to connect was over; "
                "it may be overloaded (MaxStartups in its sshd_config) or refuse this address",
                host=self.host,
            )
        if words:
            return Unreachable(f"{self.where}: ProxyCommand failed: {words}", host=self.host)
        return translate(
            error,
            host=self.host,
            where=self._blamed(error),
            next_step="check that it is up, and 'address:' and 'port:' in inventory.yaml or ssh_config",
        )

    def _blamed(self, error: Exception) -> str:
        """Returns this server, and from where it was looked for; or the jump host that allows no tunnel."""
        if self._gateway is None:
            return self.where
        is_forbidden = isinstance(error, paramiko.ChannelException) and error.code in NO_SUCH_CHANNEL
        return self._gateway.where if is_forbidden else f"{self.where} from {self._gateway.where}"


def _connect_tcp(address: str, port: int, timeout_s: float) -> socket.socket:
    """Returns a socket to the first of the address's candidates to answer; each has its share of the time."""
    candidates = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    deadline_s = time.monotonic() + timeout_s
    for left, (family, kind, protocol, _, target) in zip(
        range(len(candidates), 0, -1), candidates, strict=True
    ):
        sock = socket.socket(family, kind, protocol)
        try:
            sock.settimeout(max(deadline_s - time.monotonic(), 0.001) / left)
            sock.connect(target)
        except OSError:
            sock.close()
            if left == 1:
                raise
        else:
            _tune(sock)
            return sock
    raise AssertionError("getaddrinfo raises rather than return nothing")


def _tune(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux: what was sent and never acknowledged ends the connection
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_LIMIT_S * 1000)


class _Proxy:
    """A ``ProxyCommand`` on one end of a socket pair; paramiko's own class never notices its end."""

    def __init__(self, command: str) -> None:
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  # closed in close()
        self.socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", f"exec {command}"],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=self._said,
                start_new_session=True,
            )

    def last_words(self) -> str:
        """Returns the end of what the command wrote to stderr, or how it exited, if it has."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(0.2)
        self._said.seek(0)
        lines = self._said.read().decode("utf-8", "replace").strip().splitlines()
        if lines:
            return printable(lines[-1])
        return f"it exited with status {self._process.returncode}" if self._process.returncode else ""

    def close(self) -> None:
        self.socket.close()
        for end in (self._process.terminate, self._process.kill):
            end()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(JOIN_TIMEOUT_S)
                break
        self._said.close()


def _handle_request(channel: paramiko.Channel, message: paramiko.Message) -> None:
    """Reads ``exit-signal``, which paramiko drops, as exit status ``-n``; passes everything on."""
    request = paramiko.Message(message.get_remainder())
    if request.get_text() == "exit-signal":
        request.get_boolean()
        channel.exit_status = _status_of_signal(request.get_text())
        channel.status_event.set()
    channel._handle_request(message)  # type: ignore[attr-defined]  # noqa: SLF001  # what this stands before


def _status_of_signal(name: str) -> int:
    try:
        return -signal.Signals[f"SIG{name}"]
    except KeyError:
        return _UNNAMED_SIGNAL_STATUS


class _Transport(paramiko.Transport):
    """paramiko's connection thread, which logs in eagerly and learns of the signal that ended a program."""

    _channel_handler_table = {  # noqa: RUF012  # paramiko's own class attribute
        **paramiko.Transport._channel_handler_table,  # type: ignore[attr-defined]  # noqa: SLF001  # private
        paramiko.common.MSG_CHANNEL_REQUEST: _handle_request,
    }

    def auth_publickey(
        self, username: str, key: paramiko.PKey, event: threading.Event | None = None
    ) -> list[str]:
        """Logs in, a round trip sooner than paramiko does."""
        assert event is None, "nobody here waits by an event"
        return auth_publickey(self, username, key)

    def run(self) -> None:
        """Serves the connection; the end of a tunnel under it is no traceback on the terminal."""
        with suppress(*FOREIGN_ERRORS):
            super().run()
