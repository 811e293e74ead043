"""Answers one request of the controller on one channel: start, read, stop, status or digests.

``start`` is repeatable: the same request again finds the run that the first one started, and both then follow
the same records; the ``secrets`` beside its job stay in memory. Errors are frames
``{"error": code, "message": text}`` with code ``unfit`` (this host cannot), ``unknown-run``, ``conflict``
(the id belongs to another job), ``damaged`` or ``refused``.
"""

import os
import signal
import sys
from typing import Any, BinaryIO, Dict, Optional, Tuple

from . import detach, digests, processes, wire
from .rundir import RunDir
from .store import Store, StoreError, checked_entries, object_parts
from .tail import Tail, Watch

ORPHAN_GRACE_S = 10.0
KILL_S = 5.0
MAX_GRACE_S = 7 * 86400.0


class RequestError(Exception):
    """A request that cannot be met; ``code`` is for the controller, the text for a person."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Service:
    """One conversation: ``stream`` is binary input; frames go to standard output."""

    def __init__(self, stream: BinaryIO, root: str) -> None:
        self._stream = stream
        self._root = root

    def answer(self, request: Dict[str, Any]) -> None:
        """Meets one request."""
        op = request["op"]
        if op == "start":
            self._start(request)
        elif op == "read":
            self._read(self._known(request["run"]), request["cursor"], request["follow"])
        elif op == "stop":
            self._stop(self._known(request["run"]), request["run"], request["grace_s"])
        elif op == "status":
            self._say({"runs": {run_id: self._status(run_id) for run_id in request["runs"]}})
        elif op == "digests":
            self._digests(RunDir(self._root, request["run"]), request)
        else:
            raise RequestError("unknown-request", "this supervisor does not know the request %r" % op)

    def next_frame(self) -> Tuple[Dict[str, Any], bytes]:
        """Reads one frame from the controller."""
        return wire.read_frame(self._read_exactly)

    def say_error(self, code: str, message: str) -> None:
        """Sends an error frame."""
        self._say({"error": code, "message": message})

    def _start(self, request: Dict[str, Any]) -> None:
        job, secrets = request["job"], request.get("secrets", {})
        if sorted(secrets) != sorted(job.get("secrets", {})):
            raise RequestError("refused", "the job's secrets and those that came with it differ")
        run = RunDir(self._root, job["run_id"])
        store = Store(self._root)
        entries = checked_entries(job["bundle"], request["entries"])
        missing = store.missing(entries)
        self._say({"need": missing})
        for _ in missing:
            header, body = self.next_frame()
            store.put(header["object"], object_parts(body, header, self.next_frame))
        lock_fd = run.claim(job)
        if lock_fd is not None:
            store.unpack(entries, run.code)
            detach.start(run, job, entries, lock_fd, secrets)
        self._say({"started": lock_fd is not None})
        if request["cursor"] is not None:
            self._read(run, request["cursor"], follow=True)

    def _stop(self, run: RunDir, run_id: str, grace_s: Optional[float]) -> None:
        """Asks the supervisor; when it is gone, ends what carries the run's id and says what was ended."""
        if grace_s is not None and not (isinstance(grace_s, (int, float)) and 0 <= grace_s <= MAX_GRACE_S):
            raise RequestError("refused", "not a grace in seconds: %r" % (grace_s,))
        if run.request_stop(grace_s):
            self._say({"asked": True, "ended": [], "survivors": []})
            return
        left = processes.members(run_id)
        ended = processes.describe(left)
        processes.send_signal(left, signal.SIGTERM)
        processes.wait_for_end(left, ORPHAN_GRACE_S if grace_s is None else grace_s)
        left = processes.members(run_id)
        processes.send_signal(left, signal.SIGKILL)
        survivors = processes.describe(processes.wait_for_end(left, KILL_S))
        self._say({"asked": False, "ended": ended, "survivors": survivors})

    def _read(self, run: RunDir, cursor: Dict[str, int], follow: bool) -> None:
        tail = Tail(run.records, cursor["segment"], cursor["offset"], self._send_piece)
        if follow:
            tail.follow(lambda: run.is_alive, lambda: self._say({"idle": True}), Watch(run.records, run.lock))
        else:
            tail.pump()
        alive = run.is_alive
        segment, size = tail.host_end() if run.has_started else (0, 0)
        self._say({"end": True, "alive": alive, "segment": segment, "bytes": size})

    def _send_piece(self, segment: int, offset: int, data: bytes) -> None:
        self._write(wire.pack({"segment": segment, "offset": offset}, data))

    def _status(self, run_id: str) -> Dict[str, Any]:
        run = RunDir(self._root, run_id)
        is_alive = run.is_alive
        orphans = [] if is_alive or not run.has_started else processes.members(run_id)
        return {
            "exists": run.exists,
            "started": run.has_started,
            "alive": is_alive,
            "orphans": processes.describe(orphans),
        }

    def _digests(self, run: RunDir, request: Dict[str, Any]) -> None:
        """Answers for a run that is not here too: that it has nothing is an answer."""
        for frame in digests.of_records(run, request["sizes"]):
            self._say(frame)
        entries = request["entries"]
        bundle = None
        if entries is not None:
            bundle = digests.of_bundle(run, Store(self._root), checked_entries(request["bundle"], entries))
        self._say({"end": True, "exists": run.exists, "bundle": bundle})

    def _known(self, run_id: str) -> RunDir:
        run = RunDir(self._root, run_id)
        if not run.exists:
            raise RequestError("unknown-run", "%s has no run %s" % (self._root, run_id))
        return run

    def _read_exactly(self, size: int) -> bytes:
        data = self._stream.read(size)
        if len(data) != size:
            raise wire.WireError("the controller has gone")
        return data

    def _say(self, header: Dict[str, Any]) -> None:
        self._write(wire.pack(header))

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(1, view) :]


def serve(stream: BinaryIO, root: str, request: Dict[str, Any]) -> None:
    """Answers ``request`` and returns; objects come on ``stream``; a controller that has gone is no error."""
    service = Service(stream, root)
    try:
        try:
            service.answer(request)
        except RequestError as error:
            service.say_error(error.code, str(error))
        except ValueError as error:
            service.say_error("refused", str(error))
        except FileExistsError as error:
            service.say_error("conflict", str(error))
        except StoreError as error:
            service.say_error("damaged", str(error))
        except (OSError, detach.StartFailed) as error:
            if isinstance(error, BrokenPipeError):
                raise
            service.say_error("unfit", "%s (root %s)" % (error, root))
    except (wire.WireError, BrokenPipeError):
        sys.stderr.write("orch: the controller has gone\n")
