"""What a run can be, and how it goes from one state to the next.

::

    CREATED ──→ STARTING ──→ QUEUED ──→ RUNNING ──→ SUCCEEDED   the process ended with 0
       │            │           │          ├──────→ FAILED      … with another code
       │            │           │          ├──────→ KILLED      … by a signal
       │            │           │          ├──────→ TIMEOUT     ended by the supervisor: its time was over
       ├────────────┼───────────┼──────────┼──────→ CANCELLED   … because somebody asked for it
       ├────────────┼───────────┼──────────┴──────→ REFUSED     not started, or stopped before any work
       └────────────┴───────────┴─────────────────→ LOST        nothing is known of it where it should be

QUEUED means that the host has the run and it waits there: for its turn, for what is being prepared, or for
its cards.

A controller that looks late may skip states forward, never go back. A terminal state stays, with one
exception: LOST says that nothing was found, so what is found later corrects it. Network loss is no transition
at all.

A state is what the process did; what that means for the experiment is a `verdict.Verdict`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from orchestrator.errors import OrchError


class State(StrEnum):
    """What a run is doing or did, as far as the controller knows; the values stand in the ledger."""

    CREATED = "created"
    STARTING = "starting"
    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    KILLED = "killed"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    REFUSED = "refused"
    LOST = "lost"


_ACTIVE = frozenset({State.CREATED, State.STARTING, State.QUEUED, State.RUNNING})
_ENDED = frozenset(State) - _ACTIVE - {State.LOST}

TRANSITIONS: Mapping[State, frozenset[State]] = {
    State.CREATED: frozenset({State.STARTING, State.QUEUED, State.RUNNING, State.LOST}) | _ENDED,
    State.STARTING: frozenset({State.QUEUED, State.RUNNING, State.LOST}) | _ENDED,
    State.QUEUED: frozenset({State.RUNNING, State.LOST}) | _ENDED,
    State.RUNNING: frozenset({State.LOST}) | _ENDED,
    State.LOST: frozenset({State.QUEUED, State.RUNNING}) | _ENDED,
    **{state: frozenset() for state in _ENDED},
}


def is_terminal(state: State) -> bool:
    """Nothing more is waited for."""
    return state not in _ACTIVE


def is_settled(state: State) -> bool:
    """Nothing that a host says can change it; a lost run may still be found."""
    return state in _ENDED


def check_transition(old: State, new: State) -> None:
    """Accepts a step that `TRANSITIONS` holds, and staying where one is.

    Raises:
        OrchError: any other step.
    """
    if new is not old and new not in TRANSITIONS[old]:
        raise OrchError(f"a run that is {old} cannot become {new}; its first end stands")
