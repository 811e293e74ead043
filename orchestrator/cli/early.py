"""Begins to connect to the hosts that a command line names, before the command itself is imported.

Looks at the words alone, and where they are not what it expects it does nothing: the command meets the same
words, files and hosts again and tells what is wrong with them. Nothing is asked of a host here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from orchestrator import transports
from orchestrator.errors import OrchError
from orchestrator.inventory import find_inventory, load_inventory

MOST_HOSTS = 4
_HARMLESS = ("--dry-run", "--help", "-h")


def connect_early(command: str, arguments: Sequence[str]) -> None:
    """Begins, for ``run`` and ``rerun`` with ``--host``, for ``exec HOST`` and ``shell HOST``, unless the
    words say that no host is needed.
    """
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    hosts = list(own[:1] if command in ("exec", "shell") else _values(own, "--host"))
    if not 0 < len(hosts) <= MOST_HOSTS or set(own) & set(_HARMLESS):
        return
    try:
        named = next(_values(own, "--inventory"), None)
        inventory = load_inventory(Path(named) if named else find_inventory(Path.cwd()))
        for host in hosts:
            transports.connect_early(inventory.host(host))
    except (OrchError, OSError):
        return


def _values(arguments: Sequence[str], option: str) -> Iterator[str]:
    """Yields what follows ``option``, as a word of its own or after an equals sign."""
    for word, following in zip(arguments, [*arguments, ""][1:], strict=True):
        if word == option:
            yield following
        elif word.startswith(f"{option}="):
            yield word.partition("=")[2]
