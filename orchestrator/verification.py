"""Proves that a run's records and code are what was recorded, or says where they are not.

What can be said from here alone is in `checks`. What is on the host takes one conversation: it sends hashes
of the blocks that the mirror has, and only a block that differs travels. Nothing is written, here or there,
and nothing is repaired.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from orchestrator import remote
from orchestrator.bundle import Bundle, ObjectStore
from orchestrator.checks import NOTHING_HERE, Check, Status, local_checks, newest_arrived
from orchestrator.conversation import Cursor, Piece
from orchestrator.errors import HostError, OrchError, RecordsAltered, StorageError, UnknownName
from orchestrator.mirror_scan import Place, Scan, place_at, scan
from orchestrator.remote import BundleState, Digests, SegmentDigest
from orchestrator.run_folder import RunFolder
from orchestrator.supervisor.digests import BLOCK_BYTES, block_hashes
from orchestrator.text import counted
from orchestrator.transports import Transport, connect
from orchestrator.workspace import Workspace


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """All checks of one run; ``was_host_asked`` is False when its host could not be."""

    run_id: str
    host: str
    checks: tuple[Check, ...]
    was_host_asked: bool

    @property
    def exit_code(self) -> int:
        """0 when all is proved; else that of the error which says what is not."""
        found = {check.status for check in self.checks}
        if Status.NOT_OK in found:
            return RecordsAltered.exit_code
        if not self.was_host_asked:
            return HostError.exit_code
        return OrchError.exit_code if Status.NOT_CHECKED in found else 0


def verify(workspace: Workspace, run_id: str) -> Verification:
    """Checks a run here and on its host; a host that cannot be asked leaves its checks open.

    Raises:
        StorageError: the mirror is there but cannot be read.
    """
    folder = workspace.folder(run_id)
    try:
        return _verify(workspace, folder)
    except OSError as error:
        raise StorageError(f"{folder.path}: the mirror cannot be read: {error}") from error


def host_checks(
    transport: Transport, folder: RunFolder, found: Scan, bundle_id: str, manifest: Bundle | None
) -> list[Check]:
    """Returns what the host's hashes say.

    Raises:
        HostError: it cannot be asked.
    """
    entries = None
    if manifest is not None:
        entries = [[entry.path, entry.mode, entry.size_bytes, entry.sha256] for entry in manifest.entries]
    told = remote.digests(transport, folder.run_id, found.sizes, bundle_id, entries)
    records = _host_records(transport, folder, found, told)
    if not told.segments and not (found.sizes and told.exists):
        why = "the run is not there" if found.sizes else "the run has not started there"
        return [records, Check.open("host's code", why), Check.open("host's objects", why)]
    return [records, *check_code(told.bundle)]


def check_code(state: BundleState | None) -> list[Check]:
    """Says how the run's code and the objects on its host differ from the manifest."""
    if state is None:
        why = "the manifest is not in the object store of this machine"
        return [Check.open("host's code", why), Check.open("host's objects", why)]
    if state.changed_count:
        code = Check.wrong(
            "host's code", _named("file not as in the bundle", state.changed, state.changed_count)
        )
    else:
        code = Check.right(
            "host's code", "every file of the bundle is there unchanged, and no module was added"
        )
    if state.damaged_count:
        listed = _named("object damaged", state.damaged, state.damaged_count)
        return [code, Check.wrong("host's objects", listed)]
    absent = f", {state.absent_count} are no longer kept" if state.absent_count else ""
    return [code, Check.right("host's objects", f"those of the bundle are whole{absent}")]


def first_difference(
    mirror: Sequence[SegmentDigest],
    host: Mapping[int, SegmentDigest],
    incomplete: Collection[int] = (),
    cut_through: int = 0,
) -> Cursor | None:
    """Returns where the first block begins that is not the same; a host may have more than the mirror.

    It may lack the segments that its limit has cut, up to ``cut_through`` but never the first, and more of
    the ``incomplete`` ones than is here.
    """
    for index, mine in enumerate(mirror):
        if index not in host and 0 < index <= cut_through:
            continue
        theirs = host.get(index, SegmentDigest())
        for block, digest in enumerate(mine.blocks):
            if block >= len(theirs.blocks) or theirs.blocks[block] != digest:
                return Cursor(segment=index, offset=block * BLOCK_BYTES)
        is_whole = index < len(mirror) - 1 and index not in incomplete
        if is_whole and theirs.size_bytes != mine.size_bytes:
            return Cursor(segment=index, offset=mine.size_bytes)
    return None


def _verify(workspace: Workspace, folder: RunFolder) -> Verification:
    row = workspace.ledger.get(folder.run_id)
    arrived = newest_arrived(folder)
    found = scan(folder)
    checks = local_checks(folder, found, arrived, workspace.store, row.bundle)
    manifest = _manifest(workspace.store, row.bundle)
    was_asked = True
    try:
        with connect(workspace.inventory.host(row.host)) as transport:
            checks += host_checks(transport, folder, found, row.bundle, manifest)
    except (HostError, UnknownName) as error:
        was_asked = False
        names = ("host's records", "host's code", "host's objects")
        checks += [Check.open(name, str(error)) for name in names]
    return Verification(run_id=row.run_id, host=row.host, checks=tuple(checks), was_host_asked=was_asked)


def _host_records(transport: Transport, folder: RunFolder, found: Scan, told: Digests) -> Check:
    name = "host's records"
    mirrored, on_host = sum(found.sizes), sum(segment.size_bytes for segment in told.segments.values())
    if not told.exists:
        says = f"{transport.host.root} has no run {folder.run_id}"
        if folder.was_removed_there:
            return Check.open(name, f"{says}: `orch gc` removed it from there")
        return Check.wrong(name, f"{says} any more") if mirrored else Check.open(name, says)
    if not mirrored:
        return Check.open(name, f"the mirror has 0 of {on_host} bytes: {NOTHING_HERE}")
    cut_through = 0 if told.cut is None else told.cut[0]
    mine = [_digest(folder, index, size) for index, size in enumerate(found.sizes)]
    at = first_difference(mine, told.segments, found.incomplete, cut_through)
    if at is not None:
        return _differing(transport, folder, found, told, at)
    gone = [index for index, size in enumerate(found.sizes) if size and index not in told.segments]
    doubt = _cut_doubt(found, told, gone)
    if doubt is not None:
        return doubt
    kept = sum(found.sizes[index] for index in gone)
    return _all_the_same(found, mirrored - kept, on_host, kept)


def _cut_doubt(found: Scan, told: Digests, gone: Sequence[int]) -> Check | None:
    """Asks whether what the host lacks was cut by the run's limit, as the host says."""
    name = "host's records"
    if told.cut is not None:
        index, line = told.cut
        seal = found.seals_before.get(index + 1)
        if seal is not None and f'"sha256":"{seal}"' not in line:
            says = f"the host's stub of segment {index} is not the seal that the next segment goes on from"
            return Check.wrong(name, says, Place(segment=index + 1, offset=0))
    if gone and gone[-1] > found.cut_through:
        says = f"the host says that its log limit cut segment {gone[-1]}, and no record here tells of it"
        if found.has_ended:
            return Check.wrong(name, says, Place(segment=gone[-1], offset=0))
        return Check.open(name, f"{says}; `orch show` mirrors what its host has")
    return None


def _all_the_same(found: Scan, mirrored: int, on_host: int, kept: int) -> Check:
    """Says how far; ``mirrored`` counts what is on the host too, ``kept`` what its limit has cut there."""
    name = "host's records"
    if on_host > mirrored and found.has_ended:
        end = Place(segment=len(found.sizes) - 1, offset=found.sizes[-1])
        return Check.wrong(name, f"the host has {on_host - mirrored} bytes after the end of the run", end)
    more = f"; {kept} bytes more are here that its log limit has cut there" if kept else ""
    if on_host > mirrored:
        says = f"the mirror has {mirrored} of {on_host} bytes, and these are the host's{more}"
    else:
        says = f"the mirror has all {on_host} bytes, and they are the host's{more}"
    return Check.right(name, says)


def _differing(transport: Transport, folder: RunFolder, found: Scan, told: Digests, at: Cursor) -> Check:
    """Fetches the block at ``at`` and names the first byte in it that is not the same."""
    name, size_here = "host's records", found.sizes[at.segment]
    size_there = told.segments.get(at.segment, SegmentDigest()).size_bytes
    if at.segment not in told.segments:
        where = place_at(folder, Cursor(segment=at.segment))
        return Check.wrong(
            name, f"the host lacks segment {at.segment}, {size_here} bytes in the mirror", where
        )
    mine = _read(folder, at, min(BLOCK_BYTES, size_here - at.offset))
    theirs = _read_there(transport, folder.run_id, at, len(mine)) if size_there > at.offset else b""
    same = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), None)
    offset = at.offset + (min(len(mine), len(theirs)) if same is None else same)
    where = place_at(folder, Cursor(segment=at.segment, offset=offset))
    if offset >= size_here:
        says = (
            f"the mirror has {size_here} of {size_there} bytes of segment {at.segment} and goes on after it"
        )
    elif offset >= size_there:
        says = f"the host has {size_there} bytes of segment {at.segment}, the mirror {size_here}"
    else:
        says = "host and mirror differ from here on"
    return Check.wrong(name, says, where)


def _digest(folder: RunFolder, index: int, size: int) -> SegmentDigest:
    if not size:
        return SegmentDigest()
    with folder.segment(index).open("rb") as file:
        return SegmentDigest(size_bytes=size, blocks=tuple(block_hashes(file, size)))


def _read(folder: RunFolder, at: Cursor, size: int) -> bytes:
    if size <= 0:
        return b""
    with folder.segment(at.segment).open("rb") as file:
        file.seek(at.offset)
        return file.read(size)


def _read_there(transport: Transport, run_id: str, at: Cursor, size: int) -> bytes:
    """Reads from ``at`` on and leaves when it has enough: the host stops when nobody listens."""
    data = b""
    with remote.read(transport, run_id, at, follow=False) as talk:
        for piece in talk.pieces():
            if not isinstance(piece, Piece) or piece.cursor.segment != at.segment:
                break
            data += piece.data
            if len(data) >= size:
                break
    return data[:size]


def _manifest(store: ObjectStore, bundle_id: str) -> Bundle | None:
    try:
        return store.load_manifest(bundle_id)
    except (UnknownName, StorageError):
        return None  # `check_bundle` says which


def _named(what: str, names: Sequence[str], count: int) -> str:
    more = f" and {count - len(names)} more" if count > len(names) else ""
    noun, _, rest = what.partition(" ")
    return f"{counted(count, noun)} {rest}: {', '.join(names)}{more}"
