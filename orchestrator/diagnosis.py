"""From what a host told, or from the error that kept it from telling, to findings (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator import card_checks, machine_checks, torch_checks
from orchestrator.clocks import Offset
from orchestrator.errors import (
    AuthenticationFailed,
    ContainerStopped,
    ContainerUnknown,
    HostKeyChanged,
    HostKeyUnknown,
    HostUnfit,
    OrchError,
    ProtocolError,
    Unreachable,
    UsageError,
)
from orchestrator.finding import Finding
from orchestrator.inventory import Host

__all__ = ["diagnosed", "failed", "on_the_way"]


def on_the_way(host: Host, route: Sequence[str], trip_s: float | None) -> list[Finding]:
    """Returns what a connection that was made tells: the way, and by what the host was known."""
    way = ", then ".join(route) or "this machine"
    found = [Finding.ok("reach", way if trip_s is None else f"{way}, {trip_s * 1000:.1f} ms there and back")]
    if (keyed := _with_a_log_in(host)) is not None:
        pin = keyed.host_key
        known = "by known_hosts" if pin is None else f"{pin.split()[0]}, pinned in the inventory"
        found.append(Finding.ok("host key", known))
    return found


def diagnosed(
    host: Host, route: Sequence[str], python: str, noise: bytes, offset: Offset, facts: Mapping[str, Any]
) -> list[Finding]:
    """Returns all findings about a host that answered.

    Raises:
        ProtocolError: ``facts`` are not of the form in which a supervisor tells them.
    """
    try:
        return [
            *on_the_way(host, route, 2 * offset.error_s),
            *([machine_checks.shell(noise)] if noise or _with_a_log_in(host) else []),
            machine_checks.python(python, facts),
            *machine_checks.machine(host, facts),
            machine_checks.clock(offset),
            *card_checks.cards(host, facts),
            *torch_checks.torch(facts),
        ]
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ProtocolError(f"what it tells of itself cannot be read: {error!r}", host=host.name) from error


def failed(host: Host, route: Sequence[str], error: OrchError) -> list[Finding]:
    """Returns what holds of a host in spite of ``error``, and last that."""
    name, fallback = _about(error)
    says, next_step = parted(str(error).removeprefix(f"{host.name}: "))
    fault = Finding.fault(name, says, next_step or fallback)
    if name == "reach":
        return [fault]
    way = on_the_way(host, route, None)
    return [*way[:1], fault] if name == "host key" else [*way, fault]


def _with_a_log_in(host: Host) -> Host | None:
    """Returns the server whose key and log-in shell are met, None where there is no such thing."""
    met = host.node or host
    return met if met.transport == "ssh" else None


def parted(message: str) -> tuple[str, str | None]:
    """Returns what a message says and what it says to do next: what stands behind its last semicolon, where
    that is an order.
    """
    what, mark, order = message.partition(". Next: ")
    if mark:
        return what, order
    what, mark, order = message.rpartition("; ")
    if mark and order.startswith(("set ", "install ", "check ", "see ")):
        return what, order
    return message, None


def _about(error: OrchError) -> tuple[str, str]:
    """Returns which finding an error belongs to, and what to do where its message does not say."""
    if isinstance(error, HostUnfit) and error.lacking:
        return _LACKING[error.lacking]
    return next(about for kind, about in _ABOUT if isinstance(error, kind))


_LACKING = {
    "connection": ("reach", "see the sshd_config of the server that is named"),
    "python": ("python", "set 'python:' or 'venv:' in inventory.yaml"),
    "root": ("root", "set 'root:' in inventory.yaml to a folder of yours"),
    "log-in": ("log-in", "take another user, or give this one a log-in shell"),
    "pct": ("container", "set 'node:' in inventory.yaml to a node of Proxmox VE"),
}
_ABOUT: Sequence[tuple[type[OrchError], tuple[str, str]]] = (
    (HostKeyUnknown, ("host key", "compare it on the host's own console")),
    (HostKeyChanged, ("host key", "compare it on the host's own console")),
    (AuthenticationFailed, ("log-in", "check 'user:' and 'identity:', and ~/.ssh/authorized_keys there")),
    (ContainerStopped, ("container", "start it on its node")),
    (ContainerUnknown, ("container", "look on its node: pct list")),
    (Unreachable, ("reach", "check that it is up, and try again")),
    (UsageError, ("reach", "mend what it names")),
    (OrchError, ("supervisor", "log in by hand and look what answers there")),
)
