"""What is kept of memory that ran out, in a folder of the run's artifacts: the analysis and the raw snapshot.

``orch-memory/main-1.json`` and ``main-1.pickle``, the process's name and the failure's number. The pickle is
for PyTorch's own viewer (pytorch.org/memory_viz) and holds plain containers alone.
"""

import json
import os
import time
from typing import Any, BinaryIO, Dict, Mapping, Optional

FOLDER = "orch-memory"
MOST_SNAPSHOT_BYTES = 128 * 1024 * 1024
MOST_EVENTS_AT_LEAST = 20_000  # of each card's history, where the whole is too large
_PROTOCOL = 4  # Python 3.8 and the viewer read it


class TooMuch(Exception):
    """The snapshot is larger than it may be."""


class TooLate(Exception):
    """The time for it is over."""


class MemoryFiles:
    """The files of one process; ``artifacts`` is the run's folder for what it writes."""

    def __init__(self, artifacts: str, proc: str) -> None:
        self._artifacts = os.path.abspath(artifacts)
        self._proc = proc

    def write_analysis(self, number: int, analysis: Mapping[str, Any]) -> None:
        """Writes the analysis of a failure.

        Raises:
            OSError: it cannot be written.
        """
        with self._create("%s-%d.json" % (self._proc, number)) as file:
            file.write(json.dumps(analysis, default=str, indent=1).encode("ascii"))

    def write_snapshot(self, number: int, snapshot: Dict[str, Any], deadline_s: float) -> str:
        """Writes the snapshot before ``deadline_s`` (monotonic); returns its path below the artifacts.

        One that is too large keeps the last events of its history.

        Raises:
            OSError: it cannot be written.
            TooMuch: it is too large even so.
            TooLate: the time is over.
        """
        name = "%s-%d.pickle" % (self._proc, number)
        try:
            self._dump(name, snapshot, deadline_s)
        except TooMuch:
            traces = [trace[-MOST_EVENTS_AT_LEAST:] for trace in snapshot.get("device_traces", ())]
            self._dump(name, dict(snapshot, device_traces=traces), deadline_s)
        return "%s/%s" % (FOLDER, name)

    def _dump(self, name: str, snapshot: Dict[str, Any], deadline_s: float) -> None:
        import pickle  # noqa: PLC0415  (who only asks for the folder's name does not pay for it)

        with self._create(name) as file:
            try:
                pickle.dump(snapshot, _Bounded(file, deadline_s), protocol=_PROTOCOL)
            except BaseException:
                os.unlink(os.path.join(self._artifacts, FOLDER, name))
                raise

    def _create(self, name: str) -> BinaryIO:
        """Opens a new file for this user alone, in a folder that is no link."""
        folder = os.path.join(self._artifacts, FOLDER)
        try:
            os.mkdir(folder, 0o700)
        except FileExistsError:
            pass
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            return os.fdopen(os.open(name, flags, 0o600, dir_fd=opened), "wb")
        finally:
            os.close(opened)


class _Bounded:
    """A file that takes no more than it may, and not for longer."""

    def __init__(self, file: BinaryIO, deadline_s: float) -> None:
        self._file = file
        self._deadline_s = deadline_s
        self._left = MOST_SNAPSHOT_BYTES

    def write(self, data: Any) -> Optional[int]:
        """Writes a piece of a pickle."""
        self._left -= len(data)
        if self._left < 0:
            raise TooMuch("the snapshot has more than %d bytes" % MOST_SNAPSHOT_BYTES)
        if time.monotonic() > self._deadline_s:
            raise TooLate("the time to write the snapshot is over")
        return self._file.write(data)


def process_name(environment: Mapping[str, str]) -> str:
    """Returns what the records call this process."""
    is_rank = environment.get("TORCHELASTIC_RUN_ID") == environment.get("ORCH_RUN_ID", "")
    rank = environment.get("RANK", "")
    return "rank" + rank if is_rank and rank.isdigit() else "main"
