"""Whether somebody holds a lock file, without holding it longer than the look takes."""

import fcntl
import os


def is_held(path: str) -> bool:
    """Tells whether ``path`` is locked exclusively. Looking takes the lock shared for an instant."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
