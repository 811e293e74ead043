"""Each experiment states its probe's parameters, and its `cpu` profile runs to what it expects."""

import dataclasses
import functools
import json
import re
import subprocess
import sys
from typing import Any

import pytest
from dflash.probes import anchors, backends, bench, dispatch, inference, oom

from tests.payload.probe_program import (
    EXPERIMENTS,
    Finished,
    assignments,
    cpu_bounds,
    cpu_params,
    experiment,
    run_probe,
    run_probe_here,
)

PARAMS: dict[str, Any] = {
    "oom_probe": oom.OomProbeParams,
    "inference_probe": inference.InferenceProbeParams,
    "backend_matrix": backends.BackendMatrixParams,
    "anchor_sweep": anchors.AnchorSweepParams,
    "sdpa_dispatch": dispatch.DispatchParams,
    "bench_drafter": bench.BenchParams,
}
EXPERIMENT_NAMES = {path.stem for path in EXPERIMENTS.glob("*.yaml")}
HEADS = ("grouped", "expanded", "folded")
MAINS = {name: sys.modules[cls.__module__].main for name, cls in PARAMS.items()}


@functools.cache
def finished(name: str) -> Finished:
    """Return the one run of an experiment's `cpu` profile."""
    return run_probe_here(MAINS[name], assignments(cpu_params(name)))


def test_every_experiment_is_a_trainings_a_probes_or_a_matrix_of_one() -> None:
    others = {name for name in EXPERIMENT_NAMES if experiment(name)["run"] != "dflash.train"}
    assert others == {*PARAMS, "memory_matrix"}


@pytest.mark.parametrize("name", PARAMS)
def test_experiment_runs_the_module_of_its_parameters(name: str) -> None:
    assert experiment(name)["run"] == PARAMS[name].__module__


@pytest.mark.parametrize("name", PARAMS)
def test_module_of_an_experiment_is_a_program(name: str) -> None:
    done = run_probe(["--set", "nothing=1"], module=experiment(name)["run"])
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)


@pytest.mark.parametrize("name", PARAMS)
def test_experiment_declares_every_parameter_with_its_default_or_on_purpose(name: str) -> None:
    declared = experiment(name)["params"]
    defaults = {field.name: field.default for field in dataclasses.fields(PARAMS[name])}
    assert set(declared) == set(defaults)
    differing = {key for key, value in declared.items() if json.dumps(value) != json.dumps(defaults[key])}
    assert differing <= {"device", "iterations"}


@pytest.mark.parametrize("name", [*PARAMS, "memory_matrix"])
def test_profiles_change_known_parameters_only(name: str) -> None:
    declared = experiment(name)
    known = {field.name for field in dataclasses.fields(PARAMS.get(name, oom.OomProbeParams))}
    varied = declared.get("matrix", {}).get("params", {})
    for profile in declared["profiles"].values():
        assert {*declared["params"], *varied, *profile.get("params", {})} <= known


def test_entry_points_load_without_torch() -> None:
    modules = ", ".join(cls.__module__ for cls in PARAMS.values())
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)}, timeout=60
    )


@pytest.mark.parametrize("name", [name for name in PARAMS if name != "oom_probe"])
def test_cpu_profile_runs_and_sends_what_its_experiment_expects(name: str) -> None:
    done = finished(name)
    assert done.code == 0, done.err
    metrics = done.metrics()
    for metric, bounds in cpu_bounds(name).items():
        assert bounds.get("min", -1e300) <= metrics[metric] <= bounds.get("max", 1e300), metric


def test_inference_runs_the_three_scenarios_forward_only() -> None:
    done = finished("inference_probe")
    assert done.out.count(": forward ") == 1 + cpu_params("inference_probe")["iterations"] + 1
    assert "backward" not in done.out
    assert [event["name"] for event in done.events if event["kind"] == "phase"] == [
        "warmup",
        "timed",
        "packed",
    ]


def test_training_steps_go_on_from_the_losses_of_the_oom_probe_and_report_the_gradients_norm() -> None:
    done = run_probe_here(
        oom.main, assignments({**cpu_params("oom_probe"), "optimizer": "adamw", "iterations": 1})
    )
    assert done.code == 0, done.err
    assert done.out.count("forward + backward + optimizer") == 3
    metrics = done.metrics()
    plain = run_probe_here(oom.main, assignments(cpu_params("oom_probe")))
    assert done.losses()[0] == plain.losses()[0]  # the first forward knows of no step yet
    for scenario in ("warmup", "timed", "packed"):
        assert 0 < metrics[f"{scenario}.grad_norm"] < 100
    assert "grad_norm" not in plain.out


def test_inference_has_the_losses_of_the_oom_probe(capsys: pytest.CaptureFixture[str]) -> None:
    losses = {}
    for name in ("oom_probe", "inference_probe"):
        values = {**cpu_params(name), "iterations": 1}
        assert MAINS[name](assignments(values)) == 0
        losses[name] = re.findall(r"loss (\S+),", capsys.readouterr().out)
    assert losses["oom_probe"] == losses["inference_probe"]
    assert len(losses["oom_probe"]) == 3


def test_backend_table_names_what_ran_in_a_backends_place() -> None:
    done = finished("backend_matrix")
    asked = cpu_params("backend_matrix")["backends"]
    rows = {backend: done.table_row(backend) for backend in asked}
    assert rows["flex"][1].startswith("sdpa_chunked,")
    assert "flex cannot run here" in rows["flex"][-1]
    for backend in ("sdpa_chunked", "sdpa_math", "eager"):
        assert rows[backend][1].startswith(backend)
        assert rows[backend][-1] == "fits"
        assert done.metrics()[f"{backend}.mean_ms"] == pytest.approx(float(rows[backend][2]), abs=0.06)
    assert "flex cannot run here: it has no backward on cpu" in done.err
    assert [event["about"] for event in done.events if event["kind"] == "warning"] == ["attention"]


def test_anchor_table_has_a_row_for_each_number_of_anchors() -> None:
    done = finished("anchor_sweep")
    for count in cpu_params("anchor_sweep")["anchor_counts"]:
        row = done.table_row(str(count))
        assert float(row[2]) == pytest.approx(done.metrics()[f"anchors_{count}.loss_ms"], abs=0.06)
    assert "per 1,000 anchors" in done.out


def test_dispatch_table_names_the_kernel_of_every_form_and_type() -> None:
    done = finished("sdpa_dispatch")
    for form in (
        "masked_grouped",
        "masked_expanded",
        "masked_folded",
        "unmasked_grouped",
        "unmasked_expanded",
    ):
        assert done.out.count(f"\n{form} ") == len(cpu_params("sdpa_dispatch")["dtypes"]), form
        assert done.metrics()[f"{form}.math_gib"] > 0
    assert done.metrics()["masked_folded.math_gib"] == done.metrics()["masked_grouped.math_gib"] / 4


def test_bench_table_has_every_case_with_its_reference() -> None:
    done = finished("bench_drafter")
    metrics = done.metrics()
    policies = cpu_params("bench_drafter")["policies"]
    for case in ("forward", *policies, *(f"{policy}_packed" for policy in policies)):
        assert done.table_row(case)[-1] == "fits"
        assert metrics[f"{case}.least_ms"] <= metrics[f"{case}.median_ms"] <= metrics[f"{case}.most_ms"]
        assert metrics[f"{case}.ratio"] * metrics[f"{case}.reference_ms"] == pytest.approx(
            metrics[f"{case}.median_ms"]
        )
    # A forward is less work than both, and a policy changes none of it.
    assert metrics["forward.tflop"] < metrics["none.tflop"] == metrics["layer.tflop"]


REFUSED = {
    "backend unknown": ("backend_matrix", ['backends=["flex", "sdpa"]'], r"'sdpa'.*did you mean"),
    "auto is no backend": ("backend_matrix", ['backends=["auto"]'], r"'auto'"),
    "backend twice": ("backend_matrix", ['backends=["flex", "flex"]'], r"backends is .*each once"),
    "no backends": ("backend_matrix", ["backends=[]"], r"backends is \[\]"),
    "attention is not asked for": ("backend_matrix", ["attention=flex"], r"unknown parameter 'attention'"),
    "recompute unknown": ("backend_matrix", ["recompute=mpl"], r"did you mean 'mlp'"),
    "anchors from many to few": ("anchor_sweep", ["anchor_counts=[8, 4]"], r"anchor_counts .*few to many"),
    "no anchors": ("anchor_sweep", ["anchor_counts=[0]"], r"anchor_counts is 0"),
    "more anchors than tokens": ("anchor_sweep", ["seq_len=1024"], r"1024, but a row of 1024 .* 1023"),
    "recompute in inference": ("inference_probe", ["recompute=layer"], r"unknown parameter 'recompute'"),
    "chunk of nothing": ("inference_probe", ["chunk_blocks=0"], r"chunk_blocks is 0"),
    "packed row of nothing": ("inference_probe", ["packed_lengths=[]"], r"packed_lengths is empty"),
    "policy unknown": ("bench_drafter", ['policies=["layers"]'], r"did you mean 'layer'"),
    "window in a block": ("bench_drafter", ["sliding_window=31"], r"sliding_window is 31.*block_size is 32"),
    "profile not a boolean": ("bench_drafter", ["profile=1"], r"profile is 1; it must be true or false"),
    "heads that do not divide": ("sdpa_dispatch", ["num_key_value_heads=5"], r"32 .* 5"),
    "type unknown": ("sdpa_dispatch", ['dtypes=["bf16"]'], r"'bf16'"),
    "size that dispatch has not": ("sdpa_dispatch", ["hidden_size=64"], r"unknown parameter 'hidden_size'"),
}


@pytest.mark.parametrize(("name", "settings", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_refused_parameters_exit_2_with_one_line(
    name: str, settings: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        MAINS[name]([part for setting in settings for part in ("--set", setting)])
    out, err = capsys.readouterr()
    assert (caught.value.code, out, err.count("\n")) == (2, "", 1)
    assert re.search(message, err), err


@pytest.mark.parametrize("name", PARAMS)
def test_missing_device_exits_3_with_one_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert MAINS[name](["--set", "device=cuda:99"]) == 3
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "cuda:99" in err
