"""What a host tells and sends of artifacts: as it was asked for, or refused."""

from __future__ import annotations

from typing import Any, cast

import pytest

from orchestrator import remote_artifacts
from orchestrator.conversation import Conversation
from orchestrator.errors import ProtocolError
from orchestrator.inventory import Host
from orchestrator.remote_artifacts import Artifact, Begun, Ended, Wanted

HOST = Host(name="box", transport="local", address="box")
FILE = {"path": "a", "kind": "file", "size": 4, "mtime_ns": 1}
WANTED = Wanted(
    artifact=Artifact(path="a", kind="file", size_bytes=4, mtime_ns=1), have_bytes=2, have_sha256="x"
)
DATA = {"data": True}


class Talk:
    """A conversation that brings these frames."""

    def __init__(self, *frames: tuple[dict[str, Any], bytes]) -> None:
        self._frames = list(frames)

    def frame(self) -> tuple[dict[str, Any], bytes]:
        return self._frames.pop(0)


def events(*frames: tuple[dict[str, Any], bytes]) -> list[Begun | bytes | Ended]:
    return list(remote_artifacts._one(cast("Conversation", Talk(*frames)), HOST, WANTED))


@pytest.mark.parametrize(
    "change",
    [
        {"path": None},
        {"path": 3},
        {"kind": "folder"},
        {"kind": []},
        {"size": -1},
        {"size": True},
        {"size": 2**63},
        {"mtime_ns": 1.5},
        {"mtime_ns": 2**70},
    ],
)
def test_an_artifact_that_is_none_is_refused(change: dict[str, Any]) -> None:
    assert remote_artifacts._artifact(FILE, HOST) == WANTED.artifact
    with pytest.raises(ProtocolError, match="artifact cannot be read"):
        remote_artifacts._artifact({**FILE, **change}, HOST)


def test_a_file_comes_as_it_is_sent() -> None:
    whole = events(({"idle": True}, b""), ({"from": 2}, b""), (DATA, b"cd"), ({"sha256": "y"}, b""))
    assert whole == [Begun(2), b"cd", Ended(sha256="y")]
    cut = events(({"from": 0}, b""), (DATA, b"abc"), ({"failed": "changed"}, b""))
    assert cut[2] == Ended(why="it changed while it was fetched", has_changed=True)
    unread = events(({"failed": "unreadable", "message": "no\x1b[2J"}, b""))
    assert unread == [Ended(why="the host cannot read it: no\\x1b[2J")]


@pytest.mark.parametrize(
    "frames",
    [
        [({"from": 1}, b"")],
        [({"from": -1}, b"")],
        [({"from": True}, b"")],
        [(DATA, b"ab")],
        [({"sha256": "y"}, b"")],
        [({"from": 0}, b""), (DATA, b"abcde")],
        [({"from": 2}, b""), (DATA, b"abc")],
        [({"from": 2}, b""), (DATA, b"")],
        [({"from": 2}, b""), ({"sha256": "y"}, b"")],
        [({"from": 2}, b""), ({"from": 2}, b"")],
    ],
)
def test_more_or_less_of_a_file_than_was_listed_is_refused(frames: list[Any]) -> None:
    with pytest.raises(ProtocolError, match=r"listed|unexpected"):
        events(*frames)
