"""What comes in to a supervisor besides output: requests to stop, and the payload's events.

Both arrive as lines of JSON on a descriptor. Whatever stands in them, the run goes on; what an event says
becomes a record.
"""

import json
import os
from typing import Any, Callable, Dict, Optional, Tuple

from . import environment
from .masks import Masks
from .records import RecordWriter, dump

MAX_EVENT_BYTES = 64 * 1024
MAX_MESSAGE_CHARACTERS = 4096  # where instrument.py cuts an exception's message off
RESERVED_FIELDS = ("seq", "t", "kind", "proc", "pid")


class Control:
    """The run's control pipe; each line ``{"stop": {"grace_s": seconds or null}}`` is handed to ``stop``."""

    is_open = True

    def __init__(self, fd: int, stop: Callable[[Optional[float]], None]) -> None:
        self.fd = fd
        self._stop = stop
        self._rest = b""

    def read(self) -> None:
        """Reads once; nothing but a request to stop is understood."""
        *lines, self._rest = (self._rest + os.read(self.fd, 4096)).split(b"\n")
        for line in lines:
            try:
                grace_s = json.loads(line)["stop"]["grace_s"]
            except (ValueError, KeyError, TypeError):
                continue  # only our own user can write here
            self._stop(grace_s)


class Events:
    """The reading end of the payload's events pipe.

    ``source`` stands in each record (proc and pid); facts are compared with ``asked``, the environment that
    the process was started with.
    """

    def __init__(
        self, fd: int, writer: RecordWriter, masks: Masks, source: Dict[str, Any], asked: Dict[str, str]
    ) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self.is_open = True
        self._writer = writer
        self._masks = masks
        self._source = source
        self._asked = asked
        self._rest = b""

    def read(self) -> bool:
        """Reads once, so that a flood of events holds up nothing else; tells whether there may be more."""
        if not self.is_open:
            return False
        try:
            data = os.read(self.fd, MAX_EVENT_BYTES)
        except BlockingIOError:
            return False
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._record(line)
        if not data:
            if self._rest:
                self._record(self._rest)
            os.close(self.fd)
            self.is_open = False
        elif len(self._rest) > MAX_EVENT_BYTES:
            reason = "longer than %d bytes" % MAX_EVENT_BYTES
            self._writer.write("event_refused", proc=self._source["proc"], reason=reason)
            self._rest = b""
        return self.is_open

    def _record(self, line: bytes) -> None:
        """Records an event; whatever a payload writes there, its record is readable."""
        try:
            event = json.loads(line, parse_constant=str)
            kind, fields = self._understood(event)
            text = dump(self._masks.record(fields))
        except Exception as error:  # noqa: BLE001
            head = self._masks.data(line)[:200].decode("utf-8", "backslashreplace")
            reason = "%s: %s" % (type(error).__name__, self._masks.text(str(error))[:200])
            self._writer.write("event_refused", proc=self._source["proc"], reason=reason, head=head)
        else:
            self._writer.write_text(kind, text[1:-1])

    def _understood(self, event: Dict[str, Any]) -> Tuple[str, Dict[str, Any]]:
        if event["kind"] == "facts":
            facts = {key: value for key, value in event.items() if key not in RESERVED_FIELDS}
            facts["mismatches"] = environment.mismatches(self._asked, facts)
            return "facts", {**self._source, **facts}
        if event["kind"] == "exception":
            keys = ("type", "message", "missing_module")
            told = {key: event.get(key) for key in keys}
            if isinstance(told["message"], str) and len(told["message"]) >= MAX_MESSAGE_CHARACTERS:
                told["message"] = self._masks.text(told["message"], is_cut=True)
            return "exception", {**self._source, **told}
        return "event", {**self._source, "event": event}
