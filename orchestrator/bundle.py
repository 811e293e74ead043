"""What is shipped as content: a payload's folder, one script or nothing, and under which id.

Knows the object store beside the inventory. Which files are shipped is payload_files' business, asking git
provenance's, sending a bundle remote's.

A bundle's id is the SHA-256 of its manifest: canonical JSON of path, mode (0644 or 0755), size and SHA-256 of
each file. The bytes that were hashed are the bytes that were stored, whatever happens to the file meanwhile.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from io import BufferedReader
from pathlib import Path

from orchestrator.errors import PayloadRefused, StorageError, UnknownName
from orchestrator.folders import make_private
from orchestrator.payload_files import EXCLUDED, ShippedFile, check_sizes, find_files, is_excluded, read_file
from orchestrator.provenance import Provenance, ask_git
from orchestrator.text import check_name, did_you_mean, printable

__all__ = [
    "Bundle",
    "Entry",
    "ObjectStore",
    "Provenance",
    "build_bundle",
    "build_script_bundle",
    "build_setup_bundle",
    "empty_bundle",
    "find_payload",
]

_MANIFEST_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One shipped file; ``path`` begins with the payload's name, ``mode`` is 0o644 or 0o755."""

    path: str
    mode: int
    size_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Bundle:
    """What is shipped (sorted by path) and what was left out; a folder left out ends in a slash.

    A bundle from `ObjectStore.load_manifest` knows neither ``excluded`` nor ``provenance``: those belong to
    the moment of building, and the same content can come from several commits.
    """

    id: str
    entries: tuple[Entry, ...]
    excluded: tuple[str, ...] = ()
    size_bytes: int = 0
    provenance: Provenance = field(default_factory=Provenance)

    def manifest(self) -> bytes:
        """Returns the bytes whose SHA-256 is ``id``."""
        return _manifest(self.entries)


def find_payload(project: Path, name: str) -> Path:
    """Returns the folder ``payloads/<name>`` of the project.

    Raises:
        UsageError: not a plain name.
        UnknownName: there is no such folder; the message lists those there are.
        PayloadRefused: a symlink leads out of the project.
    """
    check_name("payload", name)
    folder = project / "payloads" / name
    if not folder.is_dir():
        known = [
            path.name for path in sorted(folder.parent.glob("*/")) if not path.name.startswith((".", "_"))
        ]
        listed = ", ".join(map(printable, known)) or "none"
        where = printable(str(folder.parent))
        raise UnknownName(f"no payload {name!r} in {where}; known are {listed}{did_you_mean(name, known)}")
    if not folder.resolve().is_relative_to(project.resolve()):
        target = printable(str(folder.resolve()))
        raise PayloadRefused(f"payload {name!r}: its folder leads out of the project, to {target}")
    return folder


def build_bundle(payload_dir: Path, store: ObjectStore) -> Bundle:
    """Reads the payload once into ``store`` and returns what a run of it ships.

    Raises:
        PayloadRefused: the folder holds something that a rule refuses, or nothing to ship.
        StorageError: the store cannot be written.
    """
    name = check_name("payload", payload_dir.name)
    found = find_files(payload_dir, name)
    if not found.files:
        raise PayloadRefused(f"payload {name!r} holds no file to ship")
    check_sizes(found.files)
    entries: list[Entry] = []
    for file in found.files:
        data, mode = read_file(file)
        entries.append(Entry(path=file.path, mode=mode, size_bytes=len(data), sha256=store.put(data)))
    shipped = tuple(sorted(entries, key=lambda entry: entry.path))
    bundle = Bundle(
        id=hashlib.sha256(_manifest(shipped)).hexdigest(),
        entries=shipped,
        excluded=tuple(sorted(found.excluded)),
        size_bytes=sum(entry.size_bytes for entry in shipped),
        provenance=_provenance(payload_dir.resolve(), found.files, store),
    )
    store.save_manifest(bundle)
    return bundle


def build_script_bundle(script: Path, store: ObjectStore) -> Bundle:
    """Returns what a run of one file ships: that file alone, under its own name.

    Raises:
        PayloadRefused: it is no file, cannot be read, is too large, or looks like a secret by its name.
        StorageError: the store cannot be written.
    """
    if is_excluded(script.name):
        raise PayloadRefused(f"{printable(str(script))}: a file of this name is never shipped: rename it")
    try:
        source = script.resolve(strict=True)
        size_bytes = source.stat().st_size
        script.name.encode()
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise PayloadRefused(f"{printable(str(script))}: cannot be read: {reason}") from error
    except UnicodeEncodeError:
        raise PayloadRefused(f"{printable(str(script))}: the name is not UTF-8: rename it") from None
    data, mode = read_file(ShippedFile(path=script.name, source=source, size_bytes=size_bytes))
    entry = Entry(path=script.name, mode=mode, size_bytes=len(data), sha256=store.put(data))
    provenance, diff = ask_git(
        source.parent, shipped=[source.name], excluded=(), within=f":(literal){source.name}"
    )
    return _stored((entry,), store, replace(provenance, diff_sha256=store.put(diff)) if diff else provenance)


def build_setup_bundle(files: Sequence[ShippedFile], store: ObjectStore, program: str | None) -> Bundle:
    """Returns what prepares an environment: just these files, of which ``program`` can be executed.

    Raises:
        PayloadRefused: one cannot be read.
        StorageError: the store cannot be written.
    """
    entries = []
    for file in sorted(files, key=lambda file: file.path):
        data, mode = read_file(file)
        mode = 0o755 if file.path == program else mode
        entries.append(Entry(path=file.path, mode=mode, size_bytes=len(data), sha256=store.put(data)))
    return _stored(tuple(entries), store, Provenance())


def empty_bundle(store: ObjectStore) -> Bundle:
    """Returns the bundle that ships nothing."""
    return _stored((), store, Provenance())


class ObjectStore:
    """Files by content: ``objects/<hh>/<sha256>`` and ``bundles/<id>.json``, for this user alone."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, sha256: str) -> Path:
        """Returns where the object stands or would stand."""
        return self.root / "objects" / _checked_id(sha256)[:2] / sha256

    def put(self, data: bytes) -> str:
        """Stores ``data`` unless it is there, and returns its SHA-256.

        Raises:
            StorageError: it cannot be written.
        """
        sha256 = hashlib.sha256(data).hexdigest()
        self._write(self.path(sha256), data)
        return sha256

    def open(self, sha256: str) -> BufferedReader:
        """Opens an object for reading.

        Raises:
            StorageError: it is not there or cannot be read.
        """
        try:
            return self.path(sha256).open("rb")
        except OSError as error:
            raise StorageError(f"object {sha256} cannot be read: {error.strerror}") from error

    def open_checked(self, sha256: str) -> BufferedReader:
        """Opens an object for reading, having read it once: its bytes are those that its name says.

        Raises:
            StorageError: it is not there, cannot be read, or is damaged.
        """
        file = self.open(sha256)
        try:
            if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
                raise StorageError(f"object {sha256} is damaged: remove {printable(str(self.path(sha256)))}")
            file.seek(0)
        except BaseException:
            file.close()
            raise
        return file

    def save_manifest(self, bundle: Bundle) -> None:
        """Stores the manifest; what `load_manifest` returns for its id from now on.

        Raises:
            StorageError: it cannot be written.
        """
        self._write(self._manifest_path(bundle.id), bundle.manifest())

    def load_manifest(self, bundle_id: str) -> Bundle:
        """Returns a stored bundle.

        Raises:
            UnknownName: there is none of this id.
            StorageError: it cannot be read, or is not what its id says.
        """
        try:
            raw = self._manifest_path(bundle_id).read_bytes()
        except FileNotFoundError:
            raise UnknownName(f"no bundle {bundle_id} in the store") from None
        except OSError as error:
            raise StorageError(f"bundle {bundle_id} cannot be read: {error.strerror}") from error
        if hashlib.sha256(raw).hexdigest() != bundle_id:
            raise StorageError(
                f"bundle {bundle_id} is damaged in the store: remove it and build it from the payload"
            )
        entries = tuple(
            Entry(path=path, mode=mode, size_bytes=size_bytes, sha256=sha256)
            for path, mode, size_bytes, sha256 in json.loads(raw)["entries"]
        )
        return Bundle(id=bundle_id, entries=entries, size_bytes=sum(entry.size_bytes for entry in entries))

    def _manifest_path(self, bundle_id: str) -> Path:
        return self.root / "bundles" / f"{_checked_id(bundle_id)}.json"

    def _write(self, path: Path, data: bytes) -> None:
        try:
            # a crash can leave an empty file
            if path.is_file() and (known := path.stat()).st_size == len(data):
                os.utime(path, ns=(time.time_ns(), known.st_mtime_ns))  # `orch gc` keeps what was just used
                return
            make_private(path.parent)
            _write_whole(path, data)
        except OSError as error:
            raise StorageError(f"cannot store {printable(str(path))}: {error.strerror}") from error


def _checked_id(text: str) -> str:
    if not re.fullmatch(r"[0-9a-f]{64}", text):
        raise UnknownName(f"{text!r} is no SHA-256")
    return text


def _write_whole(path: Path, data: bytes) -> None:
    """No reader ever sees half of a file; mkstemp gives it to this user alone."""
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=".")
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
        Path(temporary).rename(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _manifest(entries: Sequence[Entry]) -> bytes:
    listed = [[entry.path, entry.mode, entry.size_bytes, entry.sha256] for entry in entries]
    text = json.dumps(
        {"entries": listed, "version": _MANIFEST_VERSION}, sort_keys=True, separators=(",", ":")
    )
    return text.encode("ascii")


def _stored(entries: tuple[Entry, ...], store: ObjectStore, provenance: Provenance) -> Bundle:
    bundle = Bundle(
        id=hashlib.sha256(_manifest(entries)).hexdigest(),
        entries=entries,
        size_bytes=sum(entry.size_bytes for entry in entries),
        provenance=provenance,
    )
    store.save_manifest(bundle)
    return bundle


def _provenance(folder: Path, files: Sequence[ShippedFile], store: ObjectStore) -> Provenance:
    shipped = [file.path.partition("/")[2] for file in files]
    provenance, diff = ask_git(folder, shipped=shipped, excluded=EXCLUDED)
    return replace(provenance, diff_sha256=store.put(diff)) if diff else provenance
