"""What is shown while files of a run are brought here; an ended run's files that its experiment collects.

Nothing that goes wrong with artifacts changes a verdict: it is said, with the command that tries again.
"""

from __future__ import annotations

import time

from orchestrator import fetching
from orchestrator.cli.terminal import Screen
from orchestrator.errors import OrchError
from orchestrator.fetching import Fetch, finding_line
from orchestrator.text import counted, size_text
from orchestrator.workspace import Workspace

MOST_NAMED = 20
REDRAW_S = 0.1


class FetchProgress(fetching.Progress):
    """Shows bytes and rate in the status line, which only a terminal has."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._expected = self._arrived = self._moved = 0
        self._since_s = self._drawn_s = time.monotonic()

    def expects(self, files: int, size_bytes: int) -> None:
        """Begins to count; what was here before counts as arrived, and has no rate."""
        self._expected, self._arrived, self._moved = size_bytes, 0, 0
        self._since_s = time.monotonic()
        self._screen.status(f"fetching {counted(files, 'file')}, {size_text(size_bytes)}")

    def kept(self, size_bytes: int) -> None:
        """Counts what an earlier fetch has brought."""
        self._arrived += size_bytes

    def arrived(self, size_bytes: int) -> None:
        """Counts, and draws now and then."""
        self._arrived += size_bytes
        self._moved += size_bytes
        now_s = time.monotonic()
        if now_s - self._drawn_s >= REDRAW_S:
            self._drawn_s = now_s
            rate = size_text(int(self._moved / max(now_s - self._since_s, REDRAW_S)))
            sizes = f"{size_text(self._arrived)} of {size_text(self._expected)}"
            self._screen.status(f"fetching {sizes} · {rate}/s")

    def note(self, text: str) -> None:
        """Says it."""
        self._screen.note(text)


def collect_artifacts(workspace: Workspace, run_id: str, screen: Screen) -> None:
    """Brings what an ended run's experiment collects, and says what came of it."""
    try:
        done = fetching.collect(workspace, run_id, FetchProgress(screen))
    except OrchError as error:
        screen.note(f"{error}; what run {run_id} collects is not here: orch fetch {run_id}")
        return
    finally:
        screen.close()
    if done is None:
        return
    note_findings(done, screen)
    again = f"; the rest: orch fetch {run_id}" if done.findings else ""
    screen.note(f"collected {fetch_sum(done)}{again}")


def fetch_sum(done: Fetch) -> str:
    """Returns what came of a fetch in one line."""
    unchanged = len(done.files) - len(done.moved)
    were_here = f" ({unchanged} unchanged)" if unchanged else ""
    return f"{counted(len(done.files), 'file')}{were_here}, {size_text(done.size_bytes)}, in {done.to}"


def note_findings(done: Fetch, screen: Screen) -> None:
    """Names what is not here."""
    for finding in done.left[:MOST_NAMED]:
        screen.note(f"left there: {finding_line(finding)}")
    for finding in done.findings[:MOST_NAMED]:
        screen.note(f"not fetched: {finding_line(finding)}")
    for pattern in done.unmet:
        screen.note(f"no file there is meant by {pattern}; see: orch fetch --list {done.run_id}")
    more = len(done.left[MOST_NAMED:]) + len(done.findings[MOST_NAMED:])
    if more:
        screen.note(f"{more} more are not here; orch fetch --json names all")
