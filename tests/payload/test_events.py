"""Events: whole JSON lines into the watcher's pipe, or nothing at all."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dflash import events

LONGEST_LINE_BYTES = 64 * 1024


class Watcher:
    """A pipe and a thread that reads it to its end."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        self._received = b""
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    @property
    def address(self) -> str:
        return f"{self.writer}:{os.fstat(self.writer).st_ino}"

    def received(self) -> bytes:
        """Return everything that was sent; nothing can be sent any more."""
        if self._thread.is_alive():
            os.close(self.writer)
            self._thread.join()
        return self._received

    def events(self) -> list[dict[str, Any]]:
        lines = self.received().decode("utf-8").splitlines()
        return [json.loads(line, parse_constant=pytest.fail) for line in lines]

    def _read(self) -> None:
        with open(self.reader, "rb") as pipe:  # noqa: PTH123  a descriptor has no path
            self._received = pipe.read()


@pytest.fixture
def watcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watcher]:
    """Give the process a watcher."""
    watcher = Watcher()
    monkeypatch.setenv("ORCH_EVENTS_FD", watcher.address)
    yield watcher
    watcher.received()


def test_metric_and_phase_are_one_json_line_each(watcher: Watcher) -> None:
    events.emit_phase("warmup")
    events.emit_metric("timed.loss", 1.25)
    events.emit_metric("timed.iteration_ms", 3.5, step=2)
    assert watcher.events() == [
        {"kind": "phase", "name": "warmup"},
        {"kind": "metric", "name": "timed.loss", "value": 1.25},
        {"kind": "metric", "name": "timed.iteration_ms", "value": 3.5, "step": 2},
    ]


@pytest.mark.parametrize(
    ("value", "sent"),
    [
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        (float("-inf"), "-inf"),
        (torch.tensor(float("nan")), "nan"),
        (np.float64("-inf"), "-inf"),
        (10**400, "inf"),
        (-(10**400), "-inf"),
    ],
)
def test_value_that_json_has_no_number_for_is_sent_as_a_string(
    watcher: Watcher, value: Any, sent: str
) -> None:
    events.emit_metric("timed.loss", value)
    assert watcher.events() == [{"kind": "metric", "name": "timed.loss", "value": sent}]


@pytest.mark.parametrize(
    ("value", "sent"),
    [
        (7, 7),
        (2**60 + 1, 2**60 + 1),
        (2**70, 2.0**70),
        (torch.tensor(0.5), 0.5),
        (torch.tensor(3), 3.0),
        (np.float32(0.25), 0.25),
        (np.int64(4), 4.0),
    ],
)
def test_value_is_anything_that_is_a_number(watcher: Watcher, value: Any, sent: float) -> None:
    events.emit_metric("a.b", value)
    assert watcher.events()[0]["value"] == sent


@pytest.mark.parametrize("name", ['über "all"\n\x1b[31m', "lone \ud800 and \udfff", "\U0001f40d\x00\u2028"])
def test_name_may_hold_any_character(watcher: Watcher, name: str) -> None:
    events.emit_phase(name)
    events.emit_metric(name, 1.0)
    assert [event["name"] for event in watcher.events()] == [name, name]


@pytest.mark.parametrize("character", ["x", "\U0001f40d"])
def test_name_too_long_for_a_line_is_cut(watcher: Watcher, character: str) -> None:
    events.emit_metric(character * 100_000, 1.0, step=3)
    events.emit_phase(character * 100_000)
    events.emit_phase("after")
    assert all(len(line) < LONGEST_LINE_BYTES for line in watcher.received().splitlines())
    metric, phase, after = watcher.events()
    assert (metric["value"], metric["step"], after["name"]) == (1.0, 3, "after")
    for event in (metric, phase):
        assert event["name"].rstrip("…") == character * (len(event["name"]) - 1)


def test_lines_of_many_threads_stay_whole(watcher: Watcher) -> None:
    def send(thread: int) -> None:
        for step in range(200):
            events.emit_metric(f"thread{thread}.{'x' * 4500}", step, step=step)

    threads = [threading.Thread(target=send, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = watcher.events()
    assert len(lines) == 800
    for number in range(4):
        steps = [line["step"] for line in lines if line["name"].startswith(f"thread{number}.")]
        assert steps == list(range(200))


@pytest.mark.parametrize("address", ["", "none", ":", "-1:5", "999:5", "9" * 30 + ":5", "1.5:2", ":5"])
def test_without_a_usable_descriptor_nothing_happens(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORCH_EVENTS_FD", address)
    events.emit_phase("warmup")
    events.emit_metric("timed.loss", 1.0)


def test_without_a_watcher_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ORCH_EVENTS_FD", raising=False)
    events.emit_metric("timed.loss", 1.0)


def test_descriptor_without_an_inode_is_not_written_to(
    watcher: Watcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    for address in (str(watcher.writer), f"{watcher.writer}:"):
        monkeypatch.setenv("ORCH_EVENTS_FD", address)
        events.emit_phase("warmup")
    assert watcher.received() == b""


def test_another_pipe_under_the_number_is_not_written_to(
    watcher: Watcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, other = os.pipe()
    monkeypatch.setenv("ORCH_EVENTS_FD", f"{watcher.writer}:{os.fstat(other).st_ino}")
    events.emit_phase("warmup")
    assert watcher.received() == b""
    os.close(reader)
    os.close(other)


def test_a_file_is_not_written_to_whatever_its_inode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "checkpoint").open("wb") as file:
        monkeypatch.setenv("ORCH_EVENTS_FD", f"{file.fileno()}:{os.fstat(file.fileno()).st_ino}")
        events.emit_phase("warmup")
    assert (tmp_path / "checkpoint").read_bytes() == b""


def test_number_that_becomes_a_file_while_the_process_runs_is_not_written_to(
    watcher: Watcher, tmp_path: Path
) -> None:
    events.emit_phase("before")
    number, kept = watcher.writer, os.dup(watcher.writer)
    with (tmp_path / "checkpoint").open("wb") as file:
        os.dup2(file.fileno(), number)
        events.emit_phase("lost")
    os.dup2(kept, number)
    os.close(kept)
    events.emit_phase("after")
    assert [event["name"] for event in watcher.events()] == ["before", "after"]
    assert (tmp_path / "checkpoint").read_bytes() == b""


CHILD_WITH_A_CHECKPOINT = """
import os, sys
from dflash import events
number = int(os.environ["ORCH_EVENTS_FD"].partition(":")[0])
with open(sys.argv[1], "wb") as file:
    os.dup2(file.fileno(), number)
    events.emit_phase("warmup")
    events.emit_metric("timed.loss", 1.0)
"""


def test_child_that_did_not_inherit_the_pipe_leaves_its_own_files_alone(
    watcher: Watcher, tmp_path: Path
) -> None:
    run_python(CHILD_WITH_A_CHECKPOINT, str(tmp_path / "checkpoint"))
    assert (tmp_path / "checkpoint").read_bytes() == b""
    assert watcher.received() == b""


FORK_WHILE_SENDING = """
import os, signal, threading
from dflash import events
held, release = threading.Event(), threading.Event()

def send():
    with events._lock:
        held.set()
        release.wait()

threading.Thread(target=send).start()
held.wait()
child = os.fork()
if child == 0:
    signal.alarm(20)  # ends a child that waits for the lock
    events.emit_phase("child")
    os._exit(0)
_, status = os.waitpid(child, 0)
release.set()
assert status == 0
"""


def test_child_forked_while_a_thread_sends_can_send_too(watcher: Watcher) -> None:
    run_python(FORK_WHILE_SENDING, pass_fds=[watcher.writer])
    assert watcher.events() == [{"kind": "phase", "name": "child"}]


def run_python(code: str, *arguments: str, pass_fds: list[int] | None = None) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run(
        [sys.executable, "-c", code, *arguments],
        check=True,
        env=environment,
        pass_fds=pass_fds or [],
        timeout=60,
    )


def test_reader_that_has_gone_is_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    monkeypatch.setenv("ORCH_EVENTS_FD", f"{writer}:{os.fstat(writer).st_ino}")
    os.close(reader)
    events.emit_phase("warmup")
    events.emit_metric("timed.loss", 1.0)
    os.close(writer)
