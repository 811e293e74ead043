"""One conversation with a host's supervisor over one channel: start, read, stop, status, digests, clock.

`Conversation.open` sends what a host needs to answer (the bootstrap and, when it is missing there, the
supervisor) and the request in one go, so that a host which has them answers after one round trip. Reads no
records: a run's bytes come out as `Piece` values. Errors of the host are translated here.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol, Self

from orchestrator import clocks
from orchestrator.clocks import Offset
from orchestrator.errors import HostError, HostUnfit, OrchError, ProtocolError, StorageError, Unreachable
from orchestrator.inventory import Host
from orchestrator.supervisor import bootstrap, wire
from orchestrator.text import printable
from orchestrator.transports.base import Channel, Transport

LOADER = (
    "import sys;sys.version_info>=(3,8)or sys.exit("
    '"orch-needs-python-3.8 "+sys.version.split()[0]);'
    'i=sys.stdin.buffer;g={};exec(i.read(int(i.readline())),g);g["main"](i)'
)
TOO_OLD = "orch-needs-python-3.8 "
OLDER_THAN_3_4 = "Unknown option: -I"
ANSWER_TIMEOUT_S = 60.0
PAGE_TIMEOUT_S = 600.0  # a large folder takes its time to measure and to delete
SILENCE_TIMEOUT_S = 30.0
MAX_NOISE_BYTES = 1024 * 1024
COMMAND_NOT_FOUND = 127
CLOCK_TRIPS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Cursor:
    """A position in a run's records: the segment's index and the byte offset in it."""

    segment: int = 0
    offset: int = 0

    def as_json(self) -> dict[str, int]:
        """Returns what a request carries."""
        return {"segment": self.segment, "offset": self.offset}


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of a run's records and where they belong."""

    cursor: Cursor
    data: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """All from ``cursor`` to the end of segment ``through`` is gone there; ``stub`` was its last line."""

    cursor: Cursor
    through: int
    stub: bytes


class Objects(Protocol):
    """Where the files of a bundle are read from, by hash."""

    def open(self, sha256: str) -> Any:
        """Returns the object's bytes as an open binary file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """The host's answer to a start: whether this request started the run, and what had to be sent."""

    is_new: bool
    sent_files: int
    sent_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """What a host says of a run; ``orphans`` describes processes that outlived its supervisor.

    ``silent_s``: since its records were last written, None when it is not alive. ``is_stopped``: its
    supervisor is (SIGSTOP). ``was_rebooted``: the host, since the run began.
    """

    exists: bool
    has_started: bool
    is_alive: bool
    orphans: tuple[str, ...]
    is_waiting: bool = False
    silent_s: float | None = None
    is_stopped: bool = False
    was_rebooted: bool = False


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


class Conversation:
    """A channel on which one request has been sent; a context manager that closes it."""

    def __init__(self, channel: Channel, host: Host) -> None:
        self._channel = channel
        self._host = host
        self._buffer = bytearray()
        self.noise = b""
        self.hello: Mapping[str, Any] = {}
        self.clock: Offset | None = None
        self.host_end = (0, 0)

    @classmethod
    def open(cls, transport: Transport, request: Mapping[str, Any]) -> Conversation:
        """Opens a channel, sends ``request`` and reads the host's greeting.

        Raises:
            HostUnfit: no Python there, or too old a one, or a root folder that cannot be used.
            Unreachable: the connection broke.
        """
        host = transport.host
        python = host.python.removeprefix("~/") if host.python.startswith("~/") else host.python
        if python != host.python:
            python = f"./{python}"  # a program starts in its user's home, and no shell expands a ~ here
        channel = transport.open([python, "-I", "-S", "-c", LOADER])
        self = cls(channel, host)
        try:
            nonce = secrets.token_hex(16)
            hello = json.dumps({"nonce": nonce, "root": host.root, "digest": _digest()}).encode()
            code = _sources()["bootstrap.py"].encode()
            sent_t, sent_s = time.time(), time.monotonic()
            self._send(b"%d\n%s%s\n%s" % (len(code), code, hello, wire.pack(dict(request))))
            self._skip_noise(wire.preamble(nonce))
            answer = self.reply(hello=dict, supervisor=bool)
            self.hello = answer["hello"]
            self.clock = clocks.measured(sent_t, time.monotonic() - sent_s, self.hello.get("t"))
            if not answer["supervisor"]:
                sources = json.dumps(_sources()).encode()
                self._send(b"%d\n%s" % (len(sources), sources))
        except BaseException:
            channel.close()
            raise
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the channel; may be called more than once."""
        self._channel.close()

    def reply(self, timeout_s: float = ANSWER_TIMEOUT_S, **fields: type) -> dict[str, Any]:
        """Returns the next frame's header, which has ``fields`` of these types.

        Raises:
            HostUnfit: the host says that it cannot.
            ProtocolError: the reply is none of ours.
        """
        header, _ = self._frame(timeout_s)
        for name, kind in fields.items():
            if type(header.get(name)) is not kind:
                message = f"the supervisor's reply has no {name}; is another version of orch at work there?"
                raise ProtocolError(message, host=self._host.name)
        return header

    def send_object(self, sha256: str, objects: Objects) -> int:
        """Sends one object in pieces; returns its size in bytes.

        Raises:
            StorageError: the local copy cannot be read, or is not what its name says.
        """
        sent, total = 0, hashlib.sha256()
        try:
            with objects.open(sha256) as file:
                piece = file.read(wire.PIECE_BYTES)
                while True:
                    following = file.read(wire.PIECE_BYTES)
                    self._send(wire.pack({"object": sha256, "more": bool(following)}, piece))
                    total.update(piece)
                    sent += len(piece)
                    if not following:
                        break
                    piece = following
        except OSError as error:
            raise StorageError(f"a file of the bundle cannot be read: {error}") from error
        if total.hexdigest() != sha256:
            raise StorageError(f"the local object {sha256} is damaged; remove that file in .orch/objects")
        return sent

    def pieces(self) -> Iterator[Piece | Cut | None]:
        """Yields what the run writes until the host says that it has ended; None is a sign of life.

        A `Cut` stands for what is no longer there.

        `host_end` is then the host's last segment and that one's size in bytes.

        Raises:
            Unreachable: the connection broke, or nothing came for `SILENCE_TIMEOUT_S`.
        """
        while True:
            header, body = self._frame(SILENCE_TIMEOUT_S)
            segment, offset = header.get("segment"), header.get("offset")
            if header.get("end") and type(segment) is int and type(header.get("bytes")) is int:
                self.host_end = (segment, header["bytes"])
                return
            if type(segment) is int and type(offset) is int and min(segment, offset) >= 0:
                cursor, through = Cursor(segment=segment, offset=offset), header.get("through")
                if type(through) is int and through >= segment:
                    yield Cut(cursor=cursor, through=through, stub=body)
                else:
                    yield Piece(cursor, body)
            elif header.get("idle"):
                yield None
            else:
                raise ProtocolError(f"an unexpected frame: {sorted(header)}", host=self._host.name)

    def read_clock(self) -> Offset | None:
        """Makes one of the round trips that a request ``clock`` has announced."""
        sent_t, sent_s = time.time(), time.monotonic()
        self._send(wire.pack({"clock": True}))
        host_t = self.reply().get("t")
        return clocks.measured(sent_t, time.monotonic() - sent_s, host_t)

    def _send(self, data: bytes) -> None:
        """A program that has ended takes no input: its last words say more than that."""
        try:
            self._channel.send(data)
        except Unreachable:
            with contextlib.suppress(TimeoutError, Unreachable):
                while data := self._channel.recv(wire.PIECE_BYTES, 1.0):
                    self._buffer = (self._buffer + data)[:MAX_NOISE_BYTES]
                self.noise = self.noise or bytes(self._buffer)
                self._channel.wait(1.0)
                raise self._ended() from None
            raise

    def _frame(self, timeout_s: float) -> tuple[dict[str, Any], bytes]:
        try:
            header, body = wire.read_frame(lambda size: self._exactly(size, timeout_s))
        except wire.WireError as error:
            message = f"the supervisor's reply cannot be read ({error}); {self._last_words()}"
            raise ProtocolError(message, host=self._host.name) from error
        if "error" in header:
            raise self._refusal(str(header["error"]), printable(str(header.get("message"))))
        return header, body

    def _refusal(self, code: str, message: str) -> OrchError:
        if code == "unfit-root":
            hint = "; set 'root:' in inventory.yaml to a folder of yours"
            return HostUnfit(f"{message}{hint}", host=self._host.name)
        if code == "unfit":
            return HostUnfit(message, host=self._host.name)
        if code == "unknown-run":
            return HostError(
                f"{message}: its start never arrived, or it was removed there", host=self._host.name
            )
        return ProtocolError(f"{message} ({code})", host=self._host.name)

    def _exactly(self, size: int, timeout_s: float) -> bytes:
        """``timeout_s`` bounds each silence, not the whole: a slow link is no broken one."""
        while len(self._buffer) < size:
            self._fill(timeout_s)
        taken = bytes(memoryview(self._buffer)[:size])
        del self._buffer[:size]
        return taken

    def _fill(self, timeout_s: float) -> None:
        try:
            data = self._channel.recv(wire.PIECE_BYTES, max(timeout_s, 0.001))
        except TimeoutError as error:
            raise Unreachable(
                "nothing came for too long: the connection counts as broken", host=self._host.name
            ) from error
        if not data:
            raise self._ended()
        self._buffer += data

    def _ended(self) -> OrchError:
        """The far side's process has ended although an answer was due."""
        status = self._channel.wait(5.0)
        words = self._channel.stderr().decode("utf-8", "replace")
        name, python = self._host.name, printable(self._host.python)
        if TOO_OLD in words:
            found = printable(words.split(TOO_OLD, 1)[1].split("\n", 1)[0].strip())
            return HostUnfit(
                f"{python} is Python {found}, need 3.8; set 'python:' in inventory.yaml", host=name
            )
        if OLDER_THAN_3_4 in words:
            return HostUnfit(
                f"{python} is older than Python 3.4, need 3.8; set 'python:' in inventory.yaml", host=name
            )
        if status == COMMAND_NOT_FOUND:
            said = printable(words.strip()[-200:])
            return HostUnfit(f"there is no {python} ({said}); set 'python:' in inventory.yaml", host=name)
        return ProtocolError(
            f"the supervisor ended with exit status {status}; {self._last_words()}", host=name
        )

    def _last_words(self) -> str:
        words = (
            self._channel.stderr().decode("utf-8", "replace").strip()
            or self.noise.decode("utf-8", "replace").strip()
        )
        return f"its last words: {printable(words[-500:])}" if words else "it said nothing"

    def _skip_noise(self, preamble: bytes) -> None:
        end = time.monotonic() + ANSWER_TIMEOUT_S
        while (found := self._buffer.find(preamble)) < 0:
            if len(self._buffer) > MAX_NOISE_BYTES:
                self.noise = bytes(self._buffer)
                message = f"the login shell prints without end; {self._last_words()}"
                raise ProtocolError(message, host=self._host.name)
            self.noise = bytes(self._buffer)
            self._fill(end - time.monotonic())
        self.noise = bytes(self._buffer[:found])
        del self._buffer[: found + len(preamble)]


def start(
    transport: Transport,
    job: Mapping[str, Any],
    entries: Sequence[Sequence[Any]],
    objects: Objects,
    cursor: Cursor | None,
    secret_env: Mapping[str, str],
) -> tuple[Started, Conversation]:
    """Ships what the host lacks and starts the run, or finds it started; with a cursor, `pieces` follow.

    ``secret_env``: values of the variables that ``job`` names as secret; they travel here and nowhere else.

    Raises:
        HostError: as its subclasses say; a start that broke off may be tried again as it is.
    """
    request = {
        "op": "start",
        "job": job,
        "secrets": dict(secret_env),
        "entries": [list(entry) for entry in entries],
        "cursor": None if cursor is None else cursor.as_json(),
    }
    talk = Conversation.open(transport, request)
    try:
        need = talk.reply(need=list)["need"]
        if not set(map(str, need)) <= {entry[3] for entry in entries}:
            raise ProtocolError(
                "the host asks for files that are not in the bundle", host=transport.host.name
            )
        sent = sum(talk.send_object(sha256, objects) for sha256 in need)
        answer = talk.reply(started=bool)
    except BaseException:
        talk.close()
        raise
    return Started(is_new=answer["started"], sent_files=len(need), sent_bytes=sent), talk


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
            )
            for run_id in run_ids
        }
    except (KeyError, TypeError) as error:
        raise ProtocolError(f"the status of a run is missing: {error}", host=transport.host.name) from error


def clock(transport: Transport) -> Offset:
    """Measures the host's clock: of several round trips the quickest tells it best."""
    with Conversation.open(transport, {"op": "clock", "trips": CLOCK_TRIPS}) as talk:
        found = [offset for _ in range(CLOCK_TRIPS) if (offset := talk.read_clock()) is not None]
    if not found:
        raise ProtocolError("the supervisor's answer is no time", host=transport.host.name)
    return min(found, key=lambda offset: offset.error_s)


def listing(transport: Transport, run_ids: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Returns what the host tells of all its runs, or of ``run_ids`` with their jobs: its word, unchecked."""
    return _pages(transport, {"op": "list", "runs": None if run_ids is None else list(run_ids)})


def survey(transport: Transport) -> list[dict[str, Any]]:
    """Returns size, age and end of each of the host's runs."""
    return _pages(transport, {"op": "gc", "chosen": None})


def clean(
    transport: Transport, chosen: Sequence[Mapping[str, Any]], *, is_real: bool
) -> list[dict[str, Any]]:
    """Has the host remove runs and what nobody needs then, or, unless ``is_real``, say what it would."""
    return _pages(transport, {"op": "gc", "chosen": list(chosen), "is_real": is_real})


def _pages(transport: Transport, request: Mapping[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    with Conversation.open(transport, request) as talk:
        while not (told := talk.reply(PAGE_TIMEOUT_S)).get("end"):
            page = told.get("page")
            if not isinstance(page, list) or not all(isinstance(item, dict) for item in page):
                raise ProtocolError("a page of the host's answer is none", host=transport.host.name)
            found.extend(page)
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
            segments[index] = SegmentDigest(size_bytes=size, blocks=earlier + blocks)
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


@cache
def _sources() -> dict[str, str]:
    folder = Path(bootstrap.__file__).parent
    return {path.name: path.read_text("utf-8") for path in sorted(folder.glob("*.py"))}


@cache
def _digest() -> str:
    return bootstrap.digest_of({name: text.encode() for name, text in _sources().items()})
