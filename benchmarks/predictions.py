"""How near the payload's predicted peaks of memory are to what a card measures, and whether verdicts hold.

``PYTHONPATH=payloads:. python -m benchmarks.predictions [--only NAME]… [--json FILE]``, on a machine with a
card on which nothing else runs; or, without one, ``--measured benchmarks/h200.json``, which holds what was
measured on an H200 against what is predicted here today. That file is the machine and each case's ``ran`` of
a ``--json`` that all eighteen cases wrote there, without what was predicted then.

Each case is predicted in a process that sees no card, then run in one of its own under the instrument, as
``orch run`` does it; peaks are the allocator's, of each phase. Parameters, gradients and the optimizer's
states at the peak must be those of the prediction to the allocator's rounding. Cases run side by side as far
as the predictions say that they fit together, which changes times and no peak. The verdicts are tried by
running a case again, alone, under limits around its prediction. Exits with 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from orchestrator import supervisor

GIB = 2**30
INSTRUMENT = Path(*supervisor.__path__, "instrument.py")
EAGER_SHARE, COMPILED_SHARE = 0.01, 0.05
CLEAR_SHARE = 0.05  # a verdict counts where the prediction is this far from the capacity
LIMIT_FACTORS = (0.9, 1.1)
USABLE_SHARE = 0.9  # of the card, for cases side by side
CONTEXT_BYTES = GIB  # of each process, more than it takes
EXACT_CATEGORIES = ("parameter", "gradient", "optimizer_state")
ROUNDED_BYTES = 512  # of each block
SETUP = "setup"
EXPANDABLE = "expandable_segments:True"
SMALL = {"num_draft_layers": 3, "seq_len": 2000, "max_anchors": 64, "packed_lengths": [500, 700, 800]}
"""The reference's widths and fewer of everything else: what the dense backends can hold."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One configuration of a probe; ``is_limited`` cases are run again under limits."""

    name: str
    params: Mapping[str, Any]
    entry: str = "dflash.probes.oom"
    alloc_conf: str = ""
    is_limited: bool = False

    @property
    def is_compiled(self) -> bool:
        """Whether kernels are compiled, for which the bar is wider."""
        return bool(self.params.get("compile", True))


CASES = (
    Case(name="flex none", params={"recompute": "none"}, alloc_conf=EXPANDABLE),
    Case(name="flex mlp", params={"recompute": "mlp"}),
    Case(name="flex layer", params={"recompute": "layer"}, is_limited=True),
    Case(name="flex layer, 256 anchors", params={"recompute": "layer", "max_anchors": 256}),
    Case(
        name="flex none, 512 × 16, adamw",
        params={"recompute": "none", "max_anchors": 512, "block_size": 16, "optimizer": "adamw"},
        is_limited=True,
    ),
    Case(
        name="flex layer, small loss chunks",
        params={"recompute": "layer", "loss_chunk_rows": 256},
        alloc_conf=EXPANDABLE,
    ),
    Case(name="flex forward", params={}, entry="dflash.probes.inference"),
    Case(name="sdpa_chunked none", params={"attention": "sdpa_chunked", "recompute": "none"}),
    Case(name="sdpa_chunked layer", params={"attention": "sdpa_chunked", "recompute": "layer"}),
    Case(
        name="sdpa_chunked none, eager",
        params={"attention": "sdpa_chunked", "recompute": "none", "compile": False, "max_anchors": 512},
        is_limited=True,
    ),
    Case(
        name="sdpa_chunked mlp, eager, adamw",
        params={
            "attention": "sdpa_chunked",
            "recompute": "mlp",
            "compile": False,
            "max_anchors": 256,
            "optimizer": "adamw",
        },
    ),
    Case(
        name="sdpa_math layer, eager",
        params={"attention": "sdpa_math", "compile": False, "max_anchors": 256, "chunk_blocks": 32},
    ),
    Case(
        name="sdpa_math none, eager",
        params={**SMALL, "attention": "sdpa_math", "recompute": "none", "compile": False, "chunk_blocks": 16},
    ),
    Case(name="eager none", params={**SMALL, "attention": "eager", "recompute": "none", "compile": False}),
    Case(name="eager layer", params={**SMALL, "attention": "eager", "compile": False}, is_limited=True),
    Case(
        name="eager mlp, float32, adamw",
        params={
            **SMALL,
            "attention": "eager",
            "recompute": "mlp",
            "compile": False,
            "dtype": "float32",
            "optimizer": "adamw",
        },
    ),
    Case(
        name="uncompiled flex layer",
        params={**SMALL, "attention": "flex", "recompute": "layer", "compile": False},
    ),
    Case(
        name="eager forward",
        params={**SMALL, "attention": "eager", "compile": False},
        entry="dflash.probes.inference",
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Owned:
    """What a category held at a run's peak."""

    size_bytes: int
    blocks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Ran:
    """What a run measured: the peaks of its phases, and owners at the peak where the instrument told them."""

    code: int
    phases: Mapping[str, Mapping[str, int]]
    owners: Mapping[str, Owned] = field(default_factory=dict)
    error: str = ""

    @property
    def is_out_of_memory(self) -> bool:
        """Whether that is why it ended."""
        return "OutOfMemoryError" in self.error


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A case's prediction beside its measurement.

    ``errors`` are shares of what was measured, by phase; ``wrong`` says each verdict, phase and owner that
    did not hold.
    """

    case: Case
    estimate: Mapping[str, Any]
    ran: Ran
    errors: Mapping[str, float]
    bar_share: float
    wrong: Sequence[str] = ()

    @property
    def worst_phase(self) -> str | None:
        """The phase that is the furthest from its prediction; None where none was measured."""
        return max(self.errors, key=lambda name: abs(self.errors[name]), default=None)

    @property
    def worst_share(self) -> float:
        """How far that is, whichever side."""
        return float("inf") if self.worst_phase is None else abs(self.errors[self.worst_phase])

    @property
    def is_good(self) -> bool:
        """Whether it is within its bar."""
        return self.ran.code == 0 and self.worst_share <= self.bar_share and not self.wrong


class Room:
    """The card's memory, shared by cases that run at the same time."""

    def __init__(self, total_bytes: int) -> None:
        self._free = int(total_bytes * USABLE_SHARE)
        self._all = self._free
        self._changed = threading.Condition()

    def take(self, needed_bytes: int) -> int:
        """Waits until that much is free and returns what was taken."""
        taken = min(needed_bytes, self._all)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= taken)
            self._free -= taken
        return taken

    def give_back(self, taken_bytes: int) -> None:
        """Frees what `take` returned."""
        with self._changed:
            self._free += taken_bytes
            self._changed.notify_all()


def estimate(case: Case, card: str, folder: Path, limit_bytes: int | None = None) -> dict[str, Any]:
    """Returns what the payload predicts, in a process that sees no card.

    Raises:
        RuntimeError: it predicts nothing, with what it wrote.
    """
    words = ["--entry", case.entry, "--params", str(_params_file(case, folder)), "--card", card, "--json"]
    if case.alloc_conf:
        words += ["--alloc-conf", case.alloc_conf]
    if limit_bytes is not None:
        words += ["--memory-limit-bytes", str(limit_bytes)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "dflash.estimate", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{case.name}: the estimate ended with {done.returncode}: {done.stderr[-2000:]}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def run(case: Case, folder: Path, limit_bytes: int | None = None) -> Ran:
    """Runs a case under the instrument and returns what its events say."""
    reader, writer = os.pipe()
    environment = {**os.environ, "ORCH_EVENTS_FD": f"{writer}:{os.fstat(writer).st_ino}"}
    environment.pop("PYTORCH_CUDA_ALLOC_CONF", None)
    if case.alloc_conf:
        environment["PYTORCH_CUDA_ALLOC_CONF"] = case.alloc_conf
    if limit_bytes is not None:
        environment["ORCH_MEMORY_LIMIT_BYTES"] = str(limit_bytes)
    with tempfile.TemporaryDirectory() as workplace, os.fdopen(reader) as events:
        words = [case.entry, "--params", str(_params_file(case, folder))]
        process = subprocess.Popen(
            [sys.executable, str(INSTRUMENT), *words],
            env={**environment, "PYTHONPATH": str(Path("payloads").resolve())},
            cwd=workplace,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[writer],
        )
        os.close(writer)
        told = [json.loads(line) for line in events]
        code = process.wait()
    return _ran(code, told)


def _ran(code: int, told: Sequence[Mapping[str, Any]]) -> Ran:
    phases: dict[str, dict[str, int]] = {}
    for event in told:
        phase, _, name = event.get("name", "").partition(".")
        if event["kind"] == "metric" and name in ("peak_allocated_gib", "peak_reserved_gib"):
            key = name.replace("_gib", "_bytes")
            phases.setdefault(phase, {})[key] = round(event["value"] * GIB)
    owners: dict[str, Owned] = {}
    for event in told:
        if event["kind"] == "memory" and event.get("is_whole"):
            owners = {
                owner["category"]: Owned(size_bytes=owner["bytes"], blocks=owner["blocks"])
                for owner in event["owners"]
            }
    errors = [f"{event['type']}: {event['message']}" for event in told if event["kind"] == "exception"]
    return Ran(code=code, phases=phases, owners=owners, error=errors[-1] if errors else "")


def try_case(case: Case, card: str, room: Room, folder: Path) -> Found:
    """Predicts a case and runs it."""
    predicted = estimate(case, card, folder)
    taken = room.take(predicted["peak_reserved_bytes"] + CONTEXT_BYTES)
    try:
        ran = run(case, folder)
    finally:
        room.give_back(taken)
    return compare(case, predicted, ran)


def compare(case: Case, predicted: Mapping[str, Any], ran: Ran) -> Found:
    """Returns how near a prediction is to what was measured, in the worst of all phases."""
    errors = {
        phase["name"]: _allocated(phase) / _allocated(ran.phases[phase["name"]]) - 1
        for phase in predicted["phases"]
        if phase["name"] in ran.phases
    }
    bar = COMPILED_SHARE if case.is_compiled else EAGER_SHARE
    return Found(
        case=case,
        estimate=predicted,
        ran=ran,
        errors=errors,
        bar_share=bar,
        wrong=[*missing_phases(predicted, ran), *wrong_owners(predicted, ran)],
    )


def try_limits(found: Found, card: str, folder: Path) -> Found:
    """Runs a case again under limits around its prediction: alone, since a limit counts the whole card."""
    case, told = found.case, []
    for factor in LIMIT_FACTORS:
        limit_bytes = int(found.estimate["peak_reserved_bytes"] * factor)
        wrong = wrong_verdict(estimate(case, card, folder, limit_bytes), run(case, folder, limit_bytes))
        told += [] if wrong is None else [f"limit {limit_bytes / GIB:.2f} GiB: {wrong}"]
    return replace(found, wrong=[*found.wrong, *told])


def wrong_verdict(predicted: Mapping[str, Any], ran: Ran) -> str | None:
    """Returns how a run contradicts a clear verdict: another error than of memory contradicts both."""
    distance = abs(predicted["peak_allocated_bytes"] / predicted["capacity_bytes"] - 1)
    held = {"fits": ran.code == 0, "does not fit": ran.is_out_of_memory}.get(predicted["verdict"], True)
    if held or distance <= CLEAR_SHARE:
        return None
    return f"predicted {predicted['verdict']}, ended with {ran.code}: {ran.error[:80] or 'no error told'}"


def missing_phases(predicted: Mapping[str, Any], ran: Ran) -> list[str]:
    """Returns which phases were predicted and not measured; of what comes before the first no run tells."""
    names = [phase["name"] for phase in predicted["phases"] if phase["name"] != SETUP]
    return [f"{name} was predicted and not measured" for name in names if name not in ran.phases]


def wrong_owners(predicted: Mapping[str, Any], ran: Ran) -> list[str]:
    """Returns which categories at the measured peak are not as predicted of its phase, where the run told."""
    highest = max(ran.phases, key=lambda name: _allocated(ran.phases[name]), default=None)
    phase = next((phase for phase in predicted["phases"] if phase["name"] == highest), None)
    if not ran.owners or highest is None:
        return []
    if phase is None:
        return [f"{highest} was measured and not predicted"]
    found = []
    for category in EXACT_CATEGORIES:
        held = ran.owners.get(category, Owned(size_bytes=0, blocks=0))
        foreseen = phase["by_category"].get(category, 0)
        if abs(foreseen - held.size_bytes) > ROUNDED_BYTES * held.blocks:
            found.append(f"{category}: predicted {foreseen} B, measured {held.size_bytes} B")
    return found


def _allocated(phase: Mapping[str, Any]) -> int:
    return int(phase["peak_allocated_bytes"])


def table(found: Sequence[Found]) -> str:
    """Returns a row for each case, in GiB, as docs/memory.md has it, and below what was missed."""
    lines = ["| case | predicted | measured | worst error (phase) | reserved, predicted / measured |"]
    lines.append("| --- | --- | --- | --- | --- |")
    lines += [_row(one) for one in found]
    lines += [f"MISSED {one.case.name}: {_why(one)}" for one in found if not one.is_good]
    return "\n".join(lines)


def _row(one: Found) -> str:
    predicted, measured = one.estimate["phases"], [*one.ran.phases.values()]
    allocated, reserved = (
        [max((phase[key] for phase in phases), default=0) / GIB for phases in (predicted, measured)]
        for key in ("peak_allocated_bytes", "peak_reserved_bytes")
    )
    return (
        f"| {one.case.name} | {allocated[0]:.3f} | {allocated[1]:.3f} | {_error_text(one)} "
        f"| {reserved[0]:.2f} / {reserved[1]:.2f} |"
    )


def _error_text(one: Found) -> str:
    if one.worst_phase is None:
        return "not measured"
    share = f"{one.errors[one.worst_phase]:+.2%}".replace("%", " %").replace("-", "−")
    return "0.00 %" if share[1:] == "0.00 %" else f"{share} ({one.worst_phase})"


def _why(one: Found) -> str:
    told = [one.ran.error[:80]] if one.ran.code else []
    if one.worst_share > one.bar_share:
        told.append(f"{_error_text(one)} is more than {one.bar_share:.0%}")
    return "; ".join([*filter(None, told), *one.wrong]) or f"ended with {one.ran.code}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What was measured on: ``card`` is the first one as the estimate takes it.

    ``total_bytes`` is what its driver reports, None where a file does not tell.
    """

    name: str
    card: str
    torch: str
    total_bytes: int | None = None

    @classmethod
    def here(cls) -> Machine:
        """Returns this machine, asked in a process of its own."""
        code = (
            "import torch; p = torch.cuda.get_device_properties(0); "
            "print(p.name, p.total_memory, f'{p.major}{p.minor}', torch.__version__, sep='|')"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        if done.returncode:
            problem = done.stderr.strip().rpartition("\n")[2]
            raise SystemExit(f"no card can be used here ({problem}); without one: --measured FILE")
        name, told, capability, torch = done.stdout.strip().split("|")
        total_bytes = int(told)
        card = f"{total_bytes / GIB:.4f}GiB:sm_{capability}"
        return cls(name=name, card=card, torch=torch, total_bytes=total_bytes)


def read_measured(path: Path) -> tuple[Machine, dict[str, Ran]]:
    """Returns what an earlier run wrote with ``--json``: its machine, and each case's measurements."""
    measured = {}
    try:
        whole = json.loads(path.read_text())
        for name, one in whole["cases"].items():
            told = one["ran"]
            owners = {category: Owned(**held) for category, held in told["owners"].items()}
            measured[name] = Ran(**{**told, "owners": owners})
        machine = Machine(**whole["machine"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SystemExit(
            f"{path} is not what --json of this program writes ({type(error).__name__}: {error}); "
            "name such a file, as benchmarks/h200.json"
        ) from error
    return machine, measured


def measure(chosen: Sequence[Case], pool: Executor, folder: Path) -> tuple[Machine, list[Found]]:
    """Predicts cases and runs them on the card that is here."""
    machine = Machine.here()
    assert machine.total_bytes is not None
    room = Room(machine.total_bytes)
    found = list(pool.map(lambda case: try_case(case, machine.card, room, folder), chosen))
    return machine, [try_limits(one, machine.card, folder) if one.case.is_limited else one for one in found]


def hold_against(
    path: Path, only: Sequence[str], pool: Executor, folder: Path
) -> tuple[Machine, list[Found]]:
    """Predicts cases for the card that a file has measurements of: those of ``only``, else all it has."""
    machine, measured = read_measured(path)
    chosen = [case for case in CASES if case.name in measured and (not only or case.name in only)]
    missing = [name for name in only if name not in measured]
    if missing or not chosen:
        has = ", ".join(case.name for case in CASES if case.name in measured) or "none"
        raise SystemExit(
            f"{path} has no measurement of {', '.join(missing) or 'any case'} (it has: {has}); measure on a "
            "card, without --measured"
        )
    estimates = pool.map(lambda case: estimate(case, machine.card, folder), chosen)
    found = []
    for case, predicted in zip(chosen, estimates, strict=True):
        found.append(compare(case, predicted, measured[case.name]))
        print(_row(found[-1]), file=sys.stderr, flush=True)  # the whole takes minutes
    return machine, found


def main() -> int:
    """Runs the cases that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.predictions", description=__doc__)
    parser.add_argument("--only", action="append", choices=[case.name for case in CASES], help="repeatable")
    parser.add_argument("--at-once", type=int, default=4, help="cases side by side at most")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/predictions.json"), metavar="FILE")
    parser.add_argument("--measured", type=Path, metavar="FILE", help="an earlier --json, in a card's place")
    options = parser.parse_args()
    only = options.only or []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.at_once) as pool:
        if options.measured is None:
            chosen = [case for case in CASES if not only or case.name in only]
            machine, found = measure(chosen, pool, Path(folder))
        else:
            machine, found = hold_against(options.measured, only, pool, Path(folder))
    whole = {"machine": asdict(machine), "cases": {one.case.name: asdict(one) for one in found}}
    options.json.write_text(json.dumps(whole, indent=2))
    print(f"measured: {machine.name}, {machine.card}, torch {machine.torch}")
    print(f"predicted: torch {found[0].estimate['torch']}, without a card\n\n{table(found)}")
    return int(not all(one.is_good for one in found))


def _params_file(case: Case, folder: Path) -> Path:
    path = folder / f"{CASES.index(case)}.json"
    path.write_text(json.dumps(dict(case.params)))
    return path


if __name__ == "__main__":
    sys.exit(main())
