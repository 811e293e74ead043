"""Programs in a container of a Proxmox VE node: ``pct exec`` over the transport that leads to the node.

Knows how an argument vector is put for `pct`, and what `pct` says when it cannot start it. How the node is
reached is the affair of the transport that it holds: that one's connection, channels, quoting and host keys.

``pct exec`` hands the node's own variables to the program, starts it wherever the caller stood, and has no
log-in shell. So it starts ``env -i`` with the variables of a log-in, and a constant script that goes home.
A program that signal ``n`` ended has the exit status 128 + ``n``, as ``lxc-attach`` tells it.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Self

from orchestrator.errors import ContainerStopped, ContainerUnknown, HostError, HostUnfit, Unreachable
from orchestrator.inventory import Host
from orchestrator.text import printable
from orchestrator.transports.base import Channel, Transport

__all__ = ["ProxmoxChannel", "ProxmoxTransport"]

_LOG_IN = (
    "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LANG=C.UTF-8",
    "USER=root",
    "LOGNAME=root",
)
_SHELL_NAME = "in-container"  # each complaint of the script's shell begins with it, none of the node's does
_GO_HOME = 'HOME=~root; export HOME; cd && exec "$@"'
_LOG_IN_SHELL = (
    "HOME=~root; export HOME; cd; "
    'while IFS=: read -r name _ _ _ _ _ shell; do [ "$name" = root ] && SHELL=$shell; done </etc/passwd; '
    'export SHELL; exec "${SHELL:-/bin/sh}" -l'
)
_COMMAND_NOT_FOUND = 127
ANSWER_TIMEOUT_S = 60.0
_READ_BYTES = 64 * 1024
_KILLED = (128 + signal.SIGTERM, 128 + signal.SIGKILL)


class ProxmoxTransport:
    """The way to one container; it owns the way to the node."""

    def __init__(self, host: Host, connect_node: Callable[[Host], Transport]) -> None:
        """Raises `Unreachable` when the node is; all else that its transport raises, as it is."""
        assert host.node is not None
        assert host.vmid is not None
        self._host = host
        self._vmid = host.vmid
        try:
            self._node = connect_node(host.node)
        except Unreachable as error:
            raise Unreachable(f"its node cannot be reached: {error}", host=host.name) from error

    @property
    def host(self) -> Host:
        """The inventory entry."""
        return self._host

    def open(self, argv: Sequence[str]) -> ProxmoxChannel:
        """Starts ``argv`` in the container; what `pct` has against it is raised by `ProxmoxChannel.wait`."""
        try:
            channel = self._node.open([*self._pct(), "/bin/sh", "-c", _GO_HOME, _SHELL_NAME, *argv])
        except HostUnfit as error:
            if isinstance(error.__cause__, OSError):  # a local node says so at once, ssh by an exit status
                raise self._no_pct(str(error.__cause__.strerror)) from error
            raise
        return ProxmoxChannel(channel, self._host.name, self._refusal)

    def attach(self, argv: Sequence[str] | None) -> int:
        """Raises as `open` and `ProxmoxChannel.wait` do: what `pct` would say to a terminal, nobody reads."""
        with closing(self.open(["true"])) as probe:
            while probe.recv(_READ_BYTES, ANSWER_TIMEOUT_S):
                pass
            probe.wait(ANSWER_TIMEOUT_S)
        script = _LOG_IN_SHELL if argv is None else _GO_HOME
        terminal = f"TERM={os.environ.get('TERM', 'dumb')}"
        return self._node.attach([*self._pct(terminal), "/bin/sh", "-c", script, _SHELL_NAME, *(argv or ())])

    def close(self) -> None:
        """Closes the way to the node."""
        self._node.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _pct(self, *variables: str) -> list[str]:
        """Returns the words before those of a program that has the variables of a log-in."""
        return ["pct", "exec", str(self._vmid), "--", "/usr/bin/env", "-i", *_LOG_IN, *variables]

    def _refusal(self, status: int, words: str) -> HostError | None:
        """Returns why no program was started, from what was said on stderr; None when that says nothing."""
        name, vmid = self._host.name, self._vmid
        if f"container '{vmid}' not running" in words or "Failed to get init pid" in words:
            return ContainerStopped(
                f"container {vmid} is stopped. Next: run on its node: pct start {vmid}", host=name
            )
        if "Configuration file '" in words and f"/{vmid}.conf' does not exist" in words:
            return ContainerUnknown(
                f"its node has no container {vmid}; set 'vmid:' in inventory.yaml to one that `pct list` "
                "shows there, or 'node:' to the node of the cluster that has it",
                host=name,
            )
        if "please run as root" in words:
            return HostUnfit(
                "pct works for root alone; set 'user: root' for its node", host=name, lacking="pct"
            )
        if status == _COMMAND_NOT_FOUND and re.search(r"\bpct\b", words) and _SHELL_NAME not in words:
            return self._no_pct(words)
        return None

    def _no_pct(self, said: str) -> HostUnfit:
        where = "there is no pct on its node, which then is no Proxmox VE node"
        return HostUnfit(f"{where} ({printable(said.strip()[-200:])})", host=self._host.name, lacking="pct")


class ProxmoxChannel:
    """A node's channel with `pct` on it, which may have refused to start the program."""

    def __init__(
        self, channel: Channel, host_name: str, refusal: Callable[[int, str], HostError | None]
    ) -> None:
        self._channel = channel
        self._host_name = host_name
        self._refusal = refusal
        self._has_output = False

    def send(self, data: bytes) -> None:
        """As the node's channel does."""
        self._channel.send(data)

    def recv(self, max_bytes: int, timeout_s: float) -> bytes:
        """Returns the program's output, and before it what the node's log-in shell may print."""
        data = self._channel.recv(max_bytes, timeout_s)
        self._has_output = self._has_output or bool(data)
        return data

    def finish_input(self) -> None:
        """As the node's channel does."""
        self._channel.finish_input()

    def stderr(self) -> bytes:
        """As the node's channel does."""
        return self._channel.stderr()

    def wait(self, timeout_s: float) -> int:
        """Raises `ContainerStopped`, `ContainerUnknown` or `HostUnfit` when nothing was started, and
        `Unreachable` when a program that had answered was killed, as all are in a container that stops.
        """
        status = self._channel.wait(timeout_s)
        if status in _KILLED and self._has_output:
            raise Unreachable(
                "what answered inside was killed, perhaps with its container", host=self._host_name
            )
        refusal = self._refusal(status, self.stderr().decode("utf-8", "replace")) if status else None
        if refusal is not None:
            raise refusal
        return status

    def close(self) -> None:
        """As the node's channel does."""
        self._channel.close()
