"""Answers which process wrote a line, and how far that can be trusted.

A line is named as every view names it, ``RUN/main.stderr:121``. The answer comes from the mirror and the
ledger: the records around the line, and the seal that covers it, checked from the run's first byte on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from orchestrator.errors import UsageError
from orchestrator.holes import Hole, hole_after
from orchestrator.ledger import RunRow
from orchestrator.log_lines import LineAssembler, LogLine
from orchestrator.log_view import line_json, utc
from orchestrator.mirror_reader import read_records
from orchestrator.outcome import MISSING
from orchestrator.pins import newest_pins
from orchestrator.run_folder import Record, RunFolder
from orchestrator.supervisor.seals import SEAL_LINE, Seal, SealBroken, SealChecker
from orchestrator.text import printable, quoted

if TYPE_CHECKING:
    from rich.table import Table

MOST_UNSEALED_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class LineName:
    """A line's name in parts; ``run`` is as it was typed."""

    run: str
    proc: str
    stream: str
    number: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads a name as the views show it.

        Raises:
            UsageError: it is none.
        """
        match = re.fullmatch(r"([^/\s]+)/(.+)\.(stdout|stderr):([1-9][0-9]{0,17})", text)
        if match is None:
            raise UsageError(f"{quoted(text)} names no line: write it as it is shown, RUN/main.stderr:121")
        return cls(run=match[1], proc=match[2], stream=match[3], number=int(match[4]))


@dataclass(frozen=True, kw_only=True, slots=True)
class SealStanding:
    """The seal that covers a record: None while there is none, ``problem`` when it is not right.

    ``is_cut``: there will be none, the run's log limit removed it before it came. ``cut_before``: the last
    record that was removed so before this one; what is older cannot be checked from here.
    """

    seal: Seal | None = None
    is_pinned: bool = False
    cut_before: int | None = None
    problem: str | None = None
    is_cut: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Where a line is from; ``spawn`` and ``start`` are the records of its process and its supervisor."""

    line: LogLine
    row: RunRow
    spawn: Record
    start: Record
    standing: SealStanding


def find_origin(row: RunRow, folder: RunFolder, name: LineName) -> Origin:
    """Finds a line in the mirror; ``name.run`` is taken for ``row``.

    Raises:
        UsageError: the run has no such line; the message says which it has.
        RecordsAltered: the mirror holds a line that is no record.
    """
    lines = LineAssembler(host=row.host, run_id=row.run_id)
    spawns: dict[int, Record] = {}
    start: Record = {}
    streams: set[str] = set()
    count = 0
    missing: list[str] = []

    def of_stream() -> Iterator[LogLine]:
        nonlocal start
        for record in read_records(folder):
            if record["kind"] == "start":
                start = record
            elif _is_spawn_of(record, name.proc):
                spawns[record["pid"]] = record
            elif record["kind"] == "out":
                streams.add(f"{record.get('proc')}.{record.get('stream')}")
                if (record.get("proc"), record.get("stream")) == (name.proc, name.stream):
                    yield from lines.feed(record)
            elif record["kind"] == MISSING:
                missing.extend(line.text for line in lines.feed(record))
        yield from lines.flush()

    for line in of_stream():
        if line.number == name.number:
            standing = seal_over(folder, line.seq)
            return Origin(line=line, row=row, spawn=spawns.get(line.pid, {}), start=start, standing=standing)
        count = line.number
    raise UsageError("; ".join([_unknown(row.run_id, name, count, streams), *missing]))


def seal_over(folder: RunFolder, seq: int) -> SealStanding:
    """Checks the mirror from its first byte to the first seal after record ``seq``."""
    checker = SealChecker(folder.run_id)
    cut_before: int | None = None
    for block in _sealed_blocks(folder):
        if isinstance(block, Hole):
            if block.last > seq:
                return SealStanding(is_cut=True)
            checker, cut_before = block.checker(folder.run_id), block.last
            continue
        try:
            seals = checker.feed(block)
        except SealBroken as broken:
            return SealStanding(problem=str(broken))
        if seals and seals[-1].seq > seq:
            pin = next((pin for pin in newest_pins(folder) if pin.seq == seals[-1].seq), None)
            if pin is not None and pin.sha256 != seals[-1].sha256:
                return SealStanding(seal=seals[-1], problem="it is not the one that was pinned on arrival")
            return SealStanding(seal=seals[-1], is_pinned=pin is not None, cut_before=cut_before)
    return SealStanding()


def origin_table(origin: Origin) -> Table:
    """Returns all of it as labels and values."""
    from rich.table import Table  # noqa: PLC0415  (a log without it does not wait for rich)
    from rich.text import Text  # noqa: PLC0415

    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in _facts(origin):
        table.add_row(label, Text(printable(value)))
    return table


def origin_json(origin: Origin) -> dict[str, Any]:
    """Returns all of it as JSON values; of the environment the digest only, since it may hold secrets."""
    row, spawn, standing = origin.row, origin.spawn, origin.standing
    seal = standing.seal
    return {
        "line": line_json(origin.line),
        "run": {
            "run_id": row.run_id,
            "experiment": row.experiment,
            "profile": row.profile,
            "host": row.host,
            "bundle": row.bundle,
            "commit": row.commit_id,
            "dirty": row.dirty,
        },
        "process": {key: spawn.get(key) for key in ("proc", "pid", "argv", "env_digest", "identity", "t")},
        "supervisor": {"identity": origin.start.get("identity"), "python": origin.start.get("python")},
        "seal": {
            "seq": None if seal is None else seal.seq,
            "sha256": None if seal is None else seal.sha256,
            "is_right": None if seal is None and standing.problem is None else standing.problem is None,
            "is_pinned": standing.is_pinned,
            "is_cut": standing.is_cut,
            "cut_before": standing.cut_before,
            "problem": standing.problem,
        },
    }


def _facts(origin: Origin) -> Iterator[tuple[str, str]]:
    row, line, spawn = origin.row, origin.line, origin.spawn
    profile = "" if row.profile is None else f", profile {row.profile}"
    yield "line", line.name
    yield "text", line.text + (f" [… {line.left_out_bytes} more bytes]" if line.left_out_bytes else "")
    yield "record", f"seq {line.seq}, {utc(line.t)} by the host's clock"
    yield "seal", _seal(origin.standing)
    yield "run", f"{row.run_id} of {row.experiment}{profile}"
    yield "host", row.host
    yield "process", f"{line.proc}, pid {line.pid}, or a child of it that shares its {line.stream}"
    yield "argv", json.dumps(spawn.get("argv"), ensure_ascii=False)
    yield "environment", f"digest {spawn.get('env_digest')}"
    yield "started", f"{utc(spawn['t'])}, {_identity(spawn)}" if spawn else "not recorded"
    yield "supervisor", f"python {origin.start.get('python')}, {_identity(origin.start)}"
    yield "bundle", row.bundle
    yield "commit", "none" if row.commit_id is None else f"{row.commit_id}{' (dirty)' if row.dirty else ''}"


def _identity(record: Record) -> str:
    identity = record.get("identity")
    if not isinstance(identity, Mapping):
        return "identity not recorded"
    pid, tick, boot, space = map(identity.get, ("pid", "started", "boot_id", "pid_namespace"))
    return f"pid {pid} in {space}, tick {tick} of boot {boot}"


def _is_spawn_of(record: Record, proc: str) -> bool:
    is_spawn = record["kind"] == "spawn" and record.get("proc") == proc
    return is_spawn and isinstance(record.get("pid"), int)


def _seal(standing: SealStanding) -> str:
    seal = standing.seal
    if standing.problem is not None:
        return f"NOT RIGHT: {standing.problem}"
    if seal is None:
        is_cut = "none: the run's log limit cut it before it came here"
        return is_cut if standing.is_cut else "none yet: the next one will cover it"
    pinned = "pinned here on arrival" if standing.is_pinned else "not pinned here"
    cut = standing.cut_before
    begin = "the run's first byte on" if cut is None else f"seq {cut + 1} on, where the log limit's cut ends"
    return f"{seal.sha256}, seq {seal.seq}: right from {begin}, {pinned}"


def _unknown(run_id: str, name: LineName, count: int, streams: Iterable[str]) -> str:
    stream = f"{name.proc}.{name.stream}"
    if count:
        return f"run {run_id} has no line {stream}:{name.number}: {stream} has lines 1 to {count}"
    return (
        f"run {run_id} has no line of {stream}; it has output on: {', '.join(sorted(streams)) or 'nothing'}"
    )


def _sealed_blocks(folder: RunFolder) -> Iterator[bytes | Hole]:
    """Yields the mirror's bytes, cut after each seal and where none comes for long, and its holes."""
    index: int = 0
    while (path := folder.segment(index)).exists():
        block, size = [], 0
        with path.open("rb") as file:
            for line in file:
                block.append(line)
                size += len(line)
                if SEAL_LINE.match(line) or size > MOST_UNSEALED_BYTES:
                    yield b"".join(block)
                    block, size = [], 0
        yield b"".join(block)
        hole = hole_after(folder, index)
        if hole is not None:
            yield hole
        index = (index if hole is None else hole.through) + 1
