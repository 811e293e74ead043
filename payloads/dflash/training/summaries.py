"""TensorBoard's event files, where tensorboard is installed: its SummaryWriter, and nothing of our own.

A training that continues hides what an interrupted one wrote of later steps.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash.notices import warn_once


class Summaries:
    """Numbers by step in a folder's event files; without a folder or tensorboard, nowhere."""

    def __init__(self, folder: Path | None, *, steps_done: int) -> None:
        self._writer = None if folder is None else _writer(folder, steps_done)

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Write numbers to the file, a name's first part as TensorBoard's group."""
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(name.replace(".", "/", 1), value, step)
            self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()


def _writer(folder: Path, steps_done: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  tensorboard need not be there
    except ImportError:
        warn_once("tensorboard", "it is not installed here, so no event files are written")
        return None
    return SummaryWriter(str(folder), purge_step=steps_done + 1 if steps_done else None)
