"""Which runs this host holds, whoever started them, as their first records say: bounded reads, in pages.

What a first record says is its writer's word: the controller checks it. A job travels when it is asked for by
its run's id; for the others its hash does, values of variables left out, which tells whether it is the one
that the controller knows.
"""

import hashlib
import json
import os
import time
from typing import Any, Dict, Iterator, List, Optional, Sequence

from .cuts import segment_name
from .rundir import RunDir

FIRST_BYTES = 1024 * 1024  # of a first record; a longer one is not read
PAGE_RUNS = 200
PAGE_BYTES = 8 * 1024 * 1024
MASK = "***"
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe in its place holds nobody up


def job_digest(job: Any) -> str:
    """Returns the SHA-256 of a job, of its variables the names only."""
    env = job.get("env") if isinstance(job, dict) else None
    masked = dict(job, env=dict.fromkeys(env, MASK)) if isinstance(env, dict) else job
    text = json.dumps(masked, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def pages(root: str, run_ids: Optional[Sequence[str]]) -> Iterator[List[Dict[str, Any]]]:
    """Yields what is known of each run of ``root``, or, with their jobs, of ``run_ids`` alone."""
    page: List[Dict[str, Any]] = []
    size = 0
    for run_id in sorted(run_names(root)) if run_ids is None else run_ids:
        entry = _entry(RunDir(root, run_id), with_job=run_ids is not None)
        page.append(entry)
        size += len(entry.get("text", ""))
        if len(page) >= PAGE_RUNS or size >= PAGE_BYTES:
            yield page
            page, size = [], 0
    yield page


def run_names(root: str) -> List[str]:
    """Returns the names in ``runs/`` that are folders of runs: no link, no other file."""
    try:
        with os.scandir(os.path.join(root, "runs")) as entries:
            return [
                entry.name
                for entry in entries
                if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False)
            ]
    except FileNotFoundError:
        return []


def standing(run: RunDir) -> str:
    """Returns ``waiting``, ``alive``, ``ended``, or ``never started`` for a folder without a record."""
    if run.is_alive:
        return "waiting" if run.state.get("state") == "waiting" else "alive"
    return "ended" if run.has_started else "never started"


def last_written_t(run: RunDir) -> float:
    """Returns when a run's records were last written, or its folder made: seconds since the epoch."""
    folder = run.records if run.has_started else run.path
    try:
        with os.scandir(folder) as entries:
            times = [entry.stat(follow_symlinks=False).st_mtime for entry in entries]
        return max(times, default=os.lstat(folder).st_mtime)
    except OSError:
        return time.time()


def _entry(run: RunDir, with_job: bool) -> Dict[str, Any]:
    entry: Dict[str, Any] = {"run": run.run_id, "standing": standing(run)}
    text = _first_line(run)
    if text is None:
        return entry
    try:
        told = text.decode("utf-8")
        first = json.loads(told)
        job = first["job"]
        entry.update(t=first["t"], claims=first["run"], digest=job_digest(job))
    except (ValueError, KeyError, TypeError, RecursionError):
        return entry
    if with_job:
        entry["text"] = told
    return entry


def _first_line(run: RunDir) -> Optional[bytes]:
    """Returns a run's first record as it stands there, None where it has none that can be read."""
    try:
        fd = os.open(os.path.join(run.records, segment_name(0)), _READ)
    except OSError:
        return None
    with os.fdopen(fd, "rb") as file:
        line = file.readline(FIRST_BYTES)
    return line if line.endswith(b"\n") else None
