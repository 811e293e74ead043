"""What the drafter's tensors are called when its memory is watched; the allocator is made up, on the CPU."""

import inspect
import re
import sys
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from dflash.memory import log, report
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from orchestrator import payload_answers
from orchestrator.supervisor import memory_names, memory_owners, memory_watch
from orchestrator.supervisor.memory_blocks import peak
from orchestrator.supervisor.memory_names import describe, sums_by_category
from orchestrator.supervisor.memory_owners import Owners
from tests.payload.cases import FULL, Case, build
from tests.supervisor.snapshots import MIB, Allocator, Frame

VOCABULARY = 30_011
CASE = Case(
    layer_types=(FULL, FULL),
    hidden_size=32,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=48,
    vocab_size=VOCABULARY,
    mask_token_id=VOCABULARY - 1,
    lengths=(61, 37, 90),
    anchors=tuple(range(3, 185, 13)),
    loss_chunk_rows=32,  # as many as hidden_size: logits are as large as the head
    dtype=torch.float32,
    compile=False,
)


class Allocations(TorchDispatchMode):
    """Notes the birth and the death of every storage."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.allocator = Allocator()
        self._alive: dict[int, StorageWeakRef] = {}

    def hold(self, tensor: torch.Tensor, *where: Frame) -> None:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address and address not in self._alive:
            self._alive[address] = StorageWeakRef(storage)
            self.allocator.alloc(storage.nbytes(), *where, at=address)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for address, reference in list(self._alive.items()):
            if reference.expired():
                self.allocator.free(address)
                del self._alive[address]
        for part in result if isinstance(result, tuple | list) else (result,):
            if isinstance(part, torch.Tensor):
                self.hold(part, *_frames())
        return result


def _frames() -> list[Frame]:
    """Returns the frames that torch's allocator would see, from the operator to this test."""
    found = []
    frame = sys._getframe(2)
    while frame.f_code.co_filename != __file__:
        code = frame.f_code
        found.append((code.co_filename, frame.f_lineno, code.co_name))
        assert frame.f_back is not None
        frame = frame.f_back
    return found


@pytest.mark.parametrize(("attention", "function"), [("eager", "__call__"), ("sdpa_math", "_attend")])
def test_scores_logits_and_weights_of_the_drafter_are_told_apart(attention: str, function: str) -> None:
    bench = build(replace(CASE, attention=attention))
    allocations, owners = Allocations(), Owners(torch, "cpu")
    for tensor in bench.drafter.state_dict().values():
        allocations.hold(tensor)
    with allocations:
        loss, _ = bench.run()
        torch.autograd.backward(loss)
    owners.look()
    described = describe(peak(allocations.allocator.snapshot(), 0).blocks, owners.seen())
    found = {row["category"]: row["bytes"] for row in sums_by_category(described)}
    weights = sum(p.numel() * 4 for p in bench.drafter.parameters())
    assert weights <= found["parameter"] < weights + 512 * len(list(bench.drafter.parameters()))
    logits = [block for block in described if block.category == "logits"]
    assert {block.requested_bytes % (4 * VOCABULARY) for block in logits} == {0}
    assert {(block.where or "").split(":")[0] for block in logits} <= {"loss.py", "loss_rows.py"}
    scores = [block for block in described if block.category == "scores"]
    assert scores[0].module is not None
    assert scores[0].module.endswith("layers.*.self_attn")
    assert scores[0].where is not None
    assert scores[0].where.endswith(f" {function}")
    assert found["scores"] > found["activation"] / 2


def test_predicted_and_measured_memory_have_the_same_categories_and_verdicts() -> None:
    assert get_args(log.Category) == payload_answers.CATEGORIES
    assert set(get_args(report.Verdict)) == set(get_args(payload_answers.Verdict))
    measured = re.findall(
        r'\("(\w+)", (?:lambda|module)', inspect.getsource(memory_names) + inspect.getsource(memory_owners)
    )
    assert {"cublas", "buffer"} <= set(measured) <= set(payload_answers.CATEGORIES)
    block = log.Block(
        id=0, bytes=MIB, shape=(MIB,), dtype="uint8", category="logits",
        name=None, module=None, where=None, phase="forward",
    )  # fmt: skip
    held = (report.Held(block=block, allocated_bytes=2 * MIB),)
    peaks = report.PhasePeaks(name="p", peak_allocated_bytes=0, peak_reserved_bytes=0, held=held)
    assert peaks.by_category() == {"logits": MIB, memory_watch.UNSPLIT: MIB}
    assert set(peaks.by_category()) <= set(payload_answers.CATEGORIES)
