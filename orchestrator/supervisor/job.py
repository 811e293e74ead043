"""One run from its first record to its last: starts the payload, pumps its output, ends its whole process
tree.

A single-threaded loop over the payload's pipes, the control pipe, signals and deadlines. It ends when the
main process and every descendant are gone and their pipes are drained, or when what is left could not be
ended, which is then named. The last records are always ``end`` and a seal.
"""

import json
import os
import select
import selectors
import signal
import subprocess
import sys
import time
from typing import Any, Dict, List, Optional, Sequence, Tuple

from . import environment, gpus, processes, store
from .masks import Masks
from .pump import Pump
from .records import DiskFull, RecordWriter, dump

HEARTBEAT_S = 10.0
DRAIN_S = 2.0
KILL_S = 5.0
SCAN_S = 0.1
MAX_EVENT_BYTES = 64 * 1024
PROC = "main"
MAX_NAMED = 20
MAX_MESSAGE_CHARACTERS = 4096  # where instrument.py cuts an exception's message off
RESERVED_FIELDS = ("seq", "t", "kind", "proc", "pid")


class Job:
    """Runs ``job`` (the controller's JSON) in ``run_dir``, where ``code/`` holds the ``entries``.

    ``secrets`` are variables that the payload gets and no record shows.
    """

    def __init__(
        self,
        job: Dict[str, Any],
        entries: Sequence[store.Entry],
        run_dir: str,
        writer: RecordWriter,
        control_fd: int,
        secrets: Dict[str, str],
    ) -> None:
        self._job = job
        self._secrets = secrets
        self._masks = Masks(secrets.values())
        self._run_dir = run_dir
        self._entries = entries
        self._code_dir = os.path.join(run_dir, "code")
        self._writer = writer
        self._selector = selectors.DefaultSelector()
        self._control_fd = control_fd
        self._control = b""
        self._pumps: List[Pump] = []
        self._events: Optional[Tuple[int, bytes]] = None
        self._pid = 0
        self._main_end: Optional[Tuple[int, Any]] = None
        self._stop: Optional[Dict[str, Any]] = None
        self._kill_at: Optional[float] = None
        self._give_up_at: Optional[float] = None
        self._drain_until: Optional[float] = None
        self._scan_at = 0.0
        self._left: List[processes.Process] = []
        self._oom = processes.OomCounter()
        writer.may_wait = self._may_wait_for_the_disk
        writer.masked = self._masks.record
        self._asked: Dict[str, str] = {}
        self._timeout_at: Optional[float] = None
        self._heartbeat_at = time.monotonic() + HEARTBEAT_S
        self._got_sigterm = False
        self._is_stopping = False

    def run(self) -> None:
        """Runs to the end; a failure of the supervisor itself is recorded like any other reason."""
        try:
            self._start()
            self._loop()
            self._finish()
        except _Refused as error:
            self._end("refused", reason=str(error))
        except DiskFull:
            self._abandon("the host's disk stayed full")
        except Exception as error:
            self._abandon("the supervisor failed: %s: %s" % (type(error).__name__, error))
            raise

    # Starting

    def _start(self) -> None:
        self._wake_on_signals()
        chosen = self._choose_devices()
        events_read, events_write = os.pipe()
        self._asked = environment.build(
            self._job,
            base=os.environ,
            code_dir=self._code_dir,
            events="%d:%d" % (events_write, os.fstat(events_write).st_ino),
            cards=chosen,
            secrets=self._secrets,
        )
        argv = self._argv()
        try:
            child = subprocess.Popen(
                argv,
                cwd=os.path.join(self._run_dir, "artifacts"),
                env=self._asked,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(events_write,),
                start_new_session=True,
            )
        except OSError as error:
            raise _Refused("cannot start %s: %s" % (argv[0], error)) from error
        finally:
            os.close(events_write)
        child.returncode = 0  # this loop reaps it: Popen must not try
        self._pid = child.pid
        assert child.stdout is not None
        assert child.stderr is not None
        self._record_spawn(argv, chosen)
        for stream, file in (("stdout", child.stdout), ("stderr", child.stderr)):
            self._add_pump(stream, os.dup(file.fileno()))
            file.close()
        os.set_blocking(events_read, False)
        self._events = (events_read, b"")
        self._selector.register(events_read, selectors.EVENT_READ, self._read_events)
        self._selector.register(self._control_fd, selectors.EVENT_READ, self._read_control)
        timeout_s = self._job.get("timeout_s")
        self._timeout_at = time.monotonic() + timeout_s if timeout_s else None

    def _choose_devices(self) -> List[gpus.Card]:
        if not self._job["devices"]:
            return []
        try:
            return gpus.resolve(self._job["devices"], gpus.cards())
        except gpus.DeviceError as error:
            raise _Refused(str(error)) from error

    def _argv(self) -> List[str]:
        params = os.path.join(self._run_dir, "params.json")
        with open(params, "w", encoding="utf-8") as file:
            json.dump(self._job["params"], file, indent=1)
        instrument = os.path.join(os.path.dirname(os.path.abspath(__file__)), "instrument.py")
        return [sys.executable, instrument, self._job["module"], "--params", params]

    def _record_spawn(self, argv: List[str], chosen: List[gpus.Card]) -> None:
        got = processes.environment(self._pid)
        self._writer.write(
            "spawn",
            proc=PROC,
            pid=self._pid,
            argv=argv,
            cwd=os.path.join(self._run_dir, "artifacts"),
            env=got,
            env_digest=environment.digest(self._masks.value(got)),
            identity=processes.identity(self._pid),
            devices=gpus.as_record(chosen),
        )
        if got and got != self._asked:  # an empty one means that it is gone already
            self._writer.write(
                "facts",
                proc=PROC,
                pid=self._pid,
                mismatches=environment.differences(self._asked, got, sorted(self._asked)),
            )

    def _add_pump(self, stream: str, fd: int) -> None:
        def emit(off: int, line: int, key: str, value: str) -> None:
            self._writer.write_output(PROC, self._pid, stream, off, line, key, value)

        pump = Pump(fd, emit, self._masks.stream() if self._masks else None)
        self._pumps.append(pump)

        def read() -> None:
            pump.read()
            if not pump.is_open:
                self._selector.unregister(fd)

        self._selector.register(fd, selectors.EVENT_READ, read)

    def _wake_on_signals(self) -> None:
        """SIGCHLD only wakes the loop; SIGTERM, as a host sends it when it shuts down, stops the run."""
        read_fd, write_fd = os.pipe()
        os.set_blocking(read_fd, False)
        os.set_blocking(write_fd, False)
        signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        signal.signal(signal.SIGTERM, self._on_sigterm)
        self._selector.register(read_fd, selectors.EVENT_READ, lambda: os.read(read_fd, 4096))

    def _on_sigterm(self, *_: Any) -> None:
        """Only notes it: a handler runs between any two instructions, in the middle of a record too."""
        self._got_sigterm = True

    # The loop

    def _loop(self) -> None:
        while not self._is_over():
            for key, _ in self._selector.select(self._pause()):
                key.data()
            self._reap()
            self._keep_time()

    def _pause(self) -> float:
        now = time.monotonic()
        waits = [self._heartbeat_at - now]
        seal_in = self._writer.seal_due_in(now)
        waits += [] if seal_in is None else [seal_in]
        deadlines = (self._timeout_at, self._kill_at, self._give_up_at, self._drain_until)
        waits += [moment - now for moment in deadlines if moment is not None]
        if self._main_end is not None or self._is_stopping:
            waits.append(SCAN_S)
        return max(0.0, min(waits))

    def _is_over(self) -> bool:
        """Nothing runs and nothing is left to read; or killing did not help and time is up."""
        if self._give_up_at is not None and time.monotonic() >= self._give_up_at:
            return True
        return self._main_end is not None and not self._left and not any(pump.is_open for pump in self._pumps)

    def _reap(self) -> None:
        """Reaps every child: the main process, and orphans that came to us."""
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            if pid == self._pid and self._main_end is None:
                self._main_end = (status, usage)
                self._drain_until = time.monotonic() + DRAIN_S
                self._timeout_at = None
                self._record_exit(status, usage)
        if self._main_end is not None and time.monotonic() >= self._scan_at:
            self._scan_at = time.monotonic() + SCAN_S / 2
            self._left = self._members()

    def _record_exit(self, status: int, usage: Any) -> None:
        code, number = _exit(status)
        self._writer.write(
            "exit",
            proc=PROC,
            pid=self._pid,
            code=code,
            signal=number,
            oom_kill=self._oom.since_start(),
            oom_scope=self._oom.scope,
            rusage={
                "user_s": usage.ru_utime,
                "system_s": usage.ru_stime,
                "peak_rss_bytes": usage.ru_maxrss * 1024,
            },
        )

    def _keep_time(self) -> None:
        now = time.monotonic()
        if self._got_sigterm and not self._is_stopping:
            self._begin_stop("cancelled", "the supervisor got SIGTERM")
        if now >= self._heartbeat_at:
            self._writer.write("heartbeat")
            self._heartbeat_at = now + HEARTBEAT_S
        if self._timeout_at is not None and now >= self._timeout_at:
            self._begin_stop("timeout", "the run took longer than its %g s" % self._job["timeout_s"])
        if self._drain_until is not None and now >= self._drain_until:
            self._end_leftovers()
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = None
            self._give_up_at = now + KILL_S
        if self._give_up_at is not None:
            self._left = self._members()
            processes.send_signal(self._left, signal.SIGKILL)
        if self._writer.seal_due_in(now) == 0.0:
            self._writer.seal()

    # Ending

    def _may_wait_for_the_disk(self) -> bool:
        """A full disk blocks this loop, and so the payload; a cancel or the timeout ends that."""
        is_asked = bool(select.select([self._control_fd], [], [], 0)[0]) or self._got_sigterm
        is_late = self._timeout_at is not None and time.monotonic() >= self._timeout_at
        return not (is_asked or is_late)

    def _begin_stop(self, outcome: str, reason: str, grace_s: Optional[float] = None) -> None:
        """SIGTERM to all now, SIGKILL after the grace; a second request can only shorten the grace."""
        grace = self._job["grace_s"] if grace_s is None else grace_s
        kill_at = time.monotonic() + grace
        self._timeout_at = None
        if not self._is_stopping:
            self._is_stopping = True
            if self._main_end is None:  # a run that has ended by itself keeps its own outcome
                self._stop = {"outcome": outcome, "reason": reason}
            self._writer.write("stopping", outcome=outcome, reason=reason, grace_s=grace)
            processes.send_signal(self._members(), signal.SIGTERM)
        if self._give_up_at is None:
            self._kill_at = kill_at if self._kill_at is None else min(self._kill_at, kill_at)

    def _end_leftovers(self) -> None:
        """The main process has ended and something still runs or holds a pipe: name it, then end it."""
        self._drain_until = None
        self._left = self._members()
        inodes = {os.fstat(pump.fd).st_ino for pump in self._pumps if pump.is_open}
        if not self._left and not inodes:
            return
        if inodes:
            holders = processes.holders_of(inodes, processes.everything())
            self._writer.write("pipe_held", proc=PROC, holders=processes.describe(holders))
        self._writer.write("leftover", processes=processes.describe(self._left))
        if self._kill_at is None and self._give_up_at is None:
            processes.send_signal(self._left, signal.SIGTERM)
            self._kill_at = time.monotonic() + self._job["grace_s"]

    def _finish(self) -> None:
        for pump in self._pumps:
            while pump.is_open and pump.read():
                pass
            pump.close()
        while self._read_events():
            pass
        code, number = _exit(self._main_end[0]) if self._main_end else (None, None)
        stop = self._stop or {"outcome": "exited" if number is None else "signalled", "reason": None}
        changed = store.changed_files(self._code_dir, self._entries)
        if changed:
            self._writer.write("code_changed", files=changed[:MAX_NAMED], count=len(changed))
        self._end(stop["outcome"], stop["reason"], code, number, processes.describe(self._left))

    def _abandon(self, reason: str) -> None:
        """Ends the tree without reading it out; the records say why, if the disk still takes them."""
        left = self._members()
        processes.send_signal(left, signal.SIGKILL)
        left = processes.wait_for_end(left, KILL_S)
        self._end("abandoned", reason, survivors=processes.describe(left))

    def _end(
        self,
        outcome: str,
        reason: Optional[str],
        code: Optional[int] = None,
        signal_number: Optional[int] = None,
        survivors: Optional[List[Dict[str, Any]]] = None,
    ) -> None:
        self._writer.release_reserve()
        self._writer.write(
            "end", outcome=outcome, code=code, signal=signal_number, reason=reason, survivors=survivors or []
        )
        self._writer.close()

    def _members(self) -> List[processes.Process]:
        return processes.members(self._job["run_id"], os.getpid())

    # What comes in besides output

    def _read_control(self) -> None:
        """A line ``{"stop": {"grace_s": seconds or null}}`` stops the run; nothing else is understood."""
        self._control += os.read(self._control_fd, 4096)
        *lines, self._control = self._control.split(b"\n")
        for line in lines:
            try:
                grace_s = json.loads(line)["stop"]["grace_s"]
            except (ValueError, KeyError, TypeError):
                continue  # only our own user can write here
            self._begin_stop("cancelled", "cancelled on request", grace_s)

    def _read_events(self) -> bool:
        """Reads once, so that a flood of events holds up nothing else; tells whether there may be more."""
        if self._events is None:
            return False
        fd, rest = self._events
        try:
            data = os.read(fd, MAX_EVENT_BYTES)
        except BlockingIOError:
            return False
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            self._event(line)
        if not data:
            if rest:
                self._event(rest)
            self._selector.unregister(fd)
            os.close(fd)
            self._events = None
            return False
        if len(rest) > MAX_EVENT_BYTES:
            reason = "longer than %d bytes" % MAX_EVENT_BYTES
            self._writer.write("event_refused", proc=PROC, reason=reason)
            rest = b""
        self._events = (fd, rest)
        return True

    def _event(self, line: bytes) -> None:
        """Records an event; whatever a payload writes there, the run goes on and its record is readable."""
        try:
            event = json.loads(line, parse_constant=str)
            kind, fields = self._event_record(event)
            text = dump(self._masks.record(fields))
        except Exception as error:  # noqa: BLE001
            head = self._masks.data(line)[:200].decode("utf-8", "backslashreplace")
            reason = "%s: %s" % (type(error).__name__, self._masks.text(str(error))[:200])
            self._writer.write("event_refused", proc=PROC, reason=reason, head=head)
        else:
            self._writer.write_text(kind, text[1:-1])

    def _event_record(self, event: Dict[str, Any]) -> Tuple[str, Dict[str, Any]]:
        source = {"proc": PROC, "pid": self._pid}
        if event["kind"] == "facts":
            facts = {key: value for key, value in event.items() if key not in RESERVED_FIELDS}
            facts["mismatches"] = environment.mismatches(self._asked, facts)
            return "facts", {**source, **facts}
        if event["kind"] == "exception":
            keys = ("type", "message", "missing_module")
            told = {key: event.get(key) for key in keys}
            if isinstance(told["message"], str) and len(told["message"]) >= MAX_MESSAGE_CHARACTERS:
                told["message"] = self._masks.text(told["message"], is_cut=True)
            return "exception", {**source, **told}
        return "event", {**source, "event": event}


class _Refused(Exception):
    """The run cannot start on this host."""


def _exit(status: int) -> Tuple[Optional[int], Optional[int]]:
    """Returns (exit code, None) or (None, signal number)."""
    if os.WIFSIGNALED(status):
        return None, os.WTERMSIG(status)
    return os.WEXITSTATUS(status), None
