"""What the user's ssh_config says about a host, read the way ssh reads it.

paramiko parses the files; this module does what it leaves out: ``Include``, lists of quoted paths, the
order of several jump hosts, ``none``, and options that come from the inventory and must show in ``%p`` and
``%r`` too. An included file's own ``Host`` blocks apply by themselves, also where the ``Include`` stands in
a block. Of what ssh knows and this does not, ``IdentityAgent PATH`` and ``CertificateFile`` matter most.
"""

from __future__ import annotations

import getpass
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import paramiko

from orchestrator.errors import UsageError

__all__ = ["Jump", "jumps", "known_hosts_files", "load", "proxy_command"]

SYSTEM_CONFIG = Path("/etc/ssh/ssh_config")
USER_KNOWN_HOSTS = "~/.ssh/known_hosts ~/.ssh/known_hosts2"
GLOBAL_KNOWN_HOSTS = "/etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2"

_LINE = re.compile(r"(\w+)(?:\s*=\s*|\s+)(.+)")
_PATH_LISTS = ("userknownhostsfile", "globalknownhostsfile")
_MAX_INCLUDE_DEPTH = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Jump:
    """One element of ``ProxyJump``; None is for ssh_config to say."""

    address: str
    user: str | None = None
    port: int | None = None


def load(*, user: str | None = None, port: int | None = None) -> paramiko.SSHConfig:
    """Returns the user's and the system's ssh_config, with ``user`` and ``port`` before both.

    Raises:
        UsageError: a file cannot be read.
    """
    lines = ["Host *"]
    if user is not None:
        lines.append(f"User {user}")
    if port is not None:
        lines.append(f"Port {port}")
    for path in (Path("~/.ssh/config").expanduser(), SYSTEM_CONFIG):
        lines.append("Host *")
        lines.extend(_lines(path, folder=path.parent, depth=0))
    config = paramiko.SSHConfig()
    config.parse(StringIO("\n".join(lines)))
    return config


def jumps(options: Mapping[str, str], *, alias: str) -> tuple[Jump, ...]:
    """Returns the jump hosts on the way to ``alias``, the first to connect to first.

    A ``Host *`` block that sends everything through a jump host does not send that host through itself.
    """
    value = options.get("proxyjump") or "none"
    if value.lower() == "none":
        return ()
    found = tuple(_parse_jump(spec.strip()) for spec in value.split(","))
    return () if found[-1].address.lower() == alias.lower() else found


def proxy_command(options: Mapping[str, str | None]) -> str | None:
    """Returns the command whose stdin and stdout are the way to the host; ``ProxyJump`` wins over it."""
    return options.get("proxycommand") or None


def known_hosts_files(
    options: Mapping[str, str], *, address: str, alias: str, port: int, user: str
) -> list[Path]:
    """Returns the files to look host keys up in, the user's own first."""
    tokens = {
        "%%": "%",
        "%d": str(Path.home()),
        "%h": address,
        "%k": options.get("hostkeyalias", alias),
        "%n": alias,
        "%p": str(port),
        "%r": user,
        "%u": getpass.getuser(),
    }
    users = shlex.split(options.get("userknownhostsfile", USER_KNOWN_HOSTS))
    everyones = shlex.split(options.get("globalknownhostsfile", GLOBAL_KNOWN_HOSTS))
    return [
        Path(re.sub("%.", lambda token: tokens.get(token[0], token[0]), name)).expanduser()
        for name in users + everyones
        if name.lower() != "none"
    ]


def _lines(path: Path, *, folder: Path, depth: int) -> Iterator[str]:
    """Yields the file's lines with ``Include`` resolved, relative to ``folder``."""
    if depth > _MAX_INCLUDE_DEPTH:
        raise UsageError(
            f"{path}: Include is nested more than {_MAX_INCLUDE_DEPTH} deep; does it include itself?"
        )
    block = "Host *"
    for line in _read(path):
        match = _LINE.fullmatch(line.strip())
        keyword = match[1].lower() if match else ""
        if match is None or keyword not in ("include", "host", "match", *_PATH_LISTS):
            yield line
            continue
        if keyword == "include":
            for included in _included(match[2], folder):
                yield from _lines(included, folder=folder, depth=depth + 1)
            yield block
        elif keyword in _PATH_LISTS:
            # paramiko would strip the outer quotes of such a list; single quotes survive it.
            yield f"{keyword} {shlex.join(_words(match[2], path))}"
        else:
            block = line
            yield line


def _read(path: Path) -> list[str]:
    try:
        return path.read_text("utf-8", errors="surrogateescape").splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise UsageError(
            f"{path}: cannot read ssh_config: {error.strerror}; check its owner and mode"
        ) from error


def _included(value: str, folder: Path) -> Iterator[Path]:
    for pattern in _words(value, folder):
        path = folder / Path(pattern).expanduser()
        yield from sorted(Path(path.anchor).glob(str(path.relative_to(path.anchor))))


def _words(value: str, path: Path) -> list[str]:
    try:
        return shlex.split(value)
    except ValueError as error:
        raise UsageError(f"{path}: cannot read {value!r}: {error}") from error


def _parse_jump(spec: str) -> Jump:
    """``[user@]host[:port]`` or ``ssh://…``; an IPv6 address with a port stands in brackets."""
    user, _, rest = spec.removeprefix("ssh://").rstrip("/").rpartition("@")
    match = re.fullmatch(
        r"\[(?P<six>[^\]]+)\](?::(?P<a>\d+))?|(?P<host>[^:]+)(?::(?P<b>\d+))?|(?P<bare>.+)", rest
    )
    if match is None:
        raise UsageError(f"ssh_config: ProxyJump {spec!r} names no host")
    port = match["a"] or match["b"]
    return Jump(
        address=match["six"] or match["host"] or match["bare"],
        user=user or None,
        port=int(port) if port else None,
    )
