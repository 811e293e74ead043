"""The simulated card: what a run would allocate there, against real runs on the CPU and an H200's figures.

The figures are those of docs/performance.md and docs/oom-probe.md: torch 2.11, bfloat16.
"""

import contextlib
import dataclasses
import gc
import math
import resource
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from dflash import notices
from dflash.attention.eager import EagerAttention
from dflash.blocks import lay_out
from dflash.cards import parse_card
from dflash.config import create_drafter_config
from dflash.gathering import select_rows
from dflash.layers import Context, DrafterLayer
from dflash.memory import recorder
from dflash.memory.attention import choose_kernel
from dflash.memory.log import Block, Born, Died, Mark, Trace
from dflash.memory.results import CannotSimulate
from dflash.memory.trace import trace
from dflash.packing import HOST, pack
from dflash.platforms import SIMULATED, platform_of, simulation
from dflash.probes import anchors, backends, inference, oom
from dflash.probes.work import scenarios, workload
from dflash.probes.work.machine import open_machine
from dflash.projections import Plan
from dflash.rope import rope_table
from dflash.values import build
from dflash.visibility import Visibility
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.payload.simulated import GIB, H200, peaks_by_phase_gib, silent, steps

MIB = 2**20
WORKSPACE = 32 * MIB  # cuBLAS's, on Hopper, for each of two threads

SMALL: dict[str, Any] = {
    "seq_len": 90,
    "max_anchors": 6,
    "num_draft_layers": 2,
    "packed_lengths": [40, 60],
    "hidden_size": 64,
    "vocab_size": 1000,
    "mask_token_id": 5,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "iterations": 1,
}


def by_category(log: Trace, category: str) -> list[Block]:
    return [block for block in log.blocks if block.category == category]


# -- against an H200


@pytest.mark.parametrize(
    ("recompute", "expected_gib", "packed_gib"),
    [("none", 31.1, 31.7), ("mlp", 21.3, 21.8), ("layer", 15.6, 16.1)],
)
def test_peaks_are_those_measured_on_an_h200(recompute: str, expected_gib: float, packed_gib: float) -> None:
    for lengths, measured_gib in (((8000,), expected_gib), ((3000, 4000, 5000), packed_gib)):
        log = steps(lengths, recompute=recompute)
        assert peaks_by_phase_gib(log)["steps"] == pytest.approx(measured_gib, rel=0.01)


def test_the_probe_s_own_peaks_are_predicted_to_the_second_decimal() -> None:
    # Backward's cuBLAS workspace comes after the warm-up's peak and before the next one.
    measured_gib = {"warmup": 15.46, "timed": 15.49, "packed": 15.99}
    size = build(oom.OomProbeParams, {"iterations": 1}, what="parameter")
    log = silent(lambda: scenarios.run(size, workload.forward_backward, title="test"))
    assert {phase: round(peak, 2) for phase, peak in peaks_by_phase_gib(log).items()} == measured_gib


def test_the_forward_alone_peaks_where_it_did_on_an_h200() -> None:
    log = steps((8000,), workload.forward_only, recompute="none")
    assert peaks_by_phase_gib(log)["steps"] == pytest.approx(12.7, rel=0.01)


def test_eager_attention_asks_for_what_failed_on_an_h200() -> None:
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    log = steps((8000,), attention="eager")
    scores = next(block for block in log.blocks if block.bytes > 100 * GIB)
    assert scores.bytes / GIB == pytest.approx(159.25, abs=0.005)
    assert (scores.shape, scores.dtype, scores.category) == ((32, 32768, 40768), "float32", "scores")
    assert scores.module == "layers.0.self_attn"
    assert scores.where is not None
    assert scores.where.startswith("eager.py:")
    until = log.events[: log.events.index(Born(scores.id))]
    before_gib = peaks_by_phase_gib(dataclasses.replace(log, events=until))["steps"]
    assert before_gib == pytest.approx(13.57, abs=0.006)
    # Hundreds of GiB, of which not one is real.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 200 * 1024


def test_python_s_collector_is_afterwards_what_it_was() -> None:
    before = gc.get_threshold()
    trace(lambda: None, card=parse_card("h200"))
    assert (gc.get_threshold(), gc.get_freeze_count()) == (before, 0)


# -- against real runs on the CPU


class RealLog(TorchDispatchMode):
    """Births and deaths of real storages, in order, by their sizes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[tuple[str, int]] = []
        self._live: dict[int, Any] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = function(*args, **(kwargs or {}))
        given = {
            part.untyped_storage().data_ptr()
            for part in tree_leaves((args, kwargs))
            if isinstance(part, Tensor)
        }
        for result in tree_leaves(results):
            if isinstance(result, Tensor) and result.untyped_storage().data_ptr() not in given:
                self._note(result.untyped_storage())
        return results

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._live and size:
            self.events.append(("born", size))
            self._live[key] = weakref.ref(storage, lambda _: self._died(key, size))

    def _died(self, key: int, size: int) -> None:
        del self._live[key]
        self.events.append(("died", size))


def layer_step(device: torch.device, recompute: str, started: Callable[[], Any]) -> None:
    """Take one layer's forward and backward in float32, nothing compiled, after its inputs are made."""
    config = create_drafter_config(
        1,
        hidden_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=80,
        vocab_size=100,
        sliding_window=16,
        recompute=recompute,
    )
    packing = pack((20, 30), 50)
    mask = torch.ones(50, dtype=torch.bool, device=HOST)
    blocks = lay_out(packing, mask, torch.tensor([3, 9, 25], device=HOST), block_size=4)
    attend = EagerAttention(Visibility(blocks=blocks, context_length=50, window=16, device=device))
    with device:
        layer = DrafterLayer(config)
        states, slots = torch.randn(50, 48, requires_grad=True), torch.randn(12, 48, requires_grad=True)
        rows = torch.arange(3, device=device)
        rope = rope_table(torch.arange(62), head_dim=16, theta=100.0, dtype=torch.float32)
    plan = Plan(layout=attend.layout, rope_K=rope, eps=1e-6, is_compiled=False)
    with started():
        result = layer(slots, Context(states_SH=states, plan=plan), attend)
        selected = select_rows(result, rows)
        del result
        torch.autograd.backward(selected.square().sum())


@pytest.mark.parametrize("recompute", ["none", "mlp", "layer"])
def test_an_uncompiled_layer_allocates_as_it_really_does_in_order(
    recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "TEMPORARIES", {})  # the host's kernels have none
    real = RealLog()
    layer_step(HOST, recompute, lambda: real)

    @contextlib.contextmanager
    def noted() -> Iterator[None]:
        machine = open_machine("cuda")
        machine.begin_phase("step")
        yield
        machine.begin_phase("over")

    log = silent(lambda: layer_step(SIMULATED, recompute, noted))
    begin, end = (log.events.index(Mark("phase", name)) for name in ("step", "over"))
    blocks = {block.id: block for block in log.blocks if block.category != "cublas"}
    simulated = [
        ("born" if isinstance(event, Born) else "died", blocks[event.block].bytes)
        for event in log.events[begin:end]
        if isinstance(event, Born | Died) and event.block in blocks
    ]
    assert len(simulated) > 100
    during, after = real.events[: len(simulated)], real.events[len(simulated) :]
    assert simulated == during
    assert {kind for kind, _ in after} == {"died"}  # with the names at the function's end


def test_parameters_and_gradients_are_exact() -> None:
    sizes: dict[str, int] = {}

    def work() -> None:
        size = build(oom.OomProbeParams, SMALL, what="parameter")
        machine = workload.open_workplace(size, title="test")
        drafter = workload.build_drafter(size, machine, max_anchors=6)
        workload.forward_backward(drafter, workload.random_row(size, (90,), machine.device), seed=0)
        for name, parameter in drafter.named_parameters():
            sizes[name] = parameter.numel() * parameter.element_size()

    log = silent(work)
    assert {block.name: block.bytes for block in by_category(log, "parameter")} == sizes
    trained = {
        name: size for name, size in sizes.items() if name not in {"embed_tokens.weight", "lm_head.weight"}
    }
    assert {block.name: block.bytes for block in by_category(log, "gradient")} == trained


def test_nothing_of_a_step_is_left_but_workspaces() -> None:
    size = build(oom.OomProbeParams, SMALL, what="parameter")
    log = silent(lambda: scenarios.run(size, workload.forward_backward, title="test"))
    died = {event.block for event in log.events if isinstance(event, Died)}
    assert [block.bytes for block in log.blocks if block.id not in died] == [WORKSPACE, WORKSPACE]
    assert len(died) == len([event for event in log.events if isinstance(event, Died)])


# -- every way to compute


@pytest.mark.parametrize("recompute", ["none", "mlp", "layer"])
@pytest.mark.parametrize("is_compiled", [True, False], ids=["compiled", "uncompiled"])
@pytest.mark.parametrize("attention", backends.BACKENDS)
def test_every_way_to_compute_a_packed_row_runs(attention: str, is_compiled: bool, recompute: str) -> None:
    # One layer: what it is made of is the same in all of them.
    small = SMALL | {"num_draft_layers": 1, "attention": attention, "compile": is_compiled}
    log = steps((40, 60), **small, recompute=recompute)
    kernels = "compiled kernels" if is_compiled else "nothing compiled"
    assert log.execution is not None
    assert log.execution.startswith(attention)
    assert log.execution.endswith(kernels)
    makes_scores = attention in {"eager", "sdpa_math"} or (attention == "flex" and not is_compiled)
    assert bool(by_category(log, "scores")) == makes_scores
    assert {block.shape[-1] for block in by_category(log, "logits")} == {1000}
    assert bool(by_category(log, "workspace")) == (attention != "flex")  # of the kernels' backward


def test_other_probes_run_too() -> None:
    drafter = {name: value for name, value in SMALL.items() if name not in {"packed_lengths", "max_anchors"}}
    sweep = build(anchors.AnchorSweepParams, drafter | {"anchor_counts": [3]}, what="parameter")
    log = silent(lambda: anchors.work(sweep))
    kinds = [event.kind for event in log.events if isinstance(event, Mark)]
    assert kinds == ["phase", "empty_cache", "empty_cache"]
    matrix = build(backends.BackendMatrixParams, drafter | {"backends": ["eager"]}, what="parameter")
    assert by_category(silent(lambda: backends.work(matrix)), "scores")
    forward = build(inference.InferenceProbeParams, SMALL, what="parameter")
    assert not by_category(silent(lambda: inference.work(forward)), "gradient")


def test_an_optimizer_s_states_and_phase_are_known() -> None:
    def work() -> None:
        size = build(oom.OomProbeParams, SMALL, what="parameter")
        machine = workload.open_workplace(size, title="test")
        drafter = workload.build_drafter(size, machine, max_anchors=6)
        trained = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained)
        workload.forward_backward(drafter, workload.random_row(size, (90,), machine.device), seed=0)
        optimizer.step()

    log = silent(work)
    gradients, states = by_category(log, "gradient"), by_category(log, "optimizer_state")
    moments = [block for block in states if block.name and block.name.startswith("exp_avg")]
    assert sum(block.bytes for block in moments) == 2 * sum(block.bytes for block in gradients)
    assert {block.phase for block in moments} == {"optimizer"}
    assert "exp_avg of layers.0.mlp.gate_proj.weight" in {block.name for block in moments}


def test_steps_that_cuda_takes_one_by_one_are_seen() -> None:
    def work() -> None:
        rows = torch.empty(8, 100, device=SIMULATED)
        rows.logsumexp(dim=-1)

    # The input, each row's largest, the input less that, and the sums.
    assert [block.bytes for block in silent(work).blocks] == [3200, 32, 3200, 32]


def test_the_math_path_expands_keys_and_values_in_float32() -> None:
    small = SMALL | {"num_draft_layers": 1, "attention": "sdpa_math", "chunk_blocks": 4}
    made = [block for block in by_category(steps((60,), **small), "scores") if block.phase == "forward"]
    # 4 blocks of 32 slots, 4 heads over 60 + 32 keys, head_dim 16.
    expanded = [block for block in made if math.prod(block.shape) == 4 * 4 * 92 * 16 and 16 in block.shape]
    matrices = [block for block in made if block.shape[-2:] == (32, 92)]
    # Keys, keys scaled, values; and the second result, which nobody keeps, is rounded back.
    assert [block.dtype for block in expanded][:3] == ["float32"] * 3
    assert {block.dtype for block in matrices} == {"float32", "bfloat16", "bool"}


def test_the_math_path_writes_zeros_in_place_and_makes_its_second_result_before_the_first() -> None:
    # Seen on an H200 with torch 2.11.
    small = SMALL | {"num_draft_layers": 1, "attention": "sdpa_math", "chunk_blocks": 8, "recompute": "none"}
    log = steps((60,), **small)
    made = [block for block in log.blocks if block.phase == "forward" and "_attend" in (block.where or "")]
    matrices = [block for block in made if block.shape[-2:] == (32, 92) and math.prod(block.shape[:-2]) == 24]
    assert [(block.name, block.dtype) for block in matrices] == [
        ("bmm", "float32"),
        ("_softmax", "float32"),
        ("eq", "bool"),
        ("_to_copy", "bfloat16"),
    ]
    assert made[made.index(matrices[-1]) + 1].name == "bmm"


def test_a_softmax_s_backward_holds_a_product_of_its_size_beside_its_gradient() -> None:
    def work() -> None:
        rows = torch.empty(8, 1000, device=SIMULATED, requires_grad=True)
        torch.autograd.backward(rows.softmax(dim=-1).sum())

    log = silent(work)
    product = next(block for block in log.blocks if block.category == "workspace")
    assert (product.bytes, product.name) == (32_000, "_softmax_backward_data")


def test_of_the_steps_on_a_row_the_one_with_most_logits_is_simulated() -> None:
    size = build(oom.OomProbeParams, SMALL | {"device": "cuda"}, what="parameter")

    def take(numbers: range) -> int:
        machine = workload.open_workplace(size, title="test")
        drafter = workload.build_drafter(size, machine, max_anchors=size.max_anchors)
        row = workload.random_row(size, (90,), machine.device)
        (number,) = workload.steps_to_take(drafter, row, 0, numbers)
        workload.forward_only(drafter, row, seed=number)
        return number

    logits = []
    for number in range(6):
        log = silent(lambda number=number: take(range(number, number + 1)))  # type: ignore[misc]
        logits.append(sum(block.bytes for block in by_category(log, "logits")))
    found: list[int] = []
    silent(lambda: found.append(take(range(6))))
    assert len(set(logits)) > 1
    assert logits[found[0]] == max(logits)


def test_a_simulation_takes_no_warm_ups_and_one_of_what_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    size = build(oom.OomProbeParams, SMALL | {"device": "cuda"}, what="parameter")
    repeated: list[int] = []
    stepped: list[int] = []
    offered: list[range] = []

    def step(*_: object, seed: int) -> None:
        stepped.append(seed)

    def choose(_drafter: object, _row: object, _seed: int, numbers: range) -> list[int]:
        offered.append(numbers)
        return [numbers[1]]

    def work() -> None:
        machine = workload.open_workplace(size, title="test")
        drafter = workload.build_drafter(size, machine, max_anchors=size.max_anchors)
        workload.time_repeated(machine, repeated.append, warmups=2, iterations=3)
        workload.time_steps(machine, drafter, {}, step, seed=0, warmups=2, iterations=3)  # type: ignore[arg-type]

    monkeypatch.setattr(workload, "steps_to_take", choose)
    silent(work)
    assert repeated == [2]
    assert (offered, stepped) == ([range(2, 5)], [3]), "of the steps that a card measures"


# -- the card decides


def test_a_card_decides_what_cublas_takes() -> None:
    log = steps((60,), card=parse_card("rtx-pro-6000"), **SMALL)
    assert [block.bytes for block in by_category(log, "cublas")] == [(8 * 1024 + 128) * 1024] * 2


@pytest.mark.parametrize(
    ("capability", "mask", "enable_gqa", "dtype", "kernel"),
    [
        ((9, 0), True, True, torch.bfloat16, "cudnn"),
        ((12, 0), True, True, torch.bfloat16, "math"),
        ((9, 0), True, True, torch.float32, "math"),
        ((9, 0), True, False, torch.float32, "efficient"),
        ((12, 0), True, False, torch.bfloat16, "efficient"),
        ((8, 9), False, True, torch.bfloat16, "flash"),
    ],
)
def test_sdpa_takes_the_card_s_kernel(
    capability: tuple[int, int], mask: bool, enable_gqa: bool, dtype: torch.dtype, kernel: str
) -> None:
    query = torch.empty(2, 8, 4, 64, dtype=dtype)
    key = torch.empty(2, 2 if enable_gqa else 8, 16, 64, dtype=dtype)
    bias = torch.ones(2, 1, 4, 16, dtype=torch.bool) if mask else None
    assert choose_kernel(query, key, key, bias, enable_gqa=enable_gqa, capability=capability) == kernel


def test_a_head_too_wide_for_consumer_blackwell_is_told_and_replaced() -> None:
    wide = SMALL | {"head_dim": 256, "attention": "flex"}
    log = steps((60,), card=parse_card("96GiB:sm_120"), **wide)
    assert log.execution == "sdpa_chunked, compiled kernels"
    assert len(log.notes) == 1
    assert "sm_12x takes at most 128" in log.notes[0]
    assert steps((60,), **wide).execution == "flex, compiled kernels"


# -- the edges of a simulation


def test_what_only_a_card_could_know_is_refused() -> None:
    def work() -> None:
        row = torch.randn(5, device=SIMULATED)
        (row > 0).cpu()

    with pytest.raises(CannotSimulate, match="reads from the card what only a run would know"):
        trace(work, card=H200)


def test_host_and_card_do_not_mix() -> None:
    with pytest.raises(RuntimeError, match="tensors of the host beside those of a card"):
        trace(lambda: torch.ones(3, device=SIMULATED) + torch.ones(3), card=H200)


def test_numbers_that_are_known_can_be_read_back_until_they_are_overwritten() -> None:
    read: list[list[int]] = []

    def work() -> None:
        moved = torch.tensor([3, 4, 5]).to(SIMULATED)
        read.append(moved[1:].cpu().tolist())
        moved[0] = 7
        moved.cpu()

    with pytest.raises(CannotSimulate):
        trace(work, card=H200)
    assert read == [[4, 5]]


def test_outside_nothing_has_changed() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    dtype = torch.get_default_dtype()
    said = set(notices._said)
    linear = torch.nn.Linear(2, 2)
    steps((60,), **SMALL, attention="flex", compile=False)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(2), expected)
    assert torch.get_default_dtype() == dtype
    assert notices._said == said
    assert simulation() is None
    assert not platform_of(SIMULATED).is_cuda
    assert not linear._forward_pre_hooks
    assert not torch.nn.Linear(2, 2)._forward_pre_hooks
