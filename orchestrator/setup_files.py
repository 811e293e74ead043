"""Which files a ``setup:`` ships: the one that it names, and what requirements name in turn.

Requirements are read as pip reads them: ``-r`` and ``-c`` are relative to the file that says it, wheels and
folders to the folder of the first file, where pip will run. URLs and absolute paths are the host's business.
Everything else must lie below ``root``, since it is shipped.
"""

from __future__ import annotations

import re
import shlex
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
    found.add(main, setup.where)
    if setup.kind == "script":
        with main.open("rb") as file:
            if not file.read(4).startswith(_PROGRAMS):
                raise PayloadRefused(
                    f"{setup.where}: {setup.path} is executed as it is: begin it with #! and its interpreter"
                )
    else:
        _follow(found, main)
    files = list(found.files.values())
    check_sizes(files)
    return files


class _Found:
    def __init__(self, root: Path, prefix: str) -> None:
        self._root = root
        self._prefix = prefix
        self.files: dict[str, ShippedFile] = {}

    def add(self, path: Path, where: str) -> bool:
        """Adds a file, or all that a folder holds; tells whether anything was new."""
        shown = printable(str(path))
        try:
            source = path.resolve(strict=True)
        except (OSError, RuntimeError):
            raise PayloadRefused(f"{where}: there is no {shown}") from None
        is_all = source == self._root and not self._prefix
        if is_all or not source.is_relative_to(self._root):
            raise PayloadRefused(
                f"{where}: {shown} is not in {printable(str(self._root))}, from where it is shipped"
            )
        inside = source.relative_to(self._root)
        if any(map(is_excluded, inside.parts)):
            raise PayloadRefused(f"{where}: {shown}: a file of this name is never shipped: rename it")
        name = (Path(self._prefix) / inside).as_posix()
        new = [ShippedFile(path=name, source=source, size_bytes=source.stat().st_size)]
        if source.is_dir():
            new = find_files(source, name).files
        elif not source.is_file():
            raise PayloadRefused(f"{where}: {shown} is neither a file nor a folder")
        is_new = any(file.path not in self.files for file in new)
        self.files.update((file.path, file) for file in new)
        return is_new


def _follow(found: _Found, main: Path) -> None:
    waiting = [main]
    while waiting:
        file = waiting.pop()
        for named in _named_in(file):
            path = (file.parent if named.is_file else main.parent) / named.path
            is_new = found.add(path, f"{printable(str(file))}:{named.line}")
            if named.is_file and is_new:
                waiting.append(path)


def _named_in(file: Path) -> Iterator[_Named]:
    """Yields the local paths that a requirements file names."""
    for number, line in _lines(file):
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


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    """Yields the logical lines with their numbers, without comments."""
    try:
        text = file.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise PayloadRefused(f"{printable(str(file))}: cannot be read as requirements: {error}") from error
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
