"""Cards that one run at a time has: leases, and the queue of those who wait for one.

A lease is a lock (`flock`) on the card's node under /dev, which is one file for every user and container that
has the card; where no node is known it is a file below ``leases/``, for the runs of this root alone. The
payload inherits it: a card is free when the last process that has it is gone, also after a killed supervisor.
``leases/<uuid>.json`` names the last run of this root that had the card: for messages, and to wait for what
such a run left behind.

Who waits has a ticket below ``leases/queue/`` with what it asks for, in the order in which they came. Nobody
takes a card that somebody further ahead could take. Strangers have no lease: they show by their processes and
by memory in use.
"""

import errno
import json
import os
import stat
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

from . import gpus
from .gpus import Asked, Card
from .locks import take
from .rundir import RunDir
from .tickets import WAITING, Ticket, Tickets

_FOLDER = "leases"
_MOST_CONTENT = 64 * 1024


class Obstacle(NamedTuple):
    """Why a run does not get a card now; ``who`` stays the same while ``says`` counts."""

    who: str
    says: str


class Leases:
    """The cards of one run: it waits from its making on, until `try_take` gives them or `leave`.

    With ``is_shared`` neither strangers nor leases are in the way, and others see that the card is taken.
    """

    def __init__(self, run: RunDir, devices: Any, is_shared: bool) -> None:
        asked = Asked.of(devices)
        assert asked is not None, "a run without devices has nothing to wait for"
        self._asked = asked
        self._run = run
        self._is_shared = is_shared
        self._folder = os.path.join(run.root, _FOLDER)
        os.makedirs(self._folder, mode=0o700, exist_ok=True)
        self._tickets = Tickets(run.root, os.path.join(self._folder, "queue"))
        self._ticket: Optional[Ticket] = None
        self._ticket_fd = -1
        self._held: Dict[str, int] = {}
        self.obstacles: List[Obstacle] = []
        with self._tickets.lock():
            place = max((ticket.place for ticket in self._tickets.all()), default=0) + 1
            self._ticket = Ticket(WAITING, place, run.run_id)
            content = json.dumps({"devices": devices, "is_shared": is_shared})
            self._ticket_fd = self._tickets.add(self._ticket, content.encode("ascii"))

    @property
    def fds(self) -> List[int]:
        """The leases' descriptors, for the payload to inherit."""
        return list(self._held.values())

    def try_take(self, present: Sequence[Card]) -> List[Card]:
        """Returns the cards once all of them can be had, and none before that; `obstacles` say why not.

        Raises:
            DeviceError: they can never be had.
        """
        candidates = self._asked.candidates(present)
        wanted = len(self._asked.names) or self._asked.number
        self.obstacles = []
        with self._tickets.lock():
            reserved = self._reserved(present)
            chosen: List[Card] = []
            for card in (
                sorted(candidates, key=lambda card: -card.free_mib) if self._asked.number else candidates
            ):
                if len(chosen) < wanted and self._take(card, reserved):
                    chosen.append(card)
            if len(chosen) < wanted:
                self._let_go()
                return []
            for card in chosen:
                if not self._is_shared or self._live_holder(card.uuid) is None:
                    self._describe(card)
            self._leave_queue()
        return sorted(chosen, key=lambda card: card.number) if self._asked.number else chosen

    def leave(self) -> None:
        """Gives the cards, or the place in the queue, back."""
        with self._tickets.lock():
            for uuid in self._held:
                if self._described(uuid) == self._run.run_id:
                    os.unlink(self._description(uuid))
            self._let_go()
            self._leave_queue()

    def _take(self, card: Card, reserved: Dict[str, str]) -> bool:
        """Takes a card's lock, if nothing is in the way."""
        fd = self._open(card)
        is_ours = take(fd, exclusive=not self._is_shared)
        obstacle = None if self._is_shared else self._obstacle(card, is_ours, reserved)
        if obstacle is not None:
            self.obstacles.append(obstacle)
            os.close(fd)
            return False
        self._held[card.uuid] = fd
        return True

    def _obstacle(self, card: Card, is_ours: bool, reserved: Dict[str, str]) -> Optional[Obstacle]:
        if not is_ours:
            holder = self._holder(card)
            return Obstacle("%s %s" % (card.uuid, holder), "card %s is held by %s" % (card.label, holder))
        left = self._left_over(card)
        if left is not None:
            return Obstacle(
                "%s %s" % (card.uuid, left),
                "card %s is still used by what is left of run %s" % (card.label, left),
            )
        if card.uuid in reserved:
            first = reserved[card.uuid]
            return Obstacle(
                "%s %s" % (card.uuid, first), "card %s is for run %s, which came first" % (card.label, first)
            )
        occupied = self._asked.occupied(card)
        if occupied is not None:
            pids = " ".join(str(pid) for pid, _ in card.processes)
            return Obstacle("%s stranger %s" % (card.uuid, pids), "card %s %s" % (card.label, occupied))
        return None

    def _reserved(self, present: Sequence[Card]) -> Dict[str, str]:
        """Returns for each card that a run further ahead could take the first such run."""
        reserved: Dict[str, str] = {}
        for ticket in self._tickets.all():
            if self._ticket is None or ticket >= self._ticket:
                break
            if self._tickets.is_over(ticket):
                continue
            try:
                with open(self._tickets.path(ticket), "rb") as file:
                    content = json.loads(file.read(_MOST_CONTENT))
                asked = Asked.of(content["devices"])
                wanted = [] if asked is None or content["is_shared"] else asked.candidates(present)
            except (OSError, ValueError, KeyError, TypeError, gpus.DeviceError):
                continue  # it will be refused itself, or has gone
            for card in wanted:
                reserved.setdefault(card.uuid, ticket.run_id)
        return reserved

    def _holder(self, card: Card) -> str:
        run_id = self._live_holder(card.uuid)
        if run_id is not None:
            return "run %s" % run_id
        left = self._left_over(card)
        if left is not None:
            return "what is left of run %s" % left
        return "another user or container of this machine, or another root than %s" % self._run.root

    def _live_holder(self, uuid: str) -> Optional[str]:
        run_id = self._described(uuid)
        return run_id if run_id is not None and RunDir(self._run.root, run_id).is_alive else None

    def _left_over(self, card: Card) -> Optional[str]:
        """Returns the run that had the card last and still has processes, without a supervisor."""
        run_id = self._described(card.uuid)
        return run_id if run_id is not None and RunDir(self._run.root, run_id).orphans() else None

    def _open(self, card: Card) -> int:
        if card.node is not None:
            try:
                if stat.S_ISCHR(os.stat(card.node).st_mode):
                    return os.open(card.node, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                if error.errno != errno.ENOENT:
                    raise gpus.DeviceError(
                        "card %s: cannot open %s: %s" % (card, card.node, error.strerror)
                    ) from error
        path = os.path.join(self._folder, card.uuid.replace("/", "_") + ".lock")
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def _describe(self, card: Card) -> None:
        path = self._description(card.uuid)
        with open(path + ".new", "w", encoding="utf-8") as file:
            json.dump({"run": self._run.run_id}, file)
        os.rename(path + ".new", path)

    def _described(self, uuid: str) -> Optional[str]:
        try:
            with open(self._description(uuid), encoding="utf-8") as file:
                return str(json.load(file)["run"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _description(self, uuid: str) -> str:
        return os.path.join(self._folder, uuid.replace("/", "_") + ".json")

    def _let_go(self) -> None:
        for fd in self._held.values():
            os.close(fd)
        self._held.clear()

    def _leave_queue(self) -> None:
        if self._ticket is not None:
            self._tickets.remove(self._ticket, self._ticket_fd)
            self._ticket = None
