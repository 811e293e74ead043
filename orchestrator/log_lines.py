r"""Puts output records together into lines.

A record holds a chunk of one stream as it was read; here chunks become lines again, each (process, stream) by
itself. A line's name is ``RUN/rank0.stderr:121``: the number counts the line feeds of that stream, from 1.
Lines show less than the records hold, and say where: of carriage return updates the last one, of a line
longer than `log_text.LINE_LIMIT_BYTES` its beginning. Bytes that are not UTF-8 appear as ``\xff``.

Where the run's log limit has removed records, one line says so: it has ``cut`` and its text is no output.

Memory is bounded by that limit for each stream, whatever the length of the log. Reading segments and showing
lines are left to others; ``Line``, ``Stream`` and ``assemble`` are for this module and `log_tail`.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from orchestrator.errors import ProtocolError
from orchestrator.log_text import LineText, plain_parts
from orchestrator.outcome import MISSING, Record

_FIELDS: dict[str, type | tuple[type, ...]] = {
    "proc": str,
    "stream": str,
    "pid": int,
    "seq": int,
    "off": int,
    "line": int,
    "t": (int, float),
}
_USUAL_TYPES = (str, str, int, int, int, int, float)

Key = tuple[str, str]


class CutRecords(NamedTuple):
    """Which records are missing; ``size_bytes`` is None while that is not known."""

    first: int
    last: int
    size_bytes: int | None


class LogLine(NamedTuple):
    """One line; ``text`` is what the payload wrote, to be shown through `log_view.render` only.

    ``seq``, ``t`` and ``pid`` are those of the record with the line's last byte. ``is_headless`` says that
    the line may have begun before the records that were given, ``left_out_bytes`` how much of its end is not
    in ``text``.
    """

    host: str
    run_id: str
    proc: str
    pid: int
    stream: str
    number: int
    seq: int
    t: float
    text: str
    is_finished: bool = True
    is_headless: bool = False
    left_out_bytes: int = 0
    cut: CutRecords | None = None

    @property
    def name(self) -> str:
        """What the line is called in every view."""
        return f"{self.run_id}/{self.proc}.{self.stream}:{self.number}"


class LineAssembler:
    """Puts one run's output together, record by record; lines come in the order in which they end."""

    def __init__(self, *, host: str, run_id: str, streams: Streams | None = None) -> None:
        self._source = Source(host, run_id)
        self._streams: Streams = streams or {}

    def feed(self, record: Record) -> Iterator[LogLine]:
        """Yields the lines that a record ends: records of other kinds than ``out`` and `MISSING` end none.

        Raises:
            ProtocolError: an output record that does not follow the format.
        """
        if record.get("kind") != "out":
            return map(self._source.show, assemble(record, self._streams, self._source))
        parts = _plain_parts(record)
        if parts is not None:
            stream = self._streams.get((record["proc"], record["stream"]))
            if stream is not None and stream.goes_on_with(record):
                return self._add_plain(stream, record, parts)
        return map(self._source.show, assemble(record, self._streams, self._source))

    def flush(self) -> Iterator[LogLine]:
        """Yields the lines that never ended; for when no record will follow."""
        unended = [stream.line for stream in self._streams.values() if stream.line.text.kept]
        self._streams.clear()
        return map(self._source.show, sorted(unended, key=order))

    def _add_plain(self, stream: Stream, record: Record, parts: list[str]) -> Iterator[LogLine]:
        """Gives the same lines as `assemble`, several times as fast."""
        *ended, rest = parts
        if stream.has_begun and ended:
            yield from map(self._source.show, stream.add(record, ended.pop(0).encode() + b"\n"))
        host, run_id = self._source.host, self._source.run_id
        line, pid, seq, t = stream.line, record["pid"], record["seq"], record["t"]
        for number, part in enumerate(ended, line.number):
            yield LogLine(host, run_id, line.proc, pid, line.stream, number, seq, t, part)
        if ended:
            stream.pass_over(ended)
        if rest:
            stream.extend(record, rest.encode())


def select(
    records: Iterable[Record], *, proc: str | None = None, stream: str | None = None
) -> Iterator[Record]:
    """Yields the output records of one process, one stream, or both, and where any are missing."""
    for record in records:
        kind = record.get("kind")
        if kind == MISSING or (
            kind == "out" and proc in (None, record.get("proc")) and stream in (None, record.get("stream"))
        ):
            yield record


@dataclass(slots=True, eq=False)
class Line:
    """A line as far as it is known; ``start_off`` is where the known part begins in its stream."""

    proc: str
    stream: str
    number: int
    start_off: int
    has_head: bool
    pid: int
    seq: int
    t: float
    text: LineText = field(default_factory=LineText)
    is_finished: bool = False
    cut: CutRecords | None = None

    @classmethod
    def missing(cls, record: Record) -> Self:
        """Returns the line that stands for records that are missing."""
        cut = CutRecords(record["seq"], record["last"], record["bytes"])
        size = "an unknown number of" if cut.size_bytes is None else cut.size_bytes
        says = f"[… {size} bytes cut by the run's log limit, records {cut.first}–{cut.last}]"
        text = LineText.of(says.encode())
        return cls("", "", 0, 0, True, 0, cut.first, record["t"], text, is_finished=True, cut=cut)

    @classmethod
    def begin(cls, record: Record, number: int, start_off: int, *, has_head: bool) -> Self:
        """Returns a line of which nothing is known yet, in the record's stream."""
        proc, stream = record["proc"], record["stream"]
        return cls(proc, stream, number, start_off, has_head, record["pid"], record["seq"], record["t"])

    @property
    def key(self) -> Key:
        """The stream it is of."""
        return self.proc, self.stream

    @property
    def lacks_head(self) -> bool:
        """Something that shows may have come before what is known."""
        return not self.has_head and not self.text.is_fresh

    def add(self, record: Record, part: bytes) -> None:
        """Takes what follows, from ``record``."""
        self.text.extend(LineText.of(part))
        self.pid, self.seq, self.t = record["pid"], record["seq"], record["t"]

    def prepend(self, earlier: Line) -> None:
        """Takes what came before."""
        earlier.text.extend(self.text)
        self.text, self.start_off, self.has_head = earlier.text, earlier.start_off, earlier.has_head


@dataclass(slots=True)
class Stream:
    """One stream's line that has not ended, and where the stream goes on."""

    line: Line
    next_off: int = field(init=False)

    def __post_init__(self) -> None:
        self.next_off = self.line.start_off

    @property
    def has_begun(self) -> bool:
        """Something of the line is known."""
        return self.next_off > self.line.start_off

    def goes_on_with(self, record: Record) -> bool:
        """The record's first byte follows the last one here, and what begins with it begins a line."""
        return bool(self.next_off == record["off"]) and (self.has_begun or self.line.has_head)

    def pass_over(self, ended: list[str]) -> None:
        """Goes on after whole lines that needed no assembling."""
        self.next_off += len("\n".join(ended).encode()) + 1
        self.line.number += len(ended)
        self.line.start_off = self.next_off

    def extend(self, record: Record, part: bytes) -> None:
        """Takes a part of the line that does not end it."""
        self.line.add(record, part)
        self.next_off += len(part)

    def add(self, record: Record, data: bytes) -> Iterator[Line]:
        """Yields the lines that ``data`` ends."""
        *ended, rest = data.split(b"\n")
        off = self.next_off
        self.next_off += len(data)
        for part in ended:
            line = self.line
            line.add(record, part)
            line.is_finished = True
            off += len(part) + 1
            self.line = Line.begin(record, line.number + 1, off, has_head=True)
            yield line
        if rest:
            self.line.add(record, rest)


Streams = dict[Key, Stream]


@dataclass(frozen=True, slots=True)
class Source:
    """The run that records come from."""

    host: str
    run_id: str

    def data(self, record: Record) -> bytes:
        """Returns an output record's bytes; all fields that this module reads are checked here."""
        wrong = [name for name, kind in _FIELDS.items() if not isinstance(record.get(name), kind)]
        data = b""
        try:
            if "b64" in record:
                data = base64.b64decode(record["b64"], validate=True)
            else:
                data = record["text"].encode("utf-8", "surrogatepass")
        except (KeyError, TypeError, ValueError, AttributeError):
            wrong.append("text or b64")
        if wrong:
            raise ProtocolError(
                f"run {self.run_id}: record {record.get('seq')!r} has no valid {', '.join(wrong)};"
                " was it written by another version of orch?",
                host=self.host,
            )
        return data

    def show(self, line: Line) -> LogLine:
        """Returns the line as far as it is known."""
        text, left_out_bytes = line.text.decoded()
        return LogLine(
            host=self.host,
            run_id=self.run_id,
            proc=line.proc,
            pid=line.pid,
            stream=line.stream,
            number=line.number,
            seq=line.seq,
            t=line.t,
            text=text,
            is_finished=line.is_finished,
            is_headless=line.lacks_head,
            left_out_bytes=left_out_bytes,
            cut=line.cut,
        )


def _plain_parts(record: Record) -> list[str] | None:
    text = record.get("text")
    if not isinstance(text, str) or "b64" in record:
        return None
    return plain_parts(text) if tuple(map(type, map(record.get, _FIELDS))) == _USUAL_TYPES else None


def assemble(record: Record, streams: Streams, source: Source) -> Iterator[Line]:
    """Yields the lines that ``record`` ends, and keeps in ``streams`` what it begins.

    Over missing records a stream goes on as it was: not all that is missing need be its output.
    """
    if record.get("kind") == MISSING:
        yield Line.missing(record)
    if record.get("kind") != "out":
        return
    data = source.data(record)
    key = record["proc"], record["stream"]
    stream = streams.get(key)
    if stream is None or stream.next_off != record["off"]:
        if stream is not None and stream.line.text.kept:
            yield stream.line
        has_head = record["off"] == 0
        stream = streams[key] = Stream(
            Line.begin(record, record["line"] + 1, record["off"], has_head=has_head)
        )
    yield from stream.add(record, data)


def order(line: Line) -> tuple[int, int]:
    """Orders lines by their last byte; what ends in one record is of one stream."""
    return line.seq, line.number
