"""One process that a run was started as: its pipes, its pid, its records from spawn to exit.

Knows what it was started with and how it ended. When it is started, and what its end means for the run, is
the job's business; what it starts itself is the tree's.
"""

import os
import select
from typing import Any, Collection, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

from . import environment, gpus, processes, program
from .intake import Events
from .masks import Masks
from .pump import Pump
from .records import RecordWriter
from .tree import Tree

LAST_READS = 64  # a pipe holds less; a process that could not be ended may write into it for ever


class Plan(NamedTuple):
    """What all processes of a run are started with; ``hidden`` names were not imported into ``env``."""

    argv: List[str]
    cwd: str
    env: Dict[str, str]
    hidden: List[str]
    cards: Sequence[gpus.Card]
    inherited: Sequence[int]


class Member:
    """One process; ``name`` stands in each of its records, ``pid`` is 0 before it is started."""

    def __init__(self, name: str, writer: RecordWriter, masks: Masks, tree: Tree) -> None:
        self.name = name
        self.pid = 0
        self._writer = writer
        self._masks = masks
        self._tree = tree
        self._pumps: List[Pump] = []
        self._events: Optional[Events] = None
        self._status: Optional[int] = None

    def start(self, plan: Plan, rank: Mapping[str, str]) -> None:
        """Starts it with a session, an output and events of its own; ``rank`` are its own variables.

        Raises:
            Refused: it cannot be executed.
        """
        events_read, events_write = os.pipe()
        events = "%d:%d" % (events_write, os.fstat(events_write).st_ino)
        asked = environment.of_process(plan.env, events, rank)
        try:
            inherited = [events_write, *plan.inherited]
            child = program.spawn(plan.argv, plan.cwd, asked, inherited, self._tree.cgroup)
        finally:
            os.close(events_write)
        child.returncode = 0  # the job's loop reaps it: Popen must not try
        self.pid = child.pid
        assert child.stdout is not None
        assert child.stderr is not None
        self._record_spawn(plan, asked)
        for stream, file in (("stdout", child.stdout), ("stderr", child.stderr)):
            self._pumps.append(self._pump(stream, os.dup(file.fileno())))
            file.close()
        source = {"proc": self.name, "pid": self.pid}
        self._events = Events(events_read, self._writer, self._masks, source, asked)

    @property
    def sources(self) -> "List[Union[Pump, Events]]":
        """What there is to read of it."""
        return [*self._pumps, *([] if self._events is None else [self._events])]

    @property
    def has_ended(self) -> bool:
        """Its exit is recorded."""
        return self._status is not None

    @property
    def has_failed(self) -> bool:
        """It ended otherwise than with 0."""
        return bool(self._status)

    @property
    def exit(self) -> Tuple[Optional[int], Optional[int]]:
        """Its exit code, or None and the signal that ended it; twice None before."""
        if self._status is None:
            return None, None
        if os.WIFSIGNALED(self._status):
            return None, os.WTERMSIG(self._status)
        return os.WEXITSTATUS(self._status), None

    @property
    def is_drained(self) -> bool:
        """Its output was read to the end."""
        return not any(pump.is_open for pump in self._pumps)

    @property
    def open_pipes(self) -> List[int]:
        """The inodes of its output pipes that somebody still holds open."""
        return [os.fstat(pump.fd).st_ino for pump in self._pumps if pump.is_open]

    def record_exit(self, status: int, usage: Any, oom: processes.OomCounter) -> None:
        """Notes and records how it ended: ``status`` and ``usage`` are what wait4 told."""
        self._status = status
        code, number = self.exit
        self._writer.write(
            "exit",
            proc=self.name,
            pid=self.pid,
            code=code,
            signal=number,
            oom_kill=oom.since_start(),
            oom_scope=oom.scope,
            rusage={
                "user_s": usage.ru_utime,
                "system_s": usage.ru_stime,
                "peak_rss_bytes": usage.ru_maxrss * 1024,
            },
        )

    def read_out(self) -> None:
        """Reads what is left in its pipes and closes its output."""
        for source in self.sources:
            for _ in range(LAST_READS):
                if not (source.is_open and source.read()):
                    break
        for pump in self._pumps:
            pump.close()

    def _record_spawn(self, plan: Plan, asked: Dict[str, str]) -> None:
        got = processes.environment(self.pid)
        self._writer.write(
            "spawn",
            proc=self.name,
            pid=self.pid,
            argv=plan.argv,
            cwd=plan.cwd,
            env=got,
            not_imported=plan.hidden,
            env_digest=environment.digest(self._masks.value(got)),
            identity=processes.identity(self.pid),
            devices=gpus.as_record(plan.cards),
            cgroup=self._tree.cgroup if self._tree.has_in_cgroup(self.pid) else None,
        )
        if got and got != asked:  # an empty one means that it is gone already
            self._writer.write(
                "facts",
                proc=self.name,
                pid=self.pid,
                mismatches=environment.differences(asked, got, sorted(asked)),
            )

    def _pump(self, stream: str, fd: int) -> Pump:
        def emit(off: int, line: int, key: str, value: str) -> None:
            self._writer.write_output(self.name, self.pid, stream, off, line, key, value)

        return Pump(fd, emit, self._masks.stream() if self._masks else None)


class Exits:
    """In which order processes ended, as far as the kernel tells.

    wait4 gives zombies in the order in which they were started, and a rank that loses its peer often ends
    within a moment of it. pidfds become ready in the order of the ends; without them (Linux before 5.3) the
    order of wait4 has to do.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._pids: Dict[int, int] = {}
        self._order: List[int] = []

    def watch(self, pid: int) -> None:
        """Notes when ``pid`` ends, a child that was not reaped yet."""
        try:
            fd = processes.open_pidfd(pid)
        except OSError:
            return
        self._pids[fd] = pid
        self._epoll.register(fd, select.EPOLLIN)

    def ordered(self, ended: Collection[int]) -> List[int]:
        """Returns the pids in ``ended`` in the order of their ends, those that were not watched last."""
        for fd, _ in self._epoll.poll(0):
            os.close(fd)
            self._order.append(self._pids.pop(fd))
        return [pid for pid in self._order if pid in ended] + [pid for pid in ended if pid not in self._order]
