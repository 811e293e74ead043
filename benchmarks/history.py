"""What a long history costs: a ledger of many runs, and the end of a very long log."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.results import Figure, at_most
from benchmarks.rig import Rig
from orchestrator.run_folder import RunFolder
from orchestrator.supervisor.records import RecordWriter
from orchestrator.supervisor.seals import SealChecker

PIECE_BYTES = 1024 * 1024
LINE = "step {:>9} loss 0.{:>9} " + "x" * 48 + "\n"


def many_runs(rig: Rig, count: int, repeats: int) -> Iterator[Figure]:
    """``orch ps`` with a ledger of ``count`` runs that have ended."""
    rig.project.orch("run", rig.project.experiment("print('hello')\n", "one"), "--host", "near")
    _multiply(rig.project.folder / ".orch" / "ledger.db", count)
    yield at_most(0.4, name=f"orch ps with {count:,} runs", value=_best_s(rig, ["ps"], repeats), unit="s")


def long_log(rig: Rig, size_bytes: int, repeats: int) -> Iterator[Figure]:
    """``orch logs --tail 100`` of a run whose records here are ``size_bytes``, sealed and pinned."""
    rig.project.orch("run", rig.project.experiment("print('hello')\n", "one"), "--host", "near")
    run_id = rig.project.runs()[0]["run_id"]
    folder = RunFolder(rig.project.folder / ".orch", run_id)
    _fill(folder, size_bytes)
    segments = sorted(folder.records.glob("*.jsonl"))
    found = _best_s(rig, ["logs", "--tail", "100", run_id], repeats)
    begin = time.perf_counter()
    subprocess.run(["tail", "-n", "100", segments[-1]], stdout=subprocess.DEVNULL, check=True)
    plain = time.perf_counter() - begin
    size = sum(path.stat().st_size for path in segments) / 1e9
    yield at_most(0.5, name=f"orch logs --tail 100 of {size:.1f} GB", value=found, unit="s", tail_s=plain)


def _multiply(path: Path, count: int) -> None:
    """Adds ``count`` copies of the ledger's one run, by other names."""
    connection = sqlite3.connect(path)
    columns = [row[1] for row in connection.execute("PRAGMA table_info(runs)") if row[1] != "number"]
    others = ", ".join(name for name in columns if name not in {"run_id", "group_id"})
    insert = (
        f"INSERT INTO runs (run_id, group_id, {others}) "  # noqa: S608  (the ledger's own column names)
        f"SELECT ?1, ?1, {others} FROM runs WHERE number = (SELECT min(number) FROM runs)"
    )
    with connection:
        connection.executemany(insert, ((f"x{number:011}",) for number in range(count)))
    connection.close()


def _fill(folder: RunFolder, size_bytes: int) -> None:
    """Puts a run of many lines in the place of the one that is mirrored there, and pins its seals."""
    shutil.rmtree(folder.path)
    folder.make()
    writer = RecordWriter(str(folder.records), folder.run_id, {"job": {}, "bundle": {}})
    text = "".join(LINE.format(number, number) for number in range(PIECE_BYTES // len(LINE.format(0, 0))))
    lines = text.count("\n")
    for piece in range(size_bytes // len(text)):
        writer.write_output("main", 1, "stdout", piece * len(text), piece * lines, "text", text)
    writer.write("end", outcome="exited", code=0, signal=None, reason=None, survivors=[])
    writer.close()
    _pin(folder)


def _pin(folder: RunFolder) -> None:
    checker, before = SealChecker(folder.run_id), 0
    for index, path in enumerate(sorted(folder.records.glob("*.jsonl"))):
        with path.open("rb") as file:
            while data := file.read(PIECE_BYTES):
                for seal in checker.feed(data):
                    end = seal.end - before
                    folder.observe(
                        "seal",
                        seq=seal.seq,
                        sha256=seal.sha256,
                        segment=index,
                        line_start=end - seal.line_bytes,
                        line_end=end,
                    )
        before += path.stat().st_size


def _best_s(rig: Rig, arguments: list[str | Path], repeats: int) -> float:
    found = []
    for _ in range(repeats):
        begin = time.perf_counter()
        done = rig.project.orch(*arguments)
        found.append(time.perf_counter() - begin)
        assert done.code == 0, done.err
    return min(found)
