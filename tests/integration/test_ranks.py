"""A run of several ranks as its user sees it: whose line is whose, who failed first, what each told."""

from __future__ import annotations

from pathlib import Path

from tests.project import Project

CODE = """
import json, os, sys, time
rank = int(os.environ["RANK"])
print("rank", rank, "of", os.environ["WORLD_SIZE"])
fd = int(os.environ["ORCH_EVENTS_FD"].split(":")[0])
for name in ("loss", "timed.ms"):
    os.write(fd, json.dumps({"kind": "metric", "name": name, "value": rank + 0.5}).encode() + b"\\n")
open(f"ready {rank}", "w").close()
while not all(os.path.exists(f"ready {peer}") for peer in range(3)):
    time.sleep(0.01)
if rank == 2:
    raise ValueError("no such layer")
time.sleep(100)
"""


def test_the_rank_that_failed_first_is_named_and_every_line_has_its_rank(tmp_path: Path) -> None:
    project = Project(tmp_path / "my project")
    done = project.orch("run", project.experiment(CODE, processes=3, grace="5s"), "--host", "here")
    assert done.code == 1, done.err
    for rank in range(3):
        assert f"/rank{rank}.stdout:1 | rank {rank} of 3\n" in done.out
    assert "processes    3, rank0 to rank2\n" in done.out
    assert "failed (not good)\n" in done.out
    assert "rank 2 exited with code 1 first; the other ranks were ended\n" in done.out
    assert "rank2: builtins.ValueError: no such layer\n" in done.out
    assert "loss 0.5, rank1/loss 1.5, rank2/loss 2.5\n" in done.out
    assert "rank1/timed: ms 1.5\n" in done.out
    (line,) = project.orch("logs", "last", "--proc", "rank1", "--long").out.splitlines()
    spawns = [record for record in project.records(project.runs()[0]["run_id"]) if record["kind"] == "spawn"]
    assert f" pid {spawns[1]['pid']} " in line
    origin = project.orch("logs", "--where", line.split(" ")[1]).out
    assert f"rank1, pid {spawns[1]['pid']}" in origin
    assert (
        project.orch("logs", "last", "--raw", "--proc", "rank2", "--stream", "stdout").out == "rank 2 of 3\n"
    )
    assert project.orch("verify", "last").code == 0


def test_a_scripts_ranks_are_an_option_and_a_commands_are_not(tmp_path: Path) -> None:
    project = Project(tmp_path / "my project")
    script = project.folder / "train.py"
    script.touch()
    asked = ("--processes", "2", "--memory-limit", "96GiB")
    plan = project.orch("run", script, "--host", "here", "--dry-run", *asked)
    assert "processes   2\n" in plan.out
    assert "memory      103079215104 bytes\n" in plan.out
    refused = project.orch("exec", "here", "--processes", "2", "--", "true")
    assert (refused.code, "No such option" in refused.err) == (2, True)
    experiment = project.experiment("", processes=2)
    refused = project.orch("run", experiment, "--host", "here", *asked)
    assert "--processes is for scripts (….py): write `processes:` in" in refused.err
