"""What a host tells and sends of a run's artifacts, as checked values: a list, and then bytes, file by file.

A path is the host's word and stays unchecked here; whoever writes a file asks `artifact_names`. No more bytes
are taken of a file than it was listed with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.conversation import Conversation
from orchestrator.errors import ProtocolError
from orchestrator.inventory import Host
from orchestrator.remote import pages
from orchestrator.text import printable
from orchestrator.transports.base import Transport

KINDS = ("file", "link", "pipe", "socket", "device", "deep", "closed")
MOST_ASKED = 5000  # in one request, which has a largest size
_LARGEST = 2**63


@dataclass(frozen=True, kw_only=True, slots=True)
class Artifact:
    """What lies at ``path`` on the host; only a ``file`` can be fetched."""

    path: str
    kind: str
    size_bytes: int
    mtime_ns: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """A file to be sent, of which the first ``have_bytes`` are here and have this hash."""

    artifact: Artifact
    have_bytes: int = 0
    have_sha256: str = ""


@dataclass(frozen=True, slots=True)
class Begun:
    """The file's bytes follow from ``start`` on: what is here goes on, or has to be dropped."""

    start: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """The file is over: ``sha256`` of the whole, or ``why`` there is none; ``has_changed`` meanwhile."""

    sha256: str = ""
    why: str = ""
    has_changed: bool = False


def artifacts(transport: Transport, run_id: str) -> list[Artifact]:
    """Returns what a run's artifacts folder on its host holds.

    Raises:
        HostError: it cannot be asked, or has no such run.
    """
    told = pages(transport, {"op": "artifacts", "run": run_id, "files": None})
    return [_artifact(entry, transport.host) for entry in told]


def received(
    transport: Transport, run_id: str, files: Sequence[Wanted]
) -> Iterator[Iterator[Begun | bytes | Ended]]:
    """Yields what is sent of each file, in order: `Begun`, bytes and `Ended`, or `Ended` alone.

    Raises:
        HostError: the connection broke, or the host sends what it was not asked for.
    """
    for first in range(0, len(files), MOST_ASKED):
        yield from _answer(transport, run_id, files[first : first + MOST_ASKED])


def _answer(
    transport: Transport, run_id: str, files: Sequence[Wanted]
) -> Iterator[Iterator[Begun | bytes | Ended]]:
    asked = [
        [wanted.artifact.path, wanted.artifact.size_bytes, wanted.artifact.mtime_ns, wanted.have_bytes,
         wanted.have_sha256]
        for wanted in files
    ]  # fmt: skip
    with Conversation.open(transport, {"op": "artifacts", "run": run_id, "files": asked}) as talk:
        for wanted in files:
            yield _one(talk, transport.host, wanted)


def _one(talk: Conversation, host: Host, wanted: Wanted) -> Iterator[Begun | bytes | Ended]:
    left: int | None = None
    while True:
        header, body = talk.frame()
        if header.get("idle"):
            continue
        start, sha256, failed = header.get("from"), header.get("sha256"), header.get("failed")
        if isinstance(failed, str):
            yield Ended(why=_reason(failed, header), has_changed=failed in ("changed", "gone"))
            return
        if left is None:
            if type(start) is not int or start not in (0, wanted.have_bytes):
                raise ProtocolError(f"an unexpected frame: {sorted(header)}", host=host.name)
            left = wanted.artifact.size_bytes - start
            yield Begun(start)
        elif isinstance(sha256, str) and left == 0:
            yield Ended(sha256=sha256)
            return
        elif header.get("data") and 0 < len(body) <= left:
            left -= len(body)
            yield body
        else:
            message = f"it sends more or less of {printable(wanted.artifact.path)} than it listed"
            raise ProtocolError(message, host=host.name)


def _reason(failed: str, header: dict[str, Any]) -> str:
    if failed == "changed":
        return "it changed while it was fetched"
    if failed == "gone":
        return "it is gone from the host"
    return f"the host cannot read it: {printable(str(header.get('message')))}"


def _artifact(entry: dict[str, Any], host: Host) -> Artifact:
    path, kind, size, mtime_ns = (entry.get(name) for name in ("path", "kind", "size", "mtime_ns"))
    if (
        isinstance(path, str)
        and isinstance(kind, str)
        and kind in KINDS
        and type(size) is int
        and 0 <= size < _LARGEST
        and type(mtime_ns) is int
        and -_LARGEST <= mtime_ns < _LARGEST
    ):
        return Artifact(path=path, kind=kind, size_bytes=size, mtime_ns=mtime_ns)
    raise ProtocolError("what it tells of an artifact cannot be read", host=host.name)
