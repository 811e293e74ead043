"""The probes' parts: cases that do not fit, counted operations, kernels by kind, what torch is asked."""

import os
import re
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from dflash import flops
from dflash.config import DrafterConfig
from dflash.drafter import DFlashDrafter
from dflash.packing import HOST
from dflash.probes import anchors, backends, bench, dispatch
from dflash.probes.work import anchor_sweep, kernel_times, sdpa_dispatch, workload
from dflash.probes.work.machine import Machine
from dflash.probes.work.trials import Failure, explain, try_case
from dflash.values import build
from dflash.visibility import Visibility
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.payload.probe_program import assignments, cpu_params, run_probe

MACHINE = Machine(device=torch.device("cpu"))


# 32 heads of 2,048 slots over 2,248 keys make scores of 0.55 GiB in float32, where 1.2 GiB may be mapped.
CROWDED = {"num_attention_heads": 32, "num_key_value_heads": 2, "block_size": 16, "num_draft_layers": 1}
CROWDED_KIB = 1_250_000


def test_backend_without_memory_is_a_row_and_the_next_one_runs() -> None:
    changed = {**CROWDED, "max_anchors": 128, "iterations": 1, "backends": ["eager", "sdpa_chunked"]}
    done = run_probe(
        assignments({**cpu_params("backend_matrix"), **changed}),
        events=True,
        module="dflash.probes.backends",
        address_space_kib=CROWDED_KIB,
    )
    assert done.code == 0, done.err
    assert done.table_row("eager")[-1] == "out of memory: asked 0.55 GiB"
    assert done.table_row("sdpa_chunked")[-1] == "fits"
    metrics = done.metrics()
    assert (metrics["eager.fits"], metrics["sdpa_chunked.fits"]) == (0, 1)
    assert "eager.mean_ms" not in metrics


@pytest.fixture
def only_few_anchors_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = DFlashDrafter.forward

    def refuses_many(drafter: DFlashDrafter, **arguments: Any) -> Any:
        if drafter.max_anchors > 40:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 15.09 GiB.")
        return forward(drafter, **arguments)

    monkeypatch.setattr(DFlashDrafter, "forward", refuses_many)


@pytest.mark.usefixtures("only_few_anchors_fit")
def test_anchors_without_memory_are_a_row_and_the_slope_is_that_of_the_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    values = {**cpu_params("anchor_sweep"), "iterations": 1, "anchor_counts": [8, 16, 64]}
    assert anchors.main(assignments(values)) == 0
    out = capsys.readouterr().out
    assert re.search(r"^64 .* out of memory: asked 15\.09 GiB$", out, re.MULTILINE)
    assert "per 1,000 anchors" in out


@pytest.mark.usefixtures("only_few_anchors_fit")
@pytest.mark.parametrize(
    ("main", "changed"),
    [
        (anchors.main, {**cpu_params("anchor_sweep"), "anchor_counts": [64]}),
        (backends.main, {**cpu_params("backend_matrix"), "max_anchors": 64, "backends": ["eager"]}),
        (bench.main, {**cpu_params("bench_drafter"), "max_anchors": 64}),
    ],
    ids=["anchors", "backends", "bench"],
)
def test_probe_ends_with_1_when_nothing_fits(
    main: Callable[[list[str]], int], changed: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(assignments(changed)) == 1
    assert "out of memory: asked 15.09 GiB" in capsys.readouterr().out


TEXTS = {
    "card": (
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 15.09 GiB. GPU 5 has a total capacity"),
        "out of memory: asked 15.09 GiB",
    ),
    "card, small": (
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."),
        "out of memory: asked 0.02 GiB",
    ),
    "host": (
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 3221225472 bytes."),
        "out of memory: asked 3.00 GiB",
    ),
    "wrapped by the compiler": (
        RuntimeError("backend raised:\nOutOfMemoryError: CUDA out of memory."),
        "out of memory",
    ),
    "cuBLAS": (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), "out of memory"),
    "Triton's shared memory": (
        RuntimeError("out of resource: shared memory, Required: 262144"),
        "failed: RuntimeError: out of resource: shared memory, Required: 262144",
    ),
}


@pytest.mark.parametrize(("error", "told"), TEXTS.values(), ids=TEXTS.keys())
def test_failures_are_told_by_what_was_asked_for(error: RuntimeError, told: str) -> None:
    assert str(explain(error)) == told


def test_failed_case_keeps_nothing_of_what_it_held() -> None:
    held: list[weakref.ref[torch.Tensor]] = []

    def case() -> None:
        tensor = torch.empty(3)
        held.append(weakref.ref(tensor))
        raise torch.OutOfMemoryError("out of memory")

    assert isinstance(try_case(MACHINE, case), Failure)
    assert held[0]() is None


def test_mistakes_of_a_caller_are_no_failure_of_a_case() -> None:
    with pytest.raises(KeyError):
        try_case(MACHINE, {}.popitem)


def small() -> bench.BenchParams:
    return build(bench.BenchParams, {**cpu_params("bench_drafter"), "dtype": "float32"}, what="parameter")


def test_forward_alone_keeps_nothing_for_a_backward() -> None:
    params = small()
    drafter = workload.build_drafter(params, MACHINE, max_anchors=4)
    row = workload.random_row(params, (30,), MACHINE.device)
    assert not workload.forward_only(drafter, row, seed=0)[0].requires_grad
    assert all(parameter.grad is None for parameter in drafter.parameters())
    workload.forward_backward(drafter, row, seed=0)
    assert all(parameter.grad is not None for parameter in drafter.parameters() if parameter.requires_grad)


def test_warm_ups_are_not_timed() -> None:
    numbers: list[int] = []
    durations = workload.time_repeated(MACHINE, numbers.append, warmups=2, iterations=3)
    assert numbers == [0, 1, 2, 3, 4]
    assert len(durations.each_ms) == 3


def counted(lengths: tuple[int, ...]) -> tuple[DrafterConfig, flops.RowCounts]:
    params, config = small(), small().drafter_config()
    blocks = workload.blocks_of(params, lengths, max_anchors=params.max_anchors)
    return config, flops.count_row(blocks, config, context_tokens=sum(lengths))


@pytest.mark.parametrize("lengths", [(200,), (60, 80, 110)])
def test_counted_products_are_those_that_run(lengths: tuple[int, ...]) -> None:
    params = small()
    drafter = workload.build_drafter(
        params, MACHINE, max_anchors=params.max_anchors, attention="eager", compile=False
    )
    row = workload.random_row(params, lengths, MACHINE.device)
    with FlopCounterMode(display=False) as counter:
        workload.forward_only(drafter, row, seed=params.seed)
    by_operator = counter.get_flop_counts()["Global"]
    # The eager backend's products over all keys are batched ones; all the others are not.
    plain = sum(count for name, count in by_operator.items() if "bmm" not in str(name))
    config, counts = counted(lengths)
    attention = 4 * config.num_attention_heads * config.head_dim * counts.visible_keys
    assert plain + attention == flops.count_flops(config, counts, target_layers=3).forward


@pytest.mark.parametrize("lengths", [(200,), (60, 80, 110)])
def test_visible_keys_are_those_of_the_masks(lengths: tuple[int, ...]) -> None:
    params, (config, counts) = small(), counted(lengths)
    blocks = workload.blocks_of(params, lengths, max_anchors=params.max_anchors)
    windows = {"sliding_attention": config.sliding_window, "full_attention": None}
    seen = {
        kind: Visibility(blocks=blocks, context_length=sum(lengths), window=window, device=HOST)
        for kind, window in windows.items()
    }
    everything = slice(0, blocks.count), slice(0, sum(lengths))
    assert counts.visible_keys == sum(
        int(seen[kind].mask_LK(*everything).sum()) for kind in config.layer_types
    )


def test_reference_size_is_the_work_that_the_figures_speak_of() -> None:
    params = bench.BenchParams(device="cpu")
    blocks = workload.blocks_of(params, (8000,), max_anchors=1024)
    config = params.drafter_config()
    work = flops.count_flops(config, flops.count_row(blocks, config, context_tokens=8000), target_layers=5)
    # 503 TFLOP without slot 0, and 21 of attention.
    assert work.both == pytest.approx(524e12, rel=0.005)


def test_slope_is_that_of_the_line_through_the_points() -> None:
    assert anchor_sweep.slope_of({128: 9.0, 256: 10.0, 1024: 16.0}) == pytest.approx(1 / 128)
    assert anchor_sweep.slope_of({1: 4.0, 2: 4.0}) == 0


KERNELS = {
    "nvjet_tst_256x128_64x4_2x1_v_bz_coopA_NNT": "matrix products",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32": "matrix products",
    "aten::addmm": "matrix products",
    "triton_tem_fused_flex_attention_backward_0": "attention",
    "fmha_cutlassF_bf16_aligned_64x128_rf_sm80": "attention",
    "_score_rows": "loss",
    "_summarize_teacher": "loss",
    "triton_poi_fused_mul_silu_0": "pointwise",
    "triton_red_fused_mean_pow_1": "pointwise",
    "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor>": "pointwise",
    "Memcpy HtoD (Pinned -> Device)": "rest",
}


@pytest.mark.parametrize(("kernel", "kind"), KERNELS.items())
def test_kernels_are_sorted_by_what_they_are_for(kernel: str, kind: str) -> None:
    assert kernel_times.kind_of(kernel) == kind


def test_profile_shares_out_one_steps_time(capsys: pytest.CaptureFixture[str]) -> None:
    kernel_times.print_profile(MACHINE, lambda: torch.ones(8, 8) @ torch.ones(8, 8))
    out = capsys.readouterr().out
    assert "matrix products" in out
    assert "aten::mm" in out


DISPATCH = dispatch.DispatchParams(device="cpu", dtypes=("float32",))
GROUPED = sdpa_dispatch.Form(heads="grouped", is_masked=True)


def test_math_path_would_hold_what_once_ran_out_of_memory() -> None:
    assert sdpa_dispatch.math_gib(GROUPED, DISPATCH) == pytest.approx(22.31, abs=0.005)


def test_answer_names_the_kernel_that_was_chosen_and_ran() -> None:
    call = sdpa_dispatch.call_of(GROUPED, DISPATCH, torch.float32, MACHINE.device)
    fused = sdpa_dispatch.ask(call)
    with sdpa_kernel(SDPBackend.MATH):
        math = sdpa_dispatch.ask(call)
    assert (fused.chosen, fused.is_fused) == ("flash", True)
    assert (math.chosen, math.ran, math.is_fused) == ("math", "math", False)


IN_CPP = (
    b"[W1130 05:22:19.705833691 sdp_utils_cpp.h:262] Warning: "
    b"Flash Attention does not support non-null attn_mask. (function check_for_attn_mask)\n"
)


def test_reasons_are_found_as_warnings_and_past_them_and_other_output_is_passed_on(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuses(_: object, *, debug: bool) -> bool:
        assert debug
        os.write(2, IN_CPP + b"something else\n")
        warnings.warn("head_dim is odd. (Triggered internally at sdp_utils.cpp:9.)", stacklevel=1)
        return False

    monkeypatch.setattr(torch.backends.cuda, "can_use_flash_attention", refuses)
    call = sdpa_dispatch.call_of(GROUPED, DISPATCH, torch.float32, MACHINE.device)
    why = sdpa_dispatch._against("flash", call)
    assert why == "head_dim is odd.; Flash Attention does not support non-null attn_mask."
    assert capfd.readouterr().err == "something else\n"


@pytest.mark.parametrize("form", sdpa_dispatch.forms(), ids=lambda form: form.name)
def test_forms_are_calls_that_torch_takes(form: sdpa_dispatch.Form) -> None:
    call = sdpa_dispatch.call_of(form, DISPATCH, torch.float32, MACHINE.device)
    assert call.queries.shape[1] % call.keys.shape[1] == 0
    assert call.enable_gqa == (call.queries.shape[1] != call.keys.shape[1])
    assert not sdpa_dispatch.ask(call).ran.startswith("failed")
