"""A host's object store, and the code that a run gets from it.

``objects/<hh>/<sha256>`` holds each distinct file once. A run gets copies of its own in ``runs/<id>/code/``:
nothing that another run does reaches the code it runs, and what it does to its own is found at its end. Every
byte is hashed on the way out of the store.
"""

import hashlib
import json
import os
from typing import Any, Callable, Dict, Iterator, List, Sequence, Tuple

from .wire import PIECE_BYTES

Entry = Tuple[str, int, int, str]
MANIFEST_VERSION = 1
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


class StoreError(Exception):
    """A manifest or an object that is not what its name says."""


def manifest_id(entries: Sequence[Sequence[Any]]) -> str:
    """Returns a bundle's id: the hash of its sorted (path, mode, size in bytes, sha256) entries."""
    value = {"version": MANIFEST_VERSION, "entries": sorted(list(entry) for entry in entries)}
    text = json.dumps(value, separators=(",", ":"), sort_keys=True)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def checked_entries(bundle_id: str, entries: Sequence[Sequence[Any]]) -> List[Entry]:
    """Returns the manifest as tuples.

    Raises:
        StoreError: the id is not theirs, or a path would leave the tree.
    """
    if manifest_id(entries) != bundle_id:
        raise StoreError("the manifest is not the one called %s" % bundle_id)
    checked: List[Entry] = []
    for path, mode, size, sha256 in entries:
        parts = path.split("/")
        if path.startswith("/") or "\0" in path or any(part in ("", ".", "..") for part in parts):
            raise StoreError("the path %r would leave the bundle" % path)
        checked.append((path, mode, size, sha256))
    return checked


def changed_files(tree: str, entries: Sequence[Entry]) -> List[str]:
    """Returns the paths of files that are gone or have other bytes, and of modules that were added."""
    changed = [path for path, _, _, sha256 in entries if not _has_bytes(os.path.join(tree, path), sha256)]
    known = {entry[0] for entry in entries}
    added = [path for path in _files(tree) if path not in known and path.endswith((".py", ".so"))]
    return sorted(changed + added)


class Store:
    """The objects below ``root``."""

    def __init__(self, root: str) -> None:
        self._objects = os.path.join(root, "objects")
        os.makedirs(self._objects, mode=0o700, exist_ok=True)

    def missing(self, entries: Sequence[Entry]) -> List[str]:
        """Returns the hashes of objects that are not here whole; a damaged one is removed."""
        absent = []
        for sha256 in sorted({entry[3] for entry in entries}):
            path = self._object(sha256)
            if not _has_bytes(path, sha256):
                absent.append(sha256)
                if os.path.exists(path):
                    os.unlink(path)
        return absent

    def look(self, entries: Sequence[Entry]) -> Tuple[List[str], List[str]]:
        """Returns the hashes of objects that are not here, and of those that are damaged; touches none."""
        absent, damaged = [], []
        for sha256 in sorted({entry[3] for entry in entries}):
            path = self._object(sha256)
            if not os.path.exists(path):
                absent.append(sha256)
            elif not _has_bytes(path, sha256):
                damaged.append(sha256)
        return absent, damaged

    def put(self, sha256: str, parts: Iterator[bytes]) -> None:
        """Stores one object from its pieces.

        Raises:
            StoreError: the pieces are not what ``sha256`` says; nothing is kept.
        """
        path = self._object(sha256)
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        made = "%s.%s" % (path, os.urandom(8).hex())  # two starts at the same moment each write their own
        fd = os.open(made, _NEW_FILE, 0o600)
        try:
            total = hashlib.sha256()
            with open(fd, "wb") as file:
                for part in parts:
                    total.update(part)
                    file.write(part)
            if total.hexdigest() != sha256:
                raise StoreError("an object arrived damaged: %s instead of %s" % (total.hexdigest(), sha256))
            os.rename(made, path)
        except BaseException:
            os.unlink(made)
            raise

    def unpack(self, entries: Sequence[Entry], tree: str) -> None:
        """Copies the manifest's files to ``tree``, replacing what an earlier attempt left there.

        Raises:
            StoreError: a copy is not what the manifest says.
        """
        if os.path.lexists(tree):
            import shutil  # noqa: PLC0415  (needed after a start that broke off, and slow to import)

            shutil.rmtree(tree, ignore_errors=True)
        os.makedirs(tree, mode=0o700)
        folder = ""
        for path, mode, _, sha256 in entries:
            target = os.path.join(tree, path)
            if os.path.dirname(target) != folder:
                folder = os.path.dirname(target)
                os.makedirs(folder, mode=0o700, exist_ok=True)
            if _copy(self._object(sha256), target, mode & 0o700) != sha256:
                raise StoreError("%s was damaged on its way to %s" % (path, tree))

    def _object(self, sha256: str) -> str:
        if len(sha256) != 64 or not set(sha256) <= set("0123456789abcdef"):
            raise StoreError("not a SHA-256: %r" % sha256)
        return os.path.join(self._objects, sha256[:2], sha256)


def object_parts(
    first: bytes, header: Dict[str, Any], next_frame: Callable[[], Tuple[Dict[str, Any], bytes]]
) -> Iterator[bytes]:
    """Yields the pieces of an object that came in frames; every frame but the last has ``more`` set."""
    yield first
    while header.get("more"):
        header, body = next_frame()
        yield body


def _files(tree: str) -> Iterator[str]:
    for folder, _, names in os.walk(tree):
        for name in names:
            yield os.path.relpath(os.path.join(folder, name), tree)


def _copy(source: str, target: str, mode: int) -> str:
    """Makes ``target`` and returns the SHA-256 of what was written to it."""
    total = hashlib.sha256()
    with open(source, "rb") as file, open(os.open(target, _NEW_FILE, mode), "wb") as copy:
        for part in iter(lambda: file.read(PIECE_BYTES), b""):
            total.update(part)
            copy.write(part)
        os.fchmod(copy.fileno(), mode)
    return total.hexdigest()


def _has_bytes(path: str, sha256: str) -> bool:
    total = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            for part in iter(lambda: file.read(PIECE_BYTES), b""):
                total.update(part)
    except OSError:
        return False
    return total.hexdigest() == sha256
