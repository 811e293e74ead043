"""What a host answers is bounded: one that tells without end, or more than it was asked for, is refused."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator import remote
from orchestrator.bundle import ObjectStore
from orchestrator.errors import ProtocolError
from orchestrator.inventory import Host
from orchestrator.supervisor import wire
from orchestrator.transports import Transport, connect

SHA256 = "a" * 64

# In the place of python3: greets as a supervisor does, then says what it was told to, the last frame
# without end.
HOST = """
import json, sys
source = sys.stdin.buffer
source.read(int(source.readline()))
nonce = json.loads(source.readline())["nonce"]
out = sys.stdout.buffer
out.write(b"\\n\\0orch-wire-1 " + nonce.encode() + b"\\n")
with open(sys.argv[1], "rb") as file:
    out.write(file.read())
with open(sys.argv[2], "rb") as file:
    last = file.read()
try:
    while last:
        out.write(last)
    out.flush()
    source.read()
except BrokenPipeError:
    pass
"""
Liar = Callable[..., Transport]


@pytest.fixture
def liar(tmp_path: Path) -> Liar:
    """Makes a host that answers with ``frames``, and then with ``endless`` for ever."""

    def make(*frames: dict[str, Any], endless: dict[str, Any] | None = None) -> Transport:
        greeting = wire.pack({"hello": {}, "supervisor": True})
        (tmp_path / "frames").write_bytes(greeting + b"".join(map(wire.pack, frames)))
        (tmp_path / "endless").write_bytes(b"" if endless is None else wire.pack(endless))
        (tmp_path / "host.py").write_text(HOST)
        python, command = tmp_path / "python", [sys.executable, *map(str, _paths(tmp_path))]
        python.write_text(f"#!/bin/sh\nexec {shlex.join(command)} 2>/dev/null\n")
        python.chmod(0o700)
        return connect(Host(name="box", transport="local", address="box", python=str(python)))

    return make


def _paths(folder: Path) -> list[Path]:
    return [folder / name for name in ("host.py", "frames", "endless")]


@pytest.mark.parametrize("page", [[], [{}] * 50])
def test_a_listing_without_end_is_refused(
    liar: Liar, page: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "MOST_TOLD", 1000)
    monkeypatch.setattr(remote, "MOST_TOLD_BYTES", 100_000)
    with liar(endless={"page": page}) as transport, pytest.raises(ProtocolError, match="no end"):
        remote.listing(transport)


def _segment(index: int, *blocks: str) -> dict[str, Any]:
    return {"segment": index, "bytes": 1, "first": 0, "blocks": list(blocks)}


@pytest.mark.parametrize(
    "frame", [_segment(0), _segment(0, SHA256, SHA256), _segment(1, SHA256), _segment(-1, SHA256)]
)
def test_digests_that_were_not_asked_for_are_refused(liar: Liar, frame: dict[str, Any]) -> None:
    with liar(endless=frame) as transport, pytest.raises(ProtocolError, match="more of segment"):
        remote.digests(transport, "run1", [1024], "b" * 64, None)


def test_digests_of_segments_without_end_are_refused(liar: Liar, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "MOST_TOLD", 10)
    with liar(*map(_segment, range(20))) as transport, pytest.raises(ProtocolError, match="no end"):
        remote.digests(transport, "run1", [], "b" * 64, None)


@pytest.mark.parametrize("need", [[SHA256, SHA256], ["c" * 64]])
def test_files_that_are_asked_for_twice_or_not_in_the_bundle_are_not_sent(
    liar: Liar, need: list[str], tmp_path: Path
) -> None:
    entries = [["go.py", 0o644, 1, SHA256]]
    with liar({"need": need}) as transport, pytest.raises(ProtocolError, match="the host asks for"):
        remote.start(transport, {}, entries, ObjectStore(tmp_path), None, {})


@pytest.mark.parametrize("places", [[], [1], [-1], [[0]], ["0"], [True], 0, None])
def test_a_host_cannot_lack_what_was_not_asked_for(liar: Liar, places: object, tmp_path: Path) -> None:
    job = {"setup": [{"kind": "script"}]}
    with liar({"unprepared": places}) as transport, pytest.raises(ProtocolError, match="nobody asked for"):
        remote.start(transport, job, [], ObjectStore(tmp_path), None, {})


@pytest.mark.parametrize("told", [[], [5], [{}], [{"digest": "d", "done": 5, "by": None}], [{}, {}]])
def test_an_answer_about_what_is_prepared_is_checked(liar: Liar, told: list[Any]) -> None:
    with liar({"prepared": told}) as transport, pytest.raises(ProtocolError, match="prepared environments"):
        remote.prepared(transport, [{"kind": "script"}])
