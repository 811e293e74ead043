"""Starts a run's supervisor so that nothing of the channel that started it is left: no session, no
descriptor.

Double fork and setsid; standard input and output on /dev/null, standard error in ``supervisor.log``. The
parent returns when the first record is written, or with the reason why it could not be.
"""

import json
import os
import select
import sys
from typing import Any, Dict, Sequence

from . import cgroups, processes
from .job import Job
from .records import RecordWriter
from .rundir import RunDir
from .store import Entry

READY_TIMEOUT_S = 30.0


class StartFailed(Exception):
    """The supervisor ended before it was ready; the message says why."""


def start(
    run: RunDir,
    job: Dict[str, Any],
    entries: Sequence[Entry],
    lock_fd: int,
    secrets: Dict[str, str],
    preparers: Sequence[str] = (),
) -> None:
    """Starts the supervisor, which keeps ``lock_fd``, ``secrets`` and the ids of the runs that prepare what
    the run needs; returns once it is ready.

    Raises:
        StartFailed: it did not come up.
    """
    ready_read, ready_write = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.close(ready_read)
        _become_supervisor(run, job, entries, lock_fd, secrets, preparers, ready_write)
    os.close(ready_write)
    os.close(lock_fd)
    os.waitpid(child, 0)
    with os.fdopen(ready_read, "rb") as file:
        is_ready, _, _ = select.select([file], [], [], READY_TIMEOUT_S)
        answer = file.read() if is_ready else b""
    if not answer:
        run.tree().forget()  # a cgroup that nothing entered yet
        raise StartFailed("the supervisor did not come up; see %s/supervisor.log" % run.path)
    reply = json.loads(answer)
    if "error" in reply:
        run.tree().forget()
        raise StartFailed(reply["error"])


def _become_supervisor(
    run: RunDir,
    job: Dict[str, Any],
    entries: Sequence[Entry],
    lock_fd: int,
    secrets: Dict[str, str],
    preparers: Sequence[str],
    ready_fd: int,
) -> None:
    """Never returns: every path out of here ends the process."""
    code = 1
    try:
        os.setsid()
        if os.fork():
            os._exit(0)
        _leave_the_channel(run, {lock_fd, ready_fd})
        _supervise(run, job, entries, secrets, preparers, ready_fd)
        code = 0
    except BaseException:  # noqa: BLE001  (nothing may return into the channel's code)
        import traceback  # noqa: PLC0415

        traceback.print_exc()
    finally:
        os._exit(code)


def _leave_the_channel(run: RunDir, keep: "set[int]") -> None:
    null = os.open(os.devnull, os.O_RDWR)
    log = os.open(os.path.join(run.path, "supervisor.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for source, target in ((null, 0), (null, 1), (log, 2)):
        os.dup2(source, target)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in keep:
            try:
                os.close(int(name))
            except OSError:
                pass  # the listing's own descriptor
    os.chdir(run.path)
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115  (it lives as long as we do)


def _supervise(
    run: RunDir,
    job: Dict[str, Any],
    entries: Sequence[Entry],
    secrets: Dict[str, str],
    preparers: Sequence[str],
    ready_fd: int,
) -> None:
    me = processes.identity(os.getpid())
    try:
        size = sum(entry[2] for entry in entries)
        bundle = {"id": job["bundle"], "files": len(entries), "bytes": size}
        header, limit = {"job": job, "bundle": bundle}, job.get("log_limit_bytes")
        writer = RecordWriter(run.records, job["run_id"], header, limit_bytes=limit)
        reaps = processes.become_subreaper()
        writer.write(
            "start", identity=me, python=sys.version.split()[0], executable=sys.executable, subreaper=reaps
        )
        place = cgroups.place(run.run_id)  # noted before it is made: whoever finds the run finds it too
        has_to_wait = job.get("turn") or job["devices"] or job.get("setup") or job.get("prepares")
        run.change_state("waiting" if has_to_wait else "running", identity=me, cgroup=place)
        cgroup = cgroups.make(place)
        if cgroup != place:
            run.change_state(run.state["state"], cgroup=None)
        work = Job(job, entries, run, writer, secrets, cgroup, preparers)
    except Exception as error:
        os.write(ready_fd, json.dumps({"error": "%s: %s" % (type(error).__name__, error)}).encode("utf-8"))
        raise
    os.write(ready_fd, json.dumps({"identity": me}).encode("utf-8"))
    os.close(ready_fd)
    try:
        work.run()
    finally:
        run.change_state("ended")
