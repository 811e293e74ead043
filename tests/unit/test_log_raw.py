"""The bytes of a stream come out of records as they went in, or not at all."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from orchestrator.errors import ProtocolError, RecordsAltered, UsageError
from orchestrator.log_raw import RawOutput


def record(off: int, data: bytes, *, stream: str = "stdout", proc: str = "main") -> dict[str, Any]:
    place = {"seq": off, "t": 1.0, "kind": "out", "proc": proc, "pid": 7, "off": off, "line": 0}
    return {**place, "stream": stream, "b64": base64.b64encode(data).decode()}


def raw(*, proc: str | None = None, stream: str | None = None) -> RawOutput:
    return RawOutput(host="here", run_id="run1", proc=proc, stream=stream)


def test_the_bytes_are_those_that_were_written() -> None:
    output = raw()
    text = {**record(4, b""), "text": "é\r\n"}
    del text["b64"]
    records = [record(0, b"\x1b\xff\0\r"), {"kind": "heartbeat"}, text, record(8, b"end")]
    output.check(records)
    assert b"".join(map(output.bytes_of, records)) == b"\x1b\xff\0\r" + "é\r\n".encode() + b"end"


def test_two_streams_are_refused_before_and_while_they_are_written() -> None:
    records = [record(0, b"o"), record(0, b"e", stream="stderr")]
    with pytest.raises(UsageError, match=r"output on main\.stderr, main\.stdout: name one with --stream"):
        raw().check(records)
    output = raw()
    assert output.bytes_of(records[0]) == b"o"
    with pytest.raises(UsageError, match=r"main\.stderr, main\.stdout"):
        output.bytes_of(records[1])


def test_one_of_several_is_written_when_it_is_named() -> None:
    records = [record(0, b"o"), record(0, b"e", stream="stderr"), record(0, b"x", proc="rank1")]
    for output, expected in ((raw(stream="stderr"), b"e"), (raw(proc="rank1"), b"x")):
        output.check(records)
        assert b"".join(map(output.bytes_of, records)) == expected


def test_a_gap_is_no_output() -> None:
    output = raw()
    output.bytes_of(record(0, b"one"))
    with pytest.raises(RecordsAltered, match=r"main\.stdout goes on at byte 5 after byte 3"):
        output.bytes_of(record(5, b"two"))


def test_a_record_that_breaks_the_format_is_an_error() -> None:
    with pytest.raises(ProtocolError, match="off"):
        raw().bytes_of({**record(0, b"x"), "off": None})
