"""`python -m dflash.train` from files to a served drafter: whole, resumed, in threads and in processes.

A real target of transformers' with random weights, a real tokenizer with a chat template, real gloo.
"""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash import train
from dflash.serving import load_drafter
from dflash.target.capture import Target
from dflash.training.config_file import load_config
from dflash.training.step import DrafterStep
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3Config

from orchestrator.experiment import load_experiment
from tests.payload.chat_tokenizers import bytes_tokenizer
from tests.payload.probe_program import EXPERIMENTS, Finished, run_probe_here

PAYLOADS = Path(__file__).parents[2] / "payloads"
STEPS = 8
SETTINGS: dict[str, Any] = {
    "preset": "tiny",
    "drafter": {"layers": 1, "max_anchors": 8, "sliding_window": 64},
    "data": {"token_budget": 96, "max_documents": 4, "held_out_share": 0.2},
    "optimizer": {"micro_batches": 2},
    "schedule": {"steps": STEPS},
    "run": {"validate_every": 4, "validate_rows": 2, "checkpoint_every": 3, "log_every": 2},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target and its tokenizer, and beside it conversations."""
    folder = tmp_path_factory.mktemp("target")
    tokenizer = bytes_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer) + 3,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
    )
    make: Any = AutoModelForCausalLM
    with torch.random.fork_rng():
        torch.manual_seed(0)
        make.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    draw = random.Random(0)
    words = ["one", "two", "three", "four", "yes", "no"]
    lines = [
        {
            "messages": [
                {"role": "user", "content": draw.choice(words)},
                {"role": "assistant", "content": " ".join(draw.choices(words, k=draw.randint(3, 8)))},
            ]
        }
        for _ in range(40)
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


class Trained:
    """One run of the program, and what it left."""

    def __init__(self, folder: Path, done: Finished) -> None:
        self.folder, self.code, self.out, self.err = folder, done.code, done.out, done.err
        self._events = done.events

    def metric(self, name: str) -> dict[int, float]:
        """Return a metric's values by step."""
        told = (event for event in self._events if event.get("name") == name)
        return {event["step"]: event["value"] for event in told}

    def state(self, step: int = STEPS) -> dict[str, torch.Tensor]:
        """Return all tensors of a checkpoint but the generators'."""
        (checkpoint,) = (self.folder / "checkpoints").glob(f"*{step}")
        return {
            f"{path.stem}.{name}": tensor
            for path in sorted(checkpoint.glob("*.safetensors"))
            if path.stem != "generators"
            for name, tensor in load_file(path).items()
        }


def arguments(place: Path, folder: Path, **changed: Any) -> list[str]:
    """Return the program's arguments; `changed` are sections' settings."""
    settings = {name: dict(value) if isinstance(value, dict) else value for name, value in SETTINGS.items()}
    settings["target"] = {"path": str(place)}
    settings["data"]["files"] = [str(place / "chats.jsonl")]
    settings["run"]["folder"] = str(folder)
    for name, value in changed.items():
        settings.setdefault(name, {}).update(value)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "settings.json"
    path.write_text(json.dumps(settings))
    return ["--config", str(path)]


def run(place: Path, folder: Path, **changed: Any) -> Trained:
    """Train in this process to the end."""
    return Trained(folder, run_probe_here(train.main, arguments(place, folder, **changed)))


@pytest.fixture(scope="module")
def whole(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """One training without interruption."""
    trained = run(target, tmp_path_factory.mktemp("whole"))
    assert trained.code == 0, trained.err
    return trained


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], within: float = 0.0) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        difference = (tensor.double() - other[name].double()).abs().max()
        assert difference <= within * tensor.double().abs().max(), name


def test_a_training_tells_validates_saves_and_leaves_a_drafter_that_loads(whole: Trained) -> None:
    assert f"[train] {STEPS} steps done" in whole.out
    assert list(whole.metric("train.loss")) == [2, 4, 6, 8]
    assert list(whole.metric("held_out.avg_streak")) == [4, 8]
    assert len(list((whole.folder / "checkpoints").glob("step-*"))) == 2
    assert list((whole.folder / "tensorboard").iterdir())
    served = load_drafter(whole.folder / "drafter", max_anchors=8)
    assert served.block_size == 4
    assert torch.equal(served.fc.weight, whole.state()["weights.fc.weight"].to(torch.bfloat16))


def test_the_config_is_printed_in_full_and_gives_the_same_training(
    whole: Trained, target: Path, tmp_path: Path
) -> None:
    printed = whole.out[: whole.out.index("\n}\n") + 3]
    path = tmp_path / "printed.json"
    path.write_text(printed)
    again = Trained(
        tmp_path / "run",
        run_probe_here(train.main, ["--config", str(path), "--set", f"run.folder={tmp_path / 'run'}"]),
    )
    assert again.code == 0, again.err
    assert_same(again.state(), whole.state())


@pytest.mark.parametrize("step", [1, 4, 7])
def test_a_training_that_is_stopped_by_a_signal_and_resumed_is_the_uninterrupted_one(
    whole: Trained, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    take = DrafterStep.__call__
    taken: list[None] = []

    def take_and_stop(self: DrafterStep, *given: Any, **named: Any) -> Any:
        taken.append(None)
        if len(taken) == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return take(self, *given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(DrafterStep, "__call__", take_and_stop)
        stopped = run(target, tmp_path)
    assert stopped.code == 143
    assert f"[train] {step} steps done" in stopped.out
    resumed = run(target, tmp_path)
    assert resumed.code == 0, resumed.err
    assert f"[resume] after step {step}" in resumed.out
    assert_same(resumed.state(), whole.state())
    assert resumed.metric("train.tokens")[STEPS] == whole.metric("train.tokens")[STEPS]


def test_two_targets_and_two_drafters_in_one_process_train_as_one_of_each(
    whole: Trained, target: Path, tmp_path: Path
) -> None:
    pairs = run(target, tmp_path, workers={"targets": ["cpu", "cpu"], "drafters": ["cpu", "cpu"]})
    assert pairs.code == 0, pairs.err
    assert_same(pairs.state(), whole.state(), within=2e-5)
    assert pairs.metric("held_out.loss")[STEPS] == pytest.approx(
        whole.metric("held_out.loss")[STEPS], rel=1e-5
    )


def test_three_targets_feed_one_drafter_and_change_nothing(
    whole: Trained, target: Path, tmp_path: Path
) -> None:
    fed = run(target, tmp_path, workers={"targets": ["cpu"] * 3})
    assert fed.code == 0, fed.err
    assert_same(fed.state(), whole.state())


def test_two_processes_of_torchrun_train_as_one(whole: Trained, target: Path, tmp_path: Path) -> None:
    workers = {"targets": ["cpu", "cpu"], "drafters": ["cpu", "cpu"]}
    given = arguments(target, tmp_path, workers=workers)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *launcher, "-m", "dflash.train", *given],
        env={**os.environ, "PYTHONPATH": str(PAYLOADS), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    both = Trained(tmp_path, Finished(code=0, out=done.stdout, err=done.stderr, events=[]))
    assert_same(both.state(), whole.state(), within=2e-5)


def test_a_target_that_fails_ends_the_training_and_is_named(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_self: Target, _ids: Any, _lengths: Any) -> None:
        raise RuntimeError("the card fell off the bus")

    monkeypatch.setattr(Target, "capture", fail)
    monkeypatch.setattr("dflash.target.capture.check_behaviour", lambda *_: None)
    failed = run(target, tmp_path)
    assert failed.code == 1
    assert "target worker 0 failed: RuntimeError: the card fell off the bus" in failed.err


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"target": {"path": "nowhere"}}, "nowhere is not there"),
        ({"data": {"files": ["nothing.jsonl"]}}, "nothing.jsonl"),
        ({"drafter": {"target_layer_ids": [3]}}, "3"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(
    target: Path, tmp_path: Path, changed: dict[str, Any], words: str
) -> None:
    refused = run(target, tmp_path, **changed)
    assert refused.code == 2
    *_, told = refused.err.splitlines()  # transformers' progress bars come before
    assert told.startswith("dflash.train: ")
    assert words in told


def test_an_unknown_setting_is_refused_before_anything_is_loaded(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        train.main([*arguments(target, tmp_path), "--set", "drafter.blocksize=4"])
    assert left.value.code == 2
    told = "dflash.train: unknown setting 'drafter.blocksize'; did you mean 'drafter.block_size'?\n"
    assert capsys.readouterr().err == told


def test_a_drafter_with_heads_of_its_own_starts_another_training(target: Path, tmp_path: Path) -> None:
    heads = {"attention_heads": 2, "key_value_heads": 1, "head_dim": 8}
    first = run(target, tmp_path / "first", drafter=heads, schedule={"steps": 2})
    assert first.code == 0, first.err
    served = tmp_path / "first" / "drafter"
    drafter = load_drafter(served, max_anchors=8)
    assert (drafter.config.num_attention_heads, drafter.config.head_dim) == (2, 8)
    warm = run(target, tmp_path / "second", drafter={"warm_start": str(served)}, schedule={"steps": 2})
    assert warm.code == 0, warm.err
    assert warm.metric("train.loss")[2] < first.metric("train.loss")[2]


@pytest.mark.parametrize(
    ("name", "profile"),
    [
        ("train_tiny", None),
        ("train_smollm2", None),
        *(("train_pairs", profile) for profile in (None, "one-pair", "three-to-one", "tiny")),
    ],
)
def test_the_parameters_of_a_training_experiment_are_a_config(
    tmp_path: Path, name: str, profile: str | None
) -> None:
    loaded = load_experiment(EXPERIMENTS / f"{name}.yaml", profile=profile)
    path = tmp_path / "params.json"
    path.write_text(json.dumps(loaded.params))
    config = load_config(path)
    assert len(config.workers.drafters) * config.accumulation == config.optimizer.micro_batches
