"""Target workers: packed rows become captured states on their way to the drafter that takes them.

Knows a target, its place and the order of rows; what a drafter does with them is others' business.
"""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from dflash.data.row_source import RowSource
from dflash.data.rows import PackedRow
from dflash.target.capture import Target
from dflash.training.micro_batch import MicroBatch
from dflash.training.queue import Sink
from dflash.training.transfer import InTransit, carrier_between


@dataclass(frozen=True, kw_only=True, slots=True)
class Packet:
    """A row and its states, which may still be under way to the drafter's device."""

    row: PackedRow
    features: InTransit
    last_hidden: InTransit

    def receive(self) -> MicroBatch:
        """Return it as a micro-batch for what the caller's current stream does next."""
        row = self.row
        return MicroBatch(
            epoch=row.epoch,
            number=row.number,
            input_ids_1S=row.input_ids_1S,
            loss_mask_1S=row.loss_mask_1S,
            lengths=row.lengths,
            features_1SF=self.features.receive(),
            last_hidden_1SH=self.last_hidden.receive(),
        )


class Feeder:
    """One target, which its own worker and validations share."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._capturing = threading.Lock()

    def capture(self, row: PackedRow, device: torch.device) -> Packet:
        """Run a row through the target and send its states to a device."""
        with self._capturing:
            captured = self.target.capture(row.input_ids_1S, row.lengths)
            carrier = carrier_between(captured.features_1SF.device, device)
            return Packet(
                row=row,
                features=carrier.send(captured.features_1SF),
                last_hidden=carrier.send(captured.last_hidden_1SH),
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """Which rows are whose: every `members`-th one, from `first` on."""

    first: int = 0
    members: int = 1


def feed(
    sink: Sink[Packet],
    feeder: Feeder,
    rows: RowSource,
    share: Share,
    *,
    epoch: int,
    number: int,
    devices: tuple[torch.device, ...],
    seen: Callable[[PackedRow], None],
) -> None:
    """Hand over a worker's share of all rows from (epoch, number) on, epoch after epoch, without end.

    Row n goes to the device of the drafter that takes it, the n-th of `devices` in turn, and is `seen` first.
    """
    while True:
        sink.end_epoch(epoch, rows.number_of_rows(epoch))
        for row in rows.rows(epoch, number, worker=share.first, workers=share.members, epochs=epoch + 1):
            seen(row)
            sink.put(epoch, row.number, feeder.capture(row, devices[row.number % len(devices)]))
        epoch, number = epoch + 1, 0


def held_out(
    feeder: Feeder, rows: RowSource, share: Share, *, most: int, device: torch.device
) -> Iterator[MicroBatch]:
    """Yield a drafter's share of the first rows that validate, the same each time."""
    for row in rows.rows(worker=share.first, workers=share.members, epochs=1):
        if row.number >= most:
            return
        yield feeder.capture(row, device).receive()
