"""What a run's records tell of memory that was out, in one pass over them (pure).

Records come from a host and are believed only as far as their types go. Output is searched piece by piece, so
that a log of any length takes no more memory than a message.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from orchestrator.forensics.captures import Capture, read_capture
from orchestrator.forensics.growth import Growth, Series, steady_growth
from orchestrator.forensics.messages import Finder, Found
from orchestrator.outcome import Record
from orchestrator.supervisor import ranks
from orchestrator.text import gib, printable

__all__ = ["Evidence", "Told"]

MOST_CAPTURES = 16
MOST_STRANGERS = 5
MOST_SERIES = 64
MOST_VALUES = 4096
_MIB = 2**20
_UNITS = {"_bytes": 1, "_mib": _MIB, "_gib": 2**30}


@dataclass(frozen=True, kw_only=True, slots=True)
class Told:
    """All that was told: ``exceptions`` by process, what was ``found`` in output by process and stream.

    ``cards`` and ``limits`` are those that the first process told, by its own numbers of the cards.
    """

    exceptions: Mapping[str, str]
    found: Mapping[tuple[str, str], Found]
    captures: tuple[Capture, ...]
    growths: tuple[Growth, ...]
    strangers: tuple[str, ...]
    cards: tuple[Mapping[str, Any], ...]
    limits: Mapping[int, int]

    def output_of(self, proc: str | None) -> tuple[str, Found]:
        """Returns where a message was printed (``main.stderr``) and what was: of ``proc`` where it printed
        any, else of whoever did.
        """
        told = [(key, found) for key, found in self.found.items() if found.count]
        told.sort(key=lambda entry: (entry[0][0] != proc, entry[0][1] != "stderr"))
        return (".".join(told[0][0]), told[0][1]) if told else ("", Found())


@dataclass(slots=True)
class Evidence:
    """Collects what records tell while somebody else reads them too."""

    _finders: dict[tuple[str, str], Finder] = field(default_factory=dict)
    _exceptions: dict[str, str] = field(default_factory=dict)
    _captures: list[Capture] = field(default_factory=list)
    _series: dict[str, list[int]] = field(default_factory=dict)
    _names: dict[str, str] = field(default_factory=dict)
    _strangers: list[str] = field(default_factory=list)
    _cards: tuple[Mapping[str, Any], ...] = ()
    _limits: dict[int, int] = field(default_factory=dict)

    def passing(self, records: Iterable[Record]) -> Iterator[Record]:
        """Yields the records as they are, each one read."""
        for record in records:
            self.read(record)
            yield record

    def read(self, record: Record) -> None:
        """Takes what a record tells."""
        kind = record.get("kind")
        if kind == "out":
            self._read_output(record)
        elif kind == "exception":
            if isinstance(name := record.get("type"), str):
                self._exceptions.setdefault(_proc(record), f"{name}: {record.get('message') or ''}")
        elif kind == "event" and isinstance(event := record.get("event"), Mapping):
            self._read_event(event, _proc(record))
        elif kind == "oom":
            self._capture(record, _proc(record))
        elif kind == "facts":
            self._read_facts(record)
        elif kind in ("cards", "gpus"):
            for card in _mappings(record.get("cards")):
                self._read_card(card, is_sample=kind == "gpus")
        elif kind == "stranger":
            self._read_stranger(record)

    def told(self) -> Told:
        """Returns all of it, once every record was read."""
        series = (
            Series(name=printable(name)[:80], values=tuple(values)) for name, values in self._series.items()
        )
        grown = (steady_growth(each) for each in series)
        return Told(
            exceptions=self._exceptions,
            found={key: finder.close() for key, finder in self._finders.items()},
            captures=tuple(self._captures),
            growths=tuple(growth for growth in grown if growth is not None),
            strangers=tuple(self._strangers),
            cards=self._cards,
            limits=self._limits,
        )

    def _read_output(self, record: Record) -> None:
        stream = record.get("stream")
        if not isinstance(stream, str):
            return
        if isinstance(text := record.get("text"), str):
            piece = text
        else:
            try:
                piece = base64.b64decode(record.get("b64") or "").decode("utf-8", "backslashreplace")
            except (ValueError, TypeError):
                return
        self._finders.setdefault((_proc(record), stream), Finder()).feed(piece)

    def _read_event(self, event: Mapping[str, Any], proc: str) -> None:
        if event.get("kind") == "oom":
            self._capture(event, proc)
        name, value = event.get("name"), event.get("value")
        if event.get("kind") == "metric" and isinstance(name, str) and isinstance(value, int | float):
            unit = next((size for ending, size in _UNITS.items() if name.endswith(ending)), None)
            is_current = "allocated" in name or "reserved" in name
            if unit is not None and is_current and "peak" not in name and math.isfinite(value):
                whose = name if proc == ranks.MAIN else f"{proc}: {name}"
                self._add(whose, int(value * unit))

    def _capture(self, event: Mapping[str, Any], proc: str) -> None:
        self._captures = [*self._captures, read_capture(event, proc=proc)][-MOST_CAPTURES:]

    def _read_facts(self, record: Record) -> None:
        self._cards = self._cards or tuple(_mappings(record.get("devices")))
        for limit in _mappings(record.get("memory_limit")):
            index, size = limit.get("index"), limit.get("allocator_bytes")
            if type(index) is int and type(size) is int:
                self._limits.setdefault(index, size)

    def _read_card(self, card: Mapping[str, Any], *, is_sample: bool) -> None:
        uuid, used = card.get("uuid"), card.get("used_mib")
        if not isinstance(uuid, str):
            return
        if not is_sample:
            self._names[uuid] = f"card {card.get('index')} ({card.get('name')})"
        elif type(used) is int:
            self._add(f"memory in use on {self._names.get(uuid, uuid)}", used * _MIB)

    def _read_stranger(self, record: Record) -> None:
        used, argv = record.get("used_mib"), record.get("argv")
        words = " ".join(map(str, argv)) if isinstance(argv, list) else ""
        holds = f" with {gib(used * _MIB)}" if type(used) is int else ""
        text = printable(
            f"a stranger came onto the card meanwhile{holds}: process {record.get('pid')} {words}"
        )
        if len(self._strangers) < MOST_STRANGERS:
            self._strangers.append(text[:200].rstrip())

    def _add(self, name: str, value: int) -> None:
        """Keeps every so many values of a long series, and the last."""
        if name not in self._series and len(self._series) == MOST_SERIES:
            return
        values = self._series.setdefault(name, [])
        if len(values) == MOST_VALUES:
            del values[1::2]
        values.append(value)


def _proc(record: Record) -> str:
    proc = record.get("proc")
    return proc if isinstance(proc, str) else ranks.MAIN


def _mappings(value: Any) -> list[Mapping[str, Any]]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []
