"""How a step's micro-batches are split over accumulation, threads and processes changes no gradient."""

import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash.training.micro_batch import MicroBatch
from dflash.training.noise import with_noise
from dflash.training.ranks import Alone, ThreadRanks, thread_ranks
from dflash.training.seeds import seed_for
from dflash.training.step import Objective, forward
from dflash.training.sums import Sums
from torch import Tensor

from tests.payload.cases import gradients_of
from tests.payload.split_program import SEED, gradients_of_step, rows_of
from tests.payload.training import drafter_of, micro_batches, step_of

ROOT = Path(__file__).parents[2]
SCENARIOS = ("whole", "broken")
Found = Mapping[str, Any]


def farthest(found: Found, expected: Found) -> float:
    """Return the largest difference of any gradient, as a share of the largest gradient."""
    largest = max(float(value.abs().max()) for value in expected["gradients"].values())
    differences = (
        float((found["gradients"][name] - value).abs().max()) for name, value in expected["gradients"].items()
    )
    return max(differences) / largest


def alone(scenario: str) -> Found:
    return gradients_of_step(rows_of(scenario), Alone(), accumulation=4)


def in_threads(
    size: int, work: Callable[[ThreadRanks], Any], *, devices: Sequence[torch.device] = ()
) -> list[Any]:
    """Return what each drafter of a process finds."""
    found: list[Any] = [None] * size

    def run(ranks: ThreadRanks) -> None:
        found[ranks.rank] = work(ranks)

    members = thread_ranks(devices or [torch.device("cpu")] * size, timeout_s=30)
    threads = [threading.Thread(target=run, args=(ranks,)) for ranks in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two and four gloo processes found."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "tests.payload.split_program", str(folder), "2", "4"]
    environment = {
        "PYTHONPATH": f"{ROOT / 'payloads'}:{ROOT}",
        "OMP_NUM_THREADS": "1",
        "PATH": "/usr/bin:/bin",
    }
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=120)
    return folder


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_processes_get_the_gradients_of_accumulation(processes: Path, scenario: str, world: int) -> None:
    expected = alone(scenario)
    ranks = [torch.load(processes / f"{scenario}-{world}-{rank}.pt") for rank in range(world)]
    assert farthest(ranks[0], expected) < 1e-6
    torch.testing.assert_close(ranks[0]["sums"], expected["sums"], rtol=1e-6, atol=0)
    for other in ranks[1:]:
        assert all_equal(other["gradients"], ranks[0]["gradients"])
        assert torch.equal(other["sums"], ranks[0]["sums"])


def test_a_process_that_ended_is_an_error_of_the_others(processes: Path) -> None:
    message = (processes / "lost-2-0.txt").read_text()
    assert message.startswith("drafter 0 of 2 cannot sum gradients with the others: ")
    assert message.endswith("look for the rank that ended first")


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("size", [2, 4])
def test_drafters_of_one_process_get_the_gradients_of_accumulation(scenario: str, size: int) -> None:
    expected = alone(scenario)
    found = in_threads(
        size, lambda ranks: gradients_of_step(rows_of(scenario), ranks, accumulation=4 // size)
    )
    assert farthest(found[0], expected) < 1e-6
    torch.testing.assert_close(found[0]["sums"], expected["sums"], rtol=1e-6, atol=0)
    assert all(all_equal(other["gradients"], found[0]["gradients"]) for other in found[1:])


def all_equal(some: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> bool:
    return all(torch.equal(some[name], value) for name, value in others.items())


def test_narrow_gradients_are_summed_in_float32() -> None:
    rows = rows_of("whole")
    narrow = {"dtype": torch.bfloat16}
    expected = gradients_of_step(rows, Alone(), accumulation=4, **narrow)
    assert {value.dtype for value in expected["gradients"].values()} <= {torch.float32, torch.float64}
    found = in_threads(2, lambda ranks: gradients_of_step(rows, ranks, accumulation=2, **narrow))
    assert farthest(found[0], expected) < 1e-6


def test_a_row_that_is_not_finite_is_counted_and_leaves_the_others_as_they_are() -> None:
    rows = rows_of("broken")
    found = gradients_of_step(rows, Alone(), accumulation=4)
    figures = numbers(found)
    assert (figures["micro_batches"], figures["nonfinite_micro_batches"]) == (3, 1)
    assert figures["tokens"] == sum(sum(row.lengths) for row in rows.values())
    assert farthest(found, {"gradients": mean_of([only(rows, number) for number in (0, 2)])}) < 1e-6


def test_the_denominator_is_that_of_all_rows() -> None:
    rows = rows_of("whole")
    apart = [only(rows, number) for number in rows]
    assert len({weight for weight, _ in apart}) > 1
    found = gradients_of_step(rows, Alone(), accumulation=4)
    assert farthest(found, {"gradients": mean_of(apart)}) < 1e-6


def test_a_step_without_any_loss_has_zeros_and_no_denominator() -> None:
    found = gradients_of_step({}, Alone(), accumulation=4)
    assert all(bool(value.isnan().all()) for value in found["gradients"].values())
    assert numbers(found)["weight_sum"] == numbers(found)["loss"] == 0


def only(rows: Mapping[int, MicroBatch], number: int) -> tuple[float, dict[str, Tensor]]:
    """Return the denominator of one row and the gradients of its mean loss, as autograd leaves them."""
    drafter, row = drafter_of(), rows[number]
    loss, metrics = forward(
        drafter,
        row,
        Objective(),
        features_1SF=with_noise(row.features_1SF, 0.05, seed=SEED, epoch=0, number=number),
        seed=seed_for("anchors", SEED, 0, number),
    )
    torch.autograd.backward(loss)
    return float(metrics["weight_sum"]), gradients_of(drafter)


def mean_of(apart: Sequence[tuple[float, Mapping[str, Tensor]]]) -> dict[str, Tensor]:
    """Return the gradients of the rows together: those of each, weighed by its denominator."""
    total = sum(weight for weight, _ in apart)
    return {
        name: torch.stack([gradients[name] * (weight / total) for weight, gradients in apart]).sum(dim=0)
        for name in apart[0][1]
    }


def numbers(found: Found) -> dict[str, float]:
    sums = Sums(torch.device("cpu"))
    sums.vector.copy_(found["sums"])
    return sums.read()


def test_replicas_stay_equal_bit_by_bit_when_one_is_dry() -> None:
    rows = micro_batches(5)

    def train(ranks: ThreadRanks) -> Mapping[str, Tensor]:
        drafter = drafter_of(dtype=torch.bfloat16)
        step = step_of(drafter, ranks)
        for first in range(0, 5, 2):
            step([row for row in rows if row.number == first + ranks.rank], lr=1e-3)
        return drafter.state_dict()

    one, other = in_threads(2, train)
    assert all_equal(one, other)
    assert not all_equal(one, drafter_of(dtype=torch.bfloat16).state_dict())
