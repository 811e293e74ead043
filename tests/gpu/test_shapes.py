"""The catalogue of tensors on a card: what its allocator hands out, and messages named from their size."""

import gc
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash.catalogue.parameters import read_parameters
from dflash.catalogue.terms import ITEM_BYTES, Shape
from dflash.probes.oom import OomProbeParams
from dflash.probes.work.machine import open_machine
from dflash.probes.work.workload import build_drafter, forward_backward, random_row
from dflash.shapes import set_of, shapes_of
from dflash.values import build

from orchestrator.forensics.asked import asked_from_text
from orchestrator.forensics.naming import name_tensor
from orchestrator.forensics.shapes import read_shape_set
from tests.payload.probe_program import run_probe

pytestmark = pytest.mark.gpu

BLOCK = 512
DRAWN = {"valid slots", "rows of a chunk", "teacher tokens of a chunk", "context tokens that a chunk sees"}
NAMED_FROM = 0.2  # of the largest, so that cuBLAS's workspace of 32 MiB is not asked for
# Large enough for that, and no width is another's multiple by chance.
SIZE: dict[str, Any] = {
    "num_draft_layers": 2,
    "hidden_size": 896,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 2816,
    "vocab_size": 65024,
    "mask_token_id": 5,
    "sliding_window": 512,
    "target_layer_ids": [1, 3],
    "num_target_layers": 8,
    "block_size": 16,
    "max_anchors": 200,
    "seq_len": 3001,
    "packed_lengths": [500, 601],
    "chunk_blocks": 24,
}
UNCOMPILED = {"max_anchors": 512, "block_size": 16, "seq_len": 7260, "attention": "flex", "compile": False}
MATH = {"max_anchors": 1024, "block_size": 32, "seq_len": 8000, "attention": "sdpa_math", "chunk_blocks": 182}


@pytest.fixture
def history(card: torch.device) -> Iterator[torch.device]:
    torch.cuda.memory._record_memory_history("all", context=None, max_entries=200_000)
    yield card
    torch.cuda.memory._record_memory_history(None)
    gc.collect()


def allocated(card: torch.device) -> set[int]:
    """Return the sizes that were handed out since the history began."""
    events = torch.cuda.memory._snapshot()["device_traces"][card.index or 0]
    return {event["size"] for event in events if event["action"] == "alloc"}


def rounded(size_bytes: int) -> int:
    return -(-size_bytes // BLOCK) * BLOCK


def sizes(shape: Shape) -> set[int]:
    """Return what a tensor takes, for every value that the drawn anchors may leave of it."""
    found = {rounded(shape.size_bytes)}
    for at, (_, size) in enumerate(shape.dims):
        free = size.free
        if free is not None and free.name in DRAWN:
            others = math.prod(other.value for index, (_, other) in enumerate(shape.dims) if index != at)
            item = others * ITEM_BYTES[shape.dtype]
            values = range(free.least, free.most + 1)
            found |= {rounded((free.offset + free.factor * value) * item) for value in values}
    return found


@pytest.mark.filterwarnings("ignore:attention. flex attention runs uncompiled")
@pytest.mark.parametrize(
    ("attention", "compiles"),
    [
        ("flex", True),
        ("flex", False),
        ("sdpa_chunked", True),
        ("sdpa_math", True),
        ("eager", True),
        ("eager", False),
    ],
)
@pytest.mark.parametrize("recompute", ["none", "layer"])
def test_every_large_block_of_a_step_has_a_name(
    history: torch.device, attention: str, compiles: bool, recompute: str
) -> None:
    given = {**SIZE, "attention": attention, "compile": compiles, "recompute": recompute}
    params = build(OomProbeParams, given, what="parameter")
    machine = open_machine("cuda")
    torch.set_default_dtype(torch.bfloat16)
    drafter = build_drafter(params, machine, max_anchors=params.max_anchors)
    for lengths in ((params.seq_len,), params.packed_lengths):
        forward_backward(drafter, random_row(params, lengths, machine.device), seed=0)
        drafter.zero_grad()
    found = allocated(history)
    least = NAMED_FROM * max(found)
    made = [shape for shape in shapes_of(read_parameters(given)[0]) if shape.applies]
    large = {shape.name: sizes(shape) for shape in made if shape.size_bytes >= least}
    named = set().union(*(sizes(shape) for shape in made))
    assert {size for size in found if size >= least} - named == set()
    assert [name for name, possible in large.items() if not possible & found] == []


@pytest.mark.parametrize(
    ("params", "limit_gib", "name", "shape"),
    [
        (UNCOMPILED, 22, "attention scores", (32, 8192, 15452)),
        (MATH, 40, "expanded keys or values of the math path", (182, 32, 8032, 128)),
    ],
)
def test_the_two_that_nobody_found_are_named_from_the_cards_own_message(
    card: torch.device,
    tmp_path: Path,
    params: dict[str, Any],
    limit_gib: int,
    name: str,
    shape: tuple[int, ...],
) -> None:
    path = tmp_path / "params.json"
    path.write_text(json.dumps({**params, "device": "cuda:0", "memory_limit_gib": limit_gib}))
    done = run_probe(["--params", str(path)])
    assert done.code == 1, done.err
    told = re.search(r"Tried to allocate (\d+\.\d\d GiB)", done.err)
    assert told is not None, done.err
    own = read_shape_set(set_of(params), label="run", params=params)
    best = name_tensor(asked_from_text(told[1]), own=own).candidates[0]
    assert (best.tensor.name, best.fit.shape, best.fit.dtype) == (name, shape, "float32")
