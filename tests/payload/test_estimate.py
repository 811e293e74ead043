"""`python -m dflash.estimate` at the size of the probes' `cpu` profiles, on cards that are not there."""

import contextlib
import dataclasses
import functools
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash import estimate
from dflash.cards import CARDS
from dflash.events import ENVIRONMENT_NAME
from dflash.memory import estimating
from dflash.memory.entries import ENTRIES, find_entry
from dflash.memory.estimating import CONTEXT_BYTES, OUTSIDE_BYTES, Target, room_of
from dflash.memory.trace import CannotSimulate
from dflash.memory.variations import variations
from dflash.probes.work import workload
from dflash.probes.work.machine import Machine

from tests.payload.probe_program import assignments, cpu_params

GIB = 2**30
OOM = "dflash.probes.oom"
SMALL_CARD = "1GiB:sm_90"


def arguments(name: str = "oom_probe", /, *, entry: str = OOM, **changed: Any) -> list[str]:
    few = {"device": "cuda:0", "num_draft_layers": 1, "loss_chunk_rows": 512}  # operators are what takes time
    values = {**cpu_params(name), **few, **changed}
    return ["--entry", entry, *assignments(values)]


def estimated(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    assert estimate.main([*options, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@functools.cache
def on_small_card(**changed: Any) -> dict[str, Any]:
    """Return an estimate of the memory probe that nobody else changes."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert estimate.main([*arguments(**changed), "--card", SMALL_CARD, "--json"]) == 0
    found: dict[str, Any] = json.loads(out.getvalue())
    return found


def refused(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    with pytest.raises(SystemExit) as caught:
        estimate.main([*options])
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


def test_json_has_the_fields_of_format_1() -> None:
    found = on_small_card()
    assert found.keys() == {
        *("format", "entry", "torch", "seconds", "card", "capacity_bytes", "outside_bytes", "error_share"),
        *(
            "peak_allocated_bytes",
            "peak_reserved_bytes",
            "verdict",
            "failure",
            "phases",
            "execution",
            "notes",
        ),
    }
    assert (found["format"], found["entry"], found["torch"]) == (1, OOM, torch.__version__)
    assert found["card"].keys() == {"name", "key", "total_bytes", "capability"}
    assert (found["verdict"], found["failure"], found["error_share"]) == ("fits", None, 0.05)
    assert found["outside_bytes"] + found["capacity_bytes"] == GIB
    assert found["execution"] == "flex, compiled kernels"
    assert [phase["name"] for phase in found["phases"]] == ["setup", "warmup", "timed", "packed"]
    for phase in found["phases"]:
        assert sum(phase["by_category"].values()) == phase["peak_allocated_bytes"]
        assert 0 < phase["peak_allocated_bytes"] <= phase["peak_reserved_bytes"]
        assert 1 <= len(phase["largest"]) <= 10
        for tensor in phase["largest"]:
            assert tensor.keys() == {
                *("bytes", "shape", "dtype", "category", "name", "module", "where", "phase")
            }
    assert found["peak_allocated_bytes"] == max(phase["peak_allocated_bytes"] for phase in found["phases"])


def rounded(sizes: list[int]) -> int:
    return sum(max(512, (size + 511) // 512 * 512) for size in sizes)


def test_weights_and_optimizer_states_are_exact(capsys: pytest.CaptureFixture[str]) -> None:
    params = find_entry(OOM).build({**cpu_params(), "num_draft_layers": 1})
    drafter = workload.build_drafter(
        params, Machine(device=torch.device("cpu")), max_anchors=params.max_anchors
    ).bfloat16()
    capsys.readouterr()
    counts = {parameter: parameter.numel() for parameter in drafter.parameters()}
    trained = [count for parameter, count in counts.items() if parameter.requires_grad]
    phase = on_small_card(optimizer="adamw")["phases"][1]
    assert phase["by_category"]["parameter"] == rounded([2 * count for count in counts.values()])
    # A master and two moments in float32, and a counter.
    states = [size for count in trained for size in (4 * count, 4 * count, 4 * count, 4)]
    assert phase["by_category"]["optimizer_state"] == rounded(states)


def test_optimizer_adds_its_states_and_nothing_else_to_the_peak() -> None:
    plain, trained = (on_small_card(**changed)["phases"] for changed in ({}, {"optimizer": "adamw"}))
    for without, with_optimizer in zip(plain, trained, strict=True):
        states = with_optimizer["by_category"]["optimizer_state"]
        more = with_optimizer["peak_allocated_bytes"] - without["peak_allocated_bytes"]
        assert more == states, without["name"]


def test_estimates_in_one_process_do_not_disturb_each_other(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    monkeypatch.setenv(ENVIRONMENT_NAME, f"{writer}:{os.fstat(writer).st_ino}")
    dtype, chance = torch.get_default_dtype(), torch.random.get_rng_state()
    first = on_small_card()
    other = arguments("inference_probe", entry="dflash.probes.inference", dtype="float32", attention="eager")
    assert estimated(capsys, *other)["peak_allocated_bytes"] != first["peak_allocated_bytes"]
    second = estimated(capsys, *arguments(), "--card", SMALL_CARD)
    assert {**second, "seconds": 0} == {**first, "seconds": 0}
    assert torch.get_default_dtype() == dtype
    assert torch.equal(torch.random.get_rng_state(), chance)
    assert os.environ[ENVIRONMENT_NAME] == f"{writer}:{os.fstat(writer).st_ino}"
    os.close(writer)
    with open(reader, encoding="utf-8") as events:  # noqa: PTH123  a descriptor has no path
        assert events.read() == ""  # nobody hears of metrics that were not measured


def test_a_card_beside_the_first_is_named_as_one_that_a_run_may_not_see() -> None:
    told = "device is cuda:7: a run that sees fewer than 8 cards fails at its start"
    assert on_small_card(device="cuda:7")["notes"][0] == told
    assert not any("sees fewer" in note for note in on_small_card()["notes"])


def test_tensor_that_does_not_fit_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    options = [*arguments(attention="eager", compile=False, seq_len=4000), "--card", "1GiB:sm_80"]
    options += ["--memory-limit-bytes", str(CONTEXT_BYTES + 60 * 2**20)]
    found = estimated(capsys, *options)
    assert (found["verdict"], found["error_share"]) == ("does not fit", 0.01)
    failure = found["failure"]
    # 4 heads, 32 anchors of 8 slots, and as many keys and the row's.
    assert failure["shape"] == [4, 256, 4256]
    assert (failure["category"], failure["dtype"], failure["phase"]) == ("scores", "float32", "warmup")
    assert failure["bytes"] == 4 * 256 * 4256 * 4
    assert failure["segment_bytes"] == -(-failure["bytes"] // 2**21) * 2**21
    assert failure["where"].startswith("eager.py:")
    assert failure["allocated_bytes"] <= failure["reserved_bytes"] <= found["capacity_bytes"]
    assert estimate.main(options) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("does not fit: warmup asks 0.02 GiB for scores (")
    assert "[4, 256, 4256] float32 at eager.py:" in first


def test_people_get_one_screen_with_the_verdict_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert estimate.main([*arguments(), "--card", "rtx-pro-6000"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 40
    assert lines[0].startswith("fits: ")
    assert "of 94.22 GiB that NVIDIA RTX PRO 6000" in lines[0]
    assert [line.split()[0] for line in lines[4:8]] == ["setup", "warmup", "timed", "packed"]
    assert any("embed_tokens.weight" in line and "512×64" in line for line in lines)
    assert lines[-1].startswith("note: 0.75 GiB outside the allocator")


H100 = int(79.10 * GIB)


@pytest.mark.parametrize(
    ("target", "own_limit_gib", "capacity", "outside"),
    [
        (Target(card=CARDS["h100"]), None, H100 - OUTSIDE_BYTES, OUTSIDE_BYTES),
        (Target(memory_limit_bytes=8 * GIB), None, 8 * GIB - CONTEXT_BYTES, CONTEXT_BYTES),
        (Target(card=CARDS["h100"]), 40.0, 40 * GIB - CONTEXT_BYTES, CONTEXT_BYTES),
        (
            Target(card=CARDS["h100"], memory_limit_bytes=99 * GIB),
            None,
            H100 - OUTSIDE_BYTES,
            OUTSIDE_BYTES,
        ),
        (
            Target(card=CARDS["h100"], alloc_conf="per_process_memory_fraction:0.5"),
            None,
            H100 // 2,
            OUTSIDE_BYTES,
        ),
        (Target(), None, None, OUTSIDE_BYTES),
    ],
)
def test_capacity_is_what_card_limit_and_settings_leave(
    target: Target, own_limit_gib: float | None, capacity: int | None, outside: int
) -> None:
    params = find_entry(OOM).build({"memory_limit_gib": own_limit_gib})
    found, room = room_of(params, target)
    assert (found, room.capacity_bytes) == (outside, capacity)


def test_without_a_card_there_are_peaks_and_no_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    found = estimated(capsys, *arguments(compile=False))
    assert (found["verdict"], found["card"], found["capacity_bytes"]) == ("no card", None, None)
    assert found["peak_reserved_bytes"] > 0
    assert "no card was named: kernels are those of NVIDIA H200" in found["notes"][1]


def test_alternatives_are_what_differs_each_as_if_it_were_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = arguments(recompute="mlp", max_anchors=1, loss_chunk_rows=256)
    found = estimated(capsys, *options, "--card", SMALL_CARD, "--alternatives")
    by_label = {each["label"]: each for each in found["alternatives"]}
    assert list(by_label) == ["expandable_segments:True", "recompute=layer"]
    assert by_label["recompute=layer"]["set"] == {"recompute": "layer"}
    assert by_label["expandable_segments:True"]["alloc_conf"] == "expandable_segments:True"
    asked = estimated(
        capsys, *arguments(recompute="layer", max_anchors=1, loss_chunk_rows=256), "--card", SMALL_CARD
    )
    assert by_label["recompute=layer"]["peak_allocated_bytes"] == asked["peak_allocated_bytes"]
    assert all(each["verdict"] == "fits" for each in by_label.values())


def test_nothing_is_varied_that_is_so_already() -> None:
    entry = find_entry(OOM)
    best = entry.build({"recompute": "layer", "loss_chunk_rows": 256, "max_anchors": 1})
    assert variations(entry, best, "expandable_segments:True") == []
    math = entry.build({"attention": "sdpa_math", "chunk_blocks": 182, "recompute": "none"})
    labels = [variation.label for variation in variations(entry, math, "")]
    eager = entry.build({"attention": "eager", "compile": False})
    assert variations(entry, eager, "")[1].set == {"attention": "flex", "compile": True}
    assert {"chunk_blocks=45", "attention=flex", "recompute=mlp", "recompute=layer"} <= set(labels)
    sweep = find_entry("dflash.probes.backends")
    assert [each.label for each in variations(sweep, sweep.build({}), "")] == ["expandable_segments:True"]


def test_sweeps_are_estimated_case_by_case(capsys: pytest.CaptureFixture[str]) -> None:
    backends = arguments("backend_matrix", entry="dflash.probes.backends", backends=["flex", "eager"])
    anchors = arguments("anchor_sweep", entry="dflash.probes.anchors", anchor_counts=[8, 64], seq_len=300)
    for options, cases in ((backends, ["flex", "eager"]), (anchors, ["anchors_8", "anchors_64"])):
        found = estimated(capsys, *options, "--card", SMALL_CARD)
        peaks = {phase["name"]: phase["peak_allocated_bytes"] for phase in found["phases"]}
        assert [name for name in peaks if name != "setup"] == cases
        assert peaks[cases[0]] < peaks[cases[1]]


def test_benchmark_takes_the_copies_of_a_card(capsys: pytest.CaptureFixture[str]) -> None:
    options = arguments("bench_drafter", entry="dflash.probes.bench", policies=["layer"])
    found = estimated(capsys, *options, "--card", "4GiB:sm_90")
    assert [phase["name"] for phase in found["phases"]] == ["setup", "forward", "layer", "layer_packed"]
    assert found["failure"]["phase"] == "setup"
    assert found["failure"]["bytes"] == 4 * GIB
    assert found["failure"]["where"].startswith("ceilings.py:")


def test_failure_within_a_simulation_is_no_result_of_a_case(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_arguments: object, **_named: object) -> None:
        raise CannotSimulate("aten::unheard_of is not known; use torch 2.11")

    monkeypatch.setattr(workload, "random_row", refuses)
    assert estimate.main(arguments("backend_matrix", entry="dflash.probes.backends", backends=["flex"])) == 3
    assert capsys.readouterr() == ("", "dflash.estimate: aten::unheard_of is not known; use torch 2.11\n")


def test_alternatives_for_which_there_is_no_time_are_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimating, "ALTERNATIVES_S", -1.0)
    found = estimated(capsys, *arguments(loss_chunk_rows=256), "--card", SMALL_CARD, "--alternatives")
    assert [each["label"] for each in found["alternatives"]] == ["expandable_segments:True"]
    assert found["left_out"] == ["max_anchors=16", "max_anchors=8"]
    assert found["notes"][-1] == "not estimated, which would take longer: max_anchors=16; max_anchors=8"


def test_what_takes_no_cards_memory_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    dispatch = estimated(capsys, "--entry", "dflash.probes.dispatch", "--card", "h200")
    on_the_host = estimated(capsys, *arguments(device="cpu"))
    for found, told in ((dispatch, "nothing to estimate"), (on_the_host, "device is cpu")):
        assert (found["verdict"], found["peak_reserved_bytes"], found["phases"]) == ("no card", 0, [])
        assert told in found["notes"][0]
    assert estimate.main(arguments(device="cpu")) == 0
    assert capsys.readouterr().out.startswith("nothing to estimate: device is cpu")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--entry", "dflash.probes.oo"], "unknown entry 'dflash.probes.oo'; did you mean"),
        (["--entry", OOM, "--card", "rtx"], "--card: unknown card 'rtx'"),
        (["--entry", OOM, "--set", "hiden_size=3"], "did you mean 'hidden_size'"),
        (["--entry", OOM, "--params", "nowhere.json"], "nowhere.json"),
        (["--entry", OOM, "--alloc-conf", "expandable_segments:true"], "True or False"),
        (["--entry", OOM, "--memory-limit-bytes", "0"], "greater than 0"),
        ([], "--entry"),
    ],
)
def test_what_is_wrong_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], options: list[str], told: str
) -> None:
    assert told in refused(capsys, *options)


def test_without_torch_it_says_where_it_can_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "dflash.memory.trace", None)
    assert estimate.main(arguments()) == 3
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "torch cannot be loaded here" in captured.err
    assert "a Python that has torch" in captured.err


def test_parameters_are_refused_before_torch_is_loaded() -> None:
    code = "import sys; from dflash import estimate; sys.exit('torch' in sys.modules)"
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)}, timeout=60
    )


@pytest.mark.parametrize("words", [["estimate", "--entry", "dflash.probes.dispatch"], ["shapes"]])
def test_a_reader_that_leaves_ends_the_program_without_a_word(words: list[str], tmp_path: Path) -> None:
    params = tmp_path / "params.json"
    params.write_text("{}")
    reader, writer = os.pipe()
    os.close(reader)
    program = [sys.executable, "-m", f"dflash.{words[0]}", *words[1:], "--params", str(params)]
    environment = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        program, env=environment, stdout=writer, stderr=subprocess.PIPE, timeout=60, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, b"")


def test_every_entry_has_few_of_parameters_that_it_has() -> None:
    for entry in ENTRIES.values():
        assert {*entry.few} <= {field.name for field in dataclasses.fields(entry.params)}
        assert (entry.work is None) == (entry.why_not is not None)
