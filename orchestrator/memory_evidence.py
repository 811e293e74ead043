"""What a run's records tell of memory that was out, in one pass over them (pure).

Records come from a host and are believed only as far as their types go. Output is searched piece by piece, so
that a log of any length takes no more memory than a message.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from orchestrator.forensics.captures import Capture, read_capture
from orchestrator.forensics.growth import Growth, Series, steady_growth
from orchestrator.forensics.messages import Finder, Found
from orchestrator.outcome import Record, proc_of
from orchestrator.supervisor import ranks
from orchestrator.text import gib, printable
from orchestrator.told_values import mappings, scaled_size, size

__all__ = ["Evidence", "Told"]

MOST_CAPTURES = 16
MOST_STREAMS = 1024
MOST_STRANGERS = 5
MOST_SERIES = 64
MOST_VALUES = 4096
_MIB = 2**20
_IN_USE_ON = "memory in use on "
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
    """Collects what records tell while somebody else reads them too.

    Once output took longer than ``patience_s`` to search the rest of it is not; None: it may take any time.
    """

    patience_s: float | None = None
    _spent_s: float = 0.0
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
                self._read_exception(name, record)
        elif kind == "event" and isinstance(event := record.get("event"), Mapping):
            self._read_event(event, proc_of(record))
        elif kind == "oom":
            self._capture(record, proc_of(record))
        elif kind == "facts":
            self._read_facts(record)
        elif kind in ("cards", "gpus"):
            for card in mappings(record.get("cards")):
                self._read_card(card, is_sample=kind == "gpus")
        elif kind == "stranger":
            self._read_stranger(record)

    def told(self) -> Told:
        """Returns all of it, once every record was read."""
        series = [
            Series(name=printable(name)[:80], values=tuple(values), is_of_all=name.startswith(_IN_USE_ON))
            for name, values in self._series.items()
        ]
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
        key = proc_of(record), stream
        is_in_time = self.patience_s is None or self._spent_s < self.patience_s
        if is_in_time and (key in self._finders or len(self._finders) < MOST_STREAMS):
            begun_s = time.monotonic()
            self._finders.setdefault(key, Finder()).feed(piece)
            self._spent_s += time.monotonic() - begun_s

    def _read_exception(self, name: str, record: Record) -> None:
        if len(self._exceptions) < MOST_STREAMS:
            self._exceptions.setdefault(proc_of(record), f"{name}: {record.get('message') or ''}")

    def _read_event(self, event: Mapping[str, Any], proc: str) -> None:
        if event.get("kind") == "oom":
            self._capture(event, proc)
        if event.get("kind") == "metric" and isinstance(name := event.get("name"), str):
            self._read_metric(name, event.get("value"), proc)

    def _read_metric(self, name: str, value: Any, proc: str) -> None:
        unit = next((unit for ending, unit in _UNITS.items() if name.endswith(ending)), None)
        is_current = "allocated" in name or "reserved" in name
        if unit is not None and is_current and "peak" not in name:
            self._add(_name_of(name, proc), scaled_size(value, unit))

    def _capture(self, event: Mapping[str, Any], proc: str) -> None:
        self._captures = [*self._captures, read_capture(event, proc=proc)][-MOST_CAPTURES:]

    def _read_facts(self, record: Record) -> None:
        self._cards = self._cards or tuple(mappings(record.get("devices")))
        for limit in mappings(record.get("memory_limit")):
            index, limit_bytes = size(limit.get("index")), size(limit.get("allocator_bytes"))
            if index is not None and limit_bytes is not None:
                self._limits.setdefault(index, limit_bytes)

    def _read_card(self, card: Mapping[str, Any], *, is_sample: bool) -> None:
        uuid = card.get("uuid")
        if not isinstance(uuid, str):
            return
        if is_sample:
            used_bytes = scaled_size(card.get("used_mib"), _MIB)
            self._add(f"{_IN_USE_ON}{self._names.get(uuid, uuid)}", used_bytes)
        elif len(self._names) < MOST_SERIES:
            self._names[uuid] = f"card {card.get('index')} ({card.get('name')})"

    def _read_stranger(self, record: Record) -> None:
        used_bytes, argv = scaled_size(record.get("used_mib"), _MIB), record.get("argv")
        words = " ".join(map(str, argv)) if isinstance(argv, list) else ""
        holds = "" if used_bytes is None else f" with {gib(used_bytes)}"
        text = printable(
            f"a stranger came onto the card meanwhile{holds}: process {record.get('pid')} {words}"
        )
        if len(self._strangers) < MOST_STRANGERS:
            self._strangers.append(text[:200].rstrip())

    def _add(self, name: str, value: int | None) -> None:
        """Keeps every so many values of a long series, and the last."""
        if value is None or (name not in self._series and len(self._series) == MOST_SERIES):
            return
        values = self._series.setdefault(name, [])
        if len(values) == MOST_VALUES:
            del values[1::2]
        values.append(value)


def _name_of(series: str, proc: str) -> str:
    return series if proc == ranks.MAIN else f"{proc}: {series}"
