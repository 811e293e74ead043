"""Cards that one run at a time has: leases, and the queue of those who wait for one.

A lease is a lock (`flock`) on the card's node under /dev, which is one file for every user and container that
has the card; where no node is known it is a file below ``leases/``, for the runs of this root alone. The
payload inherits it: a card is free when the last process that has it is gone, also after a killed supervisor.
``leases/<uuid>.json`` names the runs of this root that have the card: for messages, for what a run left
behind, and for those that share it.

Who waits has a ticket below ``leases/queue/`` with what it asks for, in the order in which they came. Nobody
takes a card that somebody further ahead could take. Strangers have no lease: they show by their processes and
by memory in use.
"""

import json
import os
import stat
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Set

from . import gpus
from .gpus import Asked, Card
from .locks import take
from .rundir import RunDir
from .tickets import WAITING, Ticket, Tickets

_FOLDER = "leases"
_MOST_CONTENT = 64 * 1024
_PATIENCE_S, _MOMENT_S = 10.0, 0.5  # for the queue's lock, which is held for milliseconds


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
        self._unlocked: Set[int] = set()
        self.obstacles: List[Obstacle] = []
        with self._tickets.lock(_PATIENCE_S):
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
        self.obstacles = []
        try:
            with self._tickets.lock(_MOMENT_S):
                return self._take_all(candidates, present)
        except TimeoutError as error:  # somebody is at it, or was stopped while at it
            self.obstacles = [Obstacle("queue", str(error))]
            return []

    def _take_all(self, candidates: Sequence[Card], present: Sequence[Card]) -> List[Card]:
        wanted = len(self._asked.names) or self._asked.number
        if self._asked.number:
            candidates = sorted(candidates, key=lambda card: -card.free_mib)
        reserved = self._reserved(present)
        chosen: List[Card] = []
        for card in candidates:
            if len(chosen) < wanted and self._take(card, reserved):
                chosen.append(card)
        if len(chosen) < wanted:
            self._let_go()
            return []
        for card in chosen:
            self._describe(card.uuid, [*self._live_holders(card.uuid), self._run.run_id])
        self._leave_queue()
        return sorted(chosen, key=lambda card: card.number) if self._asked.number else chosen

    def leave(self) -> None:
        """Gives the cards, or the place in the queue, back; what cannot be tidied up now, others will."""
        try:
            with self._tickets.lock(_PATIENCE_S):
                for uuid in self._held:
                    self._describe(uuid, [run for run in self._described(uuid) if run != self._run.run_id])
                self._let_go()
                self._leave_queue()
        except TimeoutError:
            self._let_go()

    def hold_shared(self) -> None:
        """Takes the locks that could not be had while somebody held the shared cards alone."""
        self._unlocked = {fd for fd in self._unlocked if not take(fd, exclusive=False)}

    def _take(self, card: Card, reserved: Dict[str, str]) -> bool:
        """Takes a card's lock, if nothing is in the way."""
        try:
            fd = _open(self._run.root, card)
        except gpus.DeviceError as error:
            if self._asked.names:
                raise
            self.obstacles.append(Obstacle("%s node" % card.uuid, str(error)))
            return False
        is_ours = take(fd, exclusive=not self._is_shared)
        obstacle = None if self._is_shared else self._obstacle(card, is_ours, reserved)
        if obstacle is not None:
            self.obstacles.append(obstacle)
            os.close(fd)
            return False
        self._held[card.uuid] = fd
        if not is_ours:
            self._unlocked.add(fd)
        return True

    def _obstacle(self, card: Card, is_ours: bool, reserved: Dict[str, str]) -> Optional[Obstacle]:
        if not is_ours or self._live_holders(card.uuid):
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
        leased = {card.uuid for card in present if is_leased(self._run.root, card)}
        for ticket in self._tickets.all():
            if self._ticket is None or ticket >= self._ticket:
                break
            if self._tickets.is_over(ticket) or RunDir(self._run.root, ticket.run_id).is_stopped:
                continue
            try:
                with open(self._tickets.path(ticket), "rb") as file:
                    content = json.loads(file.read(_MOST_CONTENT))
                asked = Asked.of(content["devices"])
                if asked is None or content["is_shared"]:
                    continue
                wanted = asked.candidates(present)
            except (OSError, ValueError, KeyError, TypeError, gpus.DeviceError):
                continue  # it will be refused itself, or has gone
            for card in wanted:
                # A stranger may stay for ever: who waits for it keeps nobody else from the card.
                if card.uuid in leased or not asked.occupied(card):
                    reserved.setdefault(card.uuid, ticket.run_id)
        return reserved

    def _holder(self, card: Card) -> str:
        runs = self._live_holders(card.uuid)
        if runs:
            return "run %s" % " and run ".join(runs)
        left = self._left_over(card)
        if left is not None:
            return "what is left of run %s" % left
        return "another user or container of this machine, or another root than %s" % self._run.root

    def _live_holders(self, uuid: str) -> List[str]:
        return [run for run in self._described(uuid) if RunDir(self._run.root, run).is_alive]

    def _left_over(self, card: Card) -> Optional[str]:
        """Returns a run that had the card and still has processes, without a supervisor."""
        runs = self._described(card.uuid)
        return next((run for run in runs if RunDir(self._run.root, run).orphans()), None)

    def _describe(self, uuid: str, runs: Sequence[str]) -> None:
        """Notes which runs of this root have a card; on a full disk the locks alone say so."""
        path = self._description(uuid)
        try:
            if not runs:
                os.unlink(path)
                return
            with open(path + ".new", "w", encoding="utf-8") as file:
                json.dump({"runs": runs}, file)
            os.rename(path + ".new", path)
        except OSError:
            pass  # cleared away by hand, or no room for it

    def _described(self, uuid: str) -> List[str]:
        try:
            with open(self._description(uuid), encoding="utf-8") as file:
                return [str(run) for run in json.load(file)["runs"]]
        except (OSError, ValueError, KeyError, TypeError):
            return []

    def _description(self, uuid: str) -> str:
        return os.path.join(self._folder, uuid.replace("/", "_") + ".json")

    def _let_go(self) -> None:
        for fd in self._held.values():
            os.close(fd)
        self._held.clear()
        self._unlocked.clear()

    def _leave_queue(self) -> None:
        if self._ticket is not None:
            self._tickets.remove(self._ticket, self._ticket_fd)
            self._ticket = None


def is_leased(root: str, card: Card) -> bool:
    """Tells whether somebody has the card, alone or shared, as far as runs of ``root`` could see."""
    try:
        fd = os.open(_lock_path(root, card), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return not take(fd, exclusive=True)
    finally:
        os.close(fd)


def _open(root: str, card: Card) -> int:
    """Opens what a lease of the card locks.

    Raises:
        DeviceError: the card's node may not be opened here.
    """
    path = _lock_path(root, card)
    if path != card.node:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise gpus.DeviceError("card %s: cannot open %s: %s" % (card, path, error.strerror)) from error


def _lock_path(root: str, card: Card) -> str:
    try:
        if card.node is not None and stat.S_ISCHR(os.stat(card.node).st_mode):
            return card.node
    except OSError:
        pass  # a node that is not there
    return os.path.join(root, _FOLDER, card.uuid.replace("/", "_") + ".lock")
