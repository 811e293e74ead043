"""Which card a host has, as its runs have told: for a prediction before the next one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from orchestrator.errors import OrchError
from orchestrator.mirror_reader import read_records
from orchestrator.run_folder import RunFolder
from orchestrator.workspace import Workspace

__all__ = ["HostCard", "last_card"]

MOST_ROWS = 200
MOST_RUNS = 5
MOST_RECORDS = 2000


@dataclass(frozen=True, kw_only=True, slots=True)
class HostCard:
    """A card as torch reported it in a run: its name, its memory and its architecture."""

    name: str
    total_bytes: int
    capability: tuple[int, int]

    @classmethod
    def of(cls, told: object) -> HostCard | None:
        """Returns the card that a record, or a file of ours, tells of; None where it does not tell all."""
        if not isinstance(told, Mapping):
            return None
        name, total_bytes, capability = (told.get(key) for key in ("name", "total_bytes", "capability"))
        if not isinstance(capability, list) or len(capability) != 2:
            return None
        if not all(type(number) is int and 0 <= number < 100 for number in capability):
            return None
        if not isinstance(name, str) or type(total_bytes) is not int or not 0 < total_bytes < 2**53:
            return None
        return cls(name=name, total_bytes=total_bytes, capability=(capability[0], capability[1]))

    @property
    def text(self) -> str:
        """The card in the form that estimates take, to the byte: ``139.8GiB:sm_90``."""
        major, minor = self.capability
        return f"{self.total_bytes / 2**30!r}GiB:sm_{major}{minor}"

    def as_json(self) -> dict[str, Any]:
        """Returns plain JSON values."""
        return {**asdict(self), "capability": list(self.capability)}


def last_card(workspace: Workspace, host: str) -> HostCard | None:
    """Returns the card that the newest run on ``host`` with one has told, the smallest of several; None where
    no mirror here knows.
    """
    rows = [row for row in workspace.ledger.recent(MOST_ROWS, host) if row.job.get("devices")]
    for row in rows[:MOST_RUNS]:
        cards = _told(workspace.folder(row.run_id))
        if cards:
            return min(cards, key=lambda card: card.total_bytes)
    return None


def _told(folder: RunFolder) -> list[HostCard]:
    """Reads the beginning of a run, where its process tells of its cards."""
    try:
        for record in islice(read_records(folder), MOST_RECORDS):
            if record["kind"] == "facts" and isinstance(devices := record.get("devices"), list):
                return [card for device in devices if (card := HostCard.of(device)) is not None]
    except (OrchError, OSError):
        return []
    return []
