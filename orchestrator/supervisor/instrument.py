"""Runs a payload's module or script and reports, from inside its process, what it really got.

``python instrument.py MODULE [ARGUMENT…]`` behaves like ``python -m MODULE [ARGUMENT…]``, and ``python
instrument.py --script PATH [ARGUMENT…]`` like ``python PATH [ARGUMENT…]``. Both write JSON lines to the
descriptor named by ``ORCH_EVENTS_FD``: Python and environment at once, torch's version when torch has been
imported, the allocator's settings and the visible cards when CUDA has been initialised, the exception that
ended the program, peak memory at the end. Where ``ORCH_MEMORY_LIMIT_BYTES`` asks for it the cards are made to
look smaller. What CUDA's memory holds when it runs out, and held at its peak, `memory_watch` tells, unless
``ORCH_MEMORY_HISTORY`` is 0. It never imports torch by itself and never fails the payload.
"""

from __future__ import annotations

import sys

del sys.path[0]  # this file's folder is not the payload's business

import atexit  # noqa: E402
import importlib.util  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import runpy  # noqa: E402
import stat  # noqa: E402

TYPE_CHECKING = False  # typing itself would be an import to pay for, at each start of a payload
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, List, Optional

SCRIPT_OPTION = "--script"
EVENTS_FD_VARIABLE = "ORCH_EVENTS_FD"
MEMORY_LIMIT_VARIABLE = "ORCH_MEMORY_LIMIT_BYTES"
MEMORY_HISTORY_VARIABLE = "ORCH_MEMORY_HISTORY"
OUR_PACKAGE = "_orch_supervisor"  # under which the rest of this folder is imported where it is needed
REPORTED_VARIABLES = (
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "CUDA_MODULE_LOADING",
    "CUDA_DEVICE_ORDER",
    "CUDA_VISIBLE_DEVICES",
    "PYTHONUNBUFFERED",
    "PYTHONFAULTHANDLER",
    "PYTHONPATH",
    MEMORY_LIMIT_VARIABLE,
    MEMORY_HISTORY_VARIABLE,
)
RESETS_OF_PEAKS = ("_cuda_resetPeakMemoryStats", "_accelerator_resetPeakStats")  # of torch._C, by card
GIB = 1024**3
MAX_MESSAGE_CHARACTERS = 4096  # at most 12 bytes each as JSON: one event stays below 64 KiB


def events_fd() -> Optional[int]:
    """Returns the events descriptor, or None in a process that did not inherit it."""
    number, _, inode = os.environ.get(EVENTS_FD_VARIABLE, "").partition(":")
    try:
        found = os.fstat(int(number))
    except (ValueError, OSError):
        return None
    return int(number) if stat.S_ISFIFO(found.st_mode) and str(found.st_ino) == inode else None


def report(kind: str, **fields: Any) -> None:
    """Writes one event; a reader that has gone is no reason to stop."""
    fd = events_fd()
    if fd is not None:
        try:
            os.write(fd, json.dumps(dict(fields, kind=kind), default=str).encode("ascii") + b"\n")
        except OSError:
            pass


class MemoryLimit:
    """Makes a card look as small as ``limit_bytes``, None for as it is: torch's allocator gets what the
    context of this process and all others on the card leave of that.

    A rank limits the card that LOCAL_RANK names, since to look at one is to take memory on it.
    """

    def __init__(self, limit_bytes: Optional[int]) -> None:
        self._limit_bytes = limit_bytes
        self._fractions: Dict[int, float] = {}

    def apply(self, torch: Any) -> None:
        """Limits the cards as they come up, before the payload has anything there, and reports it."""
        if self._limit_bytes is None:
            return
        count, rank = torch.cuda.device_count(), os.environ.get("LOCAL_RANK", "")
        own = [int(rank)] if rank.isdigit() and int(rank) < count else range(count)
        told = [self._limit(torch, self._limit_bytes, index) for index in own]
        self._hold(torch)
        report("facts", memory_limit=told)

    def check_used(self, used: List[int]) -> None:
        """Reports the cards among those that were ``used`` which have no limit."""
        if self._limit_bytes is not None and set(used) - set(self._fractions):
            told = [
                self._told(self._limit_bytes, index, "was used without a limit")
                for index in used
                if index not in self._fractions
            ]
            report("facts", memory_limit=told)

    def _limit(self, torch: Any, limit_bytes: int, index: int) -> Dict[str, Any]:
        free, total = torch.cuda.mem_get_info(index)
        outside = total - free - torch.cuda.memory_reserved(index)
        if limit_bytes > total:
            return self._told(limit_bytes, index, "has %.2f GiB, it is not limited" % (total / GIB))
        now_of = getattr(torch.cuda, "get_per_process_memory_fraction", None)  # the allocator's settings may
        fraction = min(max(0, limit_bytes - outside) / total, 1.0 if now_of is None else now_of(index))
        torch.cuda.set_per_process_memory_fraction(fraction, index)
        self._fractions[index] = fraction
        if outside >= limit_bytes:
            problem = "has %.2f GiB in use outside this process's allocator: nothing is left" % (
                outside / GIB
            )
            return self._told(limit_bytes, index, problem)
        return dict(self._told(limit_bytes, index), allocator_bytes=int(fraction * total))

    def _hold(self, torch: Any) -> None:
        """Lets the payload lower a card's limit and never raise it."""
        set_fraction = torch._C._cuda_setMemoryFraction  # noqa: SLF001

        def set_within(fraction: float, index: int) -> None:
            set_fraction(min(fraction, self._fractions.get(index, fraction)), index)

        torch._C._cuda_setMemoryFraction = set_within  # noqa: SLF001

    @staticmethod
    def _told(limit_bytes: int, index: int, problem: Optional[str] = None) -> Dict[str, Any]:
        return {"index": index, "limit_bytes": limit_bytes, "allocator_bytes": None, "problem": problem}


class PeakMemory:
    """The most memory that torch's allocator held on each card, also where a payload counts anew."""

    def __init__(self, limit: MemoryLimit) -> None:
        self._limit = limit
        self._before_resets: Dict[int, List[int]] = {}
        self.memory: Any = None

    def watch(self, torch: Any) -> None:
        """Reads a card's peaks before every reset of them; torch's functions all reset through these two."""
        for name in RESETS_OF_PEAKS:
            reset = getattr(torch._C, name, None)  # noqa: SLF001
            if reset is not None:
                setattr(torch._C, name, self._after_reading(torch, reset))  # noqa: SLF001

    def goes_with(self, memory: Any) -> None:
        """Has ``memory``, which watches the allocator, tell at the end who held the peaks."""
        self.memory = memory

    def _after_reading(self, torch: Any, reset: Callable[[int], object]) -> Callable[[int], object]:
        def read_and_reset(index: int) -> object:
            try:
                self._before_resets[index] = self._highest(torch, index)
            except Exception:  # noqa: BLE001,S110  (what is read at the end says so; the payload goes on)
                pass
            return reset(index)

        return read_and_reset

    def _highest(self, torch: Any, index: int) -> List[int]:
        now = (torch.cuda.max_memory_allocated(index), torch.cuda.max_memory_reserved(index))
        return [max(pair) for pair in zip(now, self._before_resets.get(index, (0, 0)))]

    def report(self) -> None:
        """Reports peak memory on every card that this process used, and those that it used unlimited."""
        torch = sys.modules.get("torch")

        def peaks() -> None:
            if torch is None or not torch.cuda.is_initialized():
                return
            found = []
            for index in range(torch.cuda.device_count()):
                allocated, reserved = self._highest(torch, index)
                if reserved:
                    found.append({"index": index, "allocated_bytes": allocated, "reserved_bytes": reserved})
            report("facts", peak_memory=found)
            self._limit.check_used([card["index"] for card in found])
            if self.memory is not None:
                _try("tell who held the peak", lambda: self.memory.finish(found))

        _try("read peak memory", peaks)


class TorchWatcher:
    """Sees torch being imported and calls `on_torch` right after, without changing how it is found.

    Looking for torch without importing it, as libraries do, changes nothing: the watch goes on.
    """

    def __init__(self, peak_memory: PeakMemory, limit: MemoryLimit) -> None:
        self._peak_memory = peak_memory
        self._limit = limit
        self._is_looking = False

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:  # noqa: ARG002
        """Returns torch's own spec with a loader that tells us; nothing for other modules."""
        if fullname != "torch" or self._is_looking:
            return None
        self._is_looking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._is_looking = False
        if spec is not None and spec.loader is not None:
            run_module = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                run_module(module)
                sys.meta_path.remove(self)
                on_torch(module, self._peak_memory, self._limit)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def on_torch(torch: Any, peak_memory: PeakMemory, limit: MemoryLimit) -> None:
    """Reports the version now; as soon as CUDA is initialised, limits its memory and reports allocator and
    cards. Peaks count from here.
    """
    report("facts", torch=str(torch.__version__), cuda=str(torch.version.cuda))
    _try("watch peak memory", lambda: peak_memory.watch(torch))
    if torch.version.cuda is not None and os.environ.get(MEMORY_HISTORY_VARIABLE) != "0":
        _try("watch the allocator", lambda: peak_memory.goes_with(watch_memory(torch)))
    memory = peak_memory.memory
    _try("watch CUDA", lambda: torch.cuda._lazy_call(lambda: on_cuda(torch, limit, memory)))  # noqa: SLF001


def watch_memory(torch: Any) -> Any:
    """Returns what watches torch's allocator, imported so that nobody else finds anything in this folder."""
    here = os.path.dirname(os.path.abspath(__file__))
    spec = importlib.util.spec_from_file_location(
        OUR_PACKAGE, os.path.join(here, "__init__.py"), submodule_search_locations=[here]
    )
    assert spec is not None
    sys.modules[OUR_PACKAGE] = importlib.util.module_from_spec(spec)
    memory = importlib.import_module(OUR_PACKAGE + ".memory_watch").of_process(torch, report, events_fd)
    memory.watch()
    return memory


def on_cuda(torch: Any, limit: MemoryLimit, memory: Any) -> None:
    """Limits memory and lets the allocator keep its history, and reports which cards this process sees and
    what the allocator took, each as far as it can be read.
    """

    def devices() -> None:
        count = torch.cuda.device_count()
        report("facts", devices=[_device(torch, index) for index in range(count)])

    def allocator() -> None:
        backend = torch.cuda.get_allocator_backend()
        settings: Dict[str, Any] = {}
        if backend == "native":  # the other one has no snapshot
            settings = torch.cuda.memory._snapshot().get("allocator_settings", {})  # noqa: SLF001
        report("facts", allocator=backend, allocator_settings=settings)

    _try("limit memory", lambda: limit.apply(torch))
    if memory is not None:
        _try("keep the allocator's history", memory.start)
    _try("read the cards", devices)
    _try("read the allocator", allocator)


def _try(what: str, action: Callable[[], object]) -> None:
    """What cannot be told is said; the payload goes on."""
    try:
        action()
    except Exception as error:  # noqa: BLE001
        report("facts", instrument_error="cannot %s: %s: %s" % (what, type(error).__name__, error))


def report_exception(error: BaseException) -> None:
    """Reports the exception that ends the program; SystemExit is an exit code, not a failure of its own."""
    kind = type(error)
    fields: Dict[str, Any] = {"type": "%s.%s" % (kind.__module__, kind.__qualname__)}
    try:
        fields["message"] = str(error)[:MAX_MESSAGE_CHARACTERS]
    except Exception:  # noqa: BLE001  (a broken __str__ is the payload's)
        fields["message"] = "an exception whose text cannot be made"
    if isinstance(error, ModuleNotFoundError):
        fields["missing_module"] = error.name
    report("exception", **fields)


def main(arguments: List[str]) -> None:
    """Runs the module or script that ``arguments`` begin with as ``__main__``."""
    report(
        "facts",
        python=sys.version.split()[0],
        executable=sys.executable,
        environment={name: os.environ.get(name) for name in REPORTED_VARIABLES},
    )
    limit_bytes = os.environ.get(MEMORY_LIMIT_VARIABLE)
    limit = MemoryLimit(None if limit_bytes is None else int(limit_bytes))
    peak_memory = PeakMemory(limit)
    sys.meta_path.insert(0, TorchWatcher(peak_memory, limit))
    atexit.register(peak_memory.report)
    is_script = arguments[0] == SCRIPT_OPTION
    sys.argv = arguments[1:] if is_script else arguments
    program = sys.argv[0]
    sys.path.insert(0, os.path.dirname(program) if is_script else os.getcwd())
    try:
        if is_script:
            runpy.run_path(program, run_name="__main__")
        else:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
    except SystemExit:
        raise
    except BaseException as error:
        report_exception(error)
        raise


def _device(torch: Any, index: int) -> Dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    uuid: Optional[Any] = getattr(properties, "uuid", None)
    return {
        "index": index,
        "name": properties.name,
        "uuid": None if uuid is None else "GPU-%s" % str(uuid).replace("GPU-", ""),
        "total_bytes": properties.total_memory,
        "capability": [getattr(properties, "major", None), getattr(properties, "minor", None)],
    }


if __name__ == "__main__":
    main(sys.argv[1:])
