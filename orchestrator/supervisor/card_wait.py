"""How a run comes to its cards: look, take, and while they cannot be had wait and say why.

Between two looks the run's loop goes on (``step``), so that signs of life are given and a request to stop is
met. The first look decides whether the cards can ever be had; what fails later, as a driver does for a
moment, is one more obstacle.
"""

import errno
import time
from typing import Any, Callable, Dict, List, Optional

from . import gpus
from .leases import Leases, Obstacle
from .program import Refused
from .records import RecordWriter
from .rundir import RunDir
from .sampling import Look

STEP_S = 10.0
LEAST_PAUSE_S, MOST_PAUSE_S = 1.0, 10.0
_PAUSES_A_LOOK = 50  # looking takes no more than a fiftieth of the time
_MOST_NAMED = 20


class CardWait:
    """One run's wait; ``step`` lets the loop go on for at most so many seconds and tells whether the run is
    to go on too, ``watch`` has the loop read a source.
    """

    def __init__(
        self,
        run: RunDir,
        writer: RecordWriter,
        job: Dict[str, Any],
        watch: Callable[[Look], None],
        step: Callable[[float], bool],
    ) -> None:
        self._run = run
        self._writer = writer
        self._waits = job.get("waits_for_cards") is not False
        self._leases = Leases(run, job["devices"], bool(job.get("shares_cards")))
        self._watch = watch
        self._step = step

    @property
    def fds(self) -> List[int]:
        """What the payload inherits once the cards are there."""
        return self._leases.fds

    def cards(self) -> Optional[List[gpus.Card]]:
        """Returns the cards, None when the run was stopped before.

        Raises:
            Refused: they can never be had, or not now and the run does not wait.
        """
        began, told, is_first = time.monotonic(), None, True
        while True:
            looked = time.monotonic()
            look = self._look()
            if look is None:
                return None
            chosen, obstacles = self._try_take(look, is_first)
            if chosen:
                waited_s = round(time.monotonic() - began, 3)
                self._writer.write("cards", cards=gpus.as_record(chosen), waited_s=waited_s)
                self._note("running", cards=[card.label for card in chosen], obstacles=[])
                return chosen
            if {obstacle.who for obstacle in obstacles} != told:
                told = {obstacle.who for obstacle in obstacles}
                said = [obstacle.says for obstacle in obstacles[:_MOST_NAMED]]
                self._writer.write("cards_awaited", obstacles=said)
                self._note("waiting", obstacles=said)
            is_first = False
            pause_s = _PAUSES_A_LOOK * (time.monotonic() - looked)
            if not self._go_on(min(MOST_PAUSE_S, max(LEAST_PAUSE_S, pause_s))):
                return None

    def leave(self) -> None:
        """Gives the cards, or the place in the queue, back."""
        self._leases.leave()

    def hold_shared(self) -> None:
        """Takes the lock of a card that was shared with somebody who held it alone, once that is gone."""
        self._leases.hold_shared()

    def _look(self) -> Optional[Look]:
        look = Look()
        self._watch(look)
        while look.is_open:
            if not self._step(STEP_S):
                look.end()
                return None
        return look

    def _try_take(self, look: Look, is_first: bool) -> "tuple[List[gpus.Card], List[Obstacle]]":
        try:
            chosen = self._leases.try_take(look.cards())
        except gpus.DeviceError as error:
            if is_first:
                raise Refused(str(error)) from error
            return [], [Obstacle("driver", str(error))]
        obstacles = self._leases.obstacles
        if not chosen and not self._waits:
            said = "; ".join(obstacle.says for obstacle in obstacles[:_MOST_NAMED])
            raise Refused("%s; without --no-wait it waits, with --share it runs all the same" % said)
        return chosen, obstacles

    def _go_on(self, pause_s: float) -> bool:
        end = time.monotonic() + pause_s
        while time.monotonic() < end:
            if not self._step(end - time.monotonic()):
                return False
        return True

    def _note(self, state: str, **more: Any) -> None:
        """The records say it too: on a full disk, where they wait, this does not."""
        try:
            self._run.change_state(state, **more)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
