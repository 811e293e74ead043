"""A view beside its puller: what it has shown is out before it waits, and a flood goes first."""

import time
from pathlib import Path

import pytest

from orchestrator import following as module
from orchestrator.following import Following, Watcher
from orchestrator.inventory import Host
from orchestrator.run_folder import RunFolder

HOST = Host(name="box", transport="ssh", address="box")
FAR_S = 3600.0


class Flushes(Watcher):
    def __init__(self) -> None:
        self.count = 0

    def waiting(self) -> None:
        self.count += 1


def test_what_was_shown_is_flushed_before_the_view_waits_for_more(tmp_path: Path) -> None:
    following, watcher = Following(RunFolder(tmp_path, "r1"), HOST), Flushes()
    batches = following.batches(watcher)
    assert next(batches) == []
    assert watcher.count == 1


def test_a_view_gives_way_to_a_flood_for_a_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    puller = Following(RunFolder(tmp_path, "r1"), HOST)._puller
    assert puller is not None
    begin = time.monotonic()
    puller._busy_until = begin + FAR_S
    monkeypatch.setattr(module, "GIVE_WAY_S", 0.01)
    puller.wait_for_lull()
    assert begin + 0.01 <= time.monotonic() < begin + FAR_S


def test_a_view_that_is_left_gives_way_to_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    puller = Following(RunFolder(tmp_path, "r1"), HOST)._puller
    assert puller is not None
    begin = time.monotonic()
    puller._busy_until = begin + FAR_S
    monkeypatch.setattr(module, "GIVE_WAY_S", FAR_S)
    puller.leave()
    puller.wait_for_lull()
    assert time.monotonic() < begin + FAR_S
