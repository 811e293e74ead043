"""One run from its first record to its last: waits for its turn and for what it needs, starts the payload,
pumps its output, ends its whole process tree.

A single-threaded loop over the payload's pipes, the control pipe, signals and deadlines. The first of several
processes to fail ends the others. The loop ends when all processes that it started and every descendant are
gone and their pipes are drained, or when what is left could not be ended, which is then named. The last
records are always ``end`` and a seal.
"""

import os
import select
import selectors
import signal
import time
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Sequence, Tuple, Union

from . import environment, gpus, processes, program, ranks, store
from .card_wait import CardWait
from .ending import Ending, Why
from .intake import Control, Events
from .masks import Masks
from .member import Exits, Member, Plan
from .program import Refused
from .pump import Pump
from .records import DiskFull, RecordWriter
from .rundir import RunDir
from .sampling import Look, Sampler, Strangers
from .tree import Tree
from .turns import Turn

if TYPE_CHECKING:
    import socket

    from . import setups

HEARTBEAT_S = 10.0
DRAIN_S = 2.0
SCAN_S = 0.1
GRACE_S = 10.0
MAX_NAMED = 20
PREPARING_PAUSE_S = 0.2


class Job:
    """Runs ``job`` (the controller's JSON) in the folder of ``run``, whose ``code`` holds the ``entries``.

    ``secrets`` are variables that the payload gets and no record shows; ``cgroup`` is the payload's, if there
    can be one; ``preparers`` are runs that prepare what it needs.
    """

    def __init__(
        self,
        job: Dict[str, Any],
        entries: Sequence[store.Entry],
        run: RunDir,
        writer: RecordWriter,
        secrets: Dict[str, str],
        cgroup: Optional[str],
        preparers: Sequence[str] = (),
    ) -> None:
        self._job = job
        self._entries = entries
        self._run = run
        self._writer = writer
        self._secrets = secrets
        self._masks = Masks(secrets.values())
        self._tree = Tree(job["run_id"], cgroup, os.getpid())
        self._ending = Ending(self._tree, writer, job.get("grace_s", GRACE_S))
        self._oom = processes.OomCounter(cgroup)
        self._selector = selectors.DefaultSelector()
        self._control = Control(run.open_control(), self._stop_on_request)
        self._members: List[Member] = []
        self._failed: Optional[Member] = None
        self._exits = Exits()
        self._port: "Optional[socket.socket]" = None  # held to the end, so that nobody else gets it
        turn = job.get("turn")
        self._turn = Turn(run, turn) if turn else None  # runs that are started in order queue up in order
        self._needs = _needs(run, job, preparers)
        # … for cards too; who has to wait for something else first is in nobody's way meanwhile
        is_ready = self._turn is None and self._needs is None
        self._card_wait = self._queue_for_cards() if is_ready else None
        self._sampler: Optional[Sampler] = None
        self._strangers = Strangers(self._tree.members)
        self._timeout_at: Optional[float] = None
        self._drain_until: Optional[float] = None
        self._scan_at = 0.0
        self._heartbeat_at = time.monotonic() + HEARTBEAT_S
        self._got_sigterm = False
        writer.may_wait = self._may_wait_for_the_disk
        writer.masked = self._masks.record

    def run(self) -> None:
        """Runs to the end; a failure of the supervisor itself is recorded like any other reason."""
        try:
            self._wake_on_signals()
            self._watch(self._control)
            cards = None
            if self._wait_for_turn() and self._wait_for_environments():
                cards = self._wait_for_cards()
            if cards is not None:
                self._start(cards)
                self._loop()
            self._finish()
        except Refused as error:
            self._refuse(str(error))
        except DiskFull:
            waits = self._job.get("on_disk_full") != "stop"
            self._abandon(
                "the host's disk stayed full" if waits else "the host's disk is full (on_disk_full: stop)"
            )
        except Exception as error:
            self._abandon("the supervisor failed: %s: %s" % (type(error).__name__, error))
            raise
        finally:
            if not self._ending.left:  # else turn and cards are free when they are gone
                for place in (self._turn, self._card_wait):
                    if place is not None:
                        place.leave()
            self._tree.forget()

    # Starting

    def _wait_for_turn(self) -> bool:
        """Tells whether the payload may start: not when the run is stopped before."""
        if self._turn is None:
            return True
        began = time.monotonic()
        if not self._turn.try_take():
            queue, place = self._job["turn"]["queue"], self._job["turn"]["place"]
            self._writer.write("queued", queue=queue, place=place, ahead=self._turn.ahead[:MAX_NAMED])
            while not self._turn.try_take():
                self._step(self._turn.pause_s)
                if self._ending.is_stopping:
                    return False
        self._writer.write("turn", waited_s=round(time.monotonic() - began, 3))
        return True

    def _wait_for_environments(self) -> bool:
        """Tells whether the payload may start: not when the run is stopped while they are being prepared."""
        needs = self._needs
        if needs is None:
            return True
        began = time.monotonic()
        if not needs.try_take():
            self._writer.write("preparing", **needs.awaited)
            self._run.change_state("waiting")
            while not needs.try_take():
                self._step(PREPARING_PAUSE_S)
                if self._ending.is_stopping:
                    return False
        waited_s = round(time.monotonic() - began, 3)
        self._writer.write("prepared", environments=needs.as_record(), waited_s=waited_s)
        return True

    def _queue_for_cards(self) -> Optional[CardWait]:
        if not self._job["devices"]:
            return None
        return CardWait(self._run, self._writer, self._job, self._watch, self._step_on)

    def _wait_for_cards(self) -> Optional[List[gpus.Card]]:
        """Returns the cards once the run has them, None when it is stopped before."""
        self._card_wait = self._card_wait or self._queue_for_cards()
        if self._card_wait is not None:
            return self._card_wait.cards()
        if self._turn is not None or self._needs is not None:
            self._run.change_state("running")
        return []

    def _step_on(self, longest_s: float) -> bool:
        """Does a step; tells whether the run is to go on. Nothing of it runs yet but what looks at cards."""
        self._step(longest_s)
        if self._ending.is_stopping:
            self._tree.kill()
        return not self._ending.is_stopping

    def _start(self, cards: List[gpus.Card]) -> None:
        cwd = self._working_folder()
        program.check_cards(self._job, cards)
        container, hidden = self._container_env()
        env = environment.build(
            self._job,
            base=os.environ,
            code_dir=self._run.code,
            artifacts=self._run.artifacts,
            cards=cards,
            secrets=self._secrets,
            container=container,
            prepared=[] if self._needs is None else self._needs.venvs,
        )
        self._start_members(Plan(self._argv(), cwd, env, hidden, cards, self._inherited()))
        timeout_s = self._job.get("timeout_s")
        self._timeout_at = time.monotonic() + timeout_s if timeout_s else None
        if cards:
            self._sampler = Sampler([card.uuid for card in cards], self._record_sample)
            self._watch(self._sampler)

    def _argv(self) -> List[str]:
        needs = self._needs
        if needs is None:
            return program.argv(self._job, self._run, self._entries)
        preparation = needs.preparation(self._run.code) if self._job.get("prepares") else ""
        return program.argv(self._job, self._run, self._entries, needs.python, preparation)

    def _inherited(self) -> List[int]:
        """Returns the descriptors that the payload keeps open, also when this process is gone."""
        held = [] if self._turn is None else [self._turn.fd]
        for places in (self._needs, self._card_wait):
            held += [] if places is None else places.fds
        return held

    def _start_members(self, plan: Plan) -> None:
        count = ranks.count_of(self._job)
        if count > 1:
            self._port = ranks.hold_port()
        for rank, name in enumerate(ranks.names(count)):
            member = Member(name, self._writer, self._masks, self._tree)
            self._members.append(member)
            own = {}
            if self._port is not None:
                own = ranks.variables(rank, count, self._port.getsockname()[1], self._job["run_id"])
            member.start(plan, own)
            for source in member.sources:
                self._watch(source)
            if count > 1:
                self._exits.watch(member.pid)

    def _container_env(self) -> Tuple[Dict[str, str], List[str]]:
        if not self._job.get("import_container_env"):
            return {}, []
        first = processes.environment(1)
        if not first:
            raise Refused("cannot read the environment of PID 1 (import_container_env): are we root here?")
        return environment.of_container(first)

    def _working_folder(self) -> str:
        asked = self._job.get("workdir")
        if not asked:
            return self._run.artifacts
        folder = os.path.expanduser(str(asked))
        if not os.path.isdir(folder):
            raise Refused("%s is no folder; see workdir: of this host" % folder)
        return folder

    def _record_sample(self, sample: Dict[str, Any]) -> None:
        self._writer.write("gpus", **sample)
        for stranger in self._strangers.new_in(sample.get("cards", ())):
            self._writer.write("stranger", **stranger)

    def _watch(self, source: Union[Control, Events, Pump, Sampler, Look]) -> None:
        """Has the loop read ``source`` whenever there is something, until it closes its descriptor."""
        fd = source.fd

        def read() -> None:
            source.read()
            if not source.is_open:
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
            is_ending = self._has_ended or self._ending.is_stopping
            self._step(SCAN_S if is_ending else HEARTBEAT_S)

    def _step(self, longest_s: float) -> None:
        """Waits until something comes or is due, ``longest_s`` at most, and deals with it."""
        for key, _ in self._selector.select(min(longest_s, self._pause())):
            key.data()
        self._reap()
        self._keep_time()

    def _pause(self) -> float:
        now = time.monotonic()
        deadlines = (self._heartbeat_at, self._timeout_at, self._drain_until, *self._ending.deadlines())
        waits = [moment - now for moment in deadlines if moment is not None]
        seal_in = self._writer.seal_due_in(now)
        return max(0.0, min(waits if seal_in is None else [seal_in, *waits]))

    @property
    def _has_ended(self) -> bool:
        """All processes that were started have ended."""
        return bool(self._members) and all(member.has_ended for member in self._members)

    def _is_over(self) -> bool:
        """Nothing runs and nothing is left to read; or killing did not help and time is up."""
        is_drained = all(member.is_drained for member in self._members)
        is_gone = self._has_ended and not self._ending.left
        return (is_gone and is_drained) or self._ending.is_given_up()

    def _reap(self) -> None:
        """Reaps every child: the processes that were started, and orphans that came to us."""
        ended = {}
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            ended[pid] = (status, usage)
        members = {member.pid: member for member in self._members if not member.has_ended}
        for pid in self._exits.ordered(ended):
            if pid in members:
                self._note_exit(members[pid], *ended[pid])
        if self._failed is not None and not self._has_ended and not self._ending.is_stopping:
            outcome, reason = self._own_end()
            self._stop(Why(outcome, "%s; the other ranks were ended" % reason))
        if self._has_ended and time.monotonic() >= self._scan_at:
            self._scan_at = time.monotonic() + SCAN_S / 2
            self._ending.look()

    def _note_exit(self, member: Member, status: int, usage: Any) -> None:
        member.record_exit(status, usage, self._oom)
        if member.has_failed and self._failed is None:
            self._failed = member
        if self._has_ended:
            self._drain_until = time.monotonic() + DRAIN_S
            self._timeout_at = None

    def _keep_time(self) -> None:
        now = time.monotonic()
        if self._got_sigterm and not self._ending.is_stopping:
            self._stop(Why("cancelled", "the supervisor got SIGTERM"))
        if now >= self._heartbeat_at:
            self._writer.write("heartbeat")
            if self._card_wait is not None:
                self._card_wait.hold_shared()
            self._heartbeat_at = now + HEARTBEAT_S
        if self._timeout_at is not None and now >= self._timeout_at:
            self._stop(Why("timeout", "the run took longer than its %g s" % self._job["timeout_s"]))
        if self._drain_until is not None and now >= self._drain_until:
            self._drain_until = None
            self._ending.end_leftovers(
                {member.name: member.open_pipes for member in self._members if not member.is_drained}
            )
        self._ending.keep_time(now)
        if self._writer.seal_due_in(now) == 0.0:
            self._writer.seal()

    # Ending

    def _may_wait_for_the_disk(self) -> bool:
        """A full disk blocks this loop, and so the payload; a cancel or the timeout ends that."""
        is_asked = bool(select.select([self._control.fd], [], [], 0)[0]) or self._got_sigterm
        is_late = self._timeout_at is not None and time.monotonic() >= self._timeout_at
        return not (is_asked or is_late or self._job.get("on_disk_full") == "stop")

    def _stop_on_request(self, grace_s: Optional[float]) -> None:
        self._stop(Why("cancelled", "cancelled on request"), grace_s)

    def _stop(self, why: Why, grace_s: Optional[float] = None) -> None:
        self._timeout_at = None
        self._ending.stop(why, grace_s, has_ended=self._has_ended)

    def _finish(self) -> None:
        self._read_out()
        if self._sampler is not None:
            self._sampler.stop()
        changed = store.changed_files(self._run.code, self._entries)
        if changed:
            self._writer.write("code_changed", files=changed[:MAX_NAMED], count=len(changed))
        outcome, reason = self._ending.why or self._own_end()
        self._tree.forget()  # a run with an end is looked after by nobody
        self._end(outcome, reason)

    def _read_out(self) -> None:
        for member in self._members:
            member.read_out()

    def _own_end(self) -> Tuple[str, Optional[str]]:
        """Returns the outcome of a run that nobody stopped, and of several processes which was the first to
        fail.
        """
        code, number = self._exit
        outcome = "exited" if number is None else "signalled"
        if self._failed is None or len(self._members) == 1:
            return outcome, None
        how = "exited with code %s" % code if number is None else "was ended by signal %d" % number
        return outcome, "rank %d %s first" % (self._members.index(self._failed), how)

    @property
    def _exit(self) -> Tuple[Optional[int], Optional[int]]:
        """Code or signal of the first process that failed; 0 when all ended well, twice None before."""
        if self._failed is not None:
            return self._failed.exit
        return (0 if self._has_ended else None), None

    def _refuse(self, reason: str) -> None:
        """Ends ranks that were started before the one that could not be."""
        if self._members:
            self._ending.left = self._tree.end(0.0)
            self._reap()
            self._failed = None  # they were ended before any could fail
            self._read_out()
        self._end("refused", reason)

    def _abandon(self, reason: str) -> None:
        """Ends the tree without reading it out; the records say why, if the disk still takes them."""
        self._writer.release_reserve()
        self._ending.left = self._tree.end(0.0)
        try:
            self._reap()
        except DiskFull:
            pass  # the exit is recorded all the same
        self._end("abandoned", reason)

    def _end(self, outcome: str, reason: Optional[str]) -> None:
        """Writes the last records; of several processes the first that failed is named."""
        code, number = self._exit
        first = self._failed.name if self._failed is not None and len(self._members) > 1 else None
        survivors = processes.describe(self._ending.left)
        self._writer.release_reserve()
        try:
            self._writer.write(
                "end",
                outcome=outcome,
                code=code,
                signal=number,
                reason=reason,
                survivors=survivors,
                **({} if first is None else {"proc": first}),
            )
        finally:
            self._writer.close()


def _needs(run: RunDir, job: Dict[str, Any], preparers: Sequence[str]) -> "Optional[setups.Needs]":
    if not (job.get("setup") or job.get("prepares")):
        return None
    from .setups import Needs  # noqa: PLC0415  (only who needs it pays)

    return Needs(run, job, preparers)
