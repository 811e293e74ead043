"""The out-of-memory probe as a program: its experiment's parameters, one run, and what that run said."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

EXPERIMENT = Path(__file__).parents[2] / "experiments" / "oom_probe.yaml"
MODULE = "dflash.probes.oom"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """One run of the probe: what it printed, and the events it sent."""

    code: int
    out: str
    err: str
    events: list[dict[str, Any]]

    def metrics(self) -> dict[str, Any]:
        return {event["name"]: event["value"] for event in self.events if event["kind"] == "metric"}

    def losses(self) -> list[str]:
        return re.findall(r"loss (\S+),", self.out)


def experiment() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(EXPERIMENT.read_text())
    return loaded


def cpu_params() -> dict[str, Any]:
    declared = experiment()
    return {**declared["params"], **declared["profiles"]["cpu"]["params"]}


def run_probe(arguments: Sequence[str], *, events: bool = False) -> Finished:
    environment = {name: value for name, value in os.environ.items() if name != "ORCH_EVENTS_FD"}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    reader, writer = os.pipe()
    if events:
        environment["ORCH_EVENTS_FD"] = f"{writer}:{os.fstat(writer).st_ino}"
    done = subprocess.run(
        [sys.executable, "-m", MODULE, *arguments],
        capture_output=True,
        text=True,
        env=environment,
        pass_fds=[writer] if events else [],
        check=False,
        timeout=120,
    )
    os.close(writer)
    with open(reader, encoding="utf-8") as lines:  # noqa: PTH123  a descriptor has no path
        received = [json.loads(line, parse_constant=_refuse) for line in lines]
    return Finished(code=done.returncode, out=done.stdout, err=done.stderr, events=received)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
