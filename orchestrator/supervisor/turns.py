"""Turns in a queue on this host: at most so many of its runs at once, the others first come by their place.

A run's ticket is a file below ``turns/<queue>/``, locked by its supervisor; the payload inherits the lock. A
ticket that nobody holds is over once nothing of its run is left, and whoever sees that removes it. Its name
says how it stands (`_WAITING` or `_RUNNING`), its place and its run. Who may go is decided under the queue's
lock; between two decisions a run looks only at those it waits for.
"""

import fcntl
import os
import re
from contextlib import contextmanager
from typing import Any, Dict, Iterator, List, NamedTuple, Optional

from .locks import is_held
from .rundir import RunDir, checked_name

_WAITING, _RUNNING = "waiting", "running"
_TICKET = re.compile("(%s|%s)-([0-9]{9,})-([^.].*)" % (_WAITING, _RUNNING))
_NEXT_PAUSE_S = 0.2
_PAUSE_S = 1.0


class Ticket(NamedTuple):
    """One run in a queue, as its file's name says; they sort in the order in which they go."""

    state: str
    place: int
    run_id: str

    @property
    def name(self) -> str:
        """The file's name."""
        return "%s-%09d-%s" % (self.state, self.place, self.run_id)


def check(turn: Optional[Dict[str, Any]]) -> None:
    """Raises ValueError unless ``turn`` is a job's: None, or a queue's name, a place and a number."""
    if turn is None:
        return
    checked_name(turn["queue"], "queue")
    for key, least in (("place", 0), ("at_once", 1)):
        if type(turn[key]) is not int or turn[key] < least:
            raise ValueError("a turn's %s is an integer from %d on, not %r" % (key, least, turn[key]))


class Turn:
    """A run's ticket in the queue that ``turn`` names; it waits from its making on."""

    def __init__(self, run: RunDir, turn: Dict[str, Any]) -> None:
        self._root = run.root
        self._at_once: int = turn["at_once"]
        self._folder = os.path.join(run.root, "turns", turn["queue"])
        self._ticket = Ticket(_WAITING, turn["place"], run.run_id)
        self._ahead: List[Ticket] = []
        self.fd = self._queue_up()

    def try_take(self) -> bool:
        """Tells whether the turn has come; from then on it is taken, until `leave` or the last process's
        end.
        """
        watched = self._ahead[-self._at_once :]  # while these are there, nothing has changed for us
        if watched and all(is_held(self._path(ticket)) for ticket in watched):
            return False
        with self._lock():
            # a ticket that runs sorts before each that waits, whatever their places
            earlier = [ticket for ticket in self._tickets() if ticket < self._ticket]
            self._ahead = [ticket for ticket in earlier if not self._is_over(ticket)]
            if len(self._ahead) >= self._at_once:
                return False
            taken = self._ticket._replace(state=_RUNNING)
            os.rename(self._path(self._ticket), self._path(taken))
            self._ticket = taken
        return True

    @property
    def ahead(self) -> List[str]:
        """The ids of the runs that it waited for when it last had to find out, the running ones first."""
        return [ticket.run_id for ticket in self._ahead]

    @property
    def pause_s(self) -> float:
        """How long to wait before the next look: shorter for who is next, so that a long queue is quiet."""
        return _NEXT_PAUSE_S if all(ticket.state == _RUNNING for ticket in self._ahead) else _PAUSE_S

    def leave(self) -> None:
        """Gives the turn, or the place in the queue, back; the queue's folder goes with its last ticket."""
        with self._lock():
            os.close(self.fd)
            try:
                os.unlink(self._path(self._ticket))
                if not self._tickets():
                    os.unlink(self._lock_path)
                    os.rmdir(self._folder)
            except OSError:
                pass  # cleared away by hand, or the next one is on its way in

    def _queue_up(self) -> int:
        """A ticket is locked before anybody else can take the queue's lock and find it unheld."""
        with self._lock():
            fd = os.open(self._path(self._ticket), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(fd, fcntl.LOCK_EX)
        return fd

    def _is_over(self, ticket: Ticket) -> bool:
        """Tells whether nothing of the ticket's run is left, and clears it away then."""
        if is_held(self._path(ticket)) or RunDir(self._root, ticket.run_id).orphans():
            return False
        os.unlink(self._path(ticket))
        return True

    def _tickets(self) -> List[Ticket]:
        found = []
        for name in os.listdir(self._folder):
            match = _TICKET.fullmatch(name)
            if match:
                found.append(Ticket(match.group(1), int(match.group(2)), match.group(3)))
        return sorted(found)

    def _path(self, ticket: Ticket) -> str:
        return os.path.join(self._folder, ticket.name)

    @property
    def _lock_path(self) -> str:
        return os.path.join(self._folder, "lock")

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Holds the queue's lock: the one that others find there, not one that was removed meanwhile."""
        while True:
            os.makedirs(self._folder, mode=0o700, exist_ok=True)
            try:
                fd = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except FileNotFoundError:
                continue
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
                if _is_at(fd, self._lock_path):
                    yield
                    return
            finally:
                os.close(fd)


def _is_at(fd: int, path: str) -> bool:
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(fd), there)
