"""Tensors from one device to another without either waiting on the host.

Between cards a copy runs on streams of its own, ordered by events: after what the source's default stream
was given before, and before what the receiver does next. Everything else is expected on default streams.

Direct copies between cards corrupt data or hang on some machines (an IOMMU that is not passed through, a
broken switch). So each pair of cards is tried once, in a child process that may hang (`peer_check`); where
that does not end well, copies go through pinned host memory. On the CPU what is there already is handed over
as it is.
"""

import functools
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from dflash.notices import warn_once
from dflash.transfer import to_device

PEER_CHECK_TIMEOUT_S = 90.0  # loading torch and two contexts included
REAP_S = 5.0  # a process that hangs inside the driver may never end


class InTransit(Protocol):
    """A tensor under way."""

    def receive(self) -> Tensor:
        """Return it; what the caller's current stream does next comes after the copy."""

    def release(self, source: torch.device) -> None:
        """Let what the source's current stream does next come after the copy, before it overwrites."""


class Carrier(Protocol):
    """A way from one device to another."""

    def send(self, tensor: Tensor) -> InTransit:
        """Start the copy of what the source's default stream has made."""


def carrier_between(source: torch.device, target: torch.device) -> Carrier:
    """Return the way between two devices; between two cards they are tried out, once in a process."""
    if source.type == target.type == "cuda" and source != target:
        return _between_cards(source, target)
    return PlainCarrier(target)


class PlainCarrier:
    """Within a device, and between host and card."""

    def __init__(self, target: torch.device) -> None:
        self._target = target

    def send(self, tensor: Tensor) -> "Arrived":
        """Copy, or hand over what is there."""
        is_up = tensor.device.type == "cpu" and self._target.type == "cuda"
        return Arrived(to_device(tensor, self._target) if is_up else tensor.to(self._target))


class Arrived:
    """A tensor that is there, or is there for its stream."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def receive(self) -> Tensor:
        """Return it."""
        return self._tensor

    def release(self, source: torch.device) -> None:
        """Do nothing: streams have it in order."""


class PeerCarrier:
    """From card to card directly."""

    def __init__(self, source: torch.device, target: torch.device) -> None:
        self._streams = torch.cuda.Stream(source), torch.cuda.Stream(target)
        self._source, self._target = source, target

    def send(self, tensor: Tensor) -> "Copied":
        """Start the copy on both cards' own streams."""
        leaving, arriving = self._streams
        leaving.wait_stream(torch.cuda.current_stream(self._source))
        # torch copies on the source's current stream and lets the target's wait for it.
        with torch.cuda.stream(leaving), torch.cuda.stream(arriving):
            copy = tensor.to(self._target, non_blocking=True)
            arrived = arriving.record_event()
        tensor.record_stream(leaving)
        return Copied(copy, arrived)


class StagedCarrier:
    """From card to card through pinned host memory."""

    def __init__(self, source: torch.device, target: torch.device) -> None:
        self._streams = torch.cuda.Stream(source), torch.cuda.Stream(target)
        self._source, self._target = source, target

    def send(self, tensor: Tensor) -> "Copied":
        """Start both copies; the second waits for the first on the card."""
        leaving, arriving = self._streams
        leaving.wait_stream(torch.cuda.current_stream(self._source))
        # torch's allocator of pinned memory keeps a buffer until the streams that use it are done.
        staged = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        with torch.cuda.stream(leaving):
            staged.copy_(tensor, non_blocking=True)
            left = leaving.record_event()
        tensor.record_stream(leaving)
        with torch.cuda.stream(arriving):
            arriving.wait_event(left)
            copy = staged.to(self._target, non_blocking=True)
            arrived = arriving.record_event()
        return Copied(copy, arrived)


class Copied:
    """A copy between cards that its event says the end of."""

    def __init__(self, copy: Tensor, arrived: torch.cuda.Event) -> None:
        self._copy, self._arrived = copy, arrived

    def receive(self) -> Tensor:
        """Return the copy, and keep its memory from being reused before the receiver is done with it."""
        stream = torch.cuda.current_stream(self._copy.device)
        stream.wait_event(self._arrived)
        self._copy.record_stream(stream)
        return self._copy

    def release(self, source: torch.device) -> None:
        """Let the source wait for the copy before it goes on."""
        torch.cuda.current_stream(source).wait_event(self._arrived)


_choosing = threading.Lock()


def _between_cards(source: torch.device, target: torch.device) -> Carrier:
    with _choosing:
        return _chosen(source, target)


@functools.cache
def _chosen(source: torch.device, target: torch.device) -> Carrier:
    reason = why_not_direct(source, target)
    if reason is None:
        return PeerCarrier(source, target)
    warn_once("transfer", f"copies from {source} to {target} go through host memory: {reason}")
    return StagedCarrier(source, target)


def why_not_direct(source: torch.device, target: torch.device) -> str | None:
    """Return why two cards should not copy directly, or None."""
    if not torch.cuda.can_device_access_peer(source, target):
        return "the driver offers no direct way"
    cards = [str(device.index) for device in (source, target)]
    return failure_of([sys.executable, "-m", "dflash.training.peer_check", *cards], PEER_CHECK_TIMEOUT_S)


def failure_of(command: Sequence[str], timeout_s: float) -> str | None:
    """Run a program that may hang for good; return why it did not end well, or None."""
    folder = str(Path(__file__).parents[2])
    paths = [folder, *filter(None, [os.environ.get("PYTHONPATH")])]
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )
    try:
        status = child.wait(timeout_s)
    except subprocess.TimeoutExpired:
        child.kill()
        _reap(child)
        return f"a trial did not end within {timeout_s:g} s"
    return None if status == 0 else f"a trial ended with status {status}"


def _reap(child: "subprocess.Popen[bytes]") -> None:
    try:
        child.wait(REAP_S)
    except subprocess.TimeoutExpired:
        warn_once("transfer", f"process {child.pid} hangs inside the driver and cannot be ended")
