"""Environments that are prepared on this host: each once for its content, under a lock, for any run.

``envs/<digest>/`` holds what a preparation made (a virtual environment, of a script nothing) and ``done``,
which is written last: a folder without it is a leftover. ``envs/<digest>.lock`` is held exclusively by the
run that prepares it, whose id stands in it, and shared by each run that uses it. Payloads inherit the
descriptor, so the lock tells the truth after a killed supervisor too. `prepare` does the work.

A job's ``setup`` lists what the run needs, one upon the other; ``prepares`` is what a preparation makes upon
its own ``setup``.
"""

import hashlib
import json
import os
import sys
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

from .locks import is_at, is_held, take
from .program import Refused
from .rundir import RunDir, checked_name

KINDS = ("requirements", "script")
FOLDER = "envs"
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
        if not is_held(self.lock):
            return None
        try:
            with open(self.lock, encoding="ascii", errors="replace") as file:
                return file.read(80)
        except OSError:
            return ""

    def hold(self, run_id: Optional[str] = None) -> Optional[int]:
        """Takes the lock, exclusively for the run ``run_id`` that prepares, else shared; returns its
        descriptor, or None while others have it.
        """
        os.makedirs(os.path.dirname(self.path), mode=0o700, exist_ok=True)
        fd = os.open(self.lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        if not take(fd, exclusive=run_id is not None) or not is_at(fd, self.lock):
            os.close(fd)
            return None
        if run_id is not None:
            os.ftruncate(fd, 0)
            os.write(fd, run_id.encode("ascii", "replace"))
        os.utime(fd)  # when it was last used
        return fd


class Needs:
    """The environments that a run uses and the one that it prepares, as far as it has them.

    ``preparers`` are runs that were started to prepare them: while one lives, it is waited for. ``by`` is the
    run that was last waited for, ``fds`` hold the locks.
    """

    def __init__(self, run: RunDir, job: Dict[str, Any], preparers: Sequence[str]) -> None:
        self._run = run
        self._preparers = [RunDir(run.root, run_id) for run_id in preparers]
        made = job.get("prepares")
        found = chain(run.root, [*(job.get("setup") or ()), *([made] if made else ())])
        self._used = found[:-1] if made else found
        self._made = found[-1] if made else None
        self._held: Dict[str, int] = {}
        self.by: Optional[str] = None

    def try_take(self) -> bool:
        """Tells whether all of them are there, and the one to prepare is the run's own or there too.

        Raises:
            Refused: one is not there, and nobody prepares it.
        """
        for environment in self._used:
            if environment.digest not in self._held and not self._try_use(environment):
                return False
        made = self._made
        return made is None or made.digest in self._held or self._try_make(made)

    @property
    def fds(self) -> List[int]:
        """The descriptors that a payload inherits."""
        return list(self._held.values())

    @property
    def waits_for(self) -> str:
        """The file of the first environment that is still lacking."""
        every = [*self._used, *([self._made] if self._made else ())]
        return str(next(env.spec["path"] for env in every if env.digest not in self._held))

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
        told.update(file=os.path.join(code, spec["path"]), folder=self._made.path, note=note)
        return json.dumps(told)

    def _try_use(self, environment: Environment) -> bool:
        """Looks who prepares it before it looks for ``done``: whoever has finished by then has written it."""
        by = environment.preparer
        if by is None:
            by = next((run.run_id for run in self._preparers if run.is_alive), None)
        self.by = by or None
        if environment.done is not None:
            fd = environment.hold()
            if fd is not None and environment.done is not None:
                self._held[environment.digest] = fd
                return True
            if fd is not None:
                os.close(fd)
            return False
        if by is None:
            tried = ", ".join(run.run_id for run in self._preparers)
            hint = "see run %s" % tried if tried else "`orch prepare` does it"
            raise Refused("the environment of %s was not prepared: %s" % (environment.spec["path"], hint))
        return False

    def _try_make(self, environment: Environment) -> bool:
        is_there = environment.done is not None and not environment.spec.get("force")
        self.by = environment.preparer or None
        fd = environment.hold() if is_there else environment.hold(self._run.run_id)
        if fd is None:
            return False
        self._held[environment.digest] = fd
        return True


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
