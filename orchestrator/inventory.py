"""The hosts that runs can go to: ``inventory.yaml`` as checked values.

Knows the file's form and where it is found; its folder is the project's. Connecting is the transports'
business, and a ``~`` in a host's ``root`` or ``python`` means that host's home, so it is not expanded here.
"""

from __future__ import annotations

import base64
import binascii
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from orchestrator import yaml_source
from orchestrator.errors import UnknownName, UsageError
from orchestrator.fields import Secret, parse_variable
from orchestrator.setup_form import Setup, SetupForm, read_setup
from orchestrator.strict_model import Range, kind_of
from orchestrator.text import check_name, check_text, did_you_mean, printable, quoted
from orchestrator.yaml_source import Field, Source, StrictModel

__all__ = ["INVENTORY_NAME", "Host", "Inventory", "find_inventory", "load_inventory"]

INVENTORY_NAME = "inventory.yaml"
SMALLEST = "hosts: {local: {transport: local}}"

_DEFAULT_ROOT = "~/.orch"
_LONGEST_PATH_BYTES = 1024  # a system opens none of more than 4096, and orch puts folders of its own below
_LONGEST_ADDRESS = 253
_HOST_NAME = r"[A-Za-z0-9_][A-Za-z0-9._-]*"
_IPV6 = r"[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(?:%[A-Za-z0-9._-]+)?"  # elsewhere % begins a token of ssh_config
_SSH_ONLY = ("address", "port", "user", "identity", "host_key")
_PROXMOX_ONLY = ("node", "vmid")
_KEY_TYPES = (
    "ssh-ed25519",
    "ssh-rsa",
    "ecdsa-sha2-nistp256",
    "ecdsa-sha2-nistp384",
    "ecdsa-sha2-nistp521",
    "sk-ssh-ed25519@openssh.com",
    "sk-ecdsa-sha2-nistp256@openssh.com",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """One inventory entry.

    ``address`` is a host name, an IP address or an alias of ssh_config; ``port``, ``user`` and ``identity``
    are None where ssh_config decides. ``host_key`` is the pinned public key (``ssh-ed25519 AAAA…``). ``root``
    is the folder of orch on the host, ``python`` the interpreter of the payload there; with ``venv`` that of
    a virtual environment, which comes first on the payload's PATH as well. ``workdir`` is the payload's
    working folder, None for the run's own. A log-in over ssh knows nothing of the variables that a
    container's image sets: ``import_container_env`` takes them from PID 1. ``setup`` is prepared there before
    any run.

    A container of a Proxmox VE node has the id ``vmid`` there and is reached by way of ``node``, a local or
    an ssh host; all else is about the container, and ``address`` is the node's.
    """

    name: str
    transport: Literal["local", "ssh", "proxmox"]
    address: str
    port: int | None = None
    user: str | None = None
    identity: Path | None = None
    host_key: str | None = None
    python: str = "python3"
    venv: str | None = None
    workdir: str | None = None
    root: str = _DEFAULT_ROOT
    env: Mapping[str, str | Secret] = field(default_factory=dict, repr=False)
    import_container_env: bool = False
    setup: Setup | None = None
    node: Host | None = None
    vmid: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Inventory:
    """The hosts of one project, by name and in the file's order.

    ``estimate_python`` is the interpreter here that runs a payload's own programs, None for orch's own.
    """

    path: Path
    hosts: Mapping[str, Host]
    estimate_python: str | None = None

    def host(self, name: str) -> Host:
        """Returns the host called ``name``.

        Raises:
            UnknownName: there is none; the message lists those there are.
        """
        if name in self.hosts:
            return self.hosts[name]
        known = ", ".join(self.hosts)
        hint = did_you_mean(name, self.hosts)
        raise UnknownName(f"no host {quoted(name)} in {printable(str(self.path))}; known are {known}{hint}")


def find_inventory(start: Path) -> Path:
    """Returns the nearest inventory.yaml in ``start`` or a folder above it.

    Raises:
        UsageError: there is none up to the root.
    """
    folder = start.absolute()
    for candidate in (folder, *folder.parents):
        if (candidate / INVENTORY_NAME).is_file():
            return candidate / INVENTORY_NAME
    where = printable(str(folder))
    raise UsageError(
        f"no {INVENTORY_NAME} in {where} or any folder above it: "
        f"create one there, with the line `{SMALLEST}` to begin with, or name one with --inventory"
    )


def load_inventory(path: Path) -> Inventory:
    """Reads and checks all of it.

    Raises:
        ConfigError: the first thing that is wrong, with its line.
    """
    source = yaml_source.load(path)
    document = source.validate(_Document)
    if not document.hosts:
        raise source.error(f"must name at least one host, as `{SMALLEST}` does", "hosts")
    hosts = {name: _host(source, name, entry) for name, entry in document.hosts.items()}
    for name, entry in document.hosts.items():
        if entry.transport == "proxmox":
            hosts[name] = _container(source, entry, hosts[name], hosts)
    return Inventory(path=path.absolute(), hosts=hosts, estimate_python=_estimate_python(source, document))


class _Way(StrictModel):
    transport: Literal["local", "ssh", "proxmox"]
    address: str | None = None
    port: Annotated[int, Range(least=1, most=65535)] | None = None
    user: str | None = None
    identity: str | None = None
    host_key: str | None = None


class _Node(_Way):
    transport: Literal["local", "ssh"]


class _Entry(_Way):
    node: Any = None
    vmid: Annotated[int, Range(least=100, most=999_999_999)] | None = None  # Proxmox VE gives no others
    python: str | None = None
    venv: str | None = None
    workdir: str | None = None
    root: str = _DEFAULT_ROOT
    env: dict[str, Any] = Field(default_factory=dict)
    import_container_env: bool = False
    setup: SetupForm | None = None


class _Estimate(StrictModel):
    python: str


class _Document(StrictModel):
    hosts: dict[str, _Entry]
    estimate: _Estimate | None = None


def _estimate_python(source: Source, document: _Document) -> str | None:
    if document.estimate is None:
        return None
    with source.at("estimate", "python"):
        return _python(document.estimate.python)


def _host(source: Source, name: str, entry: _Entry) -> Host:
    here = ("hosts", name)
    with source.at_key(*here):
        check_name("host", name)
    way = _way(source, here, entry)
    texts = _texts(source, here, entry, ("python", "venv", "workdir", "root"))
    env: dict[str, str | Secret] = {}
    for variable, value in entry.env.items():
        with source.at(*here, "env", variable):
            env[variable] = parse_variable(variable, value, where=source.where(*here, "env", variable))
    return Host(
        name=name,
        transport=entry.transport,
        **{"address": name, **way},
        python=_interpreter(source, here, entry.transport, texts),
        venv=texts.get("venv"),
        workdir=texts.get("workdir"),
        root=texts["root"],
        env=env,
        import_container_env=entry.import_container_env,
        setup=read_setup(source, entry.setup, *here, "setup"),
    )


def _interpreter(source: Source, here: tuple[str, ...], transport: str, texts: Mapping[str, str]) -> str:
    if "venv" not in texts:
        return texts.get("python", sys.executable if transport == "local" else "python3")
    if "python" in texts:
        raise source.error("has no meaning beside venv, whose interpreter it is", *here, "python")
    return f"{texts['venv']}/bin/python"


def _way(source: Source, here: tuple[str, ...], entry: _Way) -> dict[str, Any]:
    """Returns what is said of the way there, as fields of `Host`; what has no meaning for it is refused."""
    transport, given = entry.transport, entry.model_fields_set
    for key, owner in (*((key, "ssh") for key in _SSH_ONLY), *((key, "proxmox") for key in _PROXMOX_ONLY)):
        if key in given and owner != transport:
            hint = ": say it of its node" if transport == "proxmox" else ""
            raise source.error(f"has no meaning for transport {transport}{hint}", *here, key)
    way: dict[str, Any] = _texts(source, here, entry, ("address", "user", "identity", "host_key"))
    if "identity" in way:
        with source.at(*here, "identity"):
            way["identity"] = _identity_path(way["identity"], source.path.absolute().parent)
    return way if entry.port is None else {**way, "port": entry.port}


def _texts(source: Source, here: tuple[str, ...], entry: _Way, keys: tuple[str, ...]) -> dict[str, str]:
    texts: dict[str, str] = {}
    for key in keys:
        text = getattr(entry, key)
        if text is not None:
            with source.at(*here, key):
                texts[key] = _TEXT_CHECKS[key](text)
    return texts


def _container(source: Source, entry: _Entry, host: Host, hosts: Mapping[str, Host]) -> Host:
    here = ("hosts", host.name)
    for key in _PROXMOX_ONLY:
        if getattr(entry, key) is None:
            raise source.error("is missing: transport proxmox needs it", *here, key)
    node = _node(source, (*here, "node"), entry.node, hosts)
    return replace(host, node=node, vmid=entry.vmid, address=node.address)


def _node(source: Source, here: tuple[str, ...], named: Any, hosts: Mapping[str, Host]) -> Host:
    """Returns the node: another host by its name, or one that is described in its place."""
    if isinstance(named, dict):
        way = source.validate(_Node, *here)
        name = ".".join(here[1:])
        if way.transport == "ssh" and way.address is None:
            raise source.error("is missing: where is the node?", *here, "address")
        return Host(name=name, transport=way.transport, **{"address": name, **_way(source, here, way)})
    if not isinstance(named, str):
        message = f"must be a host's name, or a mapping with transport and address, not {kind_of(named)}"
        raise source.error(message, *here)
    node = hosts.get(named)
    if node is None:
        hint = did_you_mean(named, hosts) or f"; known are {', '.join(hosts)}"
        raise source.error(f"no host {quoted(named)} in this file{hint}", *here)
    if node.transport == "proxmox":
        raise source.error(f"{named} is a container itself: a node is a local or an ssh host", *here)
    return node


def _address(text: str) -> str:
    """Accepts what ssh takes as a host: no user, no port, and nothing that it would read as an option."""
    if "@" in text:
        raise UsageError("must be the host alone: the part before '@' goes to user:")
    if re.fullmatch(r"[^:]+:[0-9]{1,5}", text):
        raise UsageError("must be the host alone: the part after ':' goes to port:")
    if len(text) > _LONGEST_ADDRESS or not re.fullmatch(rf"{_HOST_NAME}|{_IPV6}", text):
        raise UsageError(f"{quoted(text)} is no host name, IP address or ssh_config alias")
    return text


def _user(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_.][A-Za-z0-9_.@+\\-]{0,126}\$?", text):
        raise UsageError(f"{quoted(text)} is no user name")
    return text


def _identity(text: str) -> str:
    return _path("a key file's path", text)


def _identity_path(text: str, folder: Path) -> Path:
    try:
        return folder / Path(text).expanduser()
    except RuntimeError:
        raise UsageError(f"{quoted(text)} begins with the home of a user who is not known here") from None


def _python(text: str) -> str:
    """Accepts a path, or a name that is a program's for every log-in shell: no assignment, no pattern."""
    _path("an interpreter's path", text)
    if not text.startswith(("/", "~/")) and not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._+-]*", text):
        raise UsageError(f"{quoted(text)} must be a name on PATH, or begin with '/' or '~/'")
    return text


def _folder(text: str) -> str:
    _path("a folder's path", text)
    if not text.startswith(("/", "~/")) or ".." in text.split("/") or not text.strip("/"):
        raise UsageError(f"{quoted(text)} must be a folder below '/' or '~/', without '..'")
    return text.rstrip("/") or text


def _searched_folder(text: str) -> str:
    """Accepts a folder that becomes a part of PATH or PYTHONPATH."""
    if ":" in text:
        raise UsageError(f"{quoted(text)} must not hold ':', which parts the folders of a search path")
    return _folder(text)


def _path(kind: str, text: str) -> str:
    if len(text.encode()) > _LONGEST_PATH_BYTES:
        raise UsageError(f"{kind} must not be longer than {_LONGEST_PATH_BYTES} bytes, as {quoted(text)} is")
    return check_text(kind, text)


def _host_key(text: str) -> str:
    """Accepts ``TYPE BASE64`` whose two halves agree."""
    kind, _, encoded = text.partition(" ")
    if kind not in _KEY_TYPES or " " in encoded:
        raise UsageError("must be a key's type and its base64 text alone, as in 'ssh-ed25519 AAAA…'")
    try:
        blob = base64.b64decode(encoded, validate=True)
    except binascii.Error:
        blob = b""
    name = kind.encode()
    if not blob.startswith(len(name).to_bytes(4, "big") + name) or len(blob) < len(name) + 36:
        raise UsageError(f"is no {kind} key: its base64 text is cut off or belongs to another type")
    return text


_TEXT_CHECKS = {
    "address": _address,
    "user": _user,
    "identity": _identity,
    "host_key": _host_key,
    "python": _python,
    "venv": _searched_folder,
    "workdir": _folder,
    "root": _searched_folder,
}
