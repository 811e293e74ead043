"""Tensors between devices, as far as a machine without cards goes; tests/gpu has the rest."""

import sys
import time
from pathlib import Path

import pytest
import torch
from dflash.training import transfer
from dflash.training.transfer import PEER_CHECK_TIMEOUT_S, carrier_between, failure_of, why_not_direct

HOST = torch.device("cpu")


def test_on_the_host_what_is_there_is_handed_over() -> None:
    value = torch.arange(5)
    moved = carrier_between(HOST, HOST).send(value)
    assert moved.receive() is value
    moved.release(HOST)


def program(text: str) -> list[str]:
    return [sys.executable, "-c", text]


def test_a_trial_that_ends_well_is_no_failure_whatever_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert failure_of(program("import dflash.training.seeds"), 60) is None


def test_a_trial_that_finds_wrong_bits_or_dies_is_one() -> None:
    assert failure_of(program("raise SystemExit(1)"), 60) == "a trial ended with status 1"
    assert failure_of(program("import os; os.kill(os.getpid(), 11)"), 60) == "a trial ended with status -11"


def test_a_trial_that_hangs_is_ended_after_its_time() -> None:
    started_s = time.monotonic()
    reason = failure_of(program("import signal, time; signal.signal(15, lambda *_: 0); time.sleep(60)"), 0.3)
    assert reason == "a trial did not end within 0.3 s"
    assert time.monotonic() - started_s < 10


def test_cards_are_tried_where_the_driver_offers_a_direct_way(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = torch.device("cuda", 2), torch.device("cuda", 3)
    tried = []

    def failing(command: list[str], timeout_s: float) -> str:
        tried.append((command[1:], timeout_s))
        return "a trial ended with status 1"

    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: True)
    monkeypatch.setattr(transfer, "failure_of", failing)
    assert why_not_direct(first, second) == "a trial ended with status 1"
    assert tried == [(["-m", "dflash.training.peer_check", "2", "3"], PEER_CHECK_TIMEOUT_S)]
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: False)
    assert why_not_direct(first, second) == "the driver offers no direct way"
    assert len(tried) == 1
