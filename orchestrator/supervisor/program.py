"""What a run executes: its argument vector, and the process that it becomes.

A job names a module or a script of its bundle, which `instrument` runs, a command, which is executed as it
is, or an environment, which `prepare` makes. A process gets a session of its own, two pipes, the descriptors
it is to inherit, and is in the run's cgroup before its first instruction.
"""

import json
import os
import subprocess
import sys
from typing import Any, Dict, List, Optional, Sequence

from . import cgroups, gpus, ranks, store
from .rundir import RunDir

KINDS = ("module", "script", "command", "prepares")
_MIB = 1024**2
_GIB = 1024**3


class Refused(Exception):
    """The run cannot start on this host."""


def check(job: Dict[str, Any]) -> None:
    """Raises ValueError unless the job names exactly one program, and nothing that this cannot have."""
    named = [kind for kind in KINDS if job.get(kind)]
    if len(named) != 1:
        raise ValueError(
            "a job has one of %s, this one has %s" % (", ".join(KINDS), " and ".join(named) or "none")
        )
    ranks.count_of(job)
    if job.get("memory_limit_bytes") and job.get("command"):
        raise ValueError("a memory limit is kept from inside Python, and this job is a command")


def check_cards(job: Dict[str, Any], cards: Sequence[gpus.Card]) -> None:
    """Sees to it that the job's memory limit can be kept on these cards, as far as that shows before a start.

    Raises:
        Refused: it cannot.
    """
    limit = job.get("memory_limit_bytes")
    if not limit:
        return
    count = ranks.count_of(job)
    if len(cards) < count:  # two on one card would each take what is left below the limit
        raise Refused(
            "a memory limit needs a card for each process: there are %d for %d; see devices:"
            % (len(cards), count)
        )
    for card in cards:
        if 0 < card.total_mib * _MIB < limit:
            raise Refused(
                "a memory limit of %.2f GiB cannot be simulated on card %d, which has %.2f GiB; lower it, or "
                "name a larger card in devices:" % (limit / _GIB, card.number, card.total_mib * _MIB / _GIB)
            )


def argv(
    job: Dict[str, Any],
    run: RunDir,
    entries: Sequence[store.Entry],
    python: str = sys.executable,
    preparation: str = "",
) -> List[str]:
    """Returns what to execute, modules and scripts by ``python``; for a module its parameters are written to
    params.json, which is named behind its arguments. ``preparation`` is what a run that prepares something
    tells `prepare`.

    Raises:
        Refused: the script is none of the bundle's files.
    """
    if job.get("command"):
        return list(job["command"])
    ours = os.path.dirname(os.path.abspath(__file__))
    if job.get("prepares"):
        return [python, "-I", os.path.join(ours, "prepare.py"), preparation]
    instrument = os.path.join(ours, "instrument.py")
    if job.get("script"):
        if job["script"] not in {entry[0] for entry in entries}:
            raise Refused("there is no %s in the bundle" % job["script"])
        path = os.path.join(run.code, job["script"])
        return [python, instrument, "--script", path, *job.get("args", ())]
    params = os.path.join(run.path, "params.json")
    with open(params, "w", encoding="utf-8") as file:
        json.dump(job["params"], file, indent=1)
    return [python, instrument, job["module"], *(job.get("args") or ()), "--params", params]


def spawn(
    arguments: List[str], cwd: str, env: Dict[str, str], inherited: Sequence[int], cgroup: Optional[str]
) -> "subprocess.Popen[bytes]":
    """Starts the process; the program is looked for in ``env``'s PATH.

    Raises:
        Refused: it cannot be executed.
    """
    moving = cgroups.opened(cgroup) if cgroup is not None else None

    def move() -> None:
        try:
            os.write(-1 if moving is None else moving, b"0")
        except OSError:
            pass  # there is no cgroup, or we may make one and not move into it: the run goes without

    try:
        return subprocess.Popen(
            arguments,
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=tuple(inherited),
            start_new_session=True,
            preexec_fn=move,  # noqa: PLW1509  (there are no threads here)
        )
    except FileNotFoundError as error:
        where = "" if os.sep in arguments[0] else " in its PATH (%s)" % env.get("PATH", "which is not set")
        raise Refused("there is no program %s%s" % (arguments[0], where)) from error
    except (OSError, ValueError) as error:
        raise Refused("cannot start %s: %s" % (arguments[0], error)) from error
    finally:
        if moving is not None:
            os.close(moving)
