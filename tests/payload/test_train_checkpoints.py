"""Checkpoints: interrupted, or killed while it saves, a training ends bit by bit as without that."""

import contextlib
import dataclasses
import functools
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash.notices import DFlashWarning
from dflash.optimizer import MasterAdamW
from dflash.training import checkpoint_folder
from dflash.training.checkpoint_folder import CannotResume, CannotSave, CheckpointFolder
from dflash.training.checkpoints import find_checkpoint
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.payload.cases import FULL, fresh_drafter
from tests.payload.small_training import (
    CASE,
    STEPS,
    Interrupted,
    Training,
    assert_same,
    config_of,
    seed_generators,
)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[torch.dtype], dict[str, Tensor]]:
    @functools.cache
    def of(dtype: torch.dtype) -> dict[str, Tensor]:
        return Training(tmp_path_factory.mktemp("whole"), dtype=dtype, every=10 * STEPS).run().everything()

    return of


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_interrupted_anywhere_and_continued_it_ends_bit_by_bit_as_if_never(
    dtype: torch.dtype, uninterrupted: Callable[[torch.dtype], dict[str, Tensor]], tmp_path: Path
) -> None:
    expected = uninterrupted(dtype)
    chance = random.Random(str(dtype))
    for _ in range(3):
        left = iter(range(chance.randint(4, 9)))

        def interrupt(left: Iterator[int] = left) -> None:
            if next(left, None) is None:
                raise Interrupted

        with contextlib.suppress(Interrupted):
            Training(tmp_path / "run", dtype=dtype, every=2).run(interrupt)
        seed_generators()
        assert len(list((tmp_path / "run").iterdir())) in {1, 2}
    assert_same(Training(tmp_path / "run", dtype=dtype, every=2).run().everything(), expected)


def killed_at(call: int, folder: Path) -> None:
    """Train, and die at the n-th call that a save makes on the disk."""
    left = iter(range(call))

    def dying(real: Callable[..., Any]) -> Callable[..., Any]:
        def instead(*arguments: Any, **options: Any) -> Any:
            if next(left, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options)

        return instead

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", dying(os.fsync))
        patch.setattr(Path, "rename", dying(Path.rename))
        patch.setattr(Path, "mkdir", dying(Path.mkdir))
        patch.setattr(shutil, "rmtree", dying(shutil.rmtree))
        patch.setattr(checkpoint_folder, "save_file", dying(save_file))
        Training(folder).run()


def test_killed_at_any_moment_of_a_save_it_continues_from_the_newest_whole_one(
    uninterrupted: Callable[[torch.dtype], dict[str, Tensor]], tmp_path: Path
) -> None:
    expected = uninterrupted(torch.bfloat16)
    folder, newest = tmp_path / "run", ""
    # A save makes about 20 calls: each third one of the first save, then of the second.
    for call in range(0, 36, 3):
        child = multiprocessing.get_context("fork").Process(target=killed_at, args=(call, folder))
        child.start()
        child.join(60)
        assert child.exitcode == -signal.SIGKILL
        found = CheckpointFolder(path=folder).newest()
        assert found is None or found.name >= newest
        newest = found.name if found else newest
    assert "step-00000002" <= newest < f"step-{STEPS:08d}"
    assert_same(Training(folder).run().everything(), expected)
    assert sorted(found.name for found in folder.iterdir()) == ["step-00000007", "step-00000008"]


@pytest.fixture(scope="module")
def finished_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Training(tmp_path_factory.mktemp("finished") / "run", keep=3).run().folder


@pytest.fixture
def finished(finished_folder: Path, tmp_path: Path) -> Training:
    """A training that has done all its steps, continued in a folder of its own."""
    return Training(shutil.copytree(finished_folder, tmp_path / "run"), keep=3)


def test_a_folder_is_one_trainings_alone(tmp_path: Path) -> None:
    folder = CheckpointFolder(path=tmp_path / "run")
    with folder.held(), pytest.raises(CannotResume, match=r"another training writes to .*run; "):  # noqa: SIM117
        with CheckpointFolder(path=tmp_path / "run").held():
            pytest.fail("two hold it")
    with folder.held():
        assert folder.newest() is None


def cut_off(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def test_a_checkpoint_that_was_cut_off_is_left_out_and_said(finished: Training) -> None:
    training = finished
    folder = CheckpointFolder(path=training.folder)
    names = ["step-00000006", "step-00000007", "step-00000008"]
    assert sorted(found.name for found in training.folder.iterdir()) == names
    cut_off(training.folder / names[2] / "exp_avg.safetensors")
    cut_off(training.folder / names[1] / "state.json")
    with pytest.warns(DFlashWarning) as said:
        assert folder.newest() == training.folder / names[0]
    assert re.search(r"step-00000008 is left out: exp_avg\S+ has \d+ bytes of \d+", str(said[0].message))
    assert "step-00000007 is left out: state.json is damaged" in str(said[1].message)
    # What replaces it is whole again.
    assert training.save() == training.folder / names[2]
    assert folder.newest() == training.folder / names[2]


def test_damaged_checkpoints_alone_do_not_start_a_training_anew(finished: Training) -> None:
    for checkpoint in finished.folder.iterdir():
        (checkpoint / "weights.safetensors").unlink()
    with pytest.warns(DFlashWarning), pytest.raises(CannotResume, match=r"no checkpoint in .* is whole"):
        Training(finished.folder)


def test_nothing_in_a_checkpoint_is_pickled(finished: Training) -> None:
    folder = finished.save()
    for file in folder.iterdir():
        if file.suffix == ".json":
            json.loads(file.read_text())
        else:
            assert load_file(file)
    names = {file.name for file in folder.iterdir()}
    assert names == {"state.json"} | {
        f"{name}.safetensors" for name in ("weights", "master", "exp_avg", "exp_avg_sq", "step", "generators")
    }
    assert "embed_tokens.weight" not in load_file(folder / "weights.safetensors")


def test_another_training_is_not_continued_and_the_settings_are_named(finished: Training) -> None:
    training = finished
    same = config_of(training.folder, "run.checkpoint_keep=7", "drafter.recompute=layer")
    assert find_checkpoint(training.checkpoints, same) is not None
    other = config_of(training.folder, "optimizer.lr=1", "data.token_budget=99")
    with pytest.raises(CannotResume) as refused:
        find_checkpoint(training.checkpoints, other)
    assert "data.token_budget was 256, is 99; optimizer.lr was 0.003, is 1.0; " in str(refused.value)
    with pytest.raises(CannotResume, match="holds checkpoints up to step-00000008"):
        training.checkpoints.require_none()
    CheckpointFolder(path=training.folder / "other").require_none()


def test_another_drafter_is_refused_and_stays_as_it_is(finished: Training) -> None:
    found = find_checkpoint(finished.checkpoints, finished.config)
    assert found is not None
    for case, dtype, message in (
        (
            dataclasses.replace(CASE, layer_types=(FULL,)),
            torch.bfloat16,
            "weights are in one of the two",
        ),
        (dataclasses.replace(CASE, hidden_size=16), torch.bfloat16, r"was saved as \[12"),
        (CASE, torch.float32, r"bfloat16, this drafter's is .* torch\.float32"),
    ):
        drafter = fresh_drafter(case).to(dtype)
        before = [parameter.clone() for parameter in drafter.parameters()]
        with pytest.raises(CannotResume, match=message):
            found.restore(drafter, MasterAdamW(drafter.parameters(), lr=1.0))
        assert all(torch.equal(now, was) for now, was in zip(drafter.parameters(), before, strict=True))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("only root can mount a file system")
    folder = tmp_path / "small disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", folder], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.parametrize("is_noticed_before", [True, False])
def test_a_full_disk_says_what_was_needed_and_keeps_what_was_saved(
    is_noticed_before: bool, finished_folder: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(finished_folder / f"step-{STEPS:08d}", small_disk / "run" / f"step-{STEPS:08d}")
    training = Training(small_disk / "run")
    saved = training.checkpoints.newest()
    assert saved is not None
    stranger = small_disk / "of somebody else"
    stranger.write_bytes(bytes(shutil.disk_usage(small_disk).free - 30_000))
    if not is_noticed_before:  # as with quotas, which no file system tells
        monkeypatch.setattr(CheckpointFolder, "_require_space", lambda *_: None)
    training.progress = dataclasses.replace(training.progress, step=STEPS + 1)
    with pytest.raises(CannotSave, match=r"No space left .* it needs 0\.00\d GiB and 0\.000 are free"):
        training.save()
    assert [found.name for found in (small_disk / "run").iterdir()] == [saved.name]
    stranger.unlink()
    assert training.save().name == f"step-{STEPS + 1:08d}"


def test_a_folder_that_cannot_be_written_says_so(finished: Training) -> None:
    shutil.rmtree(finished.folder)
    finished.folder.write_text("a file")
    with pytest.raises(CannotSave, match=r"cannot save step-00000008 in .*: .*File exists"):
        finished.save()
