"""What a run's records say happened: a fold over them (pure).

Records come from a host and are believed only as far as their types go.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from orchestrator.fields import devices_text
from orchestrator.lifecycle import State
from orchestrator.memory_held import Held, read_held
from orchestrator.supervisor import ranks
from orchestrator.text import gib
from orchestrator.told_values import items, mappings, text

Record = Mapping[str, Any]

MOST_NOTES = 20
_NO_CARDS = "No CUDA GPUs are available"  # as torch says it
MISSING = "missing"  # the kind of the record that readers find in a hole's place; no supervisor writes it


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """A card as the process itself saw it; ``index`` counts inside the process."""

    index: int
    name: str
    uuid: str
    total_bytes: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class _OfCard:
    """Something that a process told of a card; ``index`` counts inside the process ``proc``."""

    index: int
    proc: str = ranks.MAIN

    @property
    def card(self) -> str:
        """Returns the card as the process names it, and which process that is."""
        return f"cuda:{self.index}" if self.proc == ranks.MAIN else f"{self.proc} cuda:{self.index}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak(_OfCard):
    """The most memory that torch's allocator held on a card."""

    allocated_bytes: int
    reserved_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryLimit(_OfCard):
    """What torch's allocator in ``proc`` may take of a card that is to look as if it had ``limit_bytes``."""

    limit_bytes: int
    allocator_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CardUse:
    """What samples saw of a card while the run went on, whoever used it; None is what it did not tell.

    ``name`` is the card's number on its host and its name there.
    """

    uuid: str
    name: str
    samples: int
    most_used_bytes: int
    utilisation_percent: float | None
    most_temperature_c: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a run's records say; None and empty where they say nothing.

    ``end`` is the end record's outcome (exited, signalled, timeout, cancelled, refused, abandoned), None
    while there is none. ``oom_kill`` is where the kernel killed for memory meanwhile: "cgroup" or "host".
    ``first_proc`` is the first of several processes to fail, ``exception_proc`` the one whose exception is
    told; ``pid``, ``devices`` and settings are those of the first process that told them. ``metrics`` holds
    the last value of each name; one that is no number is NaN, and those of ranks after the first are called
    ``rank1/NAME``. ``survivors`` could not be ended. ``unproven`` is what was asked for and never reported
    from inside. ``notes`` are oddities that change no verdict; of these and of the mismatches there are at
    most `MOST_NOTES`. ``prepared`` are the environments that it used. ``is_cut``: the run's log limit
    removed more than output before it was mirrored, so that what that said is not known. ``held`` says who
    held a card's memory at the peak.
    """

    end: str | None = None
    exit_code: int | None = None
    signal: int | None = None
    oom_kill: str | None = None
    reason: str | None = None
    first_proc: str | None = None
    exception_type: str | None = None
    exception_message: str | None = None
    exception_proc: str | None = None
    missing_module: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    mismatches: tuple[str, ...] = ()
    survivors: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    started_t: float | None = None
    ended_t: float | None = None
    pid: int | None = None
    python: str | None = None
    torch: str | None = None
    allocator: str | None = None
    allocator_settings: Mapping[str, Any] | None = None
    devices: tuple[Device, ...] = ()
    is_end_sealed: bool = True
    unproven: tuple[str, ...] = ()
    is_cut: bool = False
    peak_rss_bytes: int | None = None
    peak_memory: tuple[Peak, ...] = ()
    card_use: tuple[CardUse, ...] = ()
    prepared: tuple[str, ...] = ()
    memory_limits: tuple[MemoryLimit, ...] = ()
    held: tuple[Held, ...] = ()

    @property
    def state(self) -> State:
        """The terminal state that the records prove; LOST when they hold no end, or none that is sealed."""
        if not self.is_end_sealed:
            return State.LOST
        if self.end == "exited":
            return State.SUCCEEDED if self.exit_code == 0 else State.FAILED
        return _STATE_OF_END.get(self.end or "", State.LOST)


_STATE_OF_END: Mapping[str, State] = {
    "signalled": State.KILLED,
    "timeout": State.TIMEOUT,
    "cancelled": State.CANCELLED,
    "refused": State.REFUSED,
    "abandoned": State.KILLED,
}


def outcome_of(records: Iterable[Record]) -> Outcome:
    """Folds a run's records, in their order, into what they say.

    Of several uncaught exceptions that of the first process to fail counts, unless one is an out-of-memory
    error: ranks that lose their peer fail with other errors after it. Of several process exits the end
    record's code and signal count.
    """
    found: dict[str, Any] = {
        "metrics": {},
        "exceptions": {},
        "peaks": {},
        "limits": {},
        "held": {},
        "proofs": set(),
    }
    for record in records:
        read = _READERS.get(str(record.get("kind")))
        if read is not None:
            read(found, record)
    asked, missing, others_cut, sampled = (
        found.pop(name, None) for name in ("asked", "missing", "others_cut", "sampled")
    )
    names = found.pop("card_names", {})
    found["card_use"] = tuple(
        _card_use(uuid, names.get(uuid, uuid), sums) for uuid, sums in (sampled or {}).items()
    )
    proofs = found.pop("proofs")
    found["peak_memory"] = tuple(peak for _, peaks in sorted(found.pop("peaks").items()) for peak in peaks)
    found["memory_limits"] = tuple(limit for _, limit in sorted(found.pop("limits").items()))
    found["held"] = tuple(held for _, held in sorted(found.pop("held").items()))
    found["metrics"] = {
        f"rank{rank}/{name}" if rank else name: value
        for rank, told in sorted(found["metrics"].items())
        for name, value in told.items()
    }
    found |= _exception(found.pop("exceptions"), found.get("first_proc"))
    if not (asked or {}).get("devices") and _NO_CARDS in (found.get("exception_message") or ""):
        _note(found, "the run asked for no card, so it sees none; see devices:")
    is_cut = missing is not None and others_cut != 0
    if missing is not None:
        what = "what they said of metrics, facts and exceptions is not known" if is_cut else "output, no more"
        _note(found, f"records {', '.join(missing)} were cut by the run's log limit before they came: {what}")
    return Outcome(**found, unproven=tuple(_unproven(asked or {}, proofs)), is_cut=is_cut)


def _read_spawn(found: dict[str, Any], record: Record) -> None:
    found.setdefault("pid", _integer(record.get("pid")))
    found.setdefault("started_t", _number(record.get("t")))


def _read_prepared(found: dict[str, Any], record: Record) -> None:
    """Says which environments the run uses; of the one that it makes itself there is nothing to say."""
    found["prepared"] = tuple(
        f"{item.get('file')}, by run {item.get('by')}, digest {str(item.get('digest'))[:12]}"
        for item in mappings(record.get("environments"), MOST_NOTES)
    )


def _read_facts(found: dict[str, Any], record: Record) -> None:
    """A process tells its facts piece by piece, each when it is known."""
    proc = proc_of(record)
    for name in ("python", "torch", "allocator"):
        if value := text(record.get(name)):
            found.setdefault(name, value)
    if isinstance(settings := record.get("allocator_settings"), Mapping):
        found.setdefault("allocator_settings", settings)
    if devices := tuple(map(_device, mappings(record.get("devices")))):
        found.setdefault("devices", devices)
    limits = [_memory_limit(proc, item) for item in mappings(record.get("memory_limit"))]
    told = {"allocator": text(record.get("allocator")), "devices": devices, "memory_limit": limits}
    found["proofs"] |= {(proc, name) for name, value in told.items() if value}
    if peaks := tuple(_peak(proc, item) for item in mappings(record.get("peak_memory"))):
        found["peaks"][_rank(proc)] = peaks
    found["limits"] |= {(_rank(proc), limit.index): limit for limit in limits if limit.allocator_bytes}
    whose = "" if proc == ranks.MAIN else f"{proc}: "
    wrong = (f"{whose}{wrong}" for wrong in items(record.get("mismatches")))
    found["mismatches"] = tuple(dict.fromkeys((*found.get("mismatches", ()), *wrong)))[:MOST_NOTES]
    _note(found, text(record.get("instrument_error")))


def _unproven(asked: Mapping[str, Any], proofs: set[tuple[str, str]]) -> Iterable[str]:
    """Every one of a run's processes has to say what it got."""
    procs = ranks.names(asked.get("processes", 1))

    def silent(proof: str) -> str | None:
        """Returns the beginning of a sentence about who did not say it, None where all did."""
        missing = [proc for proc in procs if (proc, proof) not in proofs]
        if not missing:
            return None
        return "no process" if len(missing) == len(procs) else f"{', '.join(missing)} never"

    if asked.get("alloc_conf") and (who := silent("allocator")):
        yield f"allocator settings {asked['alloc_conf']} were asked for, and {who} said what took effect"
    if asked.get("devices") and (who := silent("devices")):
        yield f"devices {devices_text(asked['devices'])} were asked for, and {who} used CUDA"
    if asked.get("memory_limit_bytes") and (who := silent("memory_limit")):
        yield f"a memory limit of {gib(asked['memory_limit_bytes'])} was asked for, and {who} reported one"


def _read_segment(found: dict[str, Any], record: Record) -> None:
    if isinstance(job := record.get("job"), Mapping):
        found["asked"] = {
            "alloc_conf": text(job.get("alloc_conf")),
            "devices": job.get("devices"),
            "processes": min(max(_integer(job.get("processes")) or 1, 1), ranks.MOST_RANKS),
            "memory_limit_bytes": _integer(job.get("memory_limit_bytes")),
        }


def _read_seal(found: dict[str, Any], _record: Record) -> None:
    found["is_end_sealed"] = True


def _read_code_changed(found: dict[str, Any], record: Record) -> None:
    files = ", ".join(map(str, items(record.get("files"))))
    _note(found, f"the payload changed its own code while it ran: {files}")


def _read_event(found: dict[str, Any], record: Record) -> None:
    event = record.get("event")
    if not isinstance(event, Mapping):
        return
    if event.get("kind") == "metric" and isinstance(event.get("name"), str):
        value, rank = _number(event.get("value")), _rank(proc_of(record))
        told = found["metrics"].setdefault(rank, {})
        told[event["name"]] = math.nan if value is None else value
    if event.get("kind") == "memory" and (held := read_held(proc_of(record), event)) is not None:
        found["held"][_rank(held.proc), held.index] = held
    if event.get("kind") == "warning":
        _note(found, f"the payload warns: {text(event.get('about'))}: {text(event.get('message'))}")


def _read_event_refused(found: dict[str, Any], record: Record) -> None:
    _note(found, f"an event of the payload was refused: {record.get('reason')}")


def _read_exception(found: dict[str, Any], record: Record) -> None:
    kind, proc = text(record.get("type")), proc_of(record)
    if kind is None:
        return
    known = found["exceptions"].get(proc)
    if known is None or (is_oom_type(kind) and not is_oom_type(known["exception_type"])):
        found["exceptions"][proc] = {
            "exception_type": kind,
            "exception_message": text(record.get("message")),
            "missing_module": text(record.get("missing_module")),
            "exception_proc": None if proc == ranks.MAIN else proc,
        }


def _exception(told: Mapping[str, Mapping[str, Any]], first: str | None) -> Mapping[str, Any]:
    """Returns the exception that counts; ``told`` has one of each process, in the order of their coming."""
    for exception in told.values():
        if is_oom_type(exception["exception_type"]):
            return exception
    return told.get(first or "", next(iter(told.values()), {}))


def is_oom_type(kind: str) -> bool:
    """Tells whether an exception's type says that memory was out."""
    return kind.endswith("OutOfMemoryError")


def _read_exit(found: dict[str, Any], record: Record) -> None:
    if (_integer(record.get("oom_kill")) or 0) > 0:
        found["oom_kill"] = text(record.get("oom_scope")) or "host"
    usage = record.get("rusage")
    peak = _integer(usage.get("peak_rss_bytes")) if isinstance(usage, Mapping) else None
    found["peak_rss_bytes"] = max(filter(None, (found.get("peak_rss_bytes"), peak)), default=None)


def _read_missing(found: dict[str, Any], record: Record) -> None:
    """Stands where records were; see `holes`."""
    found["missing"] = (*found.get("missing", ()), f"{record.get('seq')} to {record.get('last')}")


def _read_cut(found: dict[str, Any], record: Record) -> None:
    found["others_cut"] = _integer(record.get("others"))


def _read_pipe_held(found: dict[str, Any], record: Record) -> None:
    proc = proc_of(record)
    whose, who = ("the", "the main process") if proc == ranks.MAIN else (f"{proc}'s", "it")
    for process in _processes(record.get("holders")):
        _note(found, f"kept {whose} output open after {who} had ended: {process}")


def _read_leftover(found: dict[str, Any], record: Record) -> None:
    for process in _processes(record.get("processes")):
        _note(found, f"ran on after all that was started had ended: {process}")


def _read_cards(found: dict[str, Any], record: Record) -> None:
    for card in mappings(record.get("cards")):
        name = f"card {card.get('index')} ({card.get('name')})"
        found.setdefault("card_names", {})[text(card.get("uuid"))] = name


def _read_gpus(found: dict[str, Any], record: Record) -> None:
    if fault := text(record.get("fault")):
        _note(found, f"a card stopped answering while the run went on: {fault}")
    for card in mappings(record.get("cards")):
        sums = found.setdefault("sampled", {}).setdefault(text(card.get("uuid")) or "?", _Samples())
        sums.add(card)


class _Samples:
    """Sums over the samples of one card."""

    def __init__(self) -> None:
        self.count = self.most_used_mib = 0
        self.utilisations: list[int] = [0, 0]  # how many told it, and their sum
        self.most_temperature_c: int | None = None

    def add(self, card: Record) -> None:
        self.count += 1
        self.most_used_mib = max(self.most_used_mib, _integer(card.get("used_mib")) or 0)
        if (percent := _integer(card.get("utilisation_percent"))) is not None:
            self.utilisations = [self.utilisations[0] + 1, self.utilisations[1] + percent]
        if (degrees := _integer(card.get("temperature_c"))) is not None:
            self.most_temperature_c = max(degrees, self.most_temperature_c or degrees)


def _card_use(uuid: str, name: str, sums: _Samples) -> CardUse:
    told, total = sums.utilisations
    return CardUse(
        uuid=uuid,
        name=name,
        samples=sums.count,
        most_used_bytes=sums.most_used_mib * 1024**2,
        utilisation_percent=total / told if told else None,
        most_temperature_c=sums.most_temperature_c,
    )


def _read_stranger(found: dict[str, Any], record: Record) -> None:
    used_mib = _integer(record.get("used_mib"))
    used = "" if used_mib is None else f", {used_mib / 1024:.1f} GiB"
    process = " ".join(map(str, [record.get("pid"), *items(record.get("argv"))]))
    uuid = text(record.get("uuid")) or "?"
    card = found.get("card_names", {}).get(uuid, uuid)
    _note(found, f"another process used {card} meanwhile: {process}{used}")


def _read_end(found: dict[str, Any], record: Record) -> None:
    found.update(
        end=text(record.get("outcome")),
        exit_code=_integer(record.get("code")),
        signal=_integer(record.get("signal")),
        reason=text(record.get("reason")),
        first_proc=text(record.get("proc")),
        survivors=_processes(record.get("survivors")),
        ended_t=_number(record.get("t")),
        is_end_sealed=False,
    )


_READERS = {
    "segment": _read_segment,
    MISSING: _read_missing,
    "cut": _read_cut,
    "seal": _read_seal,
    "code_changed": _read_code_changed,
    "spawn": _read_spawn,
    "prepared": _read_prepared,
    "facts": _read_facts,
    "event": _read_event,
    "event_refused": _read_event_refused,
    "exception": _read_exception,
    "exit": _read_exit,
    "pipe_held": _read_pipe_held,
    "leftover": _read_leftover,
    "cards": _read_cards,
    "gpus": _read_gpus,
    "stranger": _read_stranger,
    "end": _read_end,
}


def _note(found: dict[str, Any], note: str | None) -> None:
    notes = found.get("notes", ())
    if note and note not in notes and len(notes) < MOST_NOTES:
        found["notes"] = (*notes, note)


def _device(item: Record) -> Device:
    return Device(
        index=_integer(item.get("index")) or 0,
        name=text(item.get("name")) or "?",
        uuid=text(item.get("uuid")) or "?",
        total_bytes=_integer(item.get("total_bytes")),
    )


def _memory_limit(proc: str, item: Record) -> MemoryLimit:
    return MemoryLimit(
        proc=proc,
        index=_integer(item.get("index")) or 0,
        limit_bytes=_integer(item.get("limit_bytes")) or 0,
        allocator_bytes=_integer(item.get("allocator_bytes")) or 0,
    )


def proc_of(record: Record) -> str:
    """Returns which process a record is about."""
    return text(record.get("proc")) or ranks.MAIN


def _rank(proc: str) -> int:
    """Returns a process's rank, 0 for one without."""
    number = proc.removeprefix("rank")
    return int(number) if number.isdecimal() and len(number) < 4 else 0


def _peak(proc: str, item: Record) -> Peak:
    return Peak(
        proc=proc,
        index=_integer(item.get("index")) or 0,
        allocated_bytes=_integer(item.get("allocated_bytes")) or 0,
        reserved_bytes=_integer(item.get("reserved_bytes")) or 0,
    )


def _processes(value: Any) -> tuple[str, ...]:
    """Returns one description for each process, of which the supervisor gives pid and argv."""
    return tuple(" ".join(map(str, [item.get("pid"), *items(item.get("argv"))])) for item in mappings(value))


def _integer(value: Any) -> int | None:
    """Returns an int that a 64-bit column holds."""
    return int(value) if isinstance(value, int) and abs(value) < 2**63 else None


def _number(value: Any) -> float | None:
    """Returns a float; "nan", "inf" and their like come as strings, because JSON lacks them."""
    if isinstance(value, bool):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None
