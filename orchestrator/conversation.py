"""One conversation with a host's supervisor over one channel: the greeting, frames, a run's bytes.

`Conversation.open` sends what a host needs to answer (the bootstrap and, when it is missing there, the
supervisor) and the request in one go, so that a host which has them answers after one round trip. Reads no
records: a run's bytes come out as `Piece` values. Errors of the host are translated here; which requests
there are is `remote`'s.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import secrets
import time
from collections.abc import Iterator, Mapping
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
NO_MODULE = r"No module named '([\w.]{1,100})'"
ANSWER_TIMEOUT_S = 60.0
SILENCE_TIMEOUT_S = 30.0
MAX_NOISE_BYTES = 1024 * 1024
COMMAND_NOT_FOUND = 127


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


_IN_HOME = 'exec "$HOME/$0" "$@"'  # constant: what is below the home comes as words of its own


def _interpreter(python: str) -> list[str]:
    """Returns the words that start it: a log-in may begin in another folder than the home, so ~ is $HOME."""
    if not python.startswith("~/"):
        return [python]
    return ["/bin/sh", "-c", _IN_HOME, python.removeprefix("~/")]


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
        self.received_bytes = 0

    @classmethod
    def open(cls, transport: Transport, request: Mapping[str, Any]) -> Conversation:
        """Opens a channel, sends ``request`` and reads the host's greeting.

        Raises:
            HostUnfit: no Python there, or too old a one, or a root folder that cannot be used.
            Unreachable: the connection broke.
        """
        host = transport.host
        channel = transport.open([*_interpreter(host.python), "-I", "-S", "-c", LOADER])
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

    def frame(self) -> tuple[dict[str, Any], bytes]:
        """Returns the next frame, header and body, of an answer that brings bytes.

        Raises:
            ProtocolError: the reply is none of ours.
        """
        return self._frame(ANSWER_TIMEOUT_S)

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
            return HostUnfit(f"{message}{hint}", host=self._host.name, lacking="root")
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
        self.received_bytes += len(data)
        self._buffer += data

    def _ended(self) -> OrchError:
        """The far side's process has ended although an answer was due."""
        status = self._channel.wait(5.0)
        words = self._channel.stderr().decode("utf-8", "replace")
        if (lack := self._lack_of_python(words, status)) is not None:
            key = "python:" if self._host.venv is None else "venv:"
            message = f"{lack} set '{key}' in inventory.yaml"
            return HostUnfit(message, host=self._host.name, lacking="python")
        return ProtocolError(
            f"the supervisor ended with exit status {status}; {self._last_words()}", host=self._host.name
        )

    def _lack_of_python(self, words: str, status: int) -> str | None:
        """Returns what is wrong with the interpreter, by its last words; None where it is not that."""
        python = printable(self._host.python)
        if TOO_OLD in words:
            found = printable(words.split(TOO_OLD, 1)[1].split("\n", 1)[0].strip())
            return f"{python} is Python {found}, need 3.8;"
        if OLDER_THAN_3_4 in words:
            return f"{python} is older than Python 3.4, need 3.8;"
        if (module := re.search(NO_MODULE, words)) is not None:
            return (
                f"{python} has no module {module[1]}, so it is a stripped Python such as python3-minimal; "
                "install the whole one (Debian, Ubuntu: apt-get install python3), or"
            )
        if status == COMMAND_NOT_FOUND:
            return f"there is no {python} ({printable(words.strip()[-200:])});"
        return None

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


@cache
def _sources() -> dict[str, str]:
    folder = Path(bootstrap.__file__).parent
    return {path.name: path.read_text("utf-8") for path in sorted(folder.glob("*.py"))}


@cache
def _digest() -> str:
    return bootstrap.digest_of({name: text.encode() for name, text in _sources().items()})
