"""Bytes and commands, to this machine and to others, behind one seam.

`connect` picks the transport that the inventory names; everything above it holds a `Transport` and its
`Channel` values and is indifferent to which one it is. What the bytes mean is the affair of the callers.
"""

from __future__ import annotations

from orchestrator.inventory import Host
from orchestrator.transports.base import Channel, Transport

__all__ = ["Channel", "Transport", "connect"]


def connect(host: Host, *, connect_timeout_s: float = 15.0) -> Transport:
    """Returns an open transport to ``host``; raises a `HostError` that says what to do next.

    ``connect_timeout_s`` bounds the whole way there: every jump host, every retry, the log-in.
    """
    if host.transport == "local":
        from orchestrator.transports.local import LocalTransport  # noqa: PLC0415

        return LocalTransport(host)
    # fabric and paramiko take a quarter of a second to import: only for those who need them.
    from orchestrator.transports.ssh import SshTransport  # noqa: PLC0415

    return SshTransport(host, connect_timeout_s=connect_timeout_s)
