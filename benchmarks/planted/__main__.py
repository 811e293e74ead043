"""Runs the planted failures and prints what was named (see the package)."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from orchestrator.forensics.causes import (
    FRAGMENTATION,
    HOST,
    KERNEL_SHARED,
    LEAK,
    LIMIT,
    OTHER_PROCESS,
    OUTSIDE,
    TOO_LARGE,
)

HERE = Path(__file__).parent
PROJECT = HERE.parents[1]
LEAST_NAMED_SHARE = 11 / 12
TENSOR = (TOO_LARGE, LIMIT)
"""The causes where the answer is a tensor, and the words that name it must stand in the first line."""
PLACE = re.compile(r" at \S+:\d+ \S+")
"""Where a line of code stands in an answer: a script's own name would name its tensor."""
ORCH = [sys.executable, "-c", "from orchestrator.cli.main import main; main()"]
HOLD = """
import sys, time, torch
held = torch.empty(int(sys.argv[1]), dtype=torch.uint8, device="cuda")
print("held", flush=True)
time.sleep(1000)
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plant:
    """One planted failure; ``limit`` is the card's for scripts, experiments name their own.

    It is named when the explanation has one of these ``causes``, and all ``words`` in its first line.
    """

    file: str
    causes: Sequence[str]
    words: Sequence[str] = ()
    limit: str | None = None
    held_share: float = 0.0


PLANTS = (
    Plant(file="scores.yaml", causes=TENSOR, words=["scores"]),
    Plant(file="expanded_keys.yaml", causes=TENSOR, words=["expanded", "[182, 32, 8032, 128]"]),
    Plant(file="feed_forward.yaml", causes=TENSOR, words=["[32768, 17408]"]),
    Plant(file="loss_chunk.yaml", causes=TENSOR, words=["logits"]),
    Plant(file="logits.py", causes=TENSOR, words=["logits"], limit="12GiB"),
    Plant(file="optimizer.py", causes=TENSOR, words=["optimizer"], limit="7GiB"),
    Plant(file="gradient.py", causes=TENSOR, words=["gradient"], limit="6GiB"),
    Plant(file="parameters.py", causes=TENSOR, words=["parameter"], limit="10GiB"),
    Plant(file="leak.py", causes=[LEAK], limit="8GiB"),
    Plant(file="fragmentation.py", causes=[FRAGMENTATION], limit="2GiB"),
    Plant(file="stranger.py", causes=[OTHER_PROCESS], held_share=0.85),
    Plant(file="host_memory.py", causes=[HOST]),
    Plant(file="library.py", causes=[OUTSIDE]),
    Plant(file="shared_memory.py", causes=[KERNEL_SHARED]),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What `orch explain` said to a planted failure."""

    plant: Plant
    printed: str
    explanation: Mapping[str, Any]

    @property
    def is_named(self) -> bool:
        """Whether the first answer is the planted one."""
        cause = (self.explanation.get("cause") or {}).get("name")
        said = PLACE.sub("", self.text).lower()
        return cause in self.plant.causes and all(word in said for word in self.plant.words)

    @property
    def text(self) -> str:
        """The first line of the explanation, or why there is none."""
        return str(self.explanation.get("answer"))


def try_plant(plant: Plant, home: Path) -> Answer:
    """Lets one program fail and asks why."""
    paths = filter(None, [str(PROJECT), os.environ.get("PYTHONPATH")])
    environment = {**os.environ, "ORCH_HOME": str(home), "PYTHONPATH": os.pathsep.join(paths)}
    words = [str(HERE / plant.file), "--host", "local", "--no-estimate", "--json"]
    if plant.file.endswith(".py"):
        words += ["--devices", "0", "--share"]
        words += [] if plant.limit is None else ["--memory-limit", plant.limit]
    with _held(plant.held_share):
        done = subprocess.run(
            [*ORCH, "run", *words], env=environment, cwd=PROJECT, capture_output=True, text=True, check=False
        )
    told = subprocess.run(
        [*ORCH, "explain", "last", "--no-estimate", "--json"],
        env=environment,
        cwd=PROJECT,
        capture_output=True,
        text=True,
        check=False,
    )
    if told.returncode:
        return Answer(plant=plant, printed=done.stdout[-200:], explanation={"answer": told.stderr[-500:]})
    return Answer(plant=plant, printed=done.stdout[-200:], explanation=json.loads(told.stdout))


@contextlib.contextmanager
def _held(share: float) -> Iterator[None]:
    """Another process on the card, which no run knows."""
    if not share:
        yield
        return
    code = "import torch; print(torch.cuda.mem_get_info()[1])"
    total = int(subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True).stdout)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(int(total * share))], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    try:
        assert holder.stdout.readline() == "held\n"
        yield
    finally:
        holder.kill()
        holder.wait()


def refuse_without_a_card() -> None:
    """Ends here, with one line, where nothing could be planted."""
    code = "import torch; torch.cuda.mem_get_info()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        problem = done.stderr.strip().rpartition("\n")[2]
        raise SystemExit(f"no card can be used here ({problem}); docs/memory.md has what an H200's gave")


def main() -> int:
    """Plants what the command line names."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planted", description=__doc__)
    parser.add_argument("--only", action="append", choices=[plant.file for plant in PLANTS])
    parser.add_argument("--json", type=Path, default=Path("benchmarks/planted.json"), metavar="FILE")
    options = parser.parse_args()
    refuse_without_a_card()
    chosen = [plant for plant in PLANTS if not options.only or plant.file in options.only]
    with tempfile.TemporaryDirectory(prefix="orch-planted-") as home:
        answers: list[Answer] = []
        for plant in chosen:
            answer = try_plant(plant, Path(home))
            answers.append(answer)
            mark = "named " if answer.is_named else "MISSED"
            print(f"{mark}  {plant.file:22} {answer.text}", flush=True)
            options.json.write_text(json.dumps([asdict(answer) for answer in answers], indent=2))
    named = sum(answer.is_named for answer in answers)
    print(f"{named} of {len(answers)} named")
    return int(named < LEAST_NAMED_SHARE * len(answers))


if __name__ == "__main__":
    sys.exit(main())
