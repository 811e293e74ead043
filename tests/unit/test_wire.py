"""Frames: what is none is refused, whoever wrote it."""

from __future__ import annotations

import io

import pytest

from orchestrator.supervisor import wire


def read(data: bytes) -> tuple[dict[str, object], bytes]:
    stream = io.BytesIO(data)

    def exactly(size: int) -> bytes:
        found = stream.read(size)
        if len(found) < size:
            raise wire.WireError("the end")
        return found

    return wire.read_frame(exactly)


def test_a_frame_comes_back_as_it_was_packed() -> None:
    assert read(wire.pack({"a": [1]}, b"body")) == ({"a": [1], "size": 4}, b"body")


@pytest.mark.parametrize(
    "header",
    [b"", b"3", b"[]", b"{}", b'{"size":-1}', b'{"size":true}', b'{"size":1e999}', b"[" * 100_000, b"\xff"],
)
def test_a_header_that_is_none_is_refused(header: bytes) -> None:
    with pytest.raises(wire.WireError):
        read(b"%d\n%s" % (len(header), header))
