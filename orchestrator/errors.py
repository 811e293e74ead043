"""Every error that orch raises on purpose: one tree, each with its exit code.

::

    OrchError                      1  something orch can name went wrong
    ├── UsageError                 2  the caller's input: nothing was started
    │   ├── ConfigError               a file's content, with file and line
    │   ├── UnknownName               a host, profile or run that does not exist
    │   └── PayloadRefused            a payload folder that cannot be bundled as it is
    ├── HostError                  3  a host, by its inventory name
    │   ├── Unreachable               no connection, or it broke: worth another try
    │   ├── ContainerStopped       6  the node has the container, and it does not run
    │   ├── ContainerUnknown       2  the node has no container of that id: the inventory is wrong
    │   ├── HostKeyUnknown            never seen before
    │   ├── HostKeyChanged            not the key that was pinned
    │   ├── AuthenticationFailed      the host refused every credential
    │   ├── HostUnfit                 connected, but the run cannot start there
    │   └── ProtocolError             the far side said something that orch does not understand
    ├── ProgramFailed              3  a payload's own program has no answer
    │   └── NeedsTorch                because the interpreter that runs it lacks what it needs
    ├── StorageError               4  this machine's disk or ledger
    └── RecordsAltered             5  a run's records are not what they were

A message reads *what, where, what next*. Foreign exceptions are translated where they first appear,
so that the command line needs one ``except OrchError``.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

__all__ = [
    "AuthenticationFailed",
    "ConfigError",
    "ContainerStopped",
    "ContainerUnknown",
    "HostError",
    "HostKeyChanged",
    "HostKeyUnknown",
    "HostUnfit",
    "NeedsTorch",
    "OrchError",
    "PayloadRefused",
    "ProgramFailed",
    "ProtocolError",
    "RecordsAltered",
    "StorageError",
    "UnknownName",
    "Unreachable",
    "UsageError",
]


class OrchError(Exception):
    """The root; ``str()`` is one line for a person."""

    exit_code: ClassVar[int] = 1


class UsageError(OrchError):
    """Refused before anything was done."""

    exit_code: ClassVar[int] = 2


class ConfigError(UsageError):
    """A file that cannot be read as what it should be; ``line`` counts from 1."""

    def __init__(self, message: str, *, file: Path, line: int | None = None) -> None:
        where = str(file) if line is None else f"{file}:{line}"
        super().__init__(f"{where}: {message}")
        self.message = message
        self.file = file
        self.line = line


class UnknownName(UsageError):
    """A name that stands for nothing; the message lists what exists."""


class PayloadRefused(UsageError):
    """A payload folder holds something that the bundling rules refuse."""


class HostError(OrchError):
    """Something about one host, named as in the inventory."""

    exit_code: ClassVar[int] = 3

    def __init__(self, message: str, *, host: str) -> None:
        super().__init__(f"{host}: {message}")
        self.host = host


class Unreachable(HostError):
    """No connection, or one that broke; the run over there is not affected by it."""


class ContainerStopped(HostError):
    """The node answered; the container does not run, and neither does anything in it."""

    exit_code: ClassVar[int] = 6


class ContainerUnknown(HostError):
    """The node answered, and it has no container of the id that the inventory gives."""

    exit_code: ClassVar[int] = 2


class HostKeyUnknown(HostError):
    """The host showed a key that nobody has confirmed; ``fingerprint`` is ``SHA256:…``.

    ``pin`` is the key as inventory.yaml would name it; None for a jump host's, which no inventory names.
    """

    def __init__(self, message: str, *, host: str, fingerprint: str, pin: str | None) -> None:
        super().__init__(message, host=host)
        self.fingerprint = fingerprint
        self.pin = pin


class HostKeyChanged(HostError):
    """The host showed another key than the known one, whose fingerprint is ``pinned``.

    ``pin`` is the new key as inventory.yaml would name it; None for a jump host's, and for a revoked one.
    """

    def __init__(self, message: str, *, host: str, fingerprint: str, pinned: str, pin: str | None) -> None:
        super().__init__(message, host=host)
        self.fingerprint = fingerprint
        self.pinned = pinned
        self.pin = pin


class AuthenticationFailed(HostError):
    """The host refused the user or every key that was offered."""


class HostUnfit(HostError):
    """The host answered but lacks what the run needs (Python, a module, a device, a safe root).

    ``lacking`` says which: ``connection``, ``python``, ``root``, ``log-in``, ``pct``, or nothing where no
    word fits.
    """

    def __init__(self, message: str, *, host: str, lacking: str = "") -> None:
        super().__init__(message, host=host)
        self.lacking = lacking


class ProtocolError(HostError):
    """The supervisor's reply did not follow the protocol."""


class ProgramFailed(OrchError):
    """A program that a payload ships for us (an estimate, its shapes) failed, or answered in another form."""

    exit_code: ClassVar[int] = 3


class NeedsTorch(ProgramFailed):
    """The interpreter here has no torch, or one that cannot do it: another one may."""


class StorageError(OrchError):
    """This machine cannot store what it must (disk full, ledger damaged)."""

    exit_code: ClassVar[int] = 4


class RecordsAltered(OrchError):
    """Bytes of a run's records, here or on its host, are missing or not those that were sealed."""

    exit_code: ClassVar[int] = 5
