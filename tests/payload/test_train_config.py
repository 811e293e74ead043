"""A training's config: presets, files and assignments refusals by path, JSON that loads back."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from dflash.training.config import TrainConfig
from dflash.training.config_file import differences, help_text, load_config, parse_config, render
from dflash.training.presets import PRESETS

GIVEN = {"target": {"path": "model"}, "data": {"files": ["a.jsonl"]}}


def written(folder: Path, text: str, name: str = "config.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def loaded(folder: Path, *assignments: str, **values: Any) -> TrainConfig:
    path = written(folder, json.dumps({"preset": "tiny", **GIVEN, **values}), "config.json")
    return load_config(path, assignments)


def refusal(folder: Path, *assignments: str, **values: Any) -> str:
    with pytest.raises(ValueError) as refused:  # noqa: PT011  the caller looks at the message
        loaded(folder, *assignments, **values)
    return str(refused.value)


def test_assignments_overrule_the_file_and_the_file_its_preset(tmp_path: Path) -> None:
    config = loaded(tmp_path, "optimizer.eps=1e-6", optimizer={"lr": 1e-5, "eps": 1e-7})
    assert config.drafter.layers == PRESETS["tiny"]["drafter"]["layers"] == 2
    assert (config.optimizer.lr, config.optimizer.eps) == (1e-5, 1e-6)
    assert loaded(tmp_path, "preset=smollm2").drafter.target_layer_ids == (1, 8, 14, 21, 27)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_loads_and_is_printed_in_full_as_what_loads_back(preset: str, tmp_path: Path) -> None:
    config = loaded(tmp_path, preset=preset)
    told = json.loads(render(config))
    assert parse_config(told) == config
    assert load_config(written(tmp_path, render(config), "full.json")) == config
    assert {f"{section}.{name}" for section, settings in told.items() for name in settings} == {
        f"{section.name}.{setting.name}"
        for section in dataclasses.fields(TrainConfig)
        for setting in dataclasses.fields(type(getattr(config, section.name)))
    }


def test_the_originals_pairs_are_a_preset(tmp_path: Path) -> None:
    config = loaded(tmp_path, preset="qwen3.6-27b")
    assert config.drafter.target_layer_ids == (1, 16, 31, 46, 61)
    assert (config.data.token_budget, config.drafter.max_anchors, config.drafter.block_size) == (
        8192,
        512,
        16,
    )
    assert config.workers.target_devices == (("cuda:0",), ("cuda:1",))
    assert config.accumulation == 1


def test_yaml_says_the_same_as_json_and_numbers_are_numbers(tmp_path: Path) -> None:
    path = written(
        tmp_path, "preset: tiny\ntarget: {path: model}\ndata:\n  files: [a.jsonl]\noptimizer: {lr: 6e-4}\n"
    )
    assert load_config(path) == loaded(tmp_path, optimizer={"lr": 6e-4})


def test_settings_may_be_spelled_by_their_paths_as_a_matrix_does(tmp_path: Path) -> None:
    assert loaded(tmp_path, **{"optimizer.lr": 1e-5}) == loaded(tmp_path, optimizer={"lr": 1e-5})
    said_twice = refusal(tmp_path, **{"optimizer.lr": 1e-5, "optimizer": {"lr": 1e-5}})
    assert said_twice == "optimizer.lr is given twice"


def test_an_assignment_given_twice_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path, "optimizer.lr=1", "optimizer.lr=2") == "optimizer.lr is given twice"
    assert refusal(tmp_path, "optimizer.lr=1", 'optimizer={"lr": 2}') == "optimizer.lr is given twice"


def test_a_target_may_be_spread_over_devices(tmp_path: Path) -> None:
    config = loaded(tmp_path, workers={"targets": ["cuda:0+cuda:1", "cuda:2"], "drafters": ["cuda:3"]})
    assert config.workers.target_devices == (("cuda:0", "cuda:1"), ("cuda:2",))


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("optimizer.micro_batches=0", "optimizer.micro_batches is 0; it must be at least 1"),
        ("optimizer.lrr=1", "unknown setting 'optimizer.lrr'; did you mean 'optimizer.lr'?"),
        ("lr=1", "unknown setting 'lr'; did you mean 'optimizer.lr'?"),
        ("drafter.lr=1", "unknown setting 'drafter.lr'; did you mean 'optimizer.lr'?"),
        ("optimiser.lr=1", "unknown setting 'optimiser.lr'; did you mean 'optimizer.lr'?"),
        ("runn=1", "unknown setting 'runn'; did you mean 'run'?"),
        ("preset=tyny", "unknown preset 'tyny'; did you mean 'tiny'?"),
        ("optimizer.lr=fast", "optimizer.lr is 'fast'; it must be a finite number"),
        ("optimizer.lr=NaN", "optimizer.lr is nan; it must be a finite number"),
        ("optimizer.betas=[0.9]", "optimizer.betas are [0.9]; they must be two"),
        ("drafter.layers=true", "drafter.layers is True; it must be an integer"),
        ("drafter.recompute=mpl", "unknown drafter.recompute 'mpl'; did you mean 'mlp'?"),
        ("data.held_out_share=1", "data.held_out_share is 1.0; it must be at least 0.0 and less than 1.0"),
        ("loss.weights=d-pace", "loss.weights is d-pace, which weighs the cross-entropy alone, and "),
        ("data.files=[]", "data.files is empty; name at least one"),
        ("run=3", "run is 3; it must hold settings"),
        ('workers.drafters=["gpu"]', "workers.drafters holds 'gpu'; a device is cpu, cuda or cuda:N"),
        ('workers.drafters=["cpu","cpu"]', "optimizer.micro_batches is 1, but workers.drafters names 2; "),
        ("schedule.epochs=2", "schedule.steps is 100 and schedule.epochs is 2; give one of the two"),
        ("data.max_document_tokens=512", "data.max_document_tokens is 512, but data.token_budget is 256; "),
        ("drafter.sliding_window=3", "drafter.sliding_window is 3, but drafter.block_size is 4; "),
    ],
)
def test_what_does_not_fit_is_refused_at_load_by_its_path(
    assignment: str, message: str, tmp_path: Path
) -> None:
    assert refusal(tmp_path, assignment).startswith(message)


def test_what_must_be_given_is_asked_for_with_its_meaning() -> None:
    with pytest.raises(ValueError, match=r"^target\.path is missing; .* a GGUF file"):
        load_config(None, ["preset=tiny"])


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("c.json", '{"optimizer": {"lr": 1, "lr": 2}}', "lr is given twice"),
        ("c.yaml", "optimizer:\n  lr: 1\n  lr: 2\n", r"c\.yaml:3: lr is given twice"),
        ("c.json", "[1]", "expected a JSON object"),
        ("c.yml", "- 1\n", "expected a mapping of settings, found list"),
        ("c.yaml", "optimizer: {lr: 1\n", r"c\.yaml:\d: "),
        ("c.yaml", "run: !!python/object:os.system {}\n", "could not determine a constructor"),
        ("c.yaml", "3: 4\n", "unknown setting '3'"),
    ],
)
def test_a_file_that_says_no_config_is_refused_with_its_place(
    name: str, text: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        load_config(written(tmp_path, text, name))


def test_without_pyyaml_a_yaml_file_is_refused_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ValueError, match=r"pyyaml is not installed here; write the same as JSON"):
        load_config(written(tmp_path, "preset: tiny\n"))
    assert loaded(tmp_path).drafter.layers == 2


def test_help_tells_every_setting_with_its_meaning(tmp_path: Path) -> None:
    text = help_text()
    for section, settings in json.loads(render(loaded(tmp_path))).items():
        for name in settings:
            heading = text.index(f"\n{section}.{name}: ")
            assert text[heading:].splitlines()[2].strip(), f"{section}.{name} has no meaning"


def test_differences_are_those_that_change_the_training(tmp_path: Path) -> None:
    before = loaded(tmp_path)
    now = loaded(
        tmp_path, "optimizer.lr=1", "run.checkpoint_keep=9", 'data.files=["b"]', "drafter.compile=true"
    )
    assert differences(before, before) == []
    assert differences(before, now) == [
        'data.files was ["a.jsonl"], is ["b"]',
        "optimizer.lr was 0.003, is 1.0",
    ]


def test_a_config_is_read_without_torch(tmp_path: Path) -> None:
    program = "import sys; from dflash.training import config_file; sys.exit('torch' in sys.modules)"
    payloads = Path(__file__).parents[2] / "payloads"
    subprocess.run([sys.executable, "-c", program], cwd=payloads, check=True)
