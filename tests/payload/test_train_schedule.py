"""The learning rate over a training, and what SIGTERM and SIGINT do to one."""

import math
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from dflash.training.config import OptimizerSettings, ScheduleSettings
from dflash.training.schedule import Schedule, make_schedule

PAYLOADS = Path(__file__).parents[2] / "payloads"
TRAINING = """
import sys, time
from dflash.training.signals import stop_on_signals
with stop_on_signals() as stop:
    print("step", flush=True)
    while not stop.is_asked:
        time.sleep(0.01)
    {then}
print("saved", flush=True)
sys.exit(stop.exit_code)
"""


def schedule_of(*, epochs_of: tuple[int, ...] = (), **settings: Any) -> Schedule:
    return make_schedule(
        ScheduleSettings(**settings), OptimizerSettings(lr=1.0), steps_in_epoch=epochs_of.__getitem__
    )


def test_rate_rises_in_a_line_and_falls_as_a_cosine_to_its_floor() -> None:
    rates = schedule_of(steps=100, warmup_share=0.2, min_lr_share=0.1)
    assert rates.warmup_steps == 20
    assert [rates.lr(step) for step in (0, 9, 19)] == pytest.approx([0.05, 0.5, 1.0])
    share = (60 - 19) / (100 - 19)
    assert rates.lr(60) == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi * share)) / 2)
    assert [rates.lr(step) for step in (100, 101, 10_000)] == pytest.approx([0.1, 0.1, 0.1])
    falling = [rates.lr(step) for step in range(19, 101)]
    assert falling == sorted(falling, reverse=True)
    assert falling[-2] > falling[-1]


@pytest.mark.parametrize("warmup_share", [0.0, 1.0])
@pytest.mark.parametrize("steps", [1, 2])
def test_shortest_trainings_have_a_rate(steps: int, warmup_share: float) -> None:
    rates = schedule_of(steps=steps, warmup_share=warmup_share)
    assert all(0 < rates.lr(step) <= 1 for step in range(steps))
    assert rates.lr(steps) == 0
    assert max(rates.lr(step) for step in range(steps)) == 1.0


def test_epochs_count_the_steps_of_the_data() -> None:
    assert schedule_of(epochs=3, epochs_of=(7, 8, 7, 100)).total_steps == 22
    with pytest.raises(ValueError, match="there is no step in them"):
        schedule_of(epochs=1, epochs_of=(0,))


def started(then: str = "pass") -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINING.format(then=then)],
        cwd=PAYLOADS,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "step\n"
    return process


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_lets_the_step_end_and_leaves_with_its_code(number: int, code: int) -> None:
    process = started()
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (code, "saved\n")
    assert err.startswith(f"{signal.Signals(number).name}: the step is finished and saved")


def test_a_signal_that_a_launcher_passes_on_is_the_same_request() -> None:
    process = started(then="time.sleep(0.3)")
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=20)
    assert out == "saved\n"
    assert process.returncode in {130, 143}  # the kernel decides which of two comes first


def test_a_signal_to_a_forked_child_is_not_its_parents() -> None:
    program = """
import multiprocessing, os, signal, time
from dflash.training.signals import stop_on_signals
context = multiprocessing.get_context("fork")
ready = context.Event()
def with_a_handler():
    signal.signal(signal.SIGTERM, lambda *_: os._exit(5))
    ready.set()
    time.sleep(60)
with stop_on_signals() as stop:
    plain = context.Process(target=time.sleep, args=(60,))
    plain.start()
    plain.terminate()
    own = context.Process(target=with_a_handler)
    own.start()
    ready.wait(20)
    own.terminate()
    for child in (plain, own):
        child.join(20)
    time.sleep(0.05)
    print(plain.exitcode, own.exitcode, stop.is_asked)
"""
    told = subprocess.run([sys.executable, "-c", program], cwd=PAYLOADS, check=True, capture_output=True)
    assert told.stdout == b"-15 5 False\n"


def test_a_second_signal_ends_it_at_once_though_no_python_runs() -> None:
    # One C call that holds the main thread, as a collective does that waits for a rank that is gone.
    process = started(then="import ctypes; ctypes.CDLL(None).sleep(60) and ctypes.CDLL(None).sleep(60)")
    process.send_signal(signal.SIGTERM)
    time.sleep(1.2)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (143, "")
    assert err.splitlines()[-1] == "SIGTERM again: leaving without saving"
