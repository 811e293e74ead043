"""``orch logs --merge``: the lines of several runs, of any hosts, in one order."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace

from orchestrator import runs
from orchestrator.cli.log_output import Asked, waits_for
from orchestrator.cli.terminal import Screen
from orchestrator.clocks import Offset
from orchestrator.conversation import Cursor
from orchestrator.errors import OrchError, RecordsAltered, UnknownName
from orchestrator.following import VIEW_WAIT_S, Watcher
from orchestrator.gathering import gather
from orchestrator.log_filter import LineFilter
from orchestrator.log_lines import LineAssembler, select
from orchestrator.log_tail import tail
from orchestrator.log_view import line_json, render, waiting_note
from orchestrator.merging import LiveMerge, Placed, RunLines, merge
from orchestrator.mirror_reader import (
    READ_BYTES,
    arriving_batches,
    check_end,
    checked_records,
    end_position,
    newest_batches,
)
from orchestrator.run_folder import Record, RunFolder
from orchestrator.text import counted
from orchestrator.workspace import Workspace

MOST_FOLLOWED = 16
MOST_READ_BYTES = 16 * 1024 * 1024  # of all runs at a time; parsed they take several times as much
LEAST_READ_BYTES = 4 * 1024


def runs_of(workspace: Workspace, texts: Sequence[str]) -> list[str]:
    """Returns the ids of the runs that are meant, each once: a group's id stands for its runs.

    Raises:
        UnknownName: a text means nothing, or several things.
    """
    found: list[str] = []
    for text in texts:
        group = runs.resolve_group(workspace, text)
        found += [runs.resolve(workspace, text)] if group is None else [row.run_id for row in group]
    return list(dict.fromkeys(found))


class MergedView:
    """Several runs' output as one; each has its colour, and its lines say whose they are."""

    def __init__(self, workspace: Workspace, run_ids: Sequence[str], asked: Asked) -> None:
        self._workspace = workspace
        self._run_ids = run_ids
        self._hosts = [workspace.ledger.get(run_id).host for run_id in run_ids]
        self._folders = [workspace.folder(run_id) for run_id in run_ids]
        self._asked = asked
        self._offsets: list[Offset | None] = [None] * len(run_ids)
        self._has_written = False
        self.screen = Screen()

    def show(self, count: int | None) -> None:
        """Shows what there is, as new as the hosts can tell."""
        self._gather()
        if count is None:
            records = [checked_records(folder, self._read_bytes) for folder in self._folders]
            self._write(merge(self._lines(run).read(records[run]) for run in self._numbers))
        else:
            for lines, _ in self._show_last(count):
                self._write(lines.flush())
        self.screen.flush()
        if not self._has_written:
            these = counted(len(self._run_ids), "run")
            self.screen.note(f"there is no line that was asked for of {these} here")
        self._say_who_waits()

    def follow(self, count: int | None) -> int:
        """Shows what comes until all runs have ended; returns the exit code."""
        self._gather()
        for folder in self._folders:
            check_end(folder)
        starts = [(self._lines(run), Cursor()) for run in self._numbers]
        if count is not None:
            starts = self._show_last(count)
            self._say_who_waits()
        if len(starts) > MOST_FOLLOWED:
            self.screen.note(f"{MOST_FOLLOWED} runs are followed at a time, the next when one has ended")
        with ExitStack() as stack:
            code = self._follow(stack, deque(starts))
        self.screen.close()
        return code

    @property
    def _numbers(self) -> range:
        return range(len(self._run_ids))

    @property
    def _read_bytes(self) -> int:
        """How much of each run is read at a time: the more runs, the less."""
        return min(READ_BYTES, max(LEAST_READ_BYTES, MOST_READ_BYTES // len(self._run_ids)))

    def _gather(self) -> None:
        gathered = gather(self._workspace, self._run_ids)
        self._offsets = [gathered.offsets[run_id] for run_id in self._run_ids]
        for note in gathered.notes:
            self.screen.note(note)

    def _offset_s(self, run: int) -> float:
        offset = self._offsets[run]
        return 0.0 if offset is None else offset.offset_s

    def _wanted_by(self, run: int) -> LineFilter:
        """Returns the filter by the clock of the run's host."""
        since_t = self._asked.wanted.since_t
        return replace(self._asked.wanted, since_t=None if since_t is None else since_t + self._offset_s(run))

    def _lines(self, run: int, assembler: LineAssembler | None = None) -> RunLines:
        return RunLines(
            run,
            assembler or LineAssembler(host=self._hosts[run], run_id=self._run_ids[run]),
            offset_s=self._offset_s(run),
            proc=self._asked.proc,
            stream=self._asked.stream,
            wanted=self._wanted_by(run),
        )

    def _show_last(self, count: int) -> list[tuple[RunLines, Cursor]]:
        """Writes the last lines of all runs together; returns where and with what each goes on."""
        starts: list[tuple[RunLines, Cursor]] = []
        last: list[Placed] = []
        for run in self._numbers:
            folder = self._folders[run]
            check_end(folder)
            until = end_position(folder)
            batches = (
                select(batch, proc=self._asked.proc, stream=self._asked.stream)
                for batch in newest_batches(folder, until)
            )
            found, assembler = tail(
                batches,
                count,
                host=self._hosts[run],
                run_id=self._run_ids[run],
                matches=self._wanted_by(run),
            )
            lines = self._lines(run, assembler)
            last = list(merge([last, lines.place(found)]))[-count:] if count else []
            starts.append((lines, until))
        self._write(last)
        return starts

    def _follow(self, stack: ExitStack, to_come: deque[tuple[RunLines, Cursor]]) -> int:
        changed, live, code, began_s = threading.Event(), LiveMerge(), 0, time.monotonic()
        watchers = {host: HostWatcher(self.screen, host) for host in self._hosts}
        pulled: set[int] = set()
        while live.count or to_come:
            for _ in range(len(to_come)):
                lines, start = to_come.popleft()
                is_settled = runs.is_settled(self._workspace.ledger.get(self._run_ids[lines.run]))
                must_wait = len(pulled) >= MOST_FOLLOWED or self._folders[lines.run].is_starting
                if must_wait and not is_settled:
                    to_come.append((lines, start))
                    continue
                if not is_settled:
                    pulled.add(lines.run)
                batches = self._opened(stack, lines.run, start, changed, watchers[self._hosts[lines.run]])
                live.add(lines, self._batches(lines.run, batches))
            self._write(live.ready())
            for run, error in live.take_ended():
                pulled.discard(run)
                its_code = self._conclude(run, error)
                code = code or its_code
            self.screen.flush()
            seconds, count = int(time.monotonic() - began_s), live.count + len(to_come)
            self.screen.status(f"{count} runs go on · {seconds // 60}:{seconds % 60:02}")
            changed.wait(live.wait_s(VIEW_WAIT_S))
            changed.clear()
        return code

    def _opened(
        self, stack: ExitStack, run: int, start: Cursor, changed: threading.Event, watcher: Watcher
    ) -> Iterator[list[Record]]:
        """Opens the follow of a run; where its host is not known what is mirrored comes, then the error."""
        try:
            following = runs.follow(self._workspace, self._run_ids[run], changed)
        except UnknownName as error:
            return _mirrored_only(self._folders[run], start, self._read_bytes, error)
        stack.enter_context(following)
        return following.batches(watcher, start, self._read_bytes)

    def _batches(self, run: int, batches: Iterable[list[Record]]) -> Iterator[list[Record]]:
        """Says on the way whether the run waits for its turn."""
        for batch in batches:
            for record in batch:
                if (note := waiting_note(record, self._run_ids[run])) is not None:
                    self.screen.note(note)
            yield batch

    def _conclude(self, run: int, error: OrchError | None) -> int:
        """Says how a run ended, or why it is followed no more; returns the exit code that this asks for."""
        run_id = self._run_ids[run]
        if error is not None:
            self.screen.note(f"run {run_id}: {error}")
            return error.exit_code
        report = runs.conclude(self._workspace, run_id)
        if report.verdict is None:
            return 0
        self.screen.note(f"run {run_id} has ended: {report.row.state}, verdict {report.verdict.name}")
        if report.verdict.name != "altered":
            return 0
        self.screen.note("; ".join(report.verdict.reasons))
        return RecordsAltered.exit_code

    def _say_who_waits(self) -> None:
        for run_id, folder in zip(self._run_ids, self._folders, strict=True):
            queued = waits_for(folder)
            if queued is not None:
                self.screen.note(waiting_note(queued, run_id) or "")

    def _write(self, lines: Iterable[Placed]) -> None:
        screen = self.screen
        for placed in lines:
            self._has_written = True
            t_here = None if self._offsets[placed.run] is None else placed.t_here
            if self._asked.as_json:
                sys.stdout.write(json.dumps({**line_json(placed.line), "t_here": t_here}) + "\n")
                continue
            row = render(
                placed.line,
                colour=screen.colour,
                is_long=self._asked.is_long,
                columns=screen.columns,
                run=placed.run,
                t=t_here,
            )
            screen.line(row)


class HostWatcher(Watcher):
    """Says once of one host that it cannot be reached, whatever number of runs are followed there."""

    def __init__(self, screen: Screen, host: str) -> None:
        self._screen = screen
        self._host = host
        self._said: set[str] = set()

    def unreachable(self, message: str, retry_in_s: float) -> None:  # noqa: ARG002  (the interface's)
        """Says it with the first message of its kind."""
        if message not in self._said:
            self._screen.note(f"{message}; the run goes on over there, trying again")
        self._said.add(message)

    def reachable(self) -> None:
        """Says that it is over."""
        if self._said:
            self._screen.note(f"{self._host}: answers again")
        self._said.clear()


def _mirrored_only(
    folder: RunFolder, start: Cursor, read_bytes: int, error: OrchError
) -> Iterator[list[Record]]:
    yield from arriving_batches(folder, lambda: True, start, read_bytes)
    raise error
