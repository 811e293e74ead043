"""Which host keys are trusted, and the refusal of every other one.

A key pinned in the inventory is the only one accepted for that host. Otherwise, and for jump hosts, the
known_hosts files that ssh_config names decide, read as OpenSSH reads them: hashed names, patterns,
``[host]:port``, several keys for a name, ``@revoked``. ``StrictHostKeyChecking`` cannot weaken this. An
``@cert-authority`` line gives no trust, because paramiko does not check host certificates: such a host
counts as unknown, and the refusal says so. Nothing here asks a question or writes a file.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

import paramiko

from orchestrator.errors import HostKeyChanged, HostKeyUnknown, StorageError
from orchestrator.inventory import Host

__all__ = [
    "HostKeyPolicy",
    "KnownKey",
    "fingerprint",
    "known_host_name",
    "known_hosts_policy",
    "pinned_policy",
]

_SSH_PORT = 22

Marker = Literal["", "@revoked", "@cert-authority"]


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownKey:
    """A public key that some file speaks about; ``source`` is where, for a person."""

    type: str
    blob: bytes
    source: str
    marker: Marker = ""

    def __str__(self) -> str:
        return f"{self.type} {fingerprint(self.blob)}"


class HostKeyPolicy(paramiko.MissingHostKeyPolicy):
    """The decision about one server's key.

    paramiko itself is given no known keys, so that it asks here about each one; its own lookup knows
    neither revocation nor patterns, and takes a second key of a known type for an attack.
    """

    def __init__(
        self,
        *,
        host: str,
        where: str,
        known: Sequence[KnownKey],
        name: str,
        files: Sequence[Path] = (),
        is_pinned: bool = False,
        may_be_pinned: bool = False,
    ) -> None:
        self._host = host
        self._where = where
        self._name = name
        self._files = tuple(files)
        self._is_pinned = is_pinned
        self._may_be_pinned = may_be_pinned
        self._trusted = [key for key in known if not key.marker]
        self._revoked = [key for key in known if key.marker == "@revoked"]
        self._has_authority = any(key.marker == "@cert-authority" for key in known)

    def order(self, algorithms: Sequence[str]) -> tuple[str, ...]:
        """Returns ``algorithms`` with those of the trusted keys first.

        The others stay, so that a server that has lost its old key still shows the new one to report.
        """
        types = {key.type for key in self._trusted}
        return tuple(sorted(algorithms, key=lambda algorithm: _key_type(algorithm) not in types))

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        """Raises `HostKeyUnknown` or `HostKeyChanged` unless the key is trusted."""
        del client, hostname
        shown = KnownKey(type=key.get_name(), blob=key.asbytes(), source="")
        if any(revoked.blob == shown.blob for revoked in self._revoked):
            self._refuse_revoked(shown)
        if any(trusted.blob == shown.blob for trusted in self._trusted):
            return
        if self._trusted:
            self._refuse_changed(shown)
        self._refuse_unknown(shown)

    def _refuse_unknown(self, shown: KnownKey) -> NoReturn:
        authority = "; known_hosts names a @cert-authority for it, which orch cannot check"
        raise HostKeyUnknown(
            f"the host key of {self._where} is unknown: {shown}{authority if self._has_authority else ''}. "
            f"Next: {_how_to_compare(shown)}; if the fingerprint is the same, {self._how_to_trust(shown)}",
            host=self._host,
            fingerprint=fingerprint(shown.blob),
            pin=self._pin_of(shown),
        )

    def _refuse_changed(self, shown: KnownKey) -> NoReturn:
        known = ", ".join(f"{key} ({key.source})" for key in self._trusted)
        raise HostKeyChanged(
            f"the host key of {self._where} has CHANGED: known is {known}, shown was {shown}. The host was "
            "reinstalled, its address went to another one, or somebody is in between. "
            f"Next: {_how_to_compare(shown)}; only if the fingerprint is the same, "
            f"{self._how_to_replace(shown)}",
            host=self._host,
            fingerprint=fingerprint(shown.blob),
            pinned=fingerprint(self._trusted[0].blob),
            pin=self._pin_of(shown),
        )

    def _refuse_revoked(self, shown: KnownKey) -> NoReturn:
        revoked = next(key for key in self._revoked if key.blob == shown.blob)
        raise HostKeyChanged(
            f"the host key of {self._where} is marked @revoked in {revoked.source}: {shown}. "
            "Next: give the host a new key; do not use this one",
            host=self._host,
            fingerprint=fingerprint(shown.blob),
            pinned=fingerprint(self._trusted[0].blob) if self._trusted else "",
            pin=None,
        )

    def _pin_of(self, shown: KnownKey) -> str | None:
        may_be_pinned = self._is_pinned or self._may_be_pinned
        return f"{shown.type} {_base64(shown.blob)}" if may_be_pinned else None

    def _how_to_trust(self, shown: KnownKey) -> str:
        to_known_hosts = f"run: {self._append_command(shown)}"
        if not self._may_be_pinned:
            return to_known_hosts
        return (
            f"put this line under {self._host} in inventory.yaml: {_pin(shown)} "
            f"(orch hosts repin {self._host} does); or {to_known_hosts}"
        )

    def _how_to_replace(self, shown: KnownKey) -> str:
        if self._is_pinned:
            return (
                f"set under {self._host} in inventory.yaml: {_pin(shown)} "
                f"(orch hosts repin {self._host} does)"
            )
        stale = sorted({key.source.rpartition(":")[0] for key in self._trusted})
        forget = [shlex.join(["ssh-keygen", "-R", self._name, "-f", file]) for file in stale]
        return f"run: {' && '.join([*forget, self._append_command(shown)])}"

    def _append_command(self, shown: KnownKey) -> str:
        file = self._files[0] if self._files else Path("~/.ssh/known_hosts").expanduser()
        line = f"{self._name} {shown.type} {_base64(shown.blob)}"
        return f"echo {shlex.quote(line)} >> {shlex.quote(str(file))}"


def pinned_policy(host: Host, *, where: str, name: str) -> HostKeyPolicy:
    """Accepts the key that the inventory pins and no other; known_hosts is not read."""
    assert host.host_key is not None
    key_type, encoded = host.host_key.split()[:2]
    key = KnownKey(type=key_type, blob=base64.b64decode(encoded), source="host_key in inventory.yaml")
    return HostKeyPolicy(host=host.name, where=where, known=[key], name=name, is_pinned=True)


def known_hosts_policy(
    *, host: str, where: str, name: str, files: Sequence[Path], may_be_pinned: bool
) -> HostKeyPolicy:
    """Accepts the keys that ``files`` hold for ``name`` (see `known_host_name`); missing files are empty.

    Raises:
        StorageError: a file is there but cannot be read; it may hold a revocation.
    """
    known = [key for file in files for key in _known_keys(file, name)]
    return HostKeyPolicy(
        host=host, where=where, known=known, name=name, files=files, may_be_pinned=may_be_pinned
    )


def known_host_name(address: str, port: int) -> str:
    """Returns how known_hosts spells a server: ``host``, or ``[host]:port`` off the usual port."""
    address = address.lower()
    return address if port == _SSH_PORT else f"[{address}]:{port}"


def fingerprint(blob: bytes) -> str:
    """Returns ``SHA256:…`` of a public key, as ssh-keygen -l shows it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def _known_keys(file: Path, name: str) -> Iterator[KnownKey]:
    try:
        lines = file.read_text("utf-8", errors="replace").splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise StorageError(
            f"{file}: cannot read known host keys: {error.strerror}; check its owner and mode"
        ) from error
    for number, line in enumerate(lines, 1):
        key = _parse_line(line, name, source=f"{file}:{number}")
        if key is not None:
            yield key


def _parse_line(line: str, name: str, *, source: str) -> KnownKey | None:
    """Returns the line's key if it speaks about ``name``; OpenSSH skips what it cannot read, and so do we."""
    marker: Marker = ""
    match line.split():
        case ["@revoked" | "@cert-authority" as marker, patterns, key_type, encoded, *_]:
            pass
        case [patterns, key_type, encoded, *_] if not patterns.startswith(("#", "@")):
            pass
        case _:
            return None
    if not _is_match(patterns, name):
        return None
    try:
        blob = base64.b64decode(encoded, validate=True)
    except binascii.Error:
        return None
    return KnownKey(type=key_type, blob=blob, source=source, marker=marker)


def _is_match(patterns: str, name: str) -> bool:
    if patterns.startswith("|"):
        return _is_hash_of(patterns, name)
    is_named = False
    for pattern in patterns.lower().split(","):
        if re.fullmatch(_as_regex(pattern.removeprefix("!")), name):
            if pattern.startswith("!"):
                return False
            is_named = True
    return is_named


def _is_hash_of(hashed: str, name: str) -> bool:
    try:
        _, version, salt, digest = hashed.split("|")
        expected = hmac.digest(base64.b64decode(salt), name.encode(), "sha1")
        return version == "1" and hmac.compare_digest(expected, base64.b64decode(digest))
    except ValueError:
        return False


def _as_regex(pattern: str) -> str:
    return re.escape(pattern).replace(r"\*", ".*").replace(r"\?", ".")


def _key_type(algorithm: str) -> str:
    return "ssh-rsa" if algorithm.startswith("rsa-sha2-") else algorithm


def _how_to_compare(shown: KnownKey) -> str:
    kind = shown.type.removeprefix("ssh-").partition("-")[0]
    return f"compare on the host's own console (ssh-keygen -lf /etc/ssh/ssh_host_{kind}_key.pub)"


def _pin(key: KnownKey) -> str:
    return f"host_key: {key.type} {_base64(key.blob)}"


def _base64(blob: bytes) -> str:
    return base64.b64encode(blob).decode()
