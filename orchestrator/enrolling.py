"""A host's key, shown once and then pinned: new hosts, and hosts that were reinstalled.

Knows what a host shows and what the inventory pins. Whether a fingerprint is the right one is a person's to
say: they are asked through ``confirm``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from orchestrator import inventory_edit, transports
from orchestrator.errors import HostKeyChanged, HostKeyUnknown, UsageError
from orchestrator.inventory import Host, Inventory
from orchestrator.text import check_name, printable, quoted

__all__ = ["Question", "add", "parse_target", "repin"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A key to confirm: what was shown, and the fingerprint known until now, if there was one."""

    host: str
    key_type: str
    fingerprint: str
    known: str | None


Confirm = Callable[[Question], bool]


def parse_target(text: str) -> dict[str, str | int]:
    """Returns the inventory's fields for ``[USER@]HOST[:PORT]``; an IPv6 address with a port is ``[…]:PORT``.

    Raises:
        UsageError: it is nothing of that form.
    """
    found = re.fullmatch(
        r"(?:(?P<user>[^@/:\s]+)@)?(?:\[(?P<v6>[0-9A-Fa-f:.%]+)\]|(?P<host>[^\[\]\s:@]+|[0-9A-Fa-f:.%]*::?[0-9A-Fa-f:.%]*))"
        r"(?::(?P<port>[0-9]{1,5}))?",
        text,
    )
    if found is None:
        raise UsageError(f"{quoted(text)} is not [USER@]HOST[:PORT]")
    fields: dict[str, str | int] = {"transport": "ssh", "address": found["v6"] or found["host"]}
    if found["port"]:
        fields["port"] = int(found["port"])
    if found["user"]:
        fields["user"] = found["user"]
    return fields


def add(inventory: Inventory, name: str, fields: Mapping[str, str | int], *, confirm: Confirm) -> Host | None:
    """Writes a new host into the inventory once its key is confirmed; returns it, or None if it was not.

    A key that known_hosts has already is not asked about, and not pinned.

    Raises:
        HostError: the host cannot be reached, or a jump host's key is not known; nothing was written.
        UsageError: there is such a host, or the inventory cannot be added to.
        ConfigError: the fields are not what an inventory takes.
    """
    check_name("host", name)
    if name in inventory.hosts:
        raise UsageError(
            f"there is a host {name!r} already: change it in {printable(str(inventory.path))}; "
            f"orch hosts repin {name} takes a new key of it"
        )
    draft = inventory_edit.draft_host(inventory, name, fields)
    pin = _shown(draft.inventory.host(name), confirm)
    if pin is None:
        return None
    draft = inventory_edit.draft_host(inventory, name, {**fields, **pin})
    draft.write()
    return draft.inventory.host(name)


def repin(inventory: Inventory, name: str, *, confirm: Confirm) -> bool | None:
    """Pins the key that a host shows now; tells whether it was confirmed, and None where nothing changed.

    Raises:
        HostError: no key came from it, or a jump host's key is not known.
        UsageError: no such host, or one that has no key.
    """
    host = _keyed(inventory, name)
    pin = _shown(host, confirm)
    if pin is None:
        return False
    if not pin:
        return None
    inventory_edit.draft_host_key(inventory, name, pin["host_key"]).write()
    return True


def _keyed(inventory: Inventory, name: str) -> Host:
    """Returns the ssh host called ``name``, or the node of that name that is described under a container."""
    nodes = {host.node.name: host.node for host in inventory.hosts.values() if host.node is not None}
    host = nodes[name] if name in nodes else inventory.host(name)
    if host.node is not None:
        raise UsageError(f"{name}: the host key is its node's. Next: orch hosts repin {host.node.name}")
    if host.transport != "ssh":
        raise UsageError(f"{name}: transport {host.transport} has no host key")
    return host


def _shown(host: Host, confirm: Confirm) -> dict[str, str] | None:
    """Returns what to write of the host's key: nothing when it is trusted; None when it was not confirmed."""
    try:
        transports.connect(host).close()
    except (HostKeyUnknown, HostKeyChanged) as error:
        if error.pin is None:
            raise
        known = error.pinned if isinstance(error, HostKeyChanged) else None
        question = Question(
            host=host.name, key_type=error.pin.split()[0], fingerprint=error.fingerprint, known=known
        )
        return {"host_key": error.pin} if confirm(question) else None
    return {}
