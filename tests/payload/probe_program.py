"""The probes: their experiments' parameters, one run, as a program or in this process, and what it said."""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from dflash import notices
from dflash.events import ENVIRONMENT_NAME

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
OOM = "oom_probe"
LONGEST_S = 600  # kernels are compiled on a card


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """One run of a probe: what it printed, warnings included, and the events it sent."""

    code: int
    out: str
    err: str
    events: list[dict[str, Any]]

    def metrics(self) -> dict[str, Any]:
        return {event["name"]: event["value"] for event in self.events if event["kind"] == "metric"}

    def losses(self) -> list[str]:
        return re.findall(r"loss (\S+),", self.out)

    def table_row(self, first: str) -> list[str]:
        """Return the cells of the table's line that begins with this one."""
        (line,) = re.findall(rf"^{re.escape(first)}  .*$", self.out, re.MULTILINE)
        return re.split(r"\s{2,}", line)


def experiment(name: str = OOM) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((EXPERIMENTS / f"{name}.yaml").read_text())
    return loaded


def cpu_params(name: str = OOM) -> dict[str, Any]:
    declared = experiment(name)
    return {**declared["params"], **declared["profiles"]["cpu"]["params"]}


def assignments(params: dict[str, Any]) -> list[str]:
    """Return parameters as a probe's arguments."""
    return [part for name, value in params.items() for part in ("--set", f"{name}={json.dumps(value)}")]


def cpu_bounds(name: str = OOM) -> dict[str, dict[str, float]]:
    """Return what the experiment expects of metrics in its `cpu` profile; null takes a bound away."""
    declared = experiment(name)
    changed = declared["profiles"]["cpu"].get("expect", {}).get("metrics", {})
    bounds = {**declared["expect"]["metrics"], **changed}
    return {metric: bound for metric, bound in bounds.items() if bound is not None}


def run_probe(
    arguments: Sequence[str],
    *,
    events: bool = False,
    module: str = "dflash.probes.oom",
    address_space_kib: int | None = None,
) -> Finished:
    """Run a probe; with `address_space_kib` larger allocations are refused as where there is no memory."""
    environment = {name: value for name, value in os.environ.items() if name != ENVIRONMENT_NAME}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    reader, writer = os.pipe()
    if events:
        environment[ENVIRONMENT_NAME] = f"{writer}:{os.fstat(writer).st_ino}"
    limited = f"ulimit -v {'unlimited' if address_space_kib is None else address_space_kib}"
    done = subprocess.run(
        ["sh", "-c", f'{limited} && exec "$@"', "sh", sys.executable, "-m", module, *arguments],
        capture_output=True,
        text=True,
        env=environment,
        pass_fds=[writer] if events else [],
        check=False,
        timeout=LONGEST_S,
    )
    os.close(writer)
    with open(reader, encoding="utf-8") as lines:  # noqa: PTH123  a descriptor has no path
        received = _events(lines)
    return Finished(code=done.returncode, out=done.stdout, err=done.stderr, events=received)


def run_probe_here(main: Callable[[list[str]], int], arguments: list[str]) -> Finished:
    """Run a probe as a process would that has torch loaded already."""
    reader, writer = os.pipe()  # holds 64 KiB, several times what a probe sends
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, _warnings_to(err):
        patch.setenv(ENVIRONMENT_NAME, f"{writer}:{os.fstat(writer).st_ino}")
        patch.setattr(notices, "_said", set())
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(arguments)
    os.close(writer)
    with open(reader, encoding="utf-8") as lines:  # noqa: PTH123  a descriptor has no path
        received = _events(lines)
    return Finished(code=code, out=out.getvalue(), err=err.getvalue(), events=received)


@contextlib.contextmanager
def _warnings_to(stream: io.StringIO) -> Iterator[None]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        yield
    stream.writelines(f"{warning.category.__name__}: {warning.message}\n" for warning in caught)


def _events(lines: Iterable[str]) -> list[dict[str, Any]]:
    return [json.loads(line, parse_constant=_refuse) for line in lines]


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
