"""The model of torch's allocator beside the real one: the same requests, in a process for each setting."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.gpu

GIB = 2**30
PROGRAM = """
import json, random, sys
import torch
from dflash.memory.allocator import CachingAllocator, OutOfMemory
from dflash.memory.allocator_settings import parse_alloc_conf

conf, limit = sys.argv[1], int(sys.argv[2]) or None
chance = random.Random(0)
total = torch.cuda.mem_get_info()[1]
if limit:
    torch.cuda.set_per_process_memory_fraction(limit / total)
    limit = int(limit / total * total)
model = CachingAllocator(parse_alloc_conf(conf), limit_bytes=limit)
held, differing = {}, 0
for name in range(1500):
    if held and chance.random() < (0.0 if name < 60 or limit else 0.55):
        gone = chance.choice(list(held))
        del held[gone]
        model.free(gone)
        continue
    least, most = chance.choice([(1, 2**20), (2**20, 2**23), (2**23, 2**27)])
    size = chance.randrange(least, most)
    try:
        model.allocate(name, size)
        refused = None
    except OutOfMemory as error:
        refused = error
    try:
        held[name] = torch.empty(size, dtype=torch.uint8, device="cuda")
        told = None
    except torch.OutOfMemoryError as error:
        told = str(error)
    if told or refused:
        break
    now = (torch.cuda.memory_allocated(), torch.cuda.memory_reserved())
    differing += now != (model.allocated_bytes, model.reserved_bytes)
    if name == 59:
        first = differing
print(json.dumps({
    "first": first, "differing": differing, "told": told,
    "refused": refused and refused.segment_bytes,
    "model": [model.peak_allocated_bytes, model.peak_reserved_bytes],
    "real": [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()],
}))
"""


def compared(conf: str, *, limit_bytes: int = 0) -> dict[str, Any]:
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": conf, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, conf, str(limit_bytes)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    "conf",
    [
        "",
        "expandable_segments:True",
        "max_split_size_mb:64",
        "roundup_power2_divisions:4",
        "roundup_power2_divisions:[8:8,32:2,>:1]",
    ],
)
def test_model_allocates_and_reserves_what_torch_does(card: torch.device, conf: str) -> None:
    found = compared(conf)
    assert found["first"] == 0  # before anything is freed nothing depends on where the driver puts segments
    for model, real in zip(found["model"], found["real"], strict=True):
        assert model == pytest.approx(real, rel=0.01), found


@pytest.mark.parametrize("conf", ["", "expandable_segments:True"])
def test_model_is_refused_where_torch_is(card: torch.device, conf: str) -> None:
    found = compared(conf, limit_bytes=3 * GIB)
    assert found["told"], found
    assert found["refused"], found
    assert f"Tried to allocate {found['refused'] / 2**20:.2f} MiB" in found["told"]
    assert found["model"] == found["real"]
