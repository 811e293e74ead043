"""The two forms in which ``orch logs`` writes a run's output: lines with their source, and raw bytes."""

from __future__ import annotations

import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator import runs
from orchestrator.cli.run import RunWatcher
from orchestrator.cli.terminal import Screen
from orchestrator.conversation import Cursor
from orchestrator.errors import HostError, RecordsAltered, StorageError
from orchestrator.log_filter import LineFilter
from orchestrator.log_lines import LineAssembler, LogLine, select
from orchestrator.log_raw import RawOutput
from orchestrator.log_tail import tail
from orchestrator.log_view import line_json, render, waiting_note
from orchestrator.mirror_reader import check_end, checked_records, end_position, newest_batches, read_records
from orchestrator.run_folder import Record, RunFolder
from orchestrator.workspace import Workspace


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What is asked for: which lines, and in which form."""

    proc: str | None
    stream: str | None
    wanted: LineFilter
    as_json: bool
    is_long: bool


class View(ABC):
    """One run's output, as it is mirrored or as it comes; what of it is written is a subclass's business."""

    def __init__(self, workspace: Workspace, run_id: str, asked: Asked) -> None:
        self._workspace = workspace
        self._run_id = run_id
        self._host = workspace.ledger.get(run_id).host
        self._folder = workspace.folder(run_id)
        self._asked = asked
        self._has_written = False
        self.screen = Screen()

    def show(self, count: int | None) -> None:
        """Shows what there is, as new as the host can tell; says so when it cannot."""
        bring_up_to_date(self._workspace, self._run_id, self.screen)
        if count is None:
            for record in self._mirrored():
                self._take(record)
        else:
            check_end(self._folder)
            self._start_with_last(count, end_position(self._folder))
        self._finish()
        self.screen.flush()
        if not self._has_written:
            self.screen.note(why_nothing(self._folder, self._run_id))

    def follow(self, count: int | None) -> None:
        """Shows what comes, after the last ``count`` lines of what is mirrored or after all of it."""
        watcher = RunWatcher(self.screen, self._run_id, self._host)
        start = Cursor()
        check_end(self._folder)
        if count is not None:
            start = end_position(self._folder)
            self._start_with_last(count, start)
            if (queued := waits_for(self._folder)) is not None:
                self.screen.note(waiting_note(queued, self._run_id) or "")
        with runs.follow(self._workspace, self._run_id) as following:
            for record in following.records(watcher, start):
                self._take(record)
                runs.note_begin(self._workspace, self._run_id, record)
                if (note := waiting_note(record, self._run_id)) is not None:
                    self.screen.note(note)
        self._finish()
        self.screen.flush()
        self.screen.close()
        report = runs.conclude(self._workspace, self._run_id)
        if report.verdict is not None:
            end = f"{report.row.state}, verdict {report.verdict.name}"
            self.screen.note(f"run {self._run_id} has ended: {end}")
            if report.verdict.name == "altered":
                raise RecordsAltered("; ".join(report.verdict.reasons))

    def _mirrored(self) -> Iterator[Record]:
        return checked_records(self._folder)

    @abstractmethod
    def _start_with_last(self, count: int, until: Cursor) -> None:
        """Writes the last lines before ``until``."""

    @abstractmethod
    def _take(self, record: Record) -> None:
        """Writes what a record adds."""

    @abstractmethod
    def _finish(self) -> None:
        """Writes what was held back for more to come."""


class LinesView(View):
    """Lines with their source, or as JSON."""

    def __init__(self, workspace: Workspace, run_id: str, asked: Asked) -> None:
        super().__init__(workspace, run_id, asked)
        self._lines = LineAssembler(host=self._host, run_id=run_id)

    def _start_with_last(self, count: int, until: Cursor) -> None:
        batches = map(self._select, newest_batches(self._folder, until))
        wanted = self._asked.wanted
        last, self._lines = tail(batches, count, host=self._host, run_id=self._run_id, matches=wanted)
        self._write(last)

    def _take(self, record: Record) -> None:
        for output in self._select([record]):
            self._write(self._lines.feed(output))

    def _finish(self) -> None:
        self._write(self._lines.flush())

    def _select(self, records: Iterable[Record]) -> Iterator[Mapping[str, Any]]:
        return select(records, proc=self._asked.proc, stream=self._asked.stream)

    def _write(self, lines: Iterable[LogLine]) -> None:
        for line in filter(self._asked.wanted, lines):
            self._has_written = True
            if self._asked.as_json:
                sys.stdout.write(json.dumps(line_json(line)) + "\n")
            else:
                screen = self.screen
                row = render(line, colour=screen.colour, is_long=self._asked.is_long, columns=screen.columns)
                screen.line(row)


class RawView(View):
    """The bytes of one stream; what is mirrored is checked whole before a byte of it is written."""

    def __init__(self, workspace: Workspace, run_id: str, asked: Asked) -> None:
        super().__init__(workspace, run_id, asked)
        self._output = RawOutput(host=self._host, run_id=run_id, proc=asked.proc, stream=asked.stream)

    def _mirrored(self) -> Iterator[Record]:
        self._output.check(checked_records(self._folder))
        return checked_records(self._folder)

    def _start_with_last(self, count: int, until: Cursor) -> None:
        raise AssertionError((count, until))  # refused with the options

    def _take(self, record: Record) -> None:
        if data := self._output.bytes_of(record):
            self._has_written = True
            self.screen.close()
            sys.stdout.buffer.write(data)

    def _finish(self) -> None:
        """Bytes wait for nothing."""


def why_nothing(folder: RunFolder, run_id: str) -> str:
    """Returns why no line of a run was shown, and where to look next."""
    queued = waits_for(folder)
    if queued is not None:
        return f"{waiting_note(queued, run_id)}; it has written nothing yet"
    has_output = any(record["kind"] == "out" for record in read_records(folder))
    what = "no line that was asked for" if has_output else "no output"
    return f"there is {what} of run {run_id} here; see: orch show {run_id}"


def waits_for(folder: RunFolder) -> Record | None:
    """Returns the record that says for whom a run waits, as long as it does."""
    awaited = None
    for record in read_records(folder):
        if record["kind"] in ("queued", "preparing", "cards_awaited"):
            awaited = record
        elif record["kind"] in ("turn", "prepared"):
            awaited = None
        elif record["kind"] in ("cards", "spawn", "end"):
            return None
    return awaited


def bring_up_to_date(workspace: Workspace, run_id: str, screen: Screen) -> None:
    """Mirrors what the host has; says so when it cannot be asked. A settled run costs nothing here."""
    if runs.is_settled(workspace.ledger.get(run_id)):
        return
    try:
        runs.refresh(workspace, run_id)
    except (HostError, StorageError) as error:
        screen.note(f"{error}; showing what is mirrored here")
