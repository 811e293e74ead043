"""The way to an ssh host: which servers are passed, and what is known about each.

fabric resolves addresses, users and ports from ssh_config. It is told everything that it would decide for
itself otherwise: its own configuration files (``~/.fabric.py`` would be *run*) stay unread, its policy of
accepting every host key is replaced on every hop, and jump hosts are passed in the order of ssh.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fabric  # type: ignore[import-untyped]  # fabric ships no types
import paramiko

from orchestrator.errors import UsageError
from orchestrator.inventory import Host
from orchestrator.text import printable
from orchestrator.transports import host_keys, ssh_config
from orchestrator.transports.identities import Identities
from orchestrator.transports.ssh_config import Jump
from orchestrator.transports.ssh_hop import Hop

__all__ = ["find_route"]

MAX_HOPS = 16


def find_route(host: Host) -> tuple[Hop, ...]:
    """Returns the hops to ``host``, the first to open first and the host itself last.

    Raises:
        UsageError: ssh_config cannot be read, or its jump hosts go round in a circle.
    """
    try:
        return tuple(_route(host, Jump(address=host.address, user=host.user, port=host.port), target=host))
    except (paramiko.SSHException, ValueError) as error:
        raise UsageError(f"{host.name}: ssh_config cannot be used: {printable(str(error))}") from error


def _route(host: Host, to: Jump, *, target: Host | None, depth: int = 0) -> list[Hop]:
    if depth > MAX_HOPS:
        raise UsageError(f"{host.name}: the jump hosts of ssh_config go round in a circle at {to.address}")
    config = ssh_config.load(user=to.user, port=to.port)
    jumps = ssh_config.jumps(config.lookup(to.address), alias=to.address)
    hops: list[Hop] = []
    if jumps:
        # Only the first jump host is reached by what ssh_config says about it; the others by the one before.
        hops = _route(host, jumps[0], target=None, depth=depth + 1)
        for jump in jumps[1:]:
            hops.append(_hop(host, jump, target=None, gateway=hops[-1]))
    return [*hops, _hop(host, to, target=target, gateway=hops[-1] if hops else None)]


def _hop(host: Host, to: Jump, *, target: Host | None, gateway: Hop | None) -> Hop:
    config = fabric.Config(lazy=True, ssh_config=ssh_config.load(user=to.user, port=to.port))
    connection = fabric.Connection(
        to.address,
        config=config,
        gateway=gateway.connection if gateway else False,
        connect_timeout=0,
        forward_agent=False,
    )
    connection.connect_timeout = None  # ours is a fraction of a second exact, and counts for the whole way
    options = connection.ssh_config
    where = f"{connection.host} port {connection.port}"
    if target is None:
        where = f"jump host {to.address} ({where})"
    policy = _policy(host, to, connection, target=target, where=where)
    connection.client.set_missing_host_key_policy(policy)
    identities = Identities(
        host=host.name,
        where=where,
        user=connection.user,
        files=_identity_files(target, options.get("identityfile", [])),
        only_files=options.get("identitiesonly", "no").lower() == "yes",
        use_agent=options.get("identityagent", "").lower() != "none",
    )
    return Hop(
        connection,
        host=host.name,
        where=where,
        policy=policy,
        identities=identities,
        proxy_command=None if gateway else ssh_config.proxy_command(options),
        gateway=gateway,
    )


def _policy(
    host: Host, to: Jump, connection: Any, *, target: Host | None, where: str
) -> host_keys.HostKeyPolicy:
    options = connection.ssh_config
    name = options.get("hostkeyalias") or host_keys.known_host_name(connection.host, connection.port)
    if target is not None and target.host_key is not None:
        return host_keys.pinned_policy(target, where=where, name=name)
    files = ssh_config.known_hosts_files(
        options, address=connection.host, alias=to.address, port=connection.port, user=connection.user
    )
    return host_keys.known_hosts_policy(
        host=host.name, where=where, name=name, files=files, may_be_pinned=target is not None
    )


def _identity_files(target: Host | None, configured: Sequence[str]) -> list[Path]:
    first = [target.identity] if target is not None and target.identity is not None else []
    return first + [Path(name) for name in configured if name.lower() != "none"]
