"""Answers one request of the controller on one channel: to start, read, stop, list, compare, clean, send
artifacts, tell the time, what is prepared, or what decides whether runs can work here.

``start`` is repeatable: the same request again finds the run that the first one started, and both then follow
the same records; the ``secrets`` beside its job stay in memory. Where environments that the run needs are not
there it starts nothing and says which, unless ``preparers`` names the runs that prepare them. Errors are
frames
``{"error": code, "message": text}`` with code ``unfit`` (this host cannot), ``unknown-run``, ``conflict``
(the id belongs to another job), ``damaged`` or ``refused``.
"""

import os
import sys
import time
from typing import Any, BinaryIO, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

from . import detach, digests, locks, processes, program, turns, wire
from .rundir import RunDir
from .store import Entry, Store, StoreError, checked_entries, object_parts
from .tail import Tail, Watch

ORPHAN_GRACE_S = 10.0
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
        known: Dict[str, Callable[[], None]] = {
            "start": lambda: self._start(request),
            "read": lambda: self._read(self._known(request["run"]), request["cursor"], request["follow"]),
            "stop": lambda: self._stop(self._known(request["run"]), request["grace_s"]),
            "status": lambda: self._say(
                {"runs": {run_id: self._status(run_id) for run_id in request["runs"]}}
            ),
            "digests": lambda: self._digests(RunDir(self._root, request["run"]), request),
            "list": lambda: self._list(request["runs"]),
            "gc": lambda: self._gc(request),
            "prepared": lambda: self._prepared(request["setup"]),
            "artifacts": lambda: self._artifacts(self._known(request["run"]), request["files"]),
            "clock": lambda: self._clock(request["trips"]),
            "doctor": lambda: self._doctor(request),
        }
        if op not in known:
            raise RequestError("unknown-request", "this supervisor does not know the request %r" % op)
        known[op]()

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
        program.check(job)
        turns.check(job.get("turn"))
        run = RunDir(self._root, job["run_id"])
        entries = checked_entries(job["bundle"], request["entries"])
        envs, lacking = self._environments(job)
        preparers = request.get("preparers")
        if lacking and preparers is None and not run.has_started:
            self._say({"unprepared": lacking})
            return
        with locks.shared(os.path.join(self._root, locks.OBJECTS)):  # none of its objects goes meanwhile
            lock_fd = self._unpack(run, job, entries, envs)
        if lock_fd is not None:
            detach.start(run, job, entries, lock_fd, secrets, preparers or ())
        self._say({"started": lock_fd is not None})
        if request["cursor"] is not None:
            self._read(run, request["cursor"], follow=True)

    def _environments(self, job: Dict[str, Any]) -> Tuple[List[str], List[int]]:
        """Returns the digests of the environments that a run uses or makes, and which of those that it needs
        are not there, by their place in its ``setup``.
        """
        needed, made = job.get("setup") or [], job.get("prepares")
        if not needed and not made:
            return [], []
        from . import setups  # noqa: PLC0415  (only who needs it pays)

        setups.check(job)
        found = setups.chain(self._root, [*needed, *([made] if made else ())])
        lacking = [place for place, _ in enumerate(needed) if found[place].done is None]
        return [environment.digest for environment in found], lacking

    def _prepared(self, specs: List[Dict[str, Any]]) -> None:
        from . import setups  # noqa: PLC0415  (only who asks for it pays)

        setups.check({"setup": specs})
        found = setups.chain(self._root, specs)
        told = [{"digest": each.digest, "done": each.done, "by": each.preparer} for each in found]
        self._say({"prepared": told})

    def _unpack(
        self, run: RunDir, job: Dict[str, Any], entries: Sequence[Entry], envs: Sequence[str]
    ) -> Optional[int]:
        """Asks for what is missing and puts the code into the run's folder; returns its lock's descriptor, or
        None when it was started before.
        """
        store = Store(self._root)
        missing = store.missing(entries)
        self._say({"need": missing})
        for _ in missing:
            header, body = self.next_frame()
            store.put(header["object"], object_parts(body, header, self.next_frame))
        lock_fd = run.claim(job)
        if lock_fd is not None:
            store.unpack(entries, run.code)
            run.note_manifest(entries, envs)
        return lock_fd

    def _stop(self, run: RunDir, grace_s: Optional[float]) -> None:
        """Asks the supervisor; when it is gone, ends what is left of the run and says what was ended."""
        if grace_s is not None and not (isinstance(grace_s, (int, float)) and 0 <= grace_s <= MAX_GRACE_S):
            raise RequestError("refused", "not a grace in seconds: %r" % (grace_s,))
        if run.request_stop(grace_s):
            self._say({"asked": True, "ended": [], "survivors": []})
            return
        ended = processes.describe(run.orphans())
        survivors = run.tree().end(ORPHAN_GRACE_S if grace_s is None else grace_s)
        self._say({"asked": False, "ended": ended, "survivors": processes.describe(survivors)})

    def _read(self, run: RunDir, cursor: Dict[str, int], follow: bool) -> None:
        tail = Tail(run.records, cursor["segment"], cursor["offset"], self._send_piece, self._send_cut)
        if follow:
            tail.follow(lambda: run.is_alive, lambda: self._say({"idle": True}), Watch(run.records, run.lock))
        else:
            tail.pump()
        alive = run.is_alive
        segment, size = tail.host_end() if run.has_started else (0, 0)
        self._say({"end": True, "alive": alive, "segment": segment, "bytes": size})

    def _send_piece(self, segment: int, offset: int, data: bytes) -> None:
        self._write(wire.pack({"segment": segment, "offset": offset}, data))

    def _send_cut(self, segment: int, offset: int, through: int, stub: bytes) -> None:
        self._write(wire.pack({"segment": segment, "offset": offset, "through": through}, stub))

    def _status(self, run_id: str) -> Dict[str, Any]:
        run = RunDir(self._root, run_id)
        is_alive, state = run.is_alive, run.state
        is_waiting = is_alive and state.get("state") == "waiting"
        return {
            "exists": run.exists,
            "started": run.has_started,
            "alive": is_alive,
            "waiting": is_waiting,
            "obstacles": state.get("obstacles", []) if is_waiting else [],
            "cards": state.get("cards", []) if is_alive and not is_waiting else [],
            "silent_s": run.silent_s,
            "stopped": run.is_stopped,
            "rebooted": run.was_rebooted,
            "orphans": processes.describe(run.orphans()),
        }

    def _digests(self, run: RunDir, request: Dict[str, Any]) -> None:
        """Answers for a run that is not here too: that it has nothing is an answer."""
        for frame in digests.of_records(run, request["sizes"]):
            self._say(frame)
        entries = request["entries"]
        bundle = None
        if entries is not None:
            bundle = digests.of_bundle(run, Store(self._root), checked_entries(request["bundle"], entries))
        cut = digests.of_cut(run)
        self._say({"end": True, "exists": run.exists, "bundle": bundle, "cut": cut})

    def _clock(self, trips: int) -> None:
        """Says what time it is here, once for each frame that comes."""
        for _ in range(trips):
            self.next_frame()
            self._say({"t": time.time()})

    def _doctor(self, request: Dict[str, Any]) -> None:
        """Tells the time first, while nothing else is to be waited for."""
        from . import doctor  # noqa: PLC0415  (only who asks for it pays)

        self._clock(request["trips"])
        self._say({"facts": doctor.gather(self._root, request["asked"])})

    def _list(self, run_ids: Optional[Sequence[str]]) -> None:
        from . import listing  # noqa: PLC0415  (only who asks for it pays)

        self._say_pages(listing.pages(self._root, run_ids))

    def _gc(self, request: Dict[str, Any]) -> None:
        """Without a choice of runs, says what there is to choose from."""
        from . import cleaning  # noqa: PLC0415  (only who asks for it pays)

        chosen = request["chosen"]
        if chosen is None:
            self._say_pages(cleaning.survey(self._root))
        else:
            self._say_pages(cleaning.clean(self._root, chosen, request["is_real"]))

    def _artifacts(self, run: RunDir, files: Optional[Sequence[Sequence[Any]]]) -> None:
        """Without a choice of files, says which there are."""
        from . import artifacts  # noqa: PLC0415  (only who asks for it pays)

        if files is None:
            self._say_pages(artifacts.pages(run))
            return
        for header, body in artifacts.send(run, files):
            self._write(wire.pack(header, body))
        self._say({"end": True})

    def _say_pages(self, pages: Iterator[List[Dict[str, Any]]]) -> None:
        for page in pages:
            self._say({"page": page})
        self._say({"end": True})

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
