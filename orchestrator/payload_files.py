"""Which files of a payload's folder are shipped, and their bytes.

Knows the rules below. All below the payload's folder is shipped as ``<payload>/…``; .gitignore is not asked.

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
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from orchestrator.errors import PayloadRefused
from orchestrator.text import printable

__all__ = [
    "CACHE_PATTERNS",
    "EXCLUDED",
    "MAX_FILE_BYTES",
    "MAX_TOTAL_BYTES",
    "SECRET_PATTERNS",
    "VCS_NAMES",
    "FoundFiles",
    "ShippedFile",
    "check_sizes",
    "find_files",
    "is_excluded",
    "read_file",
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

EXCLUDED = (*VCS_NAMES, *CACHE_PATTERNS, *SECRET_PATTERNS)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShippedFile:
    """A file to ship: ``path`` in the bundle, ``source`` where its bytes stand."""

    path: str
    source: Path
    size_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundFiles:
    """What is shipped, and the paths that are not; a folder's ends in a slash."""

    files: list[ShippedFile]
    excluded: list[str]


def find_files(root: Path, name: str) -> FoundFiles:
    """Returns what a payload called ``name`` ships and leaves out, in no order.

    Raises:
        PayloadRefused: it holds something that a rule refuses.
    """
    found = FoundFiles(files=[], excluded=[])
    real_root = root.resolve()
    folders = [(real_root, name)]
    while folders:
        folder, prefix = folders.pop()
        for item in _scan(folder, prefix):
            path = f"{prefix}/{item.name}"
            is_folder = item.is_dir(follow_symlinks=False)
            if is_excluded(item.name) or _is_virtual_environment(Path(item.path)):
                found.excluded.append(f"{path}/" if is_folder else path)
            elif is_folder:
                folders.append((Path(item.path), path))
            else:
                found.files.append(_file(item, path, real_root))
    return found


def is_excluded(name: str) -> bool:
    """A file or folder of this name is not shipped."""
    lowered = name.lower()
    return any(fnmatchcase(lowered, pattern) for pattern in EXCLUDED)


def check_sizes(files: Sequence[ShippedFile]) -> None:
    """Refuses a file that is too large, and too much in all."""
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


def read_file(file: ShippedFile) -> tuple[bytes, int]:
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


def _scan(folder: Path, shown: str) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as items:
            yield from items
    except OSError as error:
        raise PayloadRefused(f"{printable(shown)}: cannot be read: {error.strerror}") from error


def _file(item: os.DirEntry[str], path: str, root: Path) -> ShippedFile:
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
    return ShippedFile(path=path, source=source, size_bytes=status.st_size)


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
    if any(map(is_excluded, inside.parts)) or any(map(_is_virtual_environment, _folders_of(inside, root))):
        raise PayloadRefused(f"{printable(path)}: a symlink to {shown}, which is excluded itself: remove it")
    return target


def _folders_of(inside: Path, root: Path) -> Iterator[Path]:
    return (root / folder for folder in inside.parents if folder.parts)


def _is_virtual_environment(folder: Path) -> bool:
    return (folder / "pyvenv.cfg").is_file()


def _too_large(file: ShippedFile, size_bytes: int) -> PayloadRefused:
    return PayloadRefused(
        f"{printable(file.path)}: {size_bytes / 1024**2:.0f} MiB, more than {MAX_FILE_BYTES // 1024**2} MiB: "
        "keep data on the host and name its path in params"
    )
