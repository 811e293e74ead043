"""A payload that ships `estimate` and `shapes`: they answer in format 1 of decision 0017.

They know their parameters alone: ``size_gib`` is the predicted peak; ``fault`` makes the programs
fail in one of several ways.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

from orchestrator.workspace import Workspace
from tests.project import Project

GIB = 2**30

ESTIMATE = """
import argparse, json, os, sys, time
from pathlib import Path

GIB = 2**30
parser = argparse.ArgumentParser()
for name in ("--entry", "--params", "--card", "--alloc-conf"):
    parser.add_argument(name)
parser.add_argument("--memory-limit-bytes", type=int)
parser.add_argument("--alternatives", action="store_true")
parser.add_argument("--json", action="store_true")
asked = parser.parse_args()
params = json.loads(Path(asked.params).read_text())
log = params.get("log")
if log:
    with open(log, "a") as file:
        print(json.dumps([sys.argv[1:], dict(os.environ), os.getcwd(), sys.executable]), file=file)
fault = params.get("fault")
if fault == "refused by its file":
    print(f"probe.estimate: {asked.params}: seq_len is -1", file=sys.stderr)
    sys.exit(2)
if fault == "refused":
    print("probe.estimate: seq_len is -1; it must be at least 2", file=sys.stderr)
    sys.exit(2)
if fault == "old torch":
    print("estimate: this needs torch 2.9, here is 2.4", file=sys.stderr)
    sys.exit(3)
if fault == "silent":
    sys.exit(3)
if fault == "no torch":
    import_name = "torch"
    raise ModuleNotFoundError("No module named 'torch'", name="torch")
if fault == "crash":
    raise RuntimeError("a \\x1b[31mred\\x1b[0m crash")
if fault == "slow":
    time.sleep(100)
if fault == "endless":
    while True:
        print("x" * 65536)
if fault == "together":
    marks = Path(params["marks"])
    (marks / str(params["size_gib"])).touch()
    give_up_at = time.monotonic() + 20
    while len(list(marks.iterdir())) < 2 and time.monotonic() < give_up_at:
        time.sleep(0.01)
    assert len(list(marks.iterdir())) == 2, "nobody else runs meanwhile"
if (fault or "").startswith("escapes"):
    import subprocess
    left = subprocess.Popen(["sleep", "100"], start_new_session=True, stdout=subprocess.DEVNULL)
    Path(params["left"]).write_text(str(left.pid))
    if fault == "escapes and waits":
        time.sleep(100)
if fault == "holder":
    import subprocess
    left = subprocess.Popen(["sleep", "100"])
    Path(params["left"]).write_text(str(left.pid))
peak = int(params["size_gib"] * GIB)
capacity = None
card = None
if asked.card:
    size, _, arch = asked.card.partition(":")
    total = {"h200": int(139.8 * GIB)}.get(size) or int(float(size.removesuffix("GiB")) * GIB)
    card = {"name": "NVIDIA " + size.upper(), "key": size, "total_bytes": total, "capability": [9, 0]}
    capacity = total - GIB
if asked.memory_limit_bytes:
    capacity = asked.memory_limit_bytes - GIB
if capacity is None:
    verdict = "no card"
elif peak * 1.05 <= capacity:
    verdict = "fits"
else:
    verdict = "does not fit" if peak * 0.95 > capacity else "within the error"
place = {"category": "scores", "name": "bmm", "module": "layers.0", "where": "eager.py:12 attend",
         "shape": [32, 8192, peak // 2 // 32 // 8192], "dtype": "float32"}
tensor = {"bytes": peak // 2, "phase": "forward", **place}
def owners(size):
    quarter = size // 4
    return {"parameter": quarter, "scores": size // 2, "activation": size - quarter - size // 2}
phases = [{"name": name, "peak_allocated_bytes": size, "peak_reserved_bytes": size + GIB,
           "by_category": owners(size), "largest": [tensor], "verdict": verdict}
          for name, size in (("warmup", peak // 2), ("timed", peak))]
failure = None
if verdict == "does not fit":
    failure = {"phase": "timed", "bytes": peak // 2, "segment_bytes": peak // 2, **place,
               "allocated_bytes": peak // 2, "reserved_bytes": peak // 2,
               "largest_free_bytes": GIB}
answer = {"format": 1, "entry": asked.entry, "torch": "2.13.0+cpu", "seconds": 0.01, "card": card,
          "capacity_bytes": capacity, "outside_bytes": GIB, "error_share": 0.05,
          "peak_allocated_bytes": peak, "peak_reserved_bytes": peak + GIB, "verdict": verdict,
          "failure": failure, "phases": phases, "execution": "flex, compiled kernels", "notes": ["a note"],
          "told_by_a_newer_payload": True}
if asked.alternatives:
    answer["alternatives"] = [{"label": "recompute=mlp", "set": {"recompute": "mlp"}, "alloc_conf": None,
                               "peak_allocated_bytes": peak // 2, "peak_reserved_bytes": peak // 2,
                               "verdict": "fits" if capacity else "no card"}]
    answer["left_out"] = ["max_anchors=16", "max_anchors=8"]
if fault == "shapeless":
    answer["phases"][0]["largest"][0]["shape"] = "big"
if fault == "no number":
    answer["seconds"] = float("nan")
print(json.dumps(answer))
"""

SHAPES = """
import json, sys
words = sys.argv[1:]
sets = []
for word, path in zip(words[::2], words[1::2]):
    assert word == "--params"
    n = json.load(open(path))["n"]
    dims = [{"name": "queries", "expression": "n", "value": n}]
    sets.append({"tensors": [{"name": "scores", "category": "scores", "dtype": "float32", "dims": dims,
                              "bytes": 4 * n, "applies": True, "when": None, "count": 1,
                              "born": "probe.attend", "remedy": {"attention": "flex"}}]})
print(json.dumps({"format": 1, "sets": sets}))
"""


def add_programs(project: Project) -> None:
    """Gives the project's payload both programs."""
    folder = project.folder / "payloads" / "probe"
    (folder / "estimate.py").write_text(ESTIMATE)
    (folder / "shapes.py").write_text(SHAPES)


@contextmanager
def open_with_programs(project: Project) -> Iterator[Workspace]:
    """Gives the project's payload both programs, and opens its workspace."""
    add_programs(project)
    with closing(Workspace.open(project.folder / "inventory.yaml")) as opened:
        yield opened
