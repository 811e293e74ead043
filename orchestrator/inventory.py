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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from orchestrator import yaml_source
from orchestrator.errors import UnknownName, UsageError
from orchestrator.fields import Secret, parse_variable
from orchestrator.strict_model import Range
from orchestrator.text import check_name, check_text, did_you_mean, printable
from orchestrator.yaml_source import Field, Source, StrictModel

__all__ = ["INVENTORY_NAME", "Host", "Inventory", "find_inventory", "load_inventory"]

INVENTORY_NAME = "inventory.yaml"

_DEFAULT_ROOT = "~/.orch"
_SSH_ONLY = ("address", "port", "user", "identity", "host_key")
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
    container's image sets: ``import_container_env`` takes them from PID 1.
    """

    name: str
    transport: Literal["local", "ssh"]
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Inventory:
    """The hosts of one project, by name and in the file's order."""

    path: Path
    hosts: Mapping[str, Host]

    def host(self, name: str) -> Host:
        """Returns the host called ``name``.

        Raises:
            UnknownName: there is none; the message lists those there are.
        """
        if name in self.hosts:
            return self.hosts[name]
        known = ", ".join(self.hosts)
        hint = did_you_mean(name, self.hosts)
        raise UnknownName(f"no host {name!r} in {printable(str(self.path))}; known are {known}{hint}")


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
        "create one there, or name one with --inventory"
    )


def load_inventory(path: Path) -> Inventory:
    """Reads and checks every host.

    Raises:
        ConfigError: the first thing that is wrong, with its line.
    """
    source = yaml_source.load(path)
    document = source.validate(_Document)
    if not document.hosts:
        raise source.error("must name at least one host", "hosts")
    hosts = {name: _host(source, name, entry) for name, entry in document.hosts.items()}
    return Inventory(path=path.absolute(), hosts=hosts)


class _Entry(StrictModel):
    transport: Literal["local", "ssh"]
    address: str | None = None
    port: Annotated[int, Range(least=1, most=65535)] | None = None
    user: str | None = None
    identity: str | None = None
    host_key: str | None = None
    python: str | None = None
    venv: str | None = None
    workdir: str | None = None
    root: str = _DEFAULT_ROOT
    env: dict[str, Any] = Field(default_factory=dict)
    import_container_env: bool = False


class _Document(StrictModel):
    hosts: dict[str, _Entry]


def _host(source: Source, name: str, entry: _Entry) -> Host:
    here = ("hosts", name)
    with source.at_key(*here):
        check_name("host", name)
    if entry.transport == "local":
        for key in _SSH_ONLY:
            if key in entry.model_fields_set:
                raise source.error("has no meaning for transport local", *here, key)
    texts: dict[str, str] = {}
    for key, check in _TEXT_CHECKS.items():
        text = getattr(entry, key)
        if text is not None:
            with source.at(*here, key):
                texts[key] = check(text)
    identity = texts.get("identity")
    with source.at(*here, "identity"):
        identity_path = None if identity is None else _identity_path(identity, source.path.absolute().parent)
    env: dict[str, str | Secret] = {}
    for variable, value in entry.env.items():
        with source.at(*here, "env", variable):
            env[variable] = parse_variable(variable, value, where=source.where(*here, "env", variable))
    return Host(
        name=name,
        transport=entry.transport,
        address=texts.get("address", name),
        port=entry.port,
        user=texts.get("user"),
        identity=identity_path,
        host_key=texts.get("host_key"),
        python=_interpreter(source, here, entry.transport, texts),
        venv=texts.get("venv"),
        workdir=texts.get("workdir"),
        root=texts["root"],
        env=env,
        import_container_env=entry.import_container_env,
    )


def _interpreter(source: Source, here: tuple[str, ...], transport: str, texts: Mapping[str, str]) -> str:
    if "venv" not in texts:
        return texts.get("python", sys.executable if transport == "local" else "python3")
    if "python" in texts:
        raise source.error("has no meaning beside venv, whose interpreter it is", *here, "python")
    return f"{texts['venv']}/bin/python"


def _address(text: str) -> str:
    """Accepts what ssh takes as a host: no user, no port, and nothing that it would read as an option."""
    if "@" in text:
        raise UsageError("must be the host alone: the part before '@' goes to user:")
    if re.fullmatch(r"[^:]+:[0-9]{1,5}", text):
        raise UsageError("must be the host alone: the part after ':' goes to port:")
    if not re.fullmatch(r"[A-Za-z0-9_:][A-Za-z0-9._:%-]{0,252}", text):
        raise UsageError(f"{text!r} is no host name, IP address or ssh_config alias")
    return text


def _user(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_.][A-Za-z0-9_.@+\\$-]{0,127}", text):
        raise UsageError(f"{text!r} is no user name")
    return text


def _identity(text: str) -> str:
    return check_text("a key file's path", text)


def _identity_path(text: str, folder: Path) -> Path:
    try:
        return folder / Path(text).expanduser()
    except RuntimeError:
        raise UsageError(f"{text!r} begins with the home of a user who is not known here") from None


def _python(text: str) -> str:
    check_text("an interpreter's path", text)
    if "/" in text and not text.startswith(("/", "~/")):
        raise UsageError(f"{text!r} must be a name on PATH, or begin with '/' or '~/'")
    return text


def _folder(text: str) -> str:
    check_text("a folder's path", text)
    if not text.startswith(("/", "~/")) or ".." in text.split("/") or not text.strip("/"):
        raise UsageError(f"{text!r} must be a folder below '/' or '~/', without '..'")
    return text.rstrip("/") or text


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
    "venv": _folder,
    "workdir": _folder,
    "root": _folder,
}
