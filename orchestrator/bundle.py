"""A payload folder as content: which files are shipped, and under which id.

Knows the rules below and the object store beside the inventory. Asking git is provenance's business, sending
a bundle is remote's. All below the payload's folder is shipped as ``<payload>/…``; .gitignore is not asked.

========================================================  =================================================
folders of version control (`VCS_NAMES`)                  excluded
caches and byte code (`CACHE_PATTERNS`)                   excluded
virtual environments (a folder with pyvenv.cfg)           excluded
what looks like a secret (`SECRET_PATTERNS`)              excluded
a symlink to a shipped file of the same payload           shipped as that file's content
any other symlink, a socket, a fifo, a device             refused
a file over 256 MiB, more than 1 GiB in all               refused: data belongs on the host
a name that is not UTF-8, a file that cannot be read      refused
========================================================  =================================================

A bundle's id is the SHA-256 of its manifest: canonical JSON of path, mode (0644 or 0755), size and SHA-256 of
each file. The bytes that were hashed are the bytes that were stored, whatever happens to the file meanwhile.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from io import BufferedReader
from pathlib import Path

from orchestrator.errors import PayloadRefused, StorageError, UnknownName
from orchestrator.provenance import Provenance, ask_git
from orchestrator.text import check_name, did_you_mean, printable

__all__ = [
    "CACHE_PATTERNS",
    "MAX_FILE_BYTES",
    "MAX_TOTAL_BYTES",
    "SECRET_PATTERNS",
    "VCS_NAMES",
    "Bundle",
    "Entry",
    "ObjectStore",
    "Provenance",
    "build_bundle",
    "find_payload",
]

MAX_FILE_BYTES = 256 * 1024**2
MAX_TOTAL_BYTES = 1024**3

VCS_NAMES = (".git", ".hg", ".svn", ".bzr", ".jj")
CACHE_PATTERNS = (
    "__pycache__",
    "*.py[co]",
    ".orch",
    ".mypy_cache",
    ".pytest_cache",
    ".ruff_cache",
    ".hypothesis",
    ".import_linter_cache",
    ".ipynb_checkpoints",
    ".tox",
    ".nox",
    ".ds_store",
)
SECRET_PATTERNS = (
    ".env",
    ".env.*",
    "*.pem",
    "*.key",
    "id_rsa*",
    "id_dsa*",
    "id_ecdsa*",
    "id_ed25519*",
    ".netrc",
    ".ssh",
    ".aws",
    ".gnupg",
)
"""Patterns are compared with the name in lower case."""

_EXCLUDED = (*VCS_NAMES, *CACHE_PATTERNS, *SECRET_PATTERNS)
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
    found = _walk(payload_dir, name)
    if not found.files:
        raise PayloadRefused(f"payload {name!r} holds no file to ship")
    _check_sizes(found.files)
    entries: list[Entry] = []
    for file in found.files:
        data, mode = _read(file)
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
            if path.is_file() and path.stat().st_size == len(data):  # a crash can leave an empty file
                return
            _make_private(path.parent)
            _write_whole(path, data)
        except OSError as error:
            raise StorageError(f"cannot store {printable(str(path))}: {error.strerror}") from error


def _checked_id(text: str) -> str:
    if not re.fullmatch(r"[0-9a-f]{64}", text):
        raise UnknownName(f"{text!r} is no SHA-256")
    return text


def _make_private(folder: Path) -> None:
    if not folder.is_dir():
        _make_private(folder.parent)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)


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


def _provenance(folder: Path, files: Sequence[_File], store: ObjectStore) -> Provenance:
    shipped = [file.path.partition("/")[2] for file in files]
    provenance, diff = ask_git(folder, shipped=shipped, excluded=_EXCLUDED)
    return replace(provenance, diff_sha256=store.put(diff)) if diff else provenance


# Which files


@dataclass(frozen=True, kw_only=True, slots=True)
class _File:
    """A file to ship: ``path`` in the bundle, ``source`` where its bytes stand."""

    path: str
    source: Path
    size_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Found:
    files: list[_File]
    excluded: list[str]


def _walk(root: Path, name: str) -> _Found:
    found = _Found(files=[], excluded=[])
    real_root = root.resolve()
    folders = [(real_root, name)]
    while folders:
        folder, prefix = folders.pop()
        for item in _scan(folder, prefix):
            path = f"{prefix}/{item.name}"
            is_folder = item.is_dir(follow_symlinks=False)
            if _is_excluded(item.name) or _is_virtual_environment(Path(item.path)):
                found.excluded.append(f"{path}/" if is_folder else path)
            elif is_folder:
                folders.append((Path(item.path), path))
            else:
                found.files.append(_file(item, path, real_root))
    return found


def _scan(folder: Path, shown: str) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as items:
            yield from items
    except OSError as error:
        raise PayloadRefused(f"{printable(shown)}: cannot be read: {error.strerror}") from error


def _file(item: os.DirEntry[str], path: str, root: Path) -> _File:
    try:
        path.encode()
    except UnicodeEncodeError:
        raise PayloadRefused(f"{printable(path)}: the name is not UTF-8: rename it") from None
    try:
        source = _target(Path(item.path), path, root) if item.is_symlink() else Path(item.path)
        status = source.lstat()
    except OSError as error:
        raise PayloadRefused(f"{printable(path)}: cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        raise PayloadRefused(f"{printable(path)}: neither a file nor a folder: remove it from the payload")
    return _File(path=path, source=source, size_bytes=status.st_size)


def _target(link: Path, path: str, root: Path) -> Path:
    """Returns what a symlink stands for, if that would be shipped itself."""
    try:
        target = link.resolve(strict=True)
    except (OSError, RuntimeError):
        raise PayloadRefused(f"{printable(path)}: a symlink that leads nowhere: remove it") from None
    shown = printable(str(target))
    if not target.is_relative_to(root):
        raise PayloadRefused(
            f"{printable(path)}: a symlink out of the payload, to {shown}: copy the file instead"
        )
    if target.is_dir():
        raise PayloadRefused(f"{printable(path)}: a symlink to a folder, {shown}: copy what it is needed for")
    inside = target.relative_to(root)
    if any(map(_is_excluded, inside.parts)) or any(map(_is_virtual_environment, _folders_of(inside, root))):
        raise PayloadRefused(f"{printable(path)}: a symlink to {shown}, which is excluded itself: remove it")
    return target


def _folders_of(inside: Path, root: Path) -> Iterator[Path]:
    return (root / folder for folder in inside.parents if folder.parts)


def _is_excluded(name: str) -> bool:
    lowered = name.lower()
    return any(fnmatchcase(lowered, pattern) for pattern in _EXCLUDED)


def _is_virtual_environment(folder: Path) -> bool:
    return (folder / "pyvenv.cfg").is_file()


def _check_sizes(files: Sequence[_File]) -> None:
    for file in files:
        if file.size_bytes > MAX_FILE_BYTES:
            raise _too_large(file, file.size_bytes)
    total_bytes = sum(file.size_bytes for file in files)
    if total_bytes > MAX_TOTAL_BYTES:
        largest = max(files, key=lambda file: file.size_bytes)
        raise PayloadRefused(
            f"it holds {total_bytes / 1024**3:.2f} GiB, more than {MAX_TOTAL_BYTES / 1024**3:g} GiB: "
            f"keep data on the host; the largest file is {printable(largest.path)}"
        )


def _too_large(file: _File, size_bytes: int) -> PayloadRefused:
    return PayloadRefused(
        f"{printable(file.path)}: {size_bytes / 1024**2:.0f} MiB, more than {MAX_FILE_BYTES // 1024**2} MiB: "
        "keep data on the host and name its path in params"
    )


def _read(file: _File) -> tuple[bytes, int]:
    """Returns bytes and normalised mode; follows no link and waits for no fifo that took the file's place."""
    try:
        fd = os.open(file.source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(fd, "rb", buffering=0) as raw:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise PayloadRefused(f"{printable(file.path)}: is no file any more: run again")
            if status.st_size > MAX_FILE_BYTES:
                raise _too_large(file, status.st_size)
            data = raw.read()
    except OSError as error:
        raise PayloadRefused(f"{printable(file.path)}: cannot be read: {error.strerror}") from error
    return data, 0o755 if status.st_mode & stat.S_IXUSR else 0o644
