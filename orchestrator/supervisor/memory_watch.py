"""Watches torch's CUDA allocator in the payload's process, and tells what its memory was when it ran out.

Loaded by `instrument` when torch was imported. From the moment when CUDA comes up the allocator keeps a
history; when an allocation fails, an ``oom`` event says who held what, and `memory_files` keep the rest; at
the end a ``memory`` event says who held the peak. Nothing here fails the payload or holds it up for long, and
its exception reaches it as it is.
"""

import fcntl
import functools
import json
import os
import sys
import termios
import threading
import time
from typing import Any, Callable, Dict, List, Mapping, Optional

from . import card_users, memory_blocks
from .memory_files import MemoryFiles, process_name
from .memory_names import Described, Known, describe, sums_by_category, sums_by_module
from .memory_owners import Owners
from .memory_stacks import BACKWARD, Stack

MOST_ENTRIES = 200_000
MOST_FAILURES = 5
MOST_LARGEST = 25
MOST_SAMPLES = 64  # of what is allocated after a backward pass
MOST_BLOCKS = 2000
MOST_EVENT_BYTES = 58_000  # the supervisor refuses longer lines than 64 KiB
PATIENCE_S = 10.0
LEAST_PATIENCE_S = 1.0
MOST_SPENT_S = 20.0  # on all failures: some programs try sizes until one fits
PEAK_TOLERANCE = 0.01
UNSPLIT = "unsplit"
_OPTIMIZED = 1  # of code flags: the frame's locals are its own
_LIVE_LOCALS = (3, 13)  # since when f_locals is no copy that keeps what it has seen alive

Report = Callable[..., None]


def keep_history(torch: Any) -> None:
    """Lets the allocator note every block's birth with the lines of Python that asked, and its death."""
    torch.cuda.memory._record_memory_history(  # noqa: SLF001
        "all", context="alloc", stacks="python", max_entries=MOST_ENTRIES
    )


class BackwardSamples:
    """What was allocated after one in ``stride`` backward passes, which doubles as a run grows longer."""

    def __init__(self) -> None:
        self.stride = 1
        self.values = []  # type: List[int]
        self._seen = 0

    def note(self, allocated: Callable[[], int]) -> None:
        """Counts one pass, and asks what is allocated where that is to be kept."""
        self._seen += 1
        if self._seen % self.stride:
            return
        self.values.append(allocated())
        if len(self.values) == MOST_SAMPLES:
            self.values, self.stride = self.values[1::2], self.stride * 2

    def as_json(self) -> Dict[str, Any]:
        """Returns the sizes in bytes, of one in so many passes."""
        return {"stride": self.stride, "bytes": list(self.values)}


class MemoryWatch:
    """One process's allocator; ``report`` writes an event's kind and fields to what ``events_fd`` returns.

    Without ``files`` none are written.
    """

    def __init__(
        self,
        torch: Any,
        owners: Owners,
        report: Report,
        events_fd: Callable[[], Optional[int]],
        files: Optional[MemoryFiles],
    ) -> None:
        self._torch = torch
        self._owners = owners
        self._report = report
        self._events_fd = events_fd
        self._files = files
        self._pid = os.getpid()
        self._failing = threading.Lock()
        self._failures = self._backwards = 0
        self._samples = {}  # type: Dict[int, BackwardSamples]
        self._can_sample = True
        self._spent_s = 0.0
        self._is_started = False
        self._is_payloads_own = False

    def watch(self) -> None:
        """Notices from now on when the payload records the history itself, and where a step ends."""
        c = self._torch._C  # noqa: SLF001
        for name in ("_cuda_record_memory_history", "_cuda_record_memory_history_legacy"):
            record = getattr(c, name, None)
            if record is not None:
                setattr(c, name, self._noticing(record))
        self._torch.autograd.backward = self._looking_after(self._torch.autograd.backward)

    def start(self) -> None:
        """Lets the allocator keep its history; CUDA has just come up, and nothing is allocated."""
        torch = self._torch
        backend = torch.cuda.get_allocator_backend()
        if backend != "native":
            self._report("facts", memory_history="none: the allocator %s keeps no history" % backend)
            return
        if self._is_payloads_own:
            self._tell_payloads_own()
        else:
            keep_history(torch)
            self._is_payloads_own = False
            self._report("facts", memory_history="the last %d events" % MOST_ENTRIES)
        self._is_started = True
        torch._C._cuda_attach_out_of_memory_observer(self._observe)  # noqa: SLF001

    def finish(self, peaks: List[Dict[str, Any]]) -> None:
        """Tells who held the peak on each card that was used."""
        if not (self._is_started and peaks) or os.getpid() != self._pid:
            return
        snapshot = self._torch.cuda.memory._snapshot()  # noqa: SLF001
        known = self._owners.seen() if self._owners.has_looked else self._owners.look_at_all()
        most_events = None if self._is_payloads_own else MOST_ENTRIES
        for card in peaks:
            self._tell("memory", peak_event(snapshot, card, known, most_events), PATIENCE_S)

    def _noticing(self, record: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(record)
        def record_and_notice(*arguments: Any, **named: Any) -> Any:
            if self._is_started and not self._is_payloads_own:
                self._tell_payloads_own()
            self._is_payloads_own = True
            return record(*arguments, **named)

        return record_and_notice

    def _tell_payloads_own(self) -> None:
        self._report("facts", memory_history="the payload's own, left as it is")

    def _looking_after(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        """Gradients are where they are after a backward pass: looks there once, and ever more rarely."""

        @functools.wraps(backward)
        def backward_and_look(*arguments: Any, **named: Any) -> Any:
            result = backward(*arguments, **named)
            if self._is_started and os.getpid() == self._pid and not self._is_within_backward():
                self._backwards += 1
                self._sample()
                if not self._backwards & (self._backwards - 1):
                    self._attempt("see whose memory is where", self._owners.look)
            return result

        return backward_and_look

    def _is_within_backward(self) -> bool:
        """Tells whether a pass ran inside another, as a reentrant checkpoint's does: it ends no step."""
        node = getattr(self._torch._C, "_current_autograd_node", None)  # noqa: SLF001
        return node is not None and node() is not None

    def _sample(self) -> None:
        """Notes what is allocated, until that fails once: it would after each pass."""
        if self._can_sample:
            self._can_sample = False
            self._attempt("see how much is allocated", self._note_sample)

    def _note_sample(self) -> None:
        device = self._torch.cuda.current_device()
        samples = self._samples.setdefault(device, BackwardSamples())
        samples.note(lambda: int(self._torch.cuda.memory_stats(device).get("allocated_bytes.all.current", 0)))
        self._can_sample = True

    def _observe(self, device: int, asked_bytes: int, limit_bytes: int, free_bytes: int) -> None:
        """Is called by torch in the thread whose allocation failed, before it raises."""
        if not self._failing.acquire(blocking=False):
            return
        try:
            self._failures += 1
            if self._failures <= MOST_FAILURES and self._spent_s < MOST_SPENT_S:
                begun_s = time.monotonic()
                failed = {
                    "device": device,
                    "asked_bytes": asked_bytes,
                    "limit_bytes": limit_bytes,
                    "free_bytes": free_bytes,
                }
                self._attempt("tell of the memory that ran out", lambda: self._tell_failure(failed))
                self._spent_s += time.monotonic() - begun_s
        finally:
            self._failing.release()

    def _tell_failure(self, failed: Dict[str, Any]) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        known = self._known()
        place = self._place(known)
        snapshot = self._torch.cuda.memory._snapshot()  # noqa: SLF001
        statistics = self._torch.cuda.memory_stats(failed["device"])
        reserved = int(statistics.get("reserved_bytes.all.current", 0))
        users = card_users.users(self._uuid(failed["device"]), reserved)
        described = describe(memory_blocks.live(snapshot, failed["device"]), known)
        event = failure_event(failed, snapshot, statistics, described)
        samples = self._samples.get(failed["device"], BackwardSamples()).as_json()
        event.update(place, processes=users, snapshot=None, number=self._failures, after_backwards=samples)
        if self._files is not None:
            files, number = self._files, self._failures
            self._attempt(
                "keep the snapshot",
                lambda: event.update(snapshot=files.write_snapshot(number, snapshot, deadline_s)),
            )
            analysis = {
                "format": 1,
                "event": event,
                "blocks": [block.as_json() for block in described[:MOST_BLOCKS]],
                "statistics": statistics,
            }
            self._attempt("keep the analysis", lambda: files.write_analysis(number, analysis))
        self._tell("oom", event, deadline_s - time.monotonic())

    def _known(self) -> Known:
        try:
            return self._owners.look_at_all()
        except Exception as error:  # noqa: BLE001  (what was seen before has to do)
            self._complain("see whose memory is where", error)
            return self._owners.seen()

    def _place(self, known: Known) -> Dict[str, Any]:
        """Returns where this thread is: its stack outside this module, the module, autograd's node."""
        frames, module = [], None
        frame = sys._getframe()  # noqa: SLF001
        while frame is not None and frame.f_code.co_filename == __file__:
            frame = frame.f_back  # type: ignore[assignment]
        while frame is not None:
            code = frame.f_code
            frames.append({"filename": code.co_filename, "line": frame.f_lineno, "name": code.co_name})
            if module is None and (code.co_filename, code.co_name) in known.sites:
                module = self._owners.name_of(_self_of(frame))
            frame = frame.f_back  # type: ignore[assignment]
        node = self._torch._C._current_autograd_node()  # noqa: SLF001
        stack = Stack(frames, known.sites, known.torch_folder)
        return {
            "stack": stack.lines,
            "module": module or stack.module,
            "autograd_node": None if node is None else str(node.name())[:200],
            "phase": stack.phase if node is None else BACKWARD,
        }

    def _uuid(self, device: int) -> str:
        """Returns a card's UUID, or that of an instance, by which the supervisor has pinned it."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        if device < len(visible) and visible[device][:4] in ("GPU-", "MIG-"):
            return visible[device]
        return "GPU-%s" % getattr(self._torch.cuda.get_device_properties(device), "uuid", "")

    def _tell(self, kind: str, event: Dict[str, Any], patience_s: float) -> None:
        """Writes an event once the pipe is empty, so that it goes whole and at once; else it is not told."""
        fd = self._events_fd()
        end = time.monotonic() + max(LEAST_PATIENCE_S, patience_s)
        while fd is not None and fcntl.ioctl(fd, termios.FIONREAD, b"\0" * 4) != b"\0" * 4:
            if time.monotonic() > end:
                return
            time.sleep(0.01)
        self._report(kind, **fitted(event))

    def _attempt(self, what: str, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001  (the payload goes on)
            self._complain(what, error)

    def _complain(self, what: str, error: Exception) -> None:
        text = "cannot %s: %s: %s" % (what, type(error).__name__, error)
        self._report("facts", instrument_error=text[:1000])


def of_process(torch: Any, report: Report, events_fd: Callable[[], Optional[int]]) -> MemoryWatch:
    """Returns what watches this process, as its environment says where its files go."""
    artifacts = os.environ.get("ORCH_ARTIFACTS")
    files = None if artifacts is None else MemoryFiles(artifacts, process_name(os.environ))
    return MemoryWatch(torch, Owners(torch), report, events_fd, files)


def failure_event(
    failed: Mapping[str, Any],
    snapshot: Mapping[str, Any],
    statistics: Mapping[str, Any],
    described: List[Described],
) -> Dict[str, Any]:
    """Returns the numbers of an ``oom`` event (pure).

    ``requested_bytes`` is the tensor's storage, rounded up to the allocator's 512 bytes; ``asked_bytes`` the
    segment for it.
    """
    device = failed["device"]
    refused = memory_blocks.last_refused(snapshot, device)
    allocated = sum(block.bytes for block in described)
    return {
        **failed,
        "requested_bytes": None if refused is None else refused["size"],
        "allocated_bytes": int(statistics.get("allocated_bytes.all.current", allocated)),
        "reserved_bytes": memory_blocks.reserved(snapshot, device),
        "largest_free_bytes": memory_blocks.largest_free(snapshot, device),
        "retries": int(statistics.get("num_alloc_retries", 0)),
        "owners": sums_by_category(described),
        "modules": sums_by_module(described),
        "largest": [block.as_json() for block in described[:MOST_LARGEST]],
    }


def peak_event(
    snapshot: Mapping[str, Any], card: Mapping[str, Any], known: Known, most_events: Optional[int]
) -> Dict[str, Any]:
    """Returns a ``memory`` event (pure); ``card`` has the peak that the allocator counted itself.

    A history that is as long as it may be, or whose length somebody else chose (None), may lack the peak.
    What the allocator counted beyond its blocks is "unsplit": rounding and what was not split off.
    """
    device, counted = card["index"], card["allocated_bytes"]
    length = len(memory_blocks.history(snapshot, device))
    found = memory_blocks.peak(snapshot, device)
    described = describe(found.blocks, known)
    is_cut = most_events is None or length >= most_events
    is_whole = not is_cut or found.allocated_bytes >= counted * (1 - PEAK_TOLERANCE)
    whose = "the payload's own" if most_events is None else "the last"
    unsplit = counted - sum(block.bytes for block in described) if is_whole else 0
    rest = [{"category": UNSPLIT, "bytes": unsplit, "blocks": 0}] if unsplit > 0 else []
    return {
        "device": device,
        "peak_allocated_bytes": counted,
        "owners": sums_by_category(described) + rest,
        "largest": [block.as_json() for block in described[:MOST_LARGEST]],
        "is_whole": is_whole,
        "reason": None if is_whole else "the peak lies before %s %d events" % (whose, length),
    }


def fitted(event: Dict[str, Any]) -> Dict[str, Any]:
    """Returns the event with shorter lists where it is longer than the supervisor takes."""
    for name in ("largest", "modules", "processes", "stack"):
        while len(json.dumps(event, default=str)) > MOST_EVENT_BYTES and event.get(name):
            event = dict(event, **{name: event[name][: len(event[name]) // 2]})
    return event


def _self_of(frame: Any) -> Any:
    """Returns the object whose method a frame runs, without making the frame keep its locals alive."""
    code = frame.f_code
    if not code.co_flags & _OPTIMIZED or code.co_varnames[:1] != ("self",):
        return None
    values = frame.f_locals
    found = values.get("self")
    if sys.version_info < _LIVE_LOCALS:
        values.clear()
    return found
