"""What can be said of a run's records from this machine alone: each `Check` answers one question.

Numbers, segments and seals come from a scan of the mirror; they are compared with the seals that were pinned
on arrival, the job that was noted at launch and the manifest in the object store. Asks no host.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Self

from orchestrator.artifact_folder import fetched_here, is_as_fetched
from orchestrator.bundle import ObjectStore
from orchestrator.errors import StorageError, UnknownName
from orchestrator.holes import Hole
from orchestrator.mirror_scan import Place, Scan
from orchestrator.pins import Pin, as_pin, newest_pins
from orchestrator.run_folder import NOTED_KINDS, Record, RunFolder
from orchestrator.text import counted

MOST_NAMED = 20
NOTHING_HERE = (
    "nothing of this run is mirrored here: `orch gc --home` may have removed it, "
    "and of one that is open `orch show` mirrors what there is"
)


class Status(StrEnum):
    """What a check came to."""

    OK = "ok"
    NOT_OK = "not ok"
    NOT_CHECKED = "not checked"


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One question, its answer in words, and the first place where it is not so, if that has a place."""

    name: str
    status: Status
    says: str
    place: Place | None = None

    @classmethod
    def right(cls, name: str, says: str) -> Self:
        """Returns a check that found all as it should be."""
        return cls(name=name, status=Status.OK, says=says)

    @classmethod
    def wrong(cls, name: str, says: str, place: Place | None = None) -> Self:
        """Returns a check that found something else."""
        return cls(name=name, status=Status.NOT_OK, says=says, place=place)

    @classmethod
    def open(cls, name: str, why: str) -> Self:
        """Returns a check that could not be made."""
        return cls(name=name, status=Status.NOT_CHECKED, says=why)


def newest_arrived(folder: RunFolder) -> int:
    """Returns the number of the newest seal pinned so far, -1 for none.

    A mirror that is scanned afterwards has it and all before it.
    """
    return next((pin.seq for pin in newest_pins(folder)), -1)


def local_checks(
    folder: RunFolder, found: Scan, arrived: int, store: ObjectStore, bundle_id: str
) -> list[Check]:
    """Returns what can be said from this machine alone; ``arrived`` was taken before the scan."""
    if not found.sizes:
        names = ("numbers", "segments", "seals")
        checks = [Check.open(name, NOTHING_HERE) for name in names]
    else:
        checks = [_numbers(found), _segments(found), _seals(found)]
    return [
        *checks,
        check_pins(folder, found, arrived),
        check_job(found.first, _noted(folder)),
        check_bundle(found.first, bundle_id, store),
        *check_artifacts(folder),
    ]


def check_artifacts(folder: RunFolder) -> list[Check]:
    """Compares fetched files that stand here with their hashes on arrival; without any there is no check."""
    found = [fetched for files in fetched_here(folder).values() for fetched in files]
    if not found:
        return []
    changed = [str(Path(file.to, file.path)) for file in found if not is_as_fetched(file)]
    if changed:
        more = f" and {len(changed) - MOST_NAMED} more" if len(changed) > MOST_NAMED else ""
        named = ", ".join(changed[:MOST_NAMED])
        return [Check.wrong("artifacts", f"not as fetched: {named}{more}")]
    return [Check.right("artifacts", f"{counted(len(found), 'fetched file')} here, each as it arrived")]


def _noted(folder: RunFolder) -> Record | None:
    return next((entry for entry in folder.notes() if entry.get("kind") in NOTED_KINDS), None)


def check_pins(folder: RunFolder, found: Scan, arrived: int) -> Check:
    """Compares the seals that were pinned on arrival with what stands in their places now.

    While the run is pulled seals come after the scan, which are not asked for.
    """
    name, newest, unpinned = "pinned seals", -1, set(found.seals)
    for entry in folder.observations():
        if entry.get("kind") != "seal":
            continue
        pin = as_pin(entry)
        if pin is None:
            return Check.wrong(name, f"{folder.observations_path} holds a pinned seal that is none")
        if pin.seq > arrived and pin.seq not in found.seals:
            continue
        wrong = _pin_problem(pin, found)
        if wrong is not None:
            return Check.wrong(name, *wrong)
        newest = max(newest, pin.seq)
        unpinned.discard(pin.seq)
    first = min(unpinned, default=newest)
    if first < newest:
        says = f"seal {first} is in the mirror but was never pinned"
        return Check.wrong(name, says, _seal_place(first, found))
    if not found.seals:
        return Check.open(name, "no seal has arrived yet")
    if unpinned:
        return Check.open(name, f"{counted(len(unpinned), 'seal')} not pinned, the first is {first}")
    return Check.right(name, f"{counted(len(found.seals), 'seal')} as pinned on arrival")


def check_job(first: Record | None, created: Record | None) -> Check:
    """Compares the job in the first record with the one noted at launch, which has no values of env."""
    if first is None or created is None:
        return Check.open(
            "job", NOTHING_HERE if first is None else "what was launched is not noted on this machine"
        )
    told, noted = first.get("job"), created.get("job")
    if not isinstance(told, dict) or not isinstance(noted, dict):
        return Check.wrong("job", "the first record holds no job", Place(segment=0, offset=0, seq=0))
    env = told.get("env")
    told = {**told, "env": sorted(env) if isinstance(env, dict) else env}
    differing = sorted(key for key in told.keys() | noted.keys() if told.get(key) != noted.get(key))
    if differing:
        says = f"the job in the first record is not the one that was launched: {', '.join(differing)} differ"
        return Check.wrong("job", says, Place(segment=0, offset=0, seq=0))
    return Check.right(
        "job", "the first record holds the job that was launched (of env the names are compared)"
    )


def check_bundle(first: Record | None, bundle_id: str, store: ObjectStore) -> Check:
    """Compares the bundle in the first record with the ledger's and with the manifest that is kept here."""
    if first is None:
        return Check.open("bundle", NOTHING_HERE)
    where, told = Place(segment=0, offset=0, seq=0), first.get("bundle")
    told_id = told.get("id") if isinstance(told, dict) else None
    if not isinstance(told, dict) or told_id != bundle_id:
        return Check.wrong(
            "bundle", f"the first record names bundle {told_id}, the ledger {bundle_id}", where
        )
    try:
        manifest = store.load_manifest(bundle_id)
    except UnknownName as error:
        return Check.open("bundle", f"{error}: its files cannot be compared")
    except StorageError as error:
        return Check.wrong("bundle", str(error))
    files, size = len(manifest.entries), sum(entry.size_bytes for entry in manifest.entries)
    if (told.get("files"), told.get("bytes")) != (files, size):
        says = f"the first record tells of {told.get('files')} files and {told.get('bytes')} bytes"
        return Check.wrong("bundle", f"{says}, the manifest of {files} and {size}", where)
    return Check.right(
        "bundle", f"{bundle_id[:12]} in record, ledger and manifest ({counted(files, 'file')}, {size} bytes)"
    )


def cut_text(hole: Hole) -> str:
    """Says what is missing."""
    size = "an unknown number of" if hole.size_bytes is None else hole.size_bytes
    return (
        f"cut by the run's log limit: {size} bytes, records {hole.first} to {hole.last}, "
        f"after byte {hole.start.offset} of segment {hole.start.segment} to the end of segment {hole.through}"
    )


def _numbers(found: Scan) -> Check:
    if found.number_problem is not None:
        return Check.wrong("numbers", *found.number_problem)
    cut = sum(hole.last - hole.first + 1 for hole in found.holes)
    but = f" but for {counted(cut, 'record')} that the run's log limit cut" if cut else ""
    here = counted(found.count - cut, "record")
    return Check.right("numbers", f"{here}, numbered from 0 without a gap{but}")


def _segments(found: Scan) -> Check:
    if found.segment_problem is not None:
        return Check.wrong("segments", *found.segment_problem)
    here = counted(sum(size > 0 for size in found.sizes), "segment")
    says = "; ".join([f"{here} of this run, each tied to the one before", *map(cut_text, found.holes)])
    if any(hole.through > found.cut_through for hole in found.holes):
        return Check.open("segments", f"{says}; the record that tells of it is not here yet")
    return Check.right("segments", says)


def _seals(found: Scan) -> Check:
    if found.seal_problem is not None:
        return Check.wrong("seals", *found.seal_problem)
    if not found.seals:
        return Check.open("seals", f"none in the {sum(found.sizes)} bytes that are here")
    torn = f", {found.torn_bytes} more came before their seal was cut" if found.torn_bytes else ""
    rest = f", {found.unsealed_bytes} more are not sealed yet" if found.unsealed_bytes else ""
    covered = sum(found.sizes) - found.unsealed_bytes - found.torn_bytes
    says = f"{counted(len(found.seals), 'seal')} right, over {covered} bytes{torn}{rest}"
    return Check.right("seals", says)


def _pin_problem(pin: Pin, found: Scan) -> tuple[str, Place | None] | None:
    seal = found.seals.get(pin.seq)
    if seal is None:
        return f"the mirror lacks seal {pin.seq}, which was pinned on arrival", None
    if seal.sha256 != pin.sha256:
        return f"seal {pin.seq} is not the one that was pinned on arrival", _seal_place(pin.seq, found)
    if (seal.segment, seal.start, seal.end) != (pin.segment, pin.start, pin.end):
        return f"seal {pin.seq} does not stand where it arrived", _seal_place(pin.seq, found)
    return None


def _seal_place(seq: int, found: Scan) -> Place:
    return Place(segment=found.seals[seq].segment, offset=found.seals[seq].start, seq=seq)
