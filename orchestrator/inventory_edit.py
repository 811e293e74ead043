"""Small changes to ``inventory.yaml`` that keep every other byte of it: comments, order, spelling.

Knows where in a file's text a host and its key stand. The result is read as any inventory is before it takes
the file's place, and a change of anything else than the one host is refused.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import yaml
from yaml.nodes import CollectionNode, MappingNode, Node

from orchestrator.errors import ConfigError, StorageError, UsageError
from orchestrator.inventory import Host, Inventory, load_inventory
from orchestrator.text import printable

__all__ = ["Draft", "draft_host", "draft_host_key"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """A changed inventory that is not written yet: its text, and what it means."""

    text: str
    inventory: Inventory

    def write(self) -> None:
        """Takes the file's place, all at once; its mode stays.

        Raises:
            StorageError: the file cannot be written; it is as it was.
        """
        target = self.inventory.path.resolve()  # a link stays one
        with _beside(target, self.text) as temporary:
            temporary.chmod(target.stat().st_mode & 0o777)
            temporary.replace(target)


def draft_host(inventory: Inventory, name: str, fields: Mapping[str, str | int]) -> Draft:
    """Returns the inventory with one more host, behind the last.

    Raises:
        UsageError: the file's form leaves no place for one.
        ConfigError: the fields are not what an inventory takes.
    """
    return _draft(inventory, name, lambda text: _with_host(text, name, fields))


def draft_host_key(inventory: Inventory, name: str, host_key: str) -> Draft:
    """Returns the inventory with a host's ``host_key`` in the place of the one that it has, or added.

    ``NAME.node`` is the node that is described under the container ``NAME``.

    Raises:
        UsageError: the host stands there in a form that cannot be added to.
    """
    keys = [name] if name in inventory.hosts else name.rsplit(".", 1)
    return _draft(inventory, keys[0], lambda text: _with_host_key(text, keys, host_key))


def _draft(inventory: Inventory, name: str, change: Callable[[str], str]) -> Draft:
    path = inventory.path
    try:
        with path.open(encoding="utf-8", newline="") as file:
            text = change(file.read())
    except OSError as error:
        raise StorageError(f"{printable(str(path))}: cannot be read: {error.strerror}") from error
    with _beside(path.resolve(), text) as temporary:
        try:
            found = load_inventory(temporary)
        except ConfigError as error:
            raise ConfigError(error.message, file=path, line=error.line) from error
    if _others(inventory, name) != _others(found, name) or name not in found.hosts:
        raise UsageError(f"{printable(str(path))}: its form leaves no place for {name!r}; write it by hand")
    return Draft(text=text, inventory=replace(found, path=path))


def _others(inventory: Inventory, name: str) -> dict[str, Host]:
    """Returns all other hosts; a container whose node is ``name`` holds that one's fields as well."""
    return {
        other: replace(host, node=None) if host.node is not None and host.node.name == name else host
        for other, host in inventory.hosts.items()
        if other != name
    }


@contextmanager
def _beside(path: Path, text: str) -> Iterator[Path]:
    """Yields a file with that text in the same folder, which relative paths in it mean; removes it after."""
    try:
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".inventory-", suffix=".yaml")
        temporary = Path(name)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8", newline="") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(f"{printable(str(path))}: cannot be changed: {error.strerror}") from error


def _with_host(text: str, name: str, fields: Mapping[str, str | int]) -> str:
    hosts = _hosts(text)
    column = hosts.value[0][0].start_mark.column
    end = _end_of(hosts)
    lines = [
        f"{' ' * column}{name}:",
        *(f"{' ' * (column + 2)}{key}: {_scalar(value)}" for key, value in fields.items()),
    ]
    newline = "\r\n" if "\r\n" in text else "\n"
    head, tail = _line_end(text, end)
    return f"{head}{newline}{newline.join(lines)}{newline}{tail}"


def _with_host_key(text: str, keys: Sequence[str], host_key: str) -> str:
    entry: Node = _hosts(text)
    for name in keys:
        entry = next(value for key, value in entry.value if key.value == name)
    if not isinstance(entry, MappingNode) or entry.flow_style or not entry.value:
        raise UsageError(
            f"line {entry.start_mark.line + 1}: {'.'.join(keys)} is not written as one key a line; "
            f"put this there by hand: host_key: {host_key}"
        )
    for key, value in entry.value:
        if key.value == "host_key":
            return f"{text[: value.start_mark.index]}{host_key}{text[value.end_mark.index :]}"
    column = entry.start_mark.column
    newline = "\r\n" if "\r\n" in text else "\n"
    head, tail = _line_end(text, _end_of(entry))
    return f"{head}{newline}{' ' * column}host_key: {host_key}{newline}{tail}"


def _scalar(value: str | int) -> str:
    """Returns a value as YAML, plain where that means the same."""
    try:
        is_plain = yaml.safe_load(str(value)) == value
    except yaml.YAMLError:
        is_plain = False
    return str(value) if is_plain else json.dumps(value)


def _hosts(text: str) -> MappingNode:
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    assert isinstance(root, MappingNode)  # it was read as an inventory
    hosts = next(value for key, value in root.value if key.value == "hosts")
    if not isinstance(hosts, MappingNode) or hosts.flow_style:
        raise UsageError(
            f"line {hosts.start_mark.line + 1}: hosts is not written as one host a line; "
            "write the change there by hand"
        )
    return hosts


def _end_of(node: Node) -> int:
    """Returns where a node's last value ends: a block's own end lies behind the comments that follow it."""
    while isinstance(node, CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        node = last[1] if isinstance(node, MappingNode) else last
    end: int = node.end_mark.index
    return end


def _line_end(text: str, index: int) -> tuple[str, str]:
    """Returns the text up to the end of that place's line, and what comes behind the line."""
    head, newline, tail = text[index:].partition("\n")
    return text[:index] + head.removesuffix("\r"), tail if newline else ""
