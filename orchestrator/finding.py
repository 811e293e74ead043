"""One line of what `orch doctor` says of a host: how one thing stands and, where it is bad, what to do."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Self

__all__ = ["Finding", "Level"]


class Level(StrEnum):
    """What a finding means for runs on this host."""

    OK = "ok"
    WARNING = "warning"
    FAULT = "fault"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What was found about ``name``; ``next`` says what to do, None only where nothing has to be done."""

    name: str
    level: Level
    says: str
    next: str | None = None

    def __post_init__(self) -> None:
        assert (self.next is None) == (self.level is Level.OK), "what is not well needs a next step"

    @classmethod
    def ok(cls, name: str, says: str) -> Self:
        """Returns a finding that asks for nothing."""
        return cls(name=name, level=Level.OK, says=says)

    @classmethod
    def warning(cls, name: str, says: str, next_step: str) -> Self:
        """Returns one with which runs work, but not all that is promised of them holds."""
        return cls(name=name, level=Level.WARNING, says=says, next=next_step)

    @classmethod
    def fault(cls, name: str, says: str, next_step: str) -> Self:
        """Returns one with which runs fail, or those do that need what it is about."""
        return cls(name=name, level=Level.FAULT, says=says, next=next_step)
