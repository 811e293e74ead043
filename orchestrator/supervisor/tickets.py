"""A queue on this host: tickets in a folder, each locked by the supervisor of the run that waits with it.

A ticket's name says how its run stands, its place and its run; its content is the queue's own business. A
ticket that nobody holds is over once nothing of its run is left, and whoever sees that removes it. Decisions
are made under the queue's lock.
"""

import fcntl
import os
import re
from contextlib import contextmanager
from typing import Iterator, List, NamedTuple

from .locks import is_at, is_held, take
from .rundir import RunDir

WAITING, RUNNING = "waiting", "running"
_NAME = re.compile("(%s|%s)-([0-9]{9,})-([^.].*)" % (WAITING, RUNNING))


class Ticket(NamedTuple):
    """One run in a queue, as its file's name says; they sort in the order in which they go."""

    state: str
    place: int
    run_id: str

    @property
    def name(self) -> str:
        """The file's name."""
        return "%s-%09d-%s" % (self.state, self.place, self.run_id)


class Tickets:
    """The tickets below ``folder``, for runs of ``root``; the folder comes and goes with them."""

    def __init__(self, root: str, folder: str) -> None:
        self._root = root
        self._folder = folder

    def add(self, ticket: Ticket, content: bytes = b"") -> int:
        """Puts a ticket in and returns its locked descriptor; the queue's lock must be held, so that nobody
        finds it unheld.
        """
        fd = os.open(self.path(ticket), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        os.write(fd, content)
        return fd

    def remove(self, ticket: Ticket, fd: int) -> None:
        """Gives a ticket back; the queue's lock must be held."""
        os.close(fd)
        try:
            os.unlink(self.path(ticket))
        except FileNotFoundError:
            pass  # cleared away by hand

    def is_over(self, ticket: Ticket) -> bool:
        """Tells whether nothing of the ticket's run is left, and clears it away then."""
        if is_held(self.path(ticket)) or RunDir(self._root, ticket.run_id).orphans():
            return False
        try:
            os.unlink(self.path(ticket))
        except OSError:
            pass  # no ticket of ours: a folder, say
        return True

    def all(self) -> List[Ticket]:
        """Returns the tickets in the order in which they go."""
        found = []
        for name in os.listdir(self._folder):
            match = _NAME.fullmatch(name)
            if match:
                found.append(Ticket(match.group(1), int(match.group(2)), match.group(3)))
        return sorted(found)

    def path(self, ticket: Ticket) -> str:
        """Returns the ticket's file."""
        return os.path.join(self._folder, ticket.name)

    @contextmanager
    def lock(self, patience_s: float) -> Iterator[None]:
        """Holds the queue's lock: the one that others find there, not one that was removed meanwhile.

        A queue that is empty then leaves nothing behind.

        Raises:
            TimeoutError: somebody else has held it for ``patience_s``.
        """
        while True:
            os.makedirs(self._folder, mode=0o700, exist_ok=True)
            try:
                fd = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except FileNotFoundError:
                continue
            try:
                if not take(fd, exclusive=True, patience_s=patience_s):
                    what = "%s has been held for %g s: by a supervisor that was stopped there?"
                    raise TimeoutError(what % (self._lock_path, patience_s))
                if is_at(fd, self._lock_path):
                    try:
                        yield
                    finally:
                        self._leave_none()
                    return
            finally:
                os.close(fd)

    def _leave_none(self) -> None:
        if self.all():
            return
        try:
            os.unlink(self._lock_path)
            os.rmdir(self._folder)
        except OSError:
            pass  # the next one is on its way in

    @property
    def _lock_path(self) -> str:
        return os.path.join(self._folder, "lock")
