"""What a run left in its artifacts folder: which files there are, and their bytes, hashed.

Each step down is taken from the descriptor of the folder above it and follows no symbolic link: what anybody
puts into a folder's place meanwhile leads nowhere. Links, devices, pipes and sockets are told by their kind
and never opened. Paths are UTF-8; bytes that are not travel as lone surrogates.
"""

import hashlib
import os
import stat
import time
from typing import Any, BinaryIO, Dict, Iterator, List, Sequence, Tuple

from .rundir import RunDir
from .wire import PIECE_BYTES

PAGE_ENTRIES = 500
MOST_ENTRIES = 100000
MOST_DEPTH = 60  # folders in each other, each of which takes a descriptor while it is walked
SIGN_OF_LIFE_S = 5.0

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe in its place holds nobody up
_KINDS = {
    stat.S_IFREG: "file",
    stat.S_IFLNK: "link",
    stat.S_IFIFO: "pipe",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "device",
    stat.S_IFBLK: "device",
}

Frame = Tuple[Dict[str, Any], bytes]


def pages(run: RunDir) -> Iterator[List[Dict[str, Any]]]:
    """Yields ``path``, ``kind``, ``size`` and ``mtime_ns`` of all that is there, folder by folder.

    A folder is told only where it was not looked into: as ``deep`` or, without the right to, as ``closed``.

    Raises:
        ValueError: the artifacts folder is none, or holds more than `MOST_ENTRIES`.
    """
    try:
        fd = _open_artifacts(run)
    except FileNotFoundError:
        return
    page: List[Dict[str, Any]] = []
    for count, entry in enumerate(_walk(fd, b"", 1)):
        if count == MOST_ENTRIES:
            raise ValueError("the artifacts are more than %d: have the payload pack them" % MOST_ENTRIES)
        page.append(entry)
        if len(page) >= PAGE_ENTRIES:
            yield page
            page = []
    yield page


def send(run: RunDir, files: Sequence[Sequence[Any]]) -> Iterator[Frame]:
    """Yields the frames of ``files``, each asked for as path, size, mtime_ns, offset and a SHA-256.

    The size and time are those that were listed, and the hash is that of the asker's first ``offset`` bytes:
    where the file's are the same, the rest follows (``from``), else all of it. The last frame of a file has
    the ``sha256`` of the whole, or says why it ``failed``.
    """
    fd = _open_artifacts(run)
    try:
        for path, size, mtime_ns, offset, prefix in files:
            try:
                with os.fdopen(_open_file(fd, path), "rb", buffering=0) as file:
                    for frame in _file_frames(file, (size, mtime_ns), offset, prefix):
                        yield frame
            except FileNotFoundError:
                yield {"failed": "gone"}, b""
            except OSError as error:
                yield {"failed": "unreadable", "message": error.strerror or str(error)}, b""
    finally:
        os.close(fd)


def _file_frames(file: BinaryIO, listed: Tuple[int, int], offset: int, prefix: str) -> Iterator[Frame]:
    if _seen(file) != listed:
        yield {"failed": "changed"}, b""
        return
    total = hashlib.sha256()
    told_at = time.monotonic()
    for piece in _pieces(file, offset):
        total.update(piece)
        if time.monotonic() - told_at > SIGN_OF_LIFE_S:
            told_at = time.monotonic()
            yield {"idle": True}, b""
    if offset and total.hexdigest() != prefix:
        file.seek(0)
        total, offset = hashlib.sha256(), 0
    yield {"from": offset}, b""
    for piece in _pieces(file, listed[0] - offset):
        total.update(piece)
        yield {"data": True}, piece
    if file.tell() != listed[0] or _seen(file) != listed:
        yield {"failed": "changed"}, b""
    else:
        yield {"sha256": total.hexdigest()}, b""


def _pieces(file: BinaryIO, left: int) -> Iterator[bytes]:
    """Yields the next ``left`` bytes; fewer at the file's end."""
    while left > 0:
        piece = file.read(min(left, PIECE_BYTES))
        if not piece:
            return
        left -= len(piece)
        yield piece


def _seen(file: BinaryIO) -> Tuple[int, int]:
    """Returns size and time; of what is no regular file a size that none has."""
    status = os.fstat(file.fileno())
    return (status.st_size if stat.S_ISREG(status.st_mode) else -1, status.st_mtime_ns)


def _walk(fd: int, above: bytes, depth: int) -> Iterator[Dict[str, Any]]:
    """Yields what is in an open folder, and closes it."""
    try:
        for name in sorted(map(os.fsencode, os.listdir(fd))):
            try:
                status = os.stat(name, dir_fd=fd, follow_symlinks=False)
            except OSError:
                continue  # the payload has just removed it
            kind = _KINDS.get(stat.S_IFMT(status.st_mode), "deep")
            if kind == "deep" and depth < MOST_DEPTH:
                try:
                    below = os.open(name, _FOLDER, dir_fd=fd)
                except FileNotFoundError:
                    continue
                except OSError:
                    kind = "closed"
                else:
                    for entry in _walk(below, above + name + b"/", depth + 1):
                        yield entry
                    continue
            yield {
                "path": (above + name).decode("utf-8", "surrogateescape"),
                "kind": kind,
                "size": status.st_size,
                "mtime_ns": status.st_mtime_ns,
            }
    finally:
        os.close(fd)


def _open_artifacts(run: RunDir) -> int:
    """Opens the run's artifacts folder step by step from the root."""
    steps = os.path.relpath(run.artifacts, run.root).encode().split(b"/")
    root = os.open(run.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return _descend(root, steps)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError("the artifacts folder of run %s is none: %s" % (run.run_id, error)) from error


def _open_file(folder: int, path: str) -> int:
    steps = path.encode("utf-8", "surrogateescape").split(b"/")
    if any(step in (b"", b".", b"..") for step in steps):
        raise ValueError("not a path of an artifact: %r" % path)
    parent = _descend(os.dup(folder), steps[:-1])
    try:
        return os.open(steps[-1], _FILE, dir_fd=parent)
    finally:
        os.close(parent)


def _descend(fd: int, steps: Sequence[bytes]) -> int:
    """Returns the descriptor of a folder below the one at ``fd``, which it closes."""
    for step in steps:
        try:
            below = os.open(step, _FOLDER, dir_fd=fd)
        finally:
            os.close(fd)
        fd = below
    return fd
