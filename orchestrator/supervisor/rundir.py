"""A run's folder on its host: who may start the run in it, how it stands, how it is told to stop.

``runs/<run-id>/`` holds job.json, manifest.json, params.json, state.json, lock, control (a named pipe),
code/, records/, artifacts/ and supervisor.log. The supervisor holds ``lock`` from before its first record
until its last: held means alive. The first record is the point of no return: a folder with records is never
started in again, whoever asks.
"""

import errno
import fcntl
import json
import os
import signal
import time
from typing import Any, Dict, List, Optional, Sequence

from . import cgroups, processes
from .cuts import segment_name
from .locks import is_held
from .tree import Tree

CLAIM_TRIES = 20
CLAIM_PAUSE_S = 0.05


class RunDir:
    """The folder of run ``run_id`` below ``root``; nothing is made before `claim`."""

    def __init__(self, root: str, run_id: str) -> None:
        self.root = root
        self.run_id = checked_name(run_id, "run id")
        self.path = os.path.join(root, "runs", run_id)
        self.records = os.path.join(self.path, "records")
        self.lock = os.path.join(self.path, "lock")
        self.code = os.path.join(self.path, "code")
        self.artifacts = os.path.join(self.path, "artifacts")

    @property
    def exists(self) -> bool:
        """Somebody has claimed this run, at some time."""
        return os.path.isdir(self.path)

    @property
    def has_started(self) -> bool:
        """The run's first segment is there."""
        return os.path.exists(os.path.join(self.records, segment_name(0)))

    @property
    def is_alive(self) -> bool:
        """A supervisor holds the lock. Looking takes it shared for an instant, which `claim` allows for."""
        return is_held(self.lock)

    def claim(self, job: Dict[str, Any]) -> Optional[int]:
        """Takes the run's lock to start it; returns its descriptor, or None when it has been started before.

        Raises:
            FileExistsError: another job was claimed under this id.
            OSError: the folder cannot be made.
        """
        for folder in (os.path.dirname(self.path), self.path, self.records, self.artifacts):
            os.makedirs(folder, mode=0o700, exist_ok=True)
        fd = os.open(self.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            for _ in range(CLAIM_TRIES):
                if self.has_started:
                    break
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    time.sleep(CLAIM_PAUSE_S)
                    continue
                if self.has_started:
                    break
                self._prepare(job)
                return fd
            if self._job() != job:
                raise FileExistsError(errno.EEXIST, "another job has this run id", self.path)
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        return None

    def note_manifest(self, entries: Sequence[Sequence[Any]], envs: Sequence[str] = ()) -> None:
        """Notes which objects the code was unpacked from, by which supervisor, and which prepared
        environments the run uses or makes: what must stay for it.
        """
        noted = {"supervisor": supervisor_digest(), "entries": [list(entry) for entry in entries]}
        noted["envs"] = list(envs)
        with open(os.path.join(self.path, "manifest.json"), "w", encoding="utf-8") as file:
            json.dump(noted, file)

    @property
    def manifest(self) -> Any:
        """What `note_manifest` noted, or None."""
        return _load(os.path.join(self.path, "manifest.json"))

    @property
    def environments(self) -> List[str]:
        """The digests of the prepared environments that the run uses or makes, as it noted them."""
        noted = self.manifest
        found = noted.get("envs") if isinstance(noted, dict) else None
        return [str(digest) for digest in found] if isinstance(found, list) else []

    def open_control(self) -> int:
        """Returns the control pipe's reading end; it stays open for writers to come and go."""
        return os.open(self._control, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

    def request_stop(self, grace_s: Optional[float]) -> bool:
        """Asks the supervisor to stop the run; tells whether one was there to be asked."""
        if not self.is_alive:
            return False
        try:
            fd = os.open(self._control, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in (errno.ENXIO, errno.ENOENT):
                return False
            raise
        try:
            os.write(fd, json.dumps({"stop": {"grace_s": grace_s}}).encode("ascii") + b"\n")
        finally:
            os.close(fd)
        if self.is_stopped:  # it would never read that
            os.kill(self._identity["pid"], signal.SIGCONT)
        return True

    @property
    def state(self) -> Dict[str, Any]:
        """What state.json says: ``state``, the supervisor's ``identity``, the payload's ``cgroup``."""
        found = _load(os.path.join(self.path, "state.json"))
        return found if isinstance(found, dict) else {}

    def change_state(self, state: str, **more: Any) -> None:
        """Replaces state.json whole: with the state it has now, and what else is to change."""
        changed = dict(self.state, state=state, t=time.time(), **more)
        _replace(os.path.join(self.path, "state.json"), changed)

    @property
    def was_rebooted(self) -> bool:
        """The run's supervisor was started before this host last was; a container has its node's boot id."""
        identity = self._identity
        if not identity:
            return False
        first = processes.look(1)
        started, now = identity.get("init_started"), first.started if first else None
        is_other_init = None not in (started, now) and started != now
        return identity.get("boot_id") != processes.boot_id() or is_other_init

    @property
    def is_stopped(self) -> bool:
        """The run's supervisor is there and holds still, for a debugger or by SIGSTOP."""
        identity = self._identity
        process = processes.look(identity["pid"]) if self.is_alive and identity else None
        return process is not None and process.started == identity["started"] and process.state in "Tt"

    @property
    def silent_s(self) -> Optional[float]:
        """How long the supervisor has written nothing, or None when there is none."""
        if not self.is_alive or not self.has_started:
            return None
        newest = max(name for name in os.listdir(self.records) if name.endswith(".jsonl"))
        return max(0.0, time.time() - os.stat(os.path.join(self.records, newest)).st_mtime)

    def tree(self) -> Tree:
        """Returns the run's processes, to be asked when the supervisor is gone."""
        return Tree(self.run_id, cgroups.checked(self.state.get("cgroup"), self.run_id))

    def orphans(self) -> List[processes.Process]:
        """Returns what still runs of a run whose supervisor is gone; a cgroup without any is removed."""
        if self.is_alive or not self.has_started or self.was_rebooted:
            return []
        tree = self.tree()
        found = tree.members()
        if not found:
            tree.forget()
        return found

    @property
    def _identity(self) -> Dict[str, Any]:
        found = self.state.get("identity")
        return found if isinstance(found, dict) else {}

    @property
    def _control(self) -> str:
        return os.path.join(self.path, "control")

    def _job(self) -> Any:
        return _load(os.path.join(self.path, "job.json"))

    def _prepare(self, job: Dict[str, Any]) -> None:
        known = self._job()
        if known is not None and known != job:
            raise FileExistsError(errno.EEXIST, "another job has this run id", self.path)
        _replace(os.path.join(self.path, "job.json"), job)
        try:
            os.mkfifo(self._control, 0o600)
        except FileExistsError:
            pass  # an earlier attempt came this far


def supervisor_digest() -> str:
    """Returns the digest that names the supervisor at work here: that of its folder's folder."""
    return os.path.basename(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def checked_name(name: str, what: str) -> str:
    """Returns ``name``, which stays in the folder that it is looked for in.

    Raises:
        ValueError: it would lead elsewhere.
    """
    if not name or name != os.path.basename(name) or name.startswith("."):
        raise ValueError("not a %s: %r" % (what, name))
    return name


def _load(path: str) -> Any:
    """Returns what a file of JSON says; None of one that is not there or that we did not write."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe there holds nobody up
        with open(fd, encoding="utf-8") as file:
            return json.load(file)
    except (FileNotFoundError, IsADirectoryError, ValueError, RecursionError):
        return None


def _replace(path: str, value: Any) -> None:
    with open(path + ".new", "w", encoding="utf-8") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    os.rename(path + ".new", path)
