"""The out-of-memory probe as a program, at the size of the experiment's `cpu` profile."""

import dataclasses
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash import DFlashDrafter
from dflash.config import DTYPES
from dflash.probes import oom
from dflash.probes.params import parse_params
from dflash.probes.work import scenarios, workload
from dflash.probes.work.machine import Machine

from tests.payload.probe_program import Finished, cpu_bounds, cpu_params, experiment, run_probe

SCENARIOS = ["warmup", "timed", "packed"]


@pytest.fixture(scope="module")
def params_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("probe with spaces") / "params.json"
    path.write_text(json.dumps(cpu_params()))
    return str(path)


@pytest.fixture(scope="module")
def alone(params_file: str) -> Finished:
    return run_probe(["--params", params_file])


@pytest.fixture(scope="module")
def watched(params_file: str) -> Finished:
    return run_probe(["--params", params_file], events=True)


def test_probe_runs_its_three_scenarios_without_a_watcher(alone: Finished) -> None:
    assert (alone.code, alone.err, alone.events) == (0, "", [])
    assert list(dict.fromkeys(re.findall(r"^\[(\w+)\]", alone.out, re.MULTILINE))) == ["build", *SCENARIOS]
    assert len(alone.losses()) == 3


def test_probe_says_every_parameter_it_ran_with(alone: Finished) -> None:
    printed = json.loads(re.findall(r"^parameters: (.*)$", alone.out, re.MULTILINE)[0])
    assert printed == cpu_params()


def test_watching_changes_nothing_that_is_printed(alone: Finished, watched: Finished) -> None:
    assert watched.code == 0
    assert watched.losses() == alone.losses()


def test_phases_open_the_scenarios_in_order(watched: Finished) -> None:
    opened: list[str] = []
    for event in watched.events:
        if event["kind"] == "phase":
            opened.append(event["name"])
        else:
            assert event["kind"] == "metric"
            assert event["name"].startswith(opened[-1] + ".")
    assert opened == SCENARIOS


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_scenario_reports_loss_metrics_time_and_peak(watched: Finished, scenario: str) -> None:
    metrics = watched.metrics()
    for name in ("loss", "accuracy", "avg_streak", "teacher_accuracy", "mean_ms", "peak_rss_gib"):
        assert isinstance(metrics[f"{scenario}.{name}"], float), name
    printed = watched.losses()[SCENARIOS.index(scenario)]
    assert float(printed) == pytest.approx(metrics[f"{scenario}.loss"], abs=1e-4)


def test_timed_scenario_sends_each_iteration_and_their_mean(watched: Finished) -> None:
    each = [event for event in watched.events if event.get("name") == "timed.iteration_ms"]
    assert [event["step"] for event in each] == [0, 1, 2]
    mean = sum(event["value"] for event in each) / 3
    assert watched.metrics()["timed.mean_ms"] == pytest.approx(mean)


def test_probe_sends_every_metric_that_its_experiment_expects(watched: Finished) -> None:
    metrics = watched.metrics()
    for name, bounds in cpu_bounds().items():
        assert bounds.get("min", -1e300) <= metrics[name] <= bounds.get("max", 1e300), name


def test_defaults_are_the_original_size() -> None:
    defaults = {field.name: field.default for field in dataclasses.fields(oom.OomProbeParams)}
    original = {
        "dtype": "bfloat16",
        "num_draft_layers": 5,
        "hidden_size": 5120,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 17408,
        "vocab_size": 248320,
        "target_layer_ids": (1, 16, 31, 46, 61),
        "block_size": 32,
        "max_anchors": 1024,
        "mask_token_id": 248070,
        "seq_len": 8000,
        "packed_lengths": (3000, 4000, 5000),
        "iterations": 3,
        "kl_weight": 0.15,
        "gamma": 10.0,
    }
    assert {name: defaults[name] for name in original} == original


def test_a_simulated_cards_memory_is_no_bound_that_its_own_cap_enforces() -> None:
    profile = experiment()["profiles"]["full-96gb"]
    bounds = profile["expect"]["metrics"]
    simulated_gib = float(profile["memory_limit"].removesuffix("GiB"))
    for scenario in ("timed", "packed"):
        assert bounds[f"{scenario}.peak_reserved_gib"]["max"] < simulated_gib / 2


REFUSED = {
    "unknown key": (["--set", "hiden_size=64"], r"'hiden_size'.*did you mean 'hidden_size'"),
    "not an assignment": (["--set", "hidden_size"], r"'hidden_size' is not KEY=VALUE"),
    "given twice": (["--set", "seed=1", "--set", "seed=2"], r"seed is given twice"),
    "wrong type": (["--set", "hidden_size=wide"], r"hidden_size is 'wide'"),
    "unknown backend": (["--set", "attention=sdpa"], r"'sdpa'"),
    "numbers that do not fit": (["--set", "num_attention_heads=30"], r"30 .* 8"),
    "no such kind of device": (["--set", "device=banana"], r"'banana'"),
    "window smaller than a block": (
        ["--set", "sliding_window=31"],
        r"sliding_window is 31.*block_size is 32",
    ),
    "layer out of range": (["--set", "target_layer_ids=[1,99]"], r"99 .* 64"),
    "mask token out of range": (["--set", "mask_token_id=248320"], r"248320 .* 248320"),
    "limit without a card": (
        ["--set", "device=cpu", "--set", "memory_limit_gib=8"],
        r"memory_limit_gib.*cpu",
    ),
    "no such file": (["--params", "nowhere.json"], r"nowhere\.json"),
    "unknown option": (["--parms", "x.json"], r"--parms"),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_refused_parameters_exit_2_with_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        oom.main(arguments)
    out, err = capsys.readouterr()
    assert (caught.value.code, out) == (2, "")
    assert re.search(message, err)
    assert err.count("\n") == 1


@pytest.mark.parametrize("text", ["[1, 2]", "{'seed': 1}", '{"seed": 1, "seed": 2}', '{"sed": 1}', "\xff"])
def test_refused_parameter_file_exits_2_with_one_line(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "params.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(SystemExit) as caught:
        oom.main(["--params", str(path)])
    assert caught.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_unknown_key_exits_2_as_a_program() -> None:
    done = run_probe(["--set", "hiden_size=64"], events=True)
    assert (done.code, done.out, done.events) == (2, "", [])
    assert done.err.count("\n") == 1


def test_set_wins_over_the_file(params_file: str) -> None:
    arguments = ["--params", params_file, "--set", "seed=7", "--set", "packed_lengths=[9,8]"]
    params = parse_params(oom.OomProbeParams, arguments, program="probe", description="")
    assert (params.seed, params.packed_lengths) == (7, (9, 8))
    assert params.hidden_size == cpu_params()["hidden_size"]


def test_missing_device_exits_3_with_one_line_that_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert oom.main(["--set", "device=cuda:99"]) == 3
    out, err = capsys.readouterr()
    assert "cuda:99" in err
    assert err.count("\n") == 1
    assert out == ""


def tiny(**changed: Any) -> oom.OomProbeParams:
    values = {**cpu_params(), "seq_len": 30, "packed_lengths": (9, 8), "max_anchors": 4, **changed}
    return oom.OomProbeParams(**{**values, "target_layer_ids": tuple(values["target_layer_ids"])})


def run_here(params: oom.OomProbeParams) -> None:
    scenarios.run(params, workload.forward_backward, title="probe")


def test_out_of_memory_is_told_with_what_had_finished_and_then_raised(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forward, calls = DFlashDrafter.forward, []

    def fails_third_time(drafter: DFlashDrafter, **arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 15.09 GiB.")
        return forward(drafter, **arguments)

    monkeypatch.setattr(DFlashDrafter, "forward", fails_third_time)
    with pytest.raises(torch.OutOfMemoryError, match=r"15\.09 GiB"):
        run_here(tiny())
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.search(r"\[timed\] OutOfMemoryError .*finished before: warmup$", last)


def test_build_time_is_read_when_the_device_has_finished(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # `now_s` waits for the device; a clock of its own shows that both ends of the build ask it.
    ticks = itertools.count(step=7)
    monkeypatch.setattr(Machine, "now_s", lambda _machine: float(next(ticks)))
    run_here(tiny())
    assert re.search(r"^\[build\] .* in 7\.0 s$", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize("dtype", DTYPES)
def test_probe_follows_the_original_and_makes_its_type_the_default(
    dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run_here(tiny(dtype=dtype))
    assert torch.get_default_dtype() == getattr(torch, dtype)
    assert "[packed] loss" in capsys.readouterr().out


def test_packed_row_restarts_its_positions_at_the_base() -> None:
    row = workload.random_row(tiny(position_base=1), (3, 4, 2), torch.device("cpu"))
    assert row["position_ids"].tolist() == [[1, 2, 3, 1, 2, 3, 4, 1, 2]]
    assert row["lengths"].tolist() == [3, 4, 2]
    assert row["all_hidden_states"].shape == (1, 9, 3 * 64)
    assert row["verifier_last_hidden"].shape == (1, 9, 64)
