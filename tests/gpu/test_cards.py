"""The host's own driver: which cards it shows, who is on them, and their leases."""

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from orchestrator.supervisor import gpus, nvml
from orchestrator.supervisor.leases import Leases
from orchestrator.supervisor.rundir import RunDir

pytestmark = pytest.mark.gpu


@pytest.fixture
def roots() -> Iterator[tuple[str, str]]:
    folders = (tempfile.mkdtemp(), tempfile.mkdtemp())
    yield folders
    for folder in folders:
        shutil.rmtree(folder)


def test_library_and_nvidia_smi_show_the_same_cards(card: torch.device) -> None:
    assert card.type == "cuda"
    by_library, by_program = gpus.cards(), gpus._from_nvidia_smi()
    assert [(each.number, each.uuid, each.name, each.node) for each in by_library] == [
        (each.number, each.uuid, each.name, each.node or by_library[each.number].node) for each in by_program
    ]
    assert Path(by_library[0].node or "").is_char_device()


def test_memory_that_somebody_holds_shows_and_so_does_what_the_card_does(card: torch.device) -> None:
    held = torch.empty(3 * 2**30, dtype=torch.uint8, device=card)
    seen = gpus.cards()[0]
    assert seen.used_mib >= held.numel() // 2**20
    library = nvml.Nvml()
    usage = library.usage(library.handles()[0])
    assert usage.utilisation_percent is not None
    assert usage.temperature_c is not None


def test_lease_on_the_cards_node_holds_for_another_root_and_another_process(
    card: torch.device, roots: tuple[str, str]
) -> None:
    assert card.type == "cuda"
    present = [gpus.cards()[0]._replace(used_mib=0, processes=())]
    mine, theirs = (Leases(RunDir(root, "run"), ["0"], is_shared=False) for root in roots)
    assert mine.try_take(present) == present
    assert theirs.try_take(present) == []
    assert "another user or container of this machine" in theirs.obstacles[0].says
    other = subprocess.run(["flock", "--nonblock", present[0].node or "", "true"], check=False)
    assert other.returncode == 1
    mine.leave()
    assert theirs.try_take(present) == present
    theirs.leave()
