"""Logging in by key, without ever asking: which keys are offered, in which order, and what became of each.

Offered are the inventory's ``identity``, the files that ssh_config names, the agent's keys (with
``IdentitiesOnly`` only those that one of the files names), and ssh's default files where no file is named.
An encrypted file is used through the agent or not at all.
"""

from __future__ import annotations

import base64
import binascii
import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import paramiko
from cryptography.exceptions import UnsupportedAlgorithm

from orchestrator.errors import AuthenticationFailed

__all__ = ["Identities"]

_DEFAULT_FILES = ("~/.ssh/id_rsa", "~/.ssh/id_ecdsa", "~/.ssh/id_ed25519")  # the order of ssh


@dataclass(frozen=True, kw_only=True, slots=True)
class Identities:
    """The credentials for one server; ``files`` in the order to try, without the defaults."""

    host: str
    where: str
    user: str
    files: Sequence[Path]
    only_files: bool
    use_agent: bool

    def authenticate(self, transport: paramiko.Transport) -> None:
        """Logs ``transport`` in; paramiko calls it once the host key is accepted.

        Raises:
            AuthenticationFailed: every key was refused, or none could be offered.
            TimeoutError: the server stopped answering.
        """
        agent = _connect_agent() if self.use_agent else None
        try:
            self._try_all(transport, agent.get_keys() if agent else ())
        finally:
            if agent is not None:
                agent.close()

    def _try_all(self, transport: paramiko.Transport, agent_keys: Sequence[paramiko.PKey]) -> None:
        outcomes: list[str] = []
        encrypted: list[Path] = []
        for name, key in self._offers(agent_keys):
            outcome = self._offer(transport, key) if isinstance(key, paramiko.PKey) else key
            if outcome is None:
                return
            if outcome == _ENCRYPTED:
                encrypted.append(Path(name))
            outcomes.append(f"{name} ({outcome})")
            if not transport.is_active():
                outcomes.append("then the host closed the connection")
                break
        self._give_up(outcomes, encrypted)

    def _offer(self, transport: paramiko.Transport, key: paramiko.PKey) -> str | None:
        """Returns None on success, or why the key did not do."""
        start_s = time.monotonic()
        try:
            still_needed = transport.auth_publickey(self.user, key)
        except paramiko.BadAuthenticationType:
            return "no log-in by key allowed"
        except paramiko.SSHException as error:
            if time.monotonic() - start_s >= transport.auth_timeout:
                raise TimeoutError(f"no answer to the log-in for {transport.auth_timeout:.0f} s") from error
            return _REFUSED if isinstance(error, paramiko.AuthenticationException) else str(error)
        return f"accepted, but the host also wants {' and '.join(still_needed)}" if still_needed else None

    def _offers(self, agent_keys: Sequence[paramiko.PKey]) -> Iterator[tuple[str, paramiko.PKey | str]]:
        """Yields names with a key, or with the reason why there is none."""
        offered: set[bytes] = set()
        in_agent = {key.asbytes(): key for key in agent_keys}
        for path in self.files or _default_files():
            key = _load(path)
            if not isinstance(key, paramiko.PKey):
                key = in_agent.get(_public_half(path), key)
            if isinstance(key, paramiko.PKey):
                offered.add(key.asbytes())
            yield str(path), key
        for blob, key in in_agent.items():
            if blob not in offered and not self.only_files:
                yield f"agent's {key.get_name()} key", key

    def _give_up(self, outcomes: Sequence[str], encrypted: Sequence[Path]) -> None:
        if encrypted:
            step = f"run: ssh-add {shlex.quote(str(encrypted[0]))}"
        elif any(outcome.endswith(f"({_REFUSED})") for outcome in outcomes):
            step = (
                f"append the public half of one of them to {self.user}'s authorized_keys there, "
                "or set 'user:' or 'identity:' in inventory.yaml"
            )
        else:
            step = (
                "set 'identity:' in inventory.yaml to a private key's file, or start an agent that holds one"
            )
        tried = ", ".join(outcomes) or "no key, none was found"
        raise AuthenticationFailed(
            f"{self.where} did not let {self.user} in; tried: {tried}. Next: {step}", host=self.host
        )


_REFUSED = "refused"
_ENCRYPTED = "is encrypted, and no agent holds it"


def _connect_agent() -> paramiko.Agent | None:
    with suppress(paramiko.SSHException, OSError):
        return paramiko.Agent()
    return None


def _default_files() -> list[Path]:
    return [path for path in (Path(name).expanduser() for name in _DEFAULT_FILES) if path.exists()]


def _load(path: Path) -> paramiko.PKey | str:
    try:
        return paramiko.PKey.from_path(path)
    except OSError as error:
        return (error.strerror or str(error)).lower()
    except (TypeError, paramiko.PasswordRequiredException):  # cryptography's word for "wants a passphrase"
        return _ENCRYPTED
    except (ValueError, UnsupportedAlgorithm, paramiko.SSHException, paramiko.pkey.UnknownKeyType):
        return "no private key that orch can use"


def _public_half(path: Path) -> bytes:
    """Returns the public key beside a private one, or nothing."""
    with suppress(OSError, ValueError, IndexError, binascii.Error):
        return base64.b64decode(Path(f"{path}.pub").read_text("utf-8").split()[1])
    return b""
