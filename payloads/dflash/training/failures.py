"""What ends a training from inside; every message says who, what, and what to look at next.

TrainingFailure
├── MemberFailed   a target worker or a drafter raised
├── Stalled        something that was owed did not come in time
├── RankLost       a drafter does not take part in a sum any more
└── QueueClosed    the other side has ended; for a worker that is the normal end
"""


class TrainingFailure(RuntimeError):
    """The training cannot go on."""


class MemberFailed(TrainingFailure):
    """A worker or drafter raised; `__cause__` is what it raised, where it is of this process."""

    def __init__(self, who: str, reason: str) -> None:
        super().__init__(f"{who} failed: {reason}")
        self.who = who


class Stalled(TrainingFailure):
    """A drafter waited for a row longer than the time-out."""

    def __init__(
        self, *, drafter: int, epoch: int, number: int, worker: int, timeout_s: float, seen: str
    ) -> None:
        super().__init__(
            f"drafter {drafter} waited {timeout_s:g} s for row {number} of epoch {epoch}, "
            f"which target worker {worker} owes; {seen}; look at what that worker does, "
            "or give the queue a longer time-out"
        )
        self.epoch, self.number, self.worker = epoch, number, worker


class RankLost(TrainingFailure):
    """A sum over drafters cannot be completed."""


class QueueClosed(TrainingFailure):
    """Nobody takes or brings rows any more."""


def reason_of(error: BaseException) -> str:
    """Return an exception in one line."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
