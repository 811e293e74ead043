"""Which files a ``setup:`` ships: the one that it names, and what requirements name in turn.

Requirements are read as pip reads them: ``-r`` and ``-c`` are relative to the file that says it, wheels and
folders to the folder of the first file, where pip will run. URLs and absolute paths are the host's business.
Everything else must lie below ``root``, since it is shipped.
"""

from __future__ import annotations

import errno
import os
import re
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from orchestrator.errors import PayloadRefused
from orchestrator.payload_files import ShippedFile, check_sizes, find_files, is_excluded
from orchestrator.setup_form import Setup
from orchestrator.text import printable

__all__ = ["find_setup_files"]

_OPTION = re.compile(
    r"(-r|--requirement|-c|--constraint|-e|--editable|-f|--find-links)(?:\s+|=|(?<=-\w))(.+)"
)
_FILES = ("-r", "--requirement", "-c", "--constraint")
_EDITABLE = ("-e", "--editable")
_ARCHIVES = (".whl", ".zip", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar")
_PROGRAMS = (b"#!", b"\x7fELF")


class _Named(NamedTuple):
    """A path in a requirements file; ``is_file``: it is read as one itself."""

    path: str
    line: int
    is_file: bool


def find_setup_files(root: Path, prefix: str, setup: Setup) -> list[ShippedFile]:
    """Returns what is shipped, by paths that begin with ``prefix``; the named file is the first.

    Raises:
        PayloadRefused: a file is not there, cannot be shipped, or is no program where one must be.
    """
    found = _Found(root.resolve(), prefix)
    main = root / setup.path
    found.add(main, setup.where, is_read=True)
    if setup.kind == "script":
        if not _read(main, setup.where, 4).startswith(_PROGRAMS):
            raise PayloadRefused(
                f"{setup.where}: {setup.path} is executed as it is: begin it with #! and its interpreter"
            )
    else:
        _follow(found, main, setup.where)
    files = list(found.files.values())
    check_sizes(files)
    return files


class _Found:
    def __init__(self, root: Path, prefix: str) -> None:
        self._root = root
        self._prefix = prefix
        self.files: dict[str, ShippedFile] = {}

    def add(self, path: Path, where: str, *, is_read: bool = False) -> bool:
        """Adds a file, or all that a folder holds unless one ``is_read``; tells whether anything was new."""
        shown = printable(str(path))
        source, status = _look(path, where)
        is_all = source == self._root and not self._prefix
        if is_all or not source.is_relative_to(self._root):
            raise PayloadRefused(
                f"{where}: {shown} is not in {printable(str(self._root))}, from where it is shipped"
            )
        inside = source.relative_to(self._root)
        if any(map(is_excluded, inside.parts)):
            raise PayloadRefused(f"{where}: {shown}: a file of this name is never shipped: rename it")
        name = (Path(self._prefix) / inside).as_posix()
        new = [ShippedFile(path=name, source=source, size_bytes=status.st_size)]
        if stat.S_ISDIR(status.st_mode):
            new = _files_below(source, name, f"{where}: {shown}", is_read)
        elif not stat.S_ISREG(status.st_mode):
            raise PayloadRefused(f"{where}: {shown} is neither a file nor a folder")
        elif not os.access(source, os.R_OK):
            raise PayloadRefused(f"{where}: {shown} cannot be read: {os.strerror(errno.EACCES)}")
        is_new = any(file.path not in self.files for file in new)
        self.files.update((file.path, file) for file in new)
        return is_new


def _look(path: Path, where: str) -> tuple[Path, os.stat_result]:
    """Returns where a path leads and what is there."""
    shown = printable(str(path))
    try:
        source = path.resolve(strict=True)
        return source, source.stat()
    except FileNotFoundError:
        is_link = path.is_symlink()
        text = f"{shown} is a symlink that leads nowhere" if is_link else f"there is no {shown}"
    except RuntimeError:  # Python 3.11 and 3.12
        text = f"{shown} is a symlink to itself"
    except (OSError, ValueError) as error:
        text = f"{shown} cannot be read: {_why(error)}"
    raise PayloadRefused(f"{where}: {text}")


def _files_below(folder: Path, name: str, shown: str, is_read: bool) -> list[ShippedFile]:
    if is_read:
        raise PayloadRefused(f"{shown} is a folder: name a file")
    try:
        return find_files(folder, name).files
    except PayloadRefused as error:
        raise PayloadRefused(f"{shown}: {error}") from None


def _follow(found: _Found, main: Path, where: str) -> None:
    waiting = [(main, where)]
    while waiting:
        file, where = waiting.pop()
        for named in _named_in(file, where):
            path = (file.parent if named.is_file else main.parent) / named.path
            here = f"{printable(str(file))}:{named.line}"
            is_new = found.add(path, here, is_read=named.is_file)
            if named.is_file and is_new:
                waiting.append((path, here))


def _named_in(file: Path, where: str) -> Iterator[_Named]:
    """Yields the local paths that a requirements file names; ``where`` that one is named."""
    for number, line in _lines(file, where):
        option = _OPTION.match(line)
        if option:
            kind, text = option.groups()
            target, is_file = _word(text), kind in _FILES
            if kind in _EDITABLE and "://" not in target:
                raise PayloadRefused(
                    f"{printable(str(file))}:{number}: an editable folder would be that run's: no {kind}"
                )
        else:
            target, is_file = "" if line.startswith("-") else _local(line), False
        if target and "://" not in target and "${" not in target and not target.startswith(("/", "file:")):
            yield _Named(re.sub(r"\[[^\]]*\]$", "", target), number, is_file)


def _read(file: Path, where: str, most: int = -1) -> bytes:
    try:
        with file.open("rb") as opened:
            return opened.read(most)
    except OSError as error:
        raise PayloadRefused(f"{where}: {printable(str(file))} cannot be read: {_why(error)}") from error


def _why(error: OSError | ValueError) -> str:
    return str(getattr(error, "strerror", None) or error)


def _lines(file: Path, where: str) -> Iterator[tuple[int, str]]:
    """Yields the logical lines with their numbers, without comments."""
    try:
        text = _read(file, where).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        shown = printable(str(file))
        raise PayloadRefused(f"{where}: {shown} cannot be read as requirements: {error}") from error
    pending, first = "", 1
    for number, line in enumerate(text.splitlines(), 1):
        first = first if pending else number
        if line.endswith("\\") and not line.lstrip().startswith("#"):
            pending += line[:-1]
            continue
        whole, pending = re.sub(r"(^|\s+)#.*$", "", pending + line).strip(), ""
        if whole:
            yield first, whole


def _word(text: str) -> str:
    try:
        return next(iter(shlex.split(text)), "")
    except ValueError:
        return text.strip()


def _local(line: str) -> str:
    """Returns the path of a requirement that is one, as pip tells them; else nothing."""
    target = re.split(r"\s+--|\s*;", line, maxsplit=1)[0].strip()
    bare = re.sub(r"\[[^\]]*\]$", "", target)
    is_path = bare.startswith(".") or "/" in bare or bare.endswith(_ARCHIVES)
    return "" if not is_path or " @ " in target else target
