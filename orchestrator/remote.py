"""What a host's supervisor can be asked: start, read, stop, status, clock, listing, cleaning, digests, facts,
and what is prepared there.

Each is one request in one `Conversation`; what it answers becomes a value that is checked here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.clocks import Offset
from orchestrator.conversation import ANSWER_TIMEOUT_S, Conversation, Cursor, Objects
from orchestrator.errors import ProtocolError
from orchestrator.supervisor.digests import BLOCK_BYTES
from orchestrator.text import printable
from orchestrator.transports.base import Transport

PAGE_TIMEOUT_S = 600.0  # a large folder takes its time to measure and to delete
CLOCK_TRIPS = 5
FACTS_TIMEOUT_S = 190.0  # more than the limits of all that the host asks on its side
MOST_TOLD = 200_000  # entries of an answer: runs of a host, or 12 TiB of one run's segments
MOST_TOLD_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """The host's answer to a start: whether this request started the run, and what had to be sent."""

    is_new: bool
    sent_files: int
    sent_bytes: int


class NotPrepared(Exception):
    """The host started nothing: what has these ``places`` in the job's ``setup`` is not prepared there."""

    def __init__(self, places: Sequence[int]) -> None:
        super().__init__(f"not prepared: {places}")
        self.places = tuple(places)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """What a host says of an environment: which run made it (or None), when, and which makes it now."""

    digest: str
    made_by: str | None
    made_t: float | None
    preparer: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """What a host says of a run; ``orphans`` describes processes that outlived its supervisor.

    ``silent_s``: since its records were last written, None when it is not alive. ``is_stopped``: its
    supervisor is (SIGSTOP). ``was_rebooted``: the host, since the run began. ``obstacles`` say what keeps it
    from its cards while it waits, ``cards`` which ones it has when it runs.
    """

    exists: bool
    has_started: bool
    is_alive: bool
    orphans: tuple[str, ...]
    is_waiting: bool = False
    silent_s: float | None = None
    is_stopped: bool = False
    was_rebooted: bool = False
    obstacles: tuple[str, ...] = ()
    cards: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Stopped:
    """What a stop did: ``asked`` its supervisor, or ``ended`` processes whose supervisor was gone."""

    asked: bool
    ended: tuple[str, ...]
    survivors: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentDigest:
    """A segment's size, and the SHA-256 of each block of its first bytes, as many as were asked for."""

    size_bytes: int = 0
    blocks: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class BundleState:
    """How a run's code on its host differs from a manifest; of paths and hashes the first few are named."""

    changed: tuple[str, ...]
    changed_count: int
    damaged: tuple[str, ...]
    damaged_count: int
    absent_count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Digests:
    """What a host has of a run; ``bundle`` is None when no manifest was sent to compare with.

    ``cut`` is the newest segment that the run's limit removed there, with its last line; None for none.
    """

    exists: bool
    segments: Mapping[int, SegmentDigest]
    bundle: BundleState | None
    cut: tuple[int, str] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class HostFacts:
    """What a host tells of itself: its word, unchecked; ``noise`` is what its log-in shell printed before."""

    python: str
    noise: bytes
    clock: Offset
    facts: Mapping[str, Any]


def start(
    transport: Transport,
    job: Mapping[str, Any],
    entries: Sequence[Sequence[Any]],
    objects: Objects,
    cursor: Cursor | None,
    secret_env: Mapping[str, str],
    preparers: Sequence[str] | None = None,
) -> tuple[Started, Conversation]:
    """Ships what the host lacks and starts the run, or finds it started; with a cursor, `pieces` follow.

    ``secret_env``: values of the variables that ``job`` names as secret; they travel here and nowhere else.
    ``preparers``: the runs for which it waits on the host while they prepare what it needs.

    Raises:
        NotPrepared: the host lacks what the job needs, and there were no ``preparers``.
        HostError: as its subclasses say; a start that broke off may be tried again as it is.
    """
    request = {
        "op": "start",
        "job": job,
        "secrets": dict(secret_env),
        "entries": [list(entry) for entry in entries],
        "cursor": None if cursor is None else cursor.as_json(),
        "preparers": None if preparers is None else list(preparers),
    }
    talk = Conversation.open(transport, request)
    try:
        answer = talk.reply()
        if preparers is None and "unprepared" in answer:
            raise NotPrepared(_places(answer["unprepared"], job, transport))
        need = _hashes(answer, transport)
        asked = set(map(str, need))
        if not asked <= {entry[3] for entry in entries}:
            raise ProtocolError(
                "the host asks for files that are not in the bundle", host=transport.host.name
            )
        if len(asked) != len(need):
            raise ProtocolError("the host asks for a file more than once", host=transport.host.name)
        sent = sum(talk.send_object(sha256, objects) for sha256 in need)
        answer = talk.reply(started=bool)
    except BaseException:
        talk.close()
        raise
    return Started(is_new=answer["started"], sent_files=len(need), sent_bytes=sent), talk


def prepared(transport: Transport, specs: Sequence[Mapping[str, Any]]) -> list[Prepared]:
    """Asks what is there of what a job's ``setup`` lists."""
    with Conversation.open(transport, {"op": "prepared", "setup": list(specs)}) as talk:
        told = talk.reply(prepared=list)["prepared"]
    try:
        if len(told) != len(specs):
            raise ValueError(f"{len(told)} answers to {len(specs)} questions")
        return [_prepared(item) for item in told]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        message = f"what it says of prepared environments cannot be read: {error}"
        raise ProtocolError(message, host=transport.host.name) from error


def read(transport: Transport, run_id: str, cursor: Cursor, *, follow: bool) -> Conversation:
    """Asks for a run's records from ``cursor`` on; `Conversation.pieces` has them."""
    return Conversation.open(
        transport, {"op": "read", "run": run_id, "cursor": cursor.as_json(), "follow": follow}
    )


def stop(transport: Transport, run_id: str, grace_s: float | None) -> Stopped:
    """Has the host stop a run; returns at once when a supervisor was asked, else when all is ended."""
    patience_s = ANSWER_TIMEOUT_S + (grace_s or 0.0)
    with Conversation.open(transport, {"op": "stop", "run": run_id, "grace_s": grace_s}) as talk:
        answer = talk.reply(patience_s, asked=bool, ended=list, survivors=list)
    try:
        ended, survivors = _described(answer["ended"]), _described(answer["survivors"])
    except (KeyError, TypeError) as error:
        raise ProtocolError(f"what was stopped cannot be read: {error}", host=transport.host.name) from error
    return Stopped(asked=answer["asked"], ended=ended, survivors=survivors)


def status(transport: Transport, run_ids: Sequence[str]) -> dict[str, Standing]:
    """Returns how each run stands on its host."""
    with Conversation.open(transport, {"op": "status", "runs": list(run_ids)}) as talk:
        told = talk.reply(runs=dict)["runs"]
    try:
        return {
            run_id: Standing(
                exists=bool(told[run_id]["exists"]),
                has_started=bool(told[run_id]["started"]),
                is_alive=bool(told[run_id]["alive"]),
                orphans=_described(told[run_id]["orphans"]),
                is_waiting=bool(told[run_id].get("waiting")),
                silent_s=_seconds(told[run_id].get("silent_s")),
                is_stopped=bool(told[run_id].get("stopped")),
                was_rebooted=bool(told[run_id].get("rebooted")),
                obstacles=tuple(map(str, told[run_id]["obstacles"])),
                cards=tuple(map(str, told[run_id]["cards"])),
            )
            for run_id in run_ids
        }
    except (KeyError, TypeError) as error:
        raise ProtocolError(f"the status of a run is missing: {error}", host=transport.host.name) from error


def clock(transport: Transport) -> Offset:
    """Measures the host's clock: of several round trips the quickest tells it best."""
    with Conversation.open(transport, {"op": "clock", "trips": CLOCK_TRIPS}) as talk:
        return _clock(talk, transport)


def facts(transport: Transport, asked: Mapping[str, Any]) -> HostFacts:
    """Has the host look at all that decides whether runs can work there."""
    request = {"op": "doctor", "trips": CLOCK_TRIPS, "asked": asked}
    with Conversation.open(transport, request) as talk:
        offset = _clock(talk, transport)
        found = talk.reply(FACTS_TIMEOUT_S, facts=dict)["facts"]
        python = f"{talk.hello.get('python')} at {talk.hello.get('executable')}"
        return HostFacts(python=python, noise=talk.noise, clock=offset, facts=found)


def _clock(talk: Conversation, transport: Transport) -> Offset:
    found = [offset for _ in range(CLOCK_TRIPS) if (offset := talk.read_clock()) is not None]
    if not found:
        raise ProtocolError("the supervisor's answer is no time", host=transport.host.name)
    return min(found, key=lambda offset: offset.error_s)


def listing(transport: Transport, run_ids: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Returns what the host tells of all its runs, or of ``run_ids`` with their jobs: its word, unchecked."""
    return pages(transport, {"op": "list", "runs": None if run_ids is None else list(run_ids)})


def survey(transport: Transport) -> list[dict[str, Any]]:
    """Returns size, age and end of each of the host's runs."""
    return pages(transport, {"op": "gc", "chosen": None})


def clean(
    transport: Transport, chosen: Sequence[Mapping[str, Any]], *, is_real: bool
) -> list[dict[str, Any]]:
    """Has the host remove runs and what nobody needs then, or, unless ``is_real``, say what it would."""
    return pages(transport, {"op": "gc", "chosen": list(chosen), "is_real": is_real})


def pages(transport: Transport, request: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns all pages of an answer as one list, its entries unchecked."""
    found: list[dict[str, Any]] = []
    with Conversation.open(transport, request) as talk:
        while not (told := talk.reply(PAGE_TIMEOUT_S)).get("end"):
            page = told.get("page")
            if not isinstance(page, list) or not all(isinstance(item, dict) for item in page):
                raise ProtocolError("a page of the host's answer is none", host=transport.host.name)
            found.extend(page)
            _bound(talk, transport, len(found))
    return found


def digests(
    transport: Transport,
    run_id: str,
    sizes: Sequence[int],
    bundle_id: str,
    entries: Sequence[Sequence[Any]] | None,
) -> Digests:
    """Asks for hashes of the first ``sizes`` bytes of a run's segments, and how its code differs from a
    manifest.
    """
    request = {"op": "digests", "run": run_id, "sizes": list(sizes), "bundle": bundle_id, "entries": entries}
    segments: dict[int, SegmentDigest] = {}
    with Conversation.open(transport, request) as talk:
        while not (told := talk.reply()).get("end"):
            try:
                index, size = int(told["segment"]), int(told["bytes"])
                blocks = tuple(map(str, told["blocks"]))
            except (KeyError, TypeError, ValueError, OverflowError) as error:
                message = f"the digests of a segment are not readable: {error}"
                raise ProtocolError(message, host=transport.host.name) from error
            earlier = segments.get(index, SegmentDigest()).blocks
            if (index in segments and not blocks) or len(earlier + blocks) > _block_count(sizes, index):
                message = f"the host tells more of segment {index} than it was asked for"
                raise ProtocolError(message, host=transport.host.name)
            segments[index] = SegmentDigest(size_bytes=size, blocks=earlier + blocks)
            _bound(talk, transport, len(segments))
    try:
        told_cut = told.get("cut")
        return Digests(
            exists=bool(told["exists"]),
            segments=segments,
            bundle=_bundle_state(told["bundle"]),
            cut=None if told_cut is None else (int(told_cut["segment"]), str(told_cut["line"])),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        message = f"the digests of the code are not readable: {error}"
        raise ProtocolError(message, host=transport.host.name) from error


def _places(told: Any, job: Mapping[str, Any], transport: Transport) -> list[int]:
    """Returns the places in the job's ``setup`` of what is not prepared."""
    known = range(len(job["setup"]))
    if (
        not isinstance(told, list)
        or not told
        or not all(type(place) is int and place in known for place in told)
    ):
        raise ProtocolError("it lacks what nobody asked for", host=transport.host.name)
    return sorted(set(told))


def _hashes(answer: Mapping[str, Any], transport: Transport) -> list[Any]:
    """Returns what the host asks for in its first answer to a start."""
    need = answer.get("need")
    if not isinstance(need, list):
        message = "the supervisor's reply has no need; is another version of orch at work there?"
        raise ProtocolError(message, host=transport.host.name)
    return need


def _prepared(told: Mapping[str, Any]) -> Prepared:
    done, by = told["done"], told["by"]
    return Prepared(
        digest=str(told["digest"]),
        made_by=None if done is None else printable(str(done.get("run"))),
        made_t=None if done is None else _seconds(done.get("t")),
        preparer=None if by is None else printable(str(by)),
    )


def _block_count(sizes: Sequence[int], index: int) -> int:
    return -(-sizes[index] // BLOCK_BYTES) if 0 <= index < len(sizes) else 0


def _bound(talk: Conversation, transport: Transport, count: int) -> None:
    """Refuses an answer of several frames that has become too long."""
    if count > MOST_TOLD or talk.received_bytes > MOST_TOLD_BYTES:
        message = f"the host's answer has no end: {count} entries in {talk.received_bytes} bytes so far"
        raise ProtocolError(message, host=transport.host.name)


def _bundle_state(told: Mapping[str, Any] | None) -> BundleState | None:
    if told is None:
        return None
    return BundleState(
        changed=tuple(map(str, told["changed"])),
        changed_count=int(told["changed_count"]),
        damaged=tuple(map(str, told["damaged"])),
        damaged_count=int(told["damaged_count"]),
        absent_count=int(told["absent_count"]),
    )


def _seconds(told: Any) -> float | None:
    return told if isinstance(told, float) and math.isfinite(told) else None


def _described(processes: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    return tuple(
        printable(f"{process['pid']} {' '.join(map(str, process['argv']))}") for process in processes
    )
