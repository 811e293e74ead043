"""Bytes and commands, to this machine and to others, behind one seam.

`connect` picks the transport that the inventory names; everything above it holds a `Transport` and its
`Channel` values and is indifferent to which one it is. What the bytes mean is the affair of the callers.
"""

from __future__ import annotations

from types import ModuleType

from orchestrator.inventory import Host
from orchestrator.transports import early
from orchestrator.transports.base import Channel, Transport
from orchestrator.transports.slim_import import without_mock

__all__ = ["Channel", "Transport", "connect", "connect_early", "drop_early", "route"]

CONNECT_TIMEOUT_S = 15.0


def connect(host: Host, *, connect_timeout_s: float = CONNECT_TIMEOUT_S) -> Transport:
    """Returns an open transport to ``host``; raises a `HostError` that says what to do next.

    ``connect_timeout_s`` bounds the whole way there: every jump host, every retry, the log-in.
    """
    return early.taken(host) or _connect(host, connect_timeout_s)


def connect_early(host: Host) -> None:
    """Begins to connect to ``host`` in the background; the first `connect` to it takes the result.

    What connecting needs is imported before: two threads that import take twice as long, and only waiting
    for the host can be done beside something else.
    """
    if "ssh" in (host.transport, host.node and host.node.transport):
        _import_ssh()
        early.begin(host, lambda: _connect(host, CONNECT_TIMEOUT_S))


def drop_early() -> None:
    """Closes what was begun and not taken."""
    early.drop()


def route(host: Host) -> tuple[str, ...]:
    """Returns the servers and the command that lead to ``host``, the first to pass first; contacts none.

    Raises:
        UsageError: ssh_config cannot be used.
    """
    if host.node is not None:
        return (*route(host.node), f"pct exec {host.vmid}")
    if host.transport == "local":
        return ()
    return tuple(hop.where for hop in _import_ssh().find_route(host))


def _connect(host: Host, timeout_s: float) -> Transport:
    if host.transport == "local":
        from orchestrator.transports.local import LocalTransport  # noqa: PLC0415

        return LocalTransport(host)
    if host.transport == "proxmox":
        from orchestrator.transports.proxmox import ProxmoxTransport  # noqa: PLC0415

        return ProxmoxTransport(host, lambda node: _connect(node, timeout_s))
    transport: Transport = _import_ssh().SshTransport(host, connect_timeout_s=timeout_s)
    return transport


def _import_ssh() -> ModuleType:
    # fabric and paramiko take a fifth of a second to import: only for those who need them.
    with without_mock():
        from orchestrator.transports import ssh  # noqa: PLC0415
    return ssh
