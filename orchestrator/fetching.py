"""Brings files of a run's artifacts from its host to a folder here: chosen, bounded, hashed, taken up again.

What cannot be brought is named and the others go on. A connection that breaks after something has arrived is
made again for half a minute; a file that changes while it is fetched is taken once more. What a person sees
meanwhile is the caller's `Progress`.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.artifact_folder import ArtifactFolder, Fetched, NotPlaced, Part
from orchestrator.artifact_names import check_path, is_asked_by_name, is_chosen, parse_patterns
from orchestrator.errors import OrchError, StorageError, Unreachable, UsageError
from orchestrator.experiment import COLLECT_LIMIT_BYTES
from orchestrator.inventory import Host
from orchestrator.ledger import RunRow
from orchestrator.lifecycle import State, is_settled
from orchestrator.remote_artifacts import Artifact, Begun, Ended, Wanted, artifacts, received
from orchestrator.run_folder import COLLECTED, REMOVED_THERE, RunFolder
from orchestrator.text import printable, quoted
from orchestrator.transports import Transport, connect
from orchestrator.workspace import Workspace

RETRY_PAUSE_S = 1.0
LONGEST_PAUSE_S = 16.0
_NO_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)
_LEFT = {
    "link": "a symbolic link",
    "pipe": "a named pipe",
    "socket": "a socket",
    "device": "a device",
    "deep": "a folder too deep to look into",
    "closed": "a folder that the host's user cannot read",
}


class Progress:
    """Somebody who is told how far it is; by default nobody."""

    def expects(self, files: int, size_bytes: int) -> None:
        """So much is to be brought now."""

    def kept(self, size_bytes: int) -> None:
        """So many bytes of a file were here before."""

    def arrived(self, size_bytes: int) -> None:
        """So many bytes more are here."""

    def note(self, text: str) -> None:
        """Something has to be said."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Something of the host's that is not here, and why."""

    path: str
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Fetch:
    """What came of it: ``files`` are here, of which ``moved`` have travelled, in ``moved_bytes``.

    ``findings`` were asked for and are not here, ``left`` are no files there or come only when they are asked
    for by name, ``unmet`` patterns mean none.
    """

    run_id: str
    to: str
    files: tuple[Fetched, ...]
    moved: tuple[str, ...]
    moved_bytes: int
    findings: tuple[Finding, ...]
    left: tuple[Finding, ...]
    unmet: tuple[str, ...]

    @property
    def size_bytes(self) -> int:
        """The size of all files that are here."""
        return sum(file.size_bytes for file in self.files)

    @property
    def exit_code(self) -> int:
        """0 when all that was asked for is here."""
        return OrchError.exit_code if self.findings or self.unmet else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Which of a host's artifacts are to be brought, with the names that lead to them here, and which not."""

    files: Mapping[Artifact, tuple[str, ...]]
    findings: tuple[Finding, ...]
    left: tuple[Finding, ...]
    unmet: tuple[str, ...]


def choose(found: Iterable[Artifact], patterns: Sequence[str], limit_bytes: int) -> Choice:
    """Returns the files that the patterns mean (without any, all), in order, as long as they fit the limit.

    A name that is not safe here is refused; what is no file is left, and so is what no pattern asks for by
    name.
    """
    files: dict[Artifact, tuple[str, ...]] = {}
    findings, left = [], []
    meant: set[str] = set()
    seen: set[str] = set()
    room = limit_bytes
    for artifact in found:
        ours = [pattern for pattern in patterns if is_chosen(artifact.path, [pattern])]
        if patterns and not ours:
            continue
        if artifact.kind != "file":
            left.append(Finding(path=artifact.path, why=f"it is {_LEFT[artifact.kind]}"))
            continue
        if not patterns and is_asked_by_name(artifact.path):
            left.append(Finding(path=artifact.path, why="it comes when it is asked for by name"))
            continue
        meant.update(ours)
        try:
            names = check_path(artifact.path)
            if artifact.path in seen:
                raise UsageError("the host names it twice")
            if artifact.size_bytes > room:
                raise UsageError(
                    f"its {artifact.size_bytes} bytes are more than is left of {limit_bytes}; see --limit"
                )
        except UsageError as error:
            findings.append(Finding(path=artifact.path, why=str(error)))
            continue
        room -= artifact.size_bytes
        seen.add(artifact.path)
        files[artifact] = names
    unmet = tuple(pattern for pattern in patterns if pattern not in meant)
    return Choice(files=files, findings=tuple(findings), left=tuple(left), unmet=unmet)


def listing(workspace: Workspace, run_id: str, patterns: Sequence[str]) -> list[Artifact]:
    """Returns what is on the host now of what the patterns mean.

    Raises:
        HostError: it cannot be asked.
    """
    with connect(workspace.inventory.host(workspace.ledger.get(run_id).host)) as transport:
        found = artifacts(transport, run_id)
    return [artifact for artifact in found if not patterns or is_chosen(artifact.path, patterns)]


def collected_patterns(job: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns what the run's experiment collects."""
    return parse_patterns(job.get("collect") or [])


def collect_limit_bytes(job: Mapping[str, Any]) -> int:
    """Returns how much of it at most."""
    limit = job.get("collect_limit_bytes")
    return limit if isinstance(limit, int) else COLLECT_LIMIT_BYTES


def is_uncollected(row: RunRow, folder: RunFolder) -> bool:
    """Some of what the run's experiment collects was not brought after its end, and may be there."""
    if not row.job.get("collect") or row.state is State.REFUSED:
        return False
    return not any(note.get("kind") in (COLLECTED, REMOVED_THERE) for note in folder.notes())


def collect(workspace: Workspace, run_id: str, progress: Progress) -> Fetch | None:
    """Brings what an ended run's experiment collects; None where that is nothing, or was done before.

    Raises:
        HostError: the host cannot be asked.
        StorageError: this disk fails.
    """
    if not is_uncollected(workspace.ledger.get(run_id), workspace.folder(run_id)):
        return None
    return fetch(workspace, run_id, (), progress=progress)


def fetch(
    workspace: Workspace,
    run_id: str,
    patterns: Sequence[str],
    *,
    to: Path | None = None,
    limit_bytes: int | None = None,
    progress: Progress,
) -> Fetch:
    """Brings what the patterns mean (without any, what its experiment collects, or all) into ``to``.

    Raises:
        HostError: the host cannot be asked; what has arrived is taken up by the next fetch.
        StorageError: this disk fails.
    """
    row, run = workspace.ledger.get(run_id), workspace.folder(run_id)
    collected = collected_patterns(row.job)
    work = _Work(
        run=run,
        patterns=patterns or collected,
        limit_bytes=collect_limit_bytes(row.job) if limit_bytes is None else limit_bytes,
        progress=progress,
    )
    target = run.artifacts if to is None else to.absolute()
    host = workspace.inventory.host(row.host)
    waiting = f"another command fetches into {target}; waiting for it"
    with _disk(target), ArtifactFolder.open(target, run, lambda: progress.note(waiting)) as folder:
        _persist(host, work, folder, progress)
    done = work.result(target)
    is_all = bool(collected) and not patterns and not done.findings
    if is_all and is_settled(row.state) and is_uncollected(row, run):
        run.observe(COLLECTED, files=len(done.files), size_bytes=done.size_bytes, to=done.to)
    return done


def _persist(host: Host, work: _Work, folder: ArtifactFolder, progress: Progress) -> None:
    """Connects again, with growing pauses, while there is hope: something has arrived before."""
    pause_s = RETRY_PAUSE_S
    while True:
        before = work.arrived_bytes
        try:
            with connect(host) as transport:
                return work.run_once(transport, folder)
        except Unreachable as error:
            if work.arrived_bytes > before:
                pause_s = RETRY_PAUSE_S
            elif not work.arrived_bytes or pause_s > LONGEST_PAUSE_S:
                raise
            progress.note(f"{error}; going on from where it broke in {pause_s:g} s")
        time.sleep(pause_s)
        pause_s *= 2


class _Work:
    """One fetch, over as many connections as it takes."""

    def __init__(
        self, *, run: RunFolder, patterns: Sequence[str], limit_bytes: int, progress: Progress
    ) -> None:
        self.arrived_bytes = 0
        self._run = run
        self._patterns = patterns
        self._limit_bytes = limit_bytes
        self._progress = progress
        self._moved: dict[str, Fetched] = {}
        self._done: dict[str, Fetched] = {}
        self._findings: dict[str, Finding] = {}
        self._choice = Choice(files={}, findings=(), left=(), unmet=())

    def run_once(self, transport: Transport, folder: ArtifactFolder) -> None:
        """Lists, and brings what is not here yet; what changed meanwhile is listed and brought once more."""
        changed: set[str] | None = None
        for _ in range(2):
            self._choice = choose(artifacts(transport, self._run.run_id), self._patterns, self._limit_bytes)
            changed = self._bring(transport, folder, changed)
            if not changed:
                return

    def result(self, target: Path) -> Fetch:
        """Returns what came of it."""
        return Fetch(
            run_id=self._run.run_id,
            to=str(target),
            files=tuple(self._done.values()),
            moved=tuple(self._moved),
            moved_bytes=self.arrived_bytes,
            findings=(*self._choice.findings, *self._findings.values()),
            left=self._choice.left,
            unmet=self._choice.unmet,
        )

    def _bring(self, transport: Transport, folder: ArtifactFolder, only: set[str] | None) -> set[str]:
        """Returns the paths of the files that changed while they were fetched."""
        names_of = {
            artifact: names
            for artifact, names in self._choice.files.items()
            if artifact.path not in self._moved and (only is None or artifact.path in only)
        }
        missing = [
            artifact for artifact, names in names_of.items() if not self._is_here(folder, artifact, names)
        ]
        if not missing:
            return set()
        self._progress.expects(len(missing), sum(artifact.size_bytes for artifact in missing))
        changed = set()
        with ExitStack() as stack:
            parts = {
                artifact: folder.part(artifact) for artifact in missing if folder.has_part(artifact.path)
            }
            for part in parts.values():
                stack.callback(part.close)
            wanted = [_wanted(artifact, parts.get(artifact)) for artifact in missing]
            for artifact, events in zip(missing, received(transport, self._run.run_id, wanted), strict=True):
                with closing(parts.get(artifact) or folder.part(artifact)) as part:
                    if self._take(folder, part, names_of[artifact], events):
                        changed.add(artifact.path)
        return changed

    def _is_here(self, folder: ArtifactFolder, artifact: Artifact, names: Sequence[str]) -> bool:
        """Tells whether nothing has to be moved: it is here, or cannot be."""
        try:
            with _not_placed():
                here = folder.is_here(artifact, names)
        except NotPlaced as error:
            self._find(artifact, str(error))
            return True
        if here is not None:
            self._done[artifact.path] = here
        return here is not None

    def _take(
        self,
        folder: ArtifactFolder,
        part: Part,
        names: Sequence[str],
        events: Iterator[Begun | bytes | Ended],
    ) -> bool:
        """Takes one file; tells whether it changed meanwhile."""
        artifact = part.artifact
        self._findings.pop(artifact.path, None)
        ended = Ended(why="nothing came")
        for event in events:
            match event:
                case Begun(start):
                    part.begin_at(start)
                    self._progress.kept(start)
                case Ended():
                    ended = event
                case data:
                    part.write(data)
                    self.arrived_bytes += len(data)
                    self._progress.arrived(len(data))
        if not ended.why and ended.sha256 != part.sha256:
            ended = Ended(why="it did not arrive as the host hashed it", has_changed=True)
        try:
            with _not_placed():
                if ended.why:
                    raise NotPlaced(ended.why)
                self._done[artifact.path] = self._moved[artifact.path] = folder.place(part, names)
        except NotPlaced as error:
            folder.drop(part)
            self._find(artifact, str(error))
        return ended.has_changed

    def _find(self, artifact: Artifact, why: str) -> None:
        self._findings[artifact.path] = Finding(path=artifact.path, why=why)


def _wanted(artifact: Artifact, part: Part | None) -> Wanted:
    if part is None or not part.have_bytes:
        return Wanted(artifact=artifact)
    return Wanted(artifact=artifact, have_bytes=part.have_bytes, have_sha256=part.sha256)


@contextmanager
def _not_placed() -> Iterator[None]:
    """Turns what a file system has against one file into a finding; what ails the disk stays as it is."""
    try:
        yield
    except OSError as error:
        if error.errno in _NO_DISK:
            raise
        raise NotPlaced(f"it cannot be written here: {error.strerror or error}") from error


@contextmanager
def _disk(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(f"{target}: cannot be written: {error.strerror or error}") from error


def finding_line(finding: Finding) -> str:
    """Returns a finding as one line for a person."""
    return f"{printable(finding.path) or quoted(finding.path)}: {finding.why}"
