"""Turns in a queue on this host: at most so many of its runs at once, the others first come by their place.

A run's ticket (`tickets`) is a file below ``turns/<queue>/``, locked by its supervisor; the payload inherits
the lock. Between two decisions a run looks only at those it waits for.
"""

import os
from typing import Any, Dict, List, Optional

from .locks import is_held
from .rundir import RunDir, checked_name
from .tickets import RUNNING, WAITING, Ticket, Tickets

_NEXT_PAUSE_S = 0.2
_PAUSE_S = 1.0
_PATIENCE_S, _MOMENT_S = 10.0, 0.5  # for the queue's lock, which is held for milliseconds


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
        self._at_once: int = turn["at_once"]
        self._tickets = Tickets(run.root, os.path.join(run.root, "turns", turn["queue"]))
        self._ticket = Ticket(WAITING, turn["place"], run.run_id)
        self._ahead: List[Ticket] = []
        with self._tickets.lock(_PATIENCE_S):
            self.fd = self._tickets.add(self._ticket)

    def try_take(self) -> bool:
        """Tells whether the turn has come; from then on it is taken, until `leave` or the last process's
        end.
        """
        watched = self._ahead[-self._at_once :]  # while these are there, nothing has changed for us
        if watched and all(is_held(self._tickets.path(ticket)) for ticket in watched):
            return False
        try:
            return self._take()
        except TimeoutError:  # somebody is at it, or was stopped while at it
            return False

    def _take(self) -> bool:
        with self._tickets.lock(_MOMENT_S):
            # a ticket that runs sorts before each that waits, whatever their places
            earlier = [ticket for ticket in self._tickets.all() if ticket < self._ticket]
            self._ahead = [ticket for ticket in earlier if not self._tickets.is_over(ticket)]
            if len(self._ahead) >= self._at_once:
                return False
            taken = self._ticket._replace(state=RUNNING)
            os.rename(self._tickets.path(self._ticket), self._tickets.path(taken))
            self._ticket = taken
        return True

    @property
    def ahead(self) -> List[str]:
        """The ids of the runs that it waited for when it last had to find out, the running ones first."""
        return [ticket.run_id for ticket in self._ahead]

    @property
    def pause_s(self) -> float:
        """How long to wait before the next look: shorter for who is next, so that a long queue is quiet."""
        return _NEXT_PAUSE_S if all(ticket.state == RUNNING for ticket in self._ahead) else _PAUSE_S

    def leave(self) -> None:
        """Gives the turn, or the place in the queue, back; what cannot be tidied up now, others will."""
        try:
            with self._tickets.lock(_PATIENCE_S):
                self._tickets.remove(self._ticket, self.fd)
        except TimeoutError:
            os.close(self.fd)
