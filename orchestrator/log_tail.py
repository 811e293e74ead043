"""Finds the last lines of a run without reading it from its beginning.

Records come in batches, the newest first; a line that began in an older batch than it ended in is put
together from both. How chunks become lines is `log_lines`' business.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from orchestrator.log_lines import Key, Line, LineAssembler, LogLine, Source, Stream, Streams, assemble, order
from orchestrator.outcome import Record


def tail(
    batches: Iterable[Iterable[Record]],
    count: int,
    *,
    host: str,
    run_id: str,
    matches: Callable[[LogLine], bool] | None = None,
) -> tuple[list[LogLine], LineAssembler]:
    """Returns a run's last ``count`` ended lines that match, in order, and an assembler to go on with.

    ``batches`` comes newest first, each with its records in order, and is read no further back than these
    lines reach. Unended lines wait in the assembler: feed it what follows, or flush it. It knows the streams
    that were seen on the way; the first line of another one counts as headless.
    """
    source = Source(host, run_id)
    search = _Search(source, count, matches)
    for batch in batches:
        search.read(batch)
        if search.is_complete:
            break
    assembler = LineAssembler(host=host, run_id=run_id, streams=search.streams)
    return list(map(source.show, search.lines)), assembler


class _Search:
    """Reads batches backwards until the last lines of a run are known from their beginnings.

    A line that began before a batch waits for what the next older batch ends with: whether it matches is
    known with its beginning. ``streams`` holds what each stream has of a line that never ended.
    """

    def __init__(self, source: Source, count: int, matches: Callable[[LogLine], bool] | None) -> None:
        self._source = source
        self._count = count
        self._matches = matches
        self._found: list[Line] = []
        self._waiting: dict[Key, Line] = {}
        self.streams: Streams = {}

    @property
    def lines(self) -> list[Line]:
        """The last ended lines that match as far as they are known, in order."""
        waiting = (line for line in self._waiting.values() if line.is_finished and self._is_match(line))
        return self._last([*self._found, *waiting])

    @property
    def is_complete(self) -> bool:
        """No older batch can change what was found."""
        open_lines = [line for line in self._waiting.values() if line.lacks_head]
        lines = [line for line in self.lines if line not in open_lines]
        return len(lines) == self._count and not any(
            not line.is_finished or (lines and order(line) > order(lines[0])) for line in open_lines
        )

    def read(self, batch: Iterable[Record]) -> None:
        """Takes the next older batch."""
        streams: Streams = {}
        begun_earlier: dict[Key, Line] = {}
        recent: deque[Line] = deque(maxlen=self._count)
        for record in batch:
            for line in assemble(record, streams, self._source):
                if line.has_head or line.key in begun_earlier:
                    if self._is_match(line):
                        recent.append(line)
                else:
                    begun_earlier[line.key] = line
        self._found = self._last([*recent, *self._found])
        for key, stream in streams.items():
            self._join(key, stream)
        self._waiting.update(begun_earlier)

    def _join(self, key: Key, stream: Stream) -> None:
        """Puts what an older batch's stream ends with before the line that waits for it."""
        line = self._waiting.pop(key, stream.line)
        if line is stream.line:
            self.streams.setdefault(key, stream)
        elif line.start_off == stream.next_off:
            line.prepend(stream.line)
        else:  # records between them are missing: both stay as they are
            torn = [part for part in (stream.line, line) if part.is_finished or part.text.kept]
            self._found = self._last([*self._found, *filter(self._is_match, torn)])
            return
        if not line.has_head:
            self._waiting[key] = line
        elif line.is_finished and self._is_match(line):
            self._found = self._last([*self._found, line])

    def _is_match(self, line: Line) -> bool:
        return self._matches is None or self._matches(self._source.show(line))

    def _last(self, lines: list[Line]) -> list[Line]:
        return sorted(lines, key=order)[max(0, len(lines) - self._count) :]
