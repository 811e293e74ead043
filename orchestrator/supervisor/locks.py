"""Lock files: whether somebody holds one, without holding it longer than the look takes; and taking one."""

import fcntl
import os
import time
from contextlib import contextmanager
from typing import Iterator

OBJECTS = "gc.lock"  # in the root: shared while objects are relied on, exclusive while some are removed
TRY_AGAIN_S = 0.05


def is_held(path: str) -> bool:
    """Tells whether ``path`` is locked exclusively. Looking takes the lock shared for an instant."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe there holds nobody up
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def is_at(fd: int, path: str) -> bool:
    """Tells whether an open file is the one that others find at ``path``: not one that was removed."""
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(fd), there)


@contextmanager
def shared(path: str) -> Iterator[None]:
    """Holds ``path`` shared, once whoever has it exclusively lets go."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)
        yield
    finally:
        os.close(fd)


def take(fd: int, exclusive: bool, patience_s: float = 0.0) -> bool:
    """Locks an open file within ``patience_s`` seconds; tells whether it could. Closing it lets go."""
    kind = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
    give_up_at = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= give_up_at:
                return False
            time.sleep(TRY_AGAIN_S)
        else:
            return True
