"""Environments that are prepared on this host: each once for its content, under a lock, for any run.

``envs/<digest>/`` holds what a preparation made (a virtual environment, of a script nothing) and ``done``,
which is written last: a folder without it is a leftover. ``envs/<digest>.lock`` is held exclusively by the
run that prepares it, whose id stands in it, and shared by each run that uses it. Payloads inherit the
descriptor, so the lock tells the truth after a killed supervisor too. Who waits to prepare holds
``envs/<digest>.next``: runs that come later wait behind it. `prepare` does the work.

A job's ``setup`` lists what the run needs, one upon the other; ``prepares`` is what a preparation makes upon
its own ``setup``.
"""

import hashlib
import json
import os
import sys
from contextlib import suppress
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

from .listing import run_names
from .locks import is_at, is_held, take
from .program import Refused
from .rundir import RunDir, checked_name

KINDS = ("requirements", "script")
FOLDER = "envs"
MOST_NAMED = 20
LOOK_S = 0.1  # longer than somebody holds a lock who only looks
_VERSION = 1


class Interpreter(NamedTuple):
    """The Python that an environment is made by."""

    path: str
    version: str
    prefix: str


class Environment:
    """What ``spec`` asks for, made by ``interpreter`` upon the environments with the digests ``upon``."""

    def __init__(
        self, root: str, spec: Dict[str, Any], interpreter: Interpreter, upon: Sequence[str]
    ) -> None:
        self.spec = spec
        self._made_by = interpreter
        covered = {key: spec[key] for key in ("kind", "bundle", "path", "system_packages")}
        covered.update(version=_VERSION, interpreter=list(interpreter), root=root, upon=list(upon))
        self.digest = hashlib.sha256(json.dumps(covered, sort_keys=True).encode("ascii")).hexdigest()
        self.path = os.path.join(root, FOLDER, self.digest)
        self.lock = self.path + ".lock"
        self.next = self.path + ".next"

    @property
    def has_python(self) -> bool:
        """It is a virtual environment."""
        return bool(self.spec["kind"] == "requirements")

    @property
    def interpreter(self) -> Interpreter:
        """The Python of whatever is upon this one."""
        if not self.has_python:
            return self._made_by
        return Interpreter(os.path.join(self.path, "bin", "python"), self._made_by.version, self.path)

    @property
    def done(self) -> Optional[Dict[str, Any]]:
        """Which run prepared it and when, or None."""
        try:
            with open(os.path.join(self.path, "done"), encoding="utf-8") as file:
                found = json.load(file)
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    @property
    def preparer(self) -> Optional[str]:
        """The id of the run that is preparing it now; empty where that is not known, None for nobody."""
        return _noted_in(self.lock) if is_held(self.lock) else None

    @property
    def next_preparer(self) -> Optional[str]:
        """The id of the run that prepares it as soon as nobody has it, as `preparer`."""
        return _noted_in(self.next) if is_held(self.next) else None

    @property
    def last_preparer(self) -> str:
        """The id of the run that was the last to prepare it, whatever became of that."""
        return _noted_in(self.lock)

    def hold(self, exclusive: bool = False) -> Optional[int]:
        """Takes the lock, exclusively to prepare, else shared; returns its descriptor, or None while others
        have it.
        """
        fd = self._take(self.lock, exclusive)
        if fd is not None:
            os.utime(fd)  # when it was last used
        return fd

    def queue_up(self, run_id: str) -> Optional[int]:
        """Has later runs wait behind ``run_id``, which is to prepare it, until the descriptor that it returns
        is closed; None while it is another's.
        """
        fd = self._take(self.next, exclusive=True)
        if fd is not None:
            note(fd, run_id)
        return fd

    def _take(self, path: str, exclusive: bool) -> Optional[int]:
        os.makedirs(os.path.dirname(self.path), mode=0o700, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        if not take(fd, exclusive, LOOK_S if exclusive else 0.0) or not is_at(fd, path):
            os.close(fd)
            return None
        return fd


class _Obstacle(NamedTuple):
    """Why ``environment`` cannot be had: ``by`` prepares it, or is to; ``is_used``: runs use it."""

    environment: Environment
    by: Optional[str]
    is_used: bool


class Needs:
    """The environments that a run uses and the one that it prepares, as far as it has them.

    ``preparers`` are runs that were started to prepare them: while one lives, it is waited for. ``fds`` hold
    the locks. Who waits for one that it uses holds none meanwhile: whoever prepares it may wait for another.
    """

    def __init__(self, run: RunDir, job: Dict[str, Any], preparers: Sequence[str]) -> None:
        self._run = run
        self._preparers = [RunDir(run.root, run_id) for run_id in preparers]
        made = job.get("prepares")
        found = chain(run.root, [*(job.get("setup") or ()), *([made] if made else ())])
        self._used = found[:-1] if made else found
        self._made = found[-1] if made else None
        self._held: Dict[str, int] = {}
        self._place: Optional[int] = None
        self._obstacle: Optional[_Obstacle] = None

    def try_take(self) -> bool:
        """Tells whether all of them are there, and the one to prepare is the run's own or there too.

        Raises:
            Refused: one is not there or is broken, and nobody prepares it.
        """
        for environment in self._used:
            if environment.digest not in self._held and not self._try_use(environment):
                while self._held:
                    os.close(self._held.popitem()[1])
                return False
        made = self._made
        return made is None or made.digest in self._held or self._try_make(made)

    @property
    def fds(self) -> List[int]:
        """The descriptors that a payload inherits."""
        return list(self._held.values())

    @property
    def awaited(self) -> Dict[str, Any]:
        """What the run's record says of what it waits for: which file's environment, the run that prepares it
        or ``left`` something that still does, or the ``users`` that are known.
        """
        assert self._obstacle is not None
        environment, by, is_used = self._obstacle
        told: Dict[str, Any] = {"file": environment.spec["path"], "by": by}
        if is_used:
            told["users"] = self._users(environment)[:MOST_NAMED]
        elif by and not RunDir(self._run.root, by).is_alive:
            told["left"] = True
        return told

    @property
    def venvs(self) -> List[str]:
        """The virtual environments, the one that is upon the others last."""
        return [environment.path for environment in self._used if environment.has_python]

    @property
    def python(self) -> str:
        """The interpreter of the payload."""
        return self._used[-1].interpreter.path if self._used else sys.executable

    def as_record(self) -> List[Dict[str, Any]]:
        """Returns which environments the run uses, and who prepared them when."""
        found = []
        for environment in self._used:
            done = environment.done or {}
            entry = {"file": environment.spec["path"], "digest": environment.digest}
            found.append(dict(entry, by=done.get("run"), t=done.get("t")))
        return found

    def preparation(self, code: str) -> str:
        """Returns what `prepare` is told, as JSON; ``code`` is the folder of the run's files."""
        assert self._made is not None
        spec = self._made.spec
        told = {"kind": spec["kind"], "system_packages": spec["system_packages"], "force": spec.get("force")}
        note = {"run": self._run.run_id, "file": spec["path"], "digest": self._made.digest}
        told.update(file=os.path.join(code, spec["path"]), folder=self._made.path, note=note, locks=self.fds)
        return json.dumps(told)

    def _try_use(self, environment: Environment) -> bool:
        """Looks who prepares it before it looks for ``done``: whoever has finished by then has written it."""
        by = environment.next_preparer
        if by is not None:
            return self._wait(environment, by)
        by = next((run.run_id for run in self._preparers if run.is_alive), None)
        fd = environment.hold()
        if fd is None:
            return self._wait(environment, environment.preparer or by)
        file, is_there = environment.spec["path"], environment.done is not None
        python = environment.interpreter.path
        if is_there and (os.access(python, os.X_OK) or not environment.has_python):
            self._held[environment.digest] = fd
            return True
        os.close(fd)
        if by is not None:
            return self._wait(environment, by)
        if is_there:
            hint = "`orch prepare --force` makes it anew"
            raise Refused("the environment of %s has no program %s: %s" % (file, python, hint))
        tried = ", ".join(run.run_id for run in self._preparers)
        hint = "see run %s" % tried if tried else "`orch prepare` does it"
        raise Refused("the environment of %s was not prepared: %s" % (file, hint))

    def _try_make(self, environment: Environment) -> bool:
        """Uses what is there; to make it, waits its turn, for users, and for what a killed one has left."""
        run_id, is_there = self._run.run_id, environment.done is not None
        if is_there and not environment.spec.get("force"):
            fd = environment.hold()
            if fd is None:
                return self._wait(environment, environment.preparer)
            self._held[environment.digest] = fd
            return True
        if self._place is None:
            self._place = environment.queue_up(run_id)
            if self._place is None:
                return self._wait(environment, environment.next_preparer)
        fd = environment.hold(exclusive=True)
        if fd is None:
            by = environment.preparer
            return self._wait(environment, by, is_used=by is None)
        last = environment.last_preparer
        if last not in ("", run_id) and RunDir(self._run.root, last).orphans():
            os.close(fd)
            return self._wait(environment, last)
        note(fd, run_id)
        self._held[environment.digest] = fd
        with suppress(FileNotFoundError):  # cleared away by hand
            os.unlink(environment.next)
        os.close(self._place)
        self._place = None
        return True

    def _wait(self, environment: Environment, by: Optional[str], is_used: bool = False) -> bool:
        self._obstacle = _Obstacle(environment, by or None, is_used)
        return False

    def _users(self, environment: Environment) -> List[str]:
        """Returns the runs that noted that they use it and have begun, as far as they are seen to live."""
        found = []
        for run in (RunDir(self._run.root, name) for name in sorted(run_names(self._run.root))):
            has_begun = run.state.get("state") == "running"
            if has_begun and environment.digest in run.environments and (run.is_alive or run.orphans()):
                found.append(run.run_id)
        return found


def note(fd: int, run_id: str) -> None:
    """Writes whose a lock is into its open file."""
    os.ftruncate(fd, 0)
    os.pwrite(fd, run_id.encode("ascii", "replace"), 0)


def check(job: Dict[str, Any]) -> None:
    """Raises ValueError unless what a job needs and prepares can be read."""
    made = job.get("prepares")
    try:
        for spec in [*(job.get("setup") or ()), *([made] if made else ())]:
            parts = str(spec["path"]).split("/")
            is_told = spec["kind"] in KINDS and type(spec["system_packages"]) is bool
            if not is_told or any(part in ("", ".", "..") for part in parts):
                raise ValueError("not a setup: %r" % (spec,))
            checked_name(spec["bundle"], "bundle")
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError("not a setup: %r" % (job.get("setup") or made,)) from error


def chain(root: str, specs: Sequence[Dict[str, Any]]) -> List[Environment]:
    """Returns the environments that ``specs`` ask for, each upon those before it."""
    found: List[Environment] = []
    interpreter = _interpreter()
    for spec in specs:
        environment = Environment(root, spec, interpreter, [earlier.digest for earlier in found])
        found.append(environment)
        interpreter = environment.interpreter
    return found


def _interpreter() -> Interpreter:
    """Without `site` a virtual environment's prefix is not known to its Python."""
    folder = os.path.dirname(os.path.dirname(sys.executable))
    is_venv = os.path.exists(os.path.join(folder, "pyvenv.cfg"))
    return Interpreter(sys.executable, sys.version, folder if is_venv else sys.prefix)


def _noted_in(path: str) -> str:
    """Returns the id of the run that stands in a lock's file, or nothing."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return checked_name(file.read(80), "run id")
    except (OSError, ValueError):
        return ""
