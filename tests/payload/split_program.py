"""A training step's gradients in several processes: `python -m tests.payload.split_program FOLDER WORLD…`.

Forks the ranks of each world, which meet over gloo, and leaves what each found in FOLDER.
"""

import multiprocessing
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from dflash.training.failures import RankLost
from dflash.training.gradients import GradientSums
from dflash.training.micro_batch import MicroBatch
from dflash.training.noise import with_noise
from dflash.training.ranks import ProcessRanks, Ranks
from dflash.training.seeds import seed_for
from dflash.training.step import Objective, forward, own_numbers
from torch import distributed

from tests.payload.training import drafter_of, micro_batches

SEED = 5


def rows_of(scenario: str) -> dict[int, MicroBatch]:
    """Return a step's micro-batches: four, or three of which one is not finite, so that a rank may be dry."""
    rows = dict(enumerate(micro_batches(4)))
    if scenario == "broken":
        rows[1].features_1SF[0, 3] = torch.nan
        del rows[3]
    return rows


def gradients_of_step(
    rows: Mapping[int, MicroBatch], ranks: Ranks, *, accumulation: int, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """Return a step's gradients, divided, by name, and its figures, as this rank finds them."""
    drafter = drafter_of(dtype=dtype)
    gradients = GradientSums(drafter.parameters(), is_single=accumulation * ranks.size == 1)
    for number in own_numbers(0, drafter=ranks.rank, drafters=ranks.size, accumulation=accumulation):
        if number in rows:
            loss, metrics = forward(
                drafter,
                rows[number],
                Objective(),
                features_1SF=with_noise(rows[number].features_1SF, 0.05, seed=SEED, epoch=0, number=number),
                seed=seed_for("anchors", SEED, 0, number),
            )
            gradients.add(loss, metrics, tokens=sum(rows[number].lengths))
    combined = gradients.combine(ranks)
    names = {parameter: name for name, parameter in drafter.named_parameters()}
    return {
        "gradients": {names[p]: value / combined.divisor for p, value in combined.gradients.items()},
        "sums": combined.sums.vector,
    }


def _rank(folder: Path, rank: int, world: int) -> None:
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting-{world}"
    distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world)
    for scenario in ("whole", "broken"):
        found = gradients_of_step(rows_of(scenario), ProcessRanks(), accumulation=4 // world)
        torch.save(found, folder / f"{scenario}-{world}-{rank}.pt")
    if rank == world - 1:
        os._exit(0)  # as one that was killed: without a word to the others
    try:
        ProcessRanks().sum([torch.ones(1)])
    except RankLost as error:
        (folder / f"lost-{world}-{rank}.txt").write_text(str(error))
    os._exit(0)


def main(folder: Path, worlds: list[int]) -> int:
    """Return 0 when every rank of every world ended well."""
    context = multiprocessing.get_context("fork")
    ranks = [
        context.Process(target=_rank, args=(folder, rank, world)) for world in worlds for rank in range(world)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    return max(abs(process.exitcode or 0) for process in ranks)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), [int(word) for word in sys.argv[2:]]))
