"""How fast output travels: from a process to the mirror, and from ``python3 -u``."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import fabric  # type: ignore[import-untyped]  # fabric ships no types

from benchmarks.results import Figure, at_least
from benchmarks.rig import Rig
from tests.project import ORCH, Project

FLOOD = """
import sys
lines = [b"%079d\\n" % number for number in range(1000)]
with open(1, "wb", buffering=65536, closefd=False) as out:
    for _ in range({blocks}):
        out.writelines(lines)
"""
FLOOD_U = """
for number in range({lines}):
    print("%079d" % number)
"""
BLOCK = b"".join(b"%079d\n" % number for number in range(1000))


def to_mirror(rig: Rig, size_bytes: int) -> Iterator[Figure]:
    """Lines of 80 bytes from a buffered writer into the mirror, beside ``ssh host cat`` and fabric's run."""
    blocks = size_bytes // len(BLOCK)
    experiment = rig.project.experiment(FLOOD.format(blocks=blocks), "flood")
    source = rig.folder / "flood.txt"
    source.write_bytes(BLOCK * blocks)
    whole = hashlib.sha256(BLOCK * blocks).hexdigest()
    near = _mirrored_mb_per_s(rig, experiment, "near", whole)
    yield at_least(
        80,
        name="process to mirror",
        value=near,
        unit="MB/s",
        ssh_cat=_ssh_cat_mb_per_s(rig, source, "near"),
        fabric_run=_fabric_mb_per_s(rig, source, min(size_bytes, 4_000_000)),
        note="sha256 equal; fabric's run takes 4 MB, its time grows with the square",
    )
    far = _mirrored_mb_per_s(rig, experiment, "far", whole)
    yield at_least(
        0.8,
        name="process to mirror, 100 ms round trip",
        value=far / near,
        unit="x",
        mb_per_s=far,
        ssh_cat=_ssh_cat_mb_per_s(rig, source, "far"),
    )


def unbuffered(rig: Rig, size_bytes: int) -> Iterator[Figure]:
    """The same from ``python3 -u``, beside a local pipe into ``cat``."""
    code = FLOOD_U.format(lines=size_bytes // 80)
    experiment = rig.project.experiment(code, "flood_u")
    script = rig.folder / "flood_u.py"
    script.write_text(code)
    begin = time.perf_counter()
    with (
        subprocess.Popen([sys.executable, "-u", script], stdout=subprocess.PIPE) as python,
        subprocess.Popen(["cat"], stdin=python.stdout, stdout=subprocess.DEVNULL) as cat,
    ):
        cat.wait()
    local = size_bytes / 1e6 / (time.perf_counter() - begin)
    ours = _mirrored_mb_per_s(rig, experiment, "near", None)
    yield at_least(
        0.85, name="python3 -u to mirror", value=ours / local, unit="x pipe into cat", orch=ours, cat=local
    )


def _mirrored_mb_per_s(rig: Rig, experiment: Path, host: str, sha256: str | None) -> float:
    """From the payload's start to the mirror's last byte of output; the run is followed and shown."""
    project = rig.project
    argv = [str(ORCH), "run", str(experiment), "--host", host]
    before = {row["run_id"] for row in project.runs()}
    with rig.running(argv, stdout=subprocess.DEVNULL) as process:
        run_id = _wait_for_run(project, before)
        records = project.folder / ".orch" / "runs" / run_id / "records"
        done_t = _wait_for_end(records, process)
    began_t, total, found = 0.0, 0, hashlib.sha256()
    for record in project.records(run_id):
        if record["kind"] == "spawn":
            began_t = record["t"]
        if record["kind"] == "out" and record["stream"] == "stdout":
            total += len(record["text"])
            found.update(record["text"].encode())
    assert sha256 in {None, found.hexdigest()}, "the mirror is not what the payload wrote"
    return total / 1e6 / (done_t - began_t)


def _wait_for_run(project: Project, before: set[str]) -> str:
    runs = project.folder / ".orch" / "runs"
    while True:
        for path in runs.iterdir() if runs.exists() else ():
            if path.name not in before and (path / "records").exists():
                return path.name
        time.sleep(0.01)


def _wait_for_end(records: Path, process: subprocess.Popen[bytes]) -> float:
    """Returns when the ``exit`` record, which follows all output but a last piece, was in the mirror."""
    while process.poll() is None:
        segments = sorted(records.glob("*.jsonl"))
        if segments:
            last = segments[-1]
            with last.open("rb") as file:
                file.seek(max(0, last.stat().st_size - 4096))
                if b'"kind":"end"' in file.read():
                    return last.stat().st_mtime
        time.sleep(0.01)
    return max(path.stat().st_mtime for path in records.glob("*.jsonl"))


def _ssh_cat_mb_per_s(rig: Rig, source: Path, host: str) -> float:
    begin = time.perf_counter()
    with rig.running(rig.ssh(f"cat '{source}'", host), stdout=subprocess.DEVNULL) as process:
        process.wait()
    return source.stat().st_size / 1e6 / (time.perf_counter() - begin)


def _fabric_mb_per_s(rig: Rig, source: Path, size_bytes: int) -> float:
    login = {"key_filename": str(rig.sshd.client_key)}
    begin = time.perf_counter()
    with fabric.Connection(
        rig.sshd.address, user=rig.sshd.user, port=rig.sshd.port, connect_kwargs=login
    ) as connection:
        done = connection.run(f"head -c {size_bytes} '{source}'", hide=True, in_stream=False)
    assert len(done.stdout) == size_bytes
    return size_bytes / 1e6 / (time.perf_counter() - begin)
