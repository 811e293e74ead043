"""What a host's cards do, read beside a run's loop: a driver may hang, and the loop must not.

While a run waits, a process of its own looks which cards there are (`Look`). While it runs, a thread asks the
driver's library every 10 s for memory in use, utilisation, temperature and processes (`Sampler`), which
takes well under a millisecond of a core; where the library cannot be loaded there are no samples. Both hand
what they find to the loop through a pipe.
"""

import json
import os
import signal
import threading
from typing import Any, Callable, Dict, Iterator, List, Sequence, Set, Tuple

from . import gpus, processes

FIRST_PERIOD_S = 1.0  # doubled after each sample, so that short runs are seen too
PERIOD_S = 10.0
_MOST_BYTES = 64 * 1024
_MOST_PROCESSES = 32
_MOST_DESCRIPTORS = 4096


class Look:
    """One look at the host's cards, in a process that the loop reaps like any other."""

    def __init__(self) -> None:
        self.fd, write_fd = os.pipe()
        os.set_blocking(self.fd, False)
        self.is_open = True
        self._found = b""
        self._pid = os.fork()
        if self._pid == 0:
            _tell_cards(write_fd)
        os.close(write_fd)

    def read(self) -> bool:
        """Reads once; tells whether there may be more."""
        try:
            data = os.read(self.fd, _MOST_BYTES)
        except BlockingIOError:
            return False
        self._found += data
        if not data:
            self.is_open = False
            os.close(self.fd)
        return self.is_open

    def end(self) -> None:
        """Ends the look, wherever it is."""
        try:
            os.kill(self._pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def cards(self) -> List[gpus.Card]:
        """Returns what was found, once it is not open any more.

        Raises:
            DeviceError: what it was that could not be read, or that the look itself was ended.
        """
        if not self._found:
            raise gpus.DeviceError("the look at this host's cards was ended before it was over")
        told = json.loads(self._found)
        if "error" in told:
            raise gpus.DeviceError(told["error"])
        cards = [gpus.Card(*fields) for fields in told["cards"]]
        return [card._replace(processes=tuple((pid, used) for pid, used in card.processes)) for card in cards]


class Sampler:
    """Samples of the cards with these UUIDs; each is handed to ``emit`` by `read`, in the loop's thread.

    A sample is ``{"cards": […]}``, the last one ``{"fault": text}`` where a card does not answer any more.
    """

    def __init__(self, uuids: Sequence[str], emit: Callable[[Dict[str, Any]], None]) -> None:
        self._uuids = list(uuids)
        self._emit = emit
        self._rest = b""
        self.fd, self._write_fd = os.pipe()
        os.set_blocking(self.fd, False)
        self.is_open = True
        self._stop = threading.Event()
        threading.Thread(target=self._sample, name="gpu-samples", daemon=True).start()

    def read(self) -> bool:
        """Reads once; tells whether there may be more."""
        try:
            data = os.read(self.fd, _MOST_BYTES)
        except BlockingIOError:
            return False
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._emit(json.loads(line))
        if not data:
            self.is_open = False
            os.close(self.fd)
        return self.is_open

    def stop(self) -> None:
        """Lets the thread end; what it still writes is read by nobody."""
        self._stop.set()

    def _sample(self) -> None:
        """Runs in the thread; whatever the library does, the run goes on without samples."""
        try:
            from . import nvml  # noqa: PLC0415

            library = nvml.Nvml()
            handles = _handles(library, set(self._uuids))
            period_s = FIRST_PERIOD_S
            while handles:
                try:
                    sample: Dict[str, Any] = {"cards": [_entry(library, *handle) for handle in handles]}
                except nvml.NvmlError as error:
                    sample, handles = {"fault": str(error)}, []
                os.write(self._write_fd, json.dumps(sample).encode("ascii") + b"\n")
                if self._stop.wait(period_s):
                    break
                period_s = min(2 * period_s, PERIOD_S)
        except Exception:  # noqa: BLE001,S110
            pass
        finally:
            os.close(self._write_fd)


class Strangers:
    """Processes on a run's cards that are not the run's, as they appear; ``members`` are the run's own.

    The driver counts pids in a namespace of its own, which is not always this one: only once a process of the
    run itself was seen on a card is a pid there believed.
    """

    def __init__(self, members: Callable[[], List[processes.Process]]) -> None:
        self._members = members
        self._ours: Set[int] = set()
        self._told: Set[Tuple[str, int]] = set()

    def new_in(self, cards: Sequence[Dict[str, Any]]) -> Iterator[Dict[str, Any]]:
        """Yields card, pid, argv and memory of each stranger that was not there in an earlier sample."""
        seen = {pid for card in cards for pid, _ in card["processes"]}
        if seen - self._ours - {pid for _, pid in self._told}:
            self._ours |= {process.pid for process in self._members()}
        for card in cards:
            pids = {pid for pid, _ in card["processes"]}
            for pid, used_mib in card["processes"] if pids & self._ours else ():
                if pid not in self._ours and (card["uuid"], pid) not in self._told and processes.look(pid):
                    self._told.add((card["uuid"], pid))
                    argv = processes.command_line(pid)
                    yield {"uuid": card["uuid"], "pid": pid, "argv": argv, "used_mib": used_mib}


def _tell_cards(write_fd: int) -> None:
    """Writes the cards and ends this process, which holds nothing that belongs to the run."""
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.closerange(3, write_fd)
        os.closerange(write_fd + 1, _MOST_DESCRIPTORS)
        try:
            told: Dict[str, Any] = {"cards": gpus.cards()}
        except gpus.DeviceError as error:
            told = {"error": str(error)}
        except Exception as error:  # noqa: BLE001  (nobody else can tell it)
            told = {"error": "cannot look at the cards: %s: %s" % (type(error).__name__, error)}
        with os.fdopen(write_fd, "wb") as file:
            file.write(json.dumps(told).encode("ascii"))
    finally:
        os._exit(0)


def _handles(library: Any, wanted: "set[str]") -> List[Tuple[str, Any]]:
    found = []
    for handle in library.handles():
        if not isinstance(handle, Exception):
            both = [handle, *(library.instances(handle) if library.has_instances(handle) else ())]
            found += [(library.uuid(each), each) for each in both]
    return [(uuid, handle) for uuid, handle in found if uuid in wanted]


def _entry(library: Any, uuid: str, handle: Any) -> Dict[str, Any]:
    usage = library.usage(handle)
    return {
        "uuid": uuid,
        "used_mib": library.memory_mib(handle)[1],
        "utilisation_percent": usage.utilisation_percent,
        "temperature_c": usage.temperature_c,
        "processes": [list(entry) for entry in library.processes(handle)[:_MOST_PROCESSES]],
    }
