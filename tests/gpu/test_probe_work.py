"""The other probes on a card, at the size of their `cpu` profiles."""

import pytest
import torch
from dflash.probes import dispatch
from dflash.probes.work import sdpa_dispatch

from tests.payload.probe_program import Finished, assignments, cpu_params, experiment, run_probe

pytestmark = pytest.mark.gpu

GIB = 2**30
ROOM_GIB = 6


def run_on_card(name: str, **changed: object) -> Finished:
    params = {**cpu_params(name), "device": "cuda:0", **changed}
    return run_probe(assignments(params), events=True, module=experiment(name)["run"])


def test_forward_alone_holds_less_than_forward_and_backward(card: torch.device) -> None:
    size = {"hidden_size": 512, "intermediate_size": 2048, "max_anchors": 150, "iterations": 1}
    peaks = []
    for name in ("inference_probe", "oom_probe"):
        done = run_on_card(name, **size)
        assert done.code == 0, done.err
        peaks.append(done.metrics()["timed.peak_allocated_gib"])
    assert 0 < peaks[0] < peaks[1]


def test_backend_that_does_not_fit_the_simulated_card_is_a_row(card: torch.device) -> None:
    free, total = torch.cuda.mem_get_info(card)
    # 64 heads of 199 × 32 slots make scores of 10 GiB.
    done = run_on_card(
        "backend_matrix",
        memory_limit_gib=(total - free) / GIB + ROOM_GIB,
        backends=["eager", "sdpa_chunked"],
        num_attention_heads=64,
        block_size=32,
        max_anchors=199,
        num_draft_layers=1,
    )
    assert done.code == 0, done.err
    assert done.table_row("eager")[-1].startswith("out of memory: asked ")
    assert done.table_row("sdpa_chunked")[-1] == "fits"
    # What eager held is gone again, though other sizes than this one's own were asked for.
    assert done.metrics()["sdpa_chunked.peak_reserved_gib"] < 1


def test_peak_of_the_card_grows_with_the_anchors(card: torch.device) -> None:
    done = run_on_card("anchor_sweep", anchor_counts=[20, 60, 180], hidden_size=512, intermediate_size=2048)
    assert done.code == 0, done.err
    # The first case compiles: when the number of labelled slots first differs, even while it counts.
    metrics = done.metrics()
    assert metrics["anchors_60.peak_allocated_gib"] < metrics["anchors_180.peak_allocated_gib"], done.out
    assert "slope.peak_allocated_gib_per_1000_anchors" in metrics


def test_bench_reports_the_cards_ceilings_and_where_a_steps_time_goes(card: torch.device) -> None:
    done = run_on_card("bench_drafter", policies=["none"], profile=True)
    assert done.code == 0, done.err
    metrics = done.metrics()
    assert metrics["ceilings.square_tflop_per_s"] > 1
    assert metrics["ceilings.copy_tb_per_s"] > 0.05
    assert metrics["none.ratio"] > 1
    assert 0 < metrics["none.peak_allocated_gib"] <= metrics["none.peak_reserved_gib"]
    for kind in ("loss", "attention", "matrix_products", "pointwise"):
        assert metrics[f"profile.{kind}_ms"] > 0, kind


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def test_flash_refuses_a_mask_in_torchs_own_words(card: torch.device, dtype: torch.dtype) -> None:
    form = sdpa_dispatch.Form(heads="grouped", is_masked=True)
    answer = sdpa_dispatch.ask(sdpa_dispatch.call_of(form, dispatch.DispatchParams(), dtype, card))
    assert answer.chosen != "flash"
    assert "attn_mask" in answer.against["flash"]
    assert "internally" not in " ".join(answer.against.values())
    assert "no reason told" not in answer.against.values()
    assert answer.is_fused == (answer.chosen != "math")


def test_folded_heads_have_a_fused_kernel(card: torch.device) -> None:
    form = sdpa_dispatch.Form(heads="folded", is_masked=True)
    call = sdpa_dispatch.call_of(form, dispatch.DispatchParams(), torch.bfloat16, card)
    assert sdpa_dispatch.ask(call).is_fused
