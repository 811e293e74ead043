"""A folder of checkpoints on a disk that may be full, in a process that may be killed at any moment.

A checkpoint is a folder `step-00000120`. It is written under another name, brought to the disk, and renamed:
what has that name is whole. `state.json`, written last, has each file's size, against copies that were cut
off. One process writes: the one that holds the folder.

Knows names, order, space and wholeness. What the files hold is `dflash.training.checkpoints`' business.
"""

import contextlib
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from dflash.notices import warn_once

FORMAT = 1
STATE = "state.json"
GIB = 2**30
JSON_BYTES = 2**20  # more than the file that is not tensors takes
PREFIX = "step-"
DISK_IS_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class CannotSave(Exception):
    """A checkpoint cannot be written; what was saved before is as it was."""


class CannotResume(Exception):
    """There are checkpoints, but this training cannot be continued from them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointFolder:
    """The checkpoints of one training, the `keep` newest of which stay."""

    path: Path
    keep: int = 2

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep the folder for this process alone; the kernel lets go of it however the process ends.

        Raises:
            CannotResume: another training holds it, or there can be no folder.
        """
        with contextlib.ExitStack() as stack:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                lock = stack.enter_context((self.path / ".lock").open("w"))
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise CannotResume(
                    f"another training writes to {self.path}; let it end, or name another run.folder"
                ) from None
            except OSError as error:
                raise CannotResume(f"cannot use {self.path} for checkpoints: {_reason(error)}") from error
            yield

    def newest(self) -> Path | None:
        """Return the newest whole checkpoint, None where there is none at all.

        Raises:
            CannotResume: there are some, and all of them are damaged.
        """
        faults = {}
        for found in reversed(self._all()):
            fault = _fault(found)
            if fault is None:
                return found
            faults[found.name] = fault
            warn_once("checkpoints", f"{found} is left out: {fault}")
        if faults:
            told = "; ".join(f"{name}: {fault}" for name, fault in faults.items())
            raise CannotResume(f"no checkpoint in {self.path} is whole ({told}); remove them to start anew")
        return None

    def require_none(self) -> None:
        """Refuse to start anew where another training's checkpoints would be taken for this one's.

        Raises:
            CannotResume: there are some.
        """
        found = self._all()
        if found:
            raise CannotResume(
                f"{self.path} holds checkpoints up to {found[-1].name}, and run.resume is false; "
                "set it to true, or name another run.folder"
            )

    def write(self, step: int, tensors: Mapping[str, dict[str, Tensor]], state: Mapping[str, Any]) -> Path:
        """Write a checkpoint of files of tensors and return its folder, on the disk when this returns.

        A step that is there and whole is not written again.

        Raises:
            CannotSave: the disk is full or does not take it.
        """
        final = self.path / f"{PREFIX}{step:08d}"
        if final.exists() and _fault(final) is None:
            return final
        needed = JSON_BYTES + sum(tensor.nbytes for group in tensors.values() for tensor in group.values())
        with self._telling(final.name, needed):
            self.path.mkdir(parents=True, exist_ok=True)
            self._remove_leftovers()
            self._require_space(needed)
            partial = self.path / f".{final.name}.partial"
            try:
                _write(partial, tensors, state)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
            self._put_away(final)
            partial.rename(final)
            _sync(self.path)
            self._remove_old(final)
        return final

    def _all(self) -> list[Path]:
        if not self.path.is_dir():
            return []
        return sorted(found for found in self.path.iterdir() if found.name.startswith(PREFIX))

    def _require_space(self, needed: int) -> None:
        if self._free_bytes() < needed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _free_bytes(self) -> int:
        there = next(folder for folder in (self.path, *self.path.absolute().parents) if folder.exists())
        return shutil.disk_usage(there).free

    @contextlib.contextmanager
    def _telling(self, name: str, needed: int) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError) as error:
            reason = f"cannot save {name} in {self.path}: {_reason(error)}"
            if not _is_full(error):
                raise CannotSave(reason) from error
            free = self._free_bytes()
            raise CannotSave(
                f"{reason}; it needs {needed / GIB:.3f} GiB and {free / GIB:.3f} are free, "
                "beside the checkpoints that are kept; make room or lower run.checkpoint_keep"
            ) from error

    def _remove_leftovers(self) -> None:
        """Remove what a killed process left: half a checkpoint, or one that was being removed."""
        for found in self.path.glob(f".{PREFIX}*"):
            shutil.rmtree(found, ignore_errors=True)

    def _remove_old(self, newest: Path) -> None:
        older = [found for found in self._all() if found.name < newest.name]
        whole = [found for found in older if _fault(found) is None]
        kept = whole[len(whole) - (self.keep - 1) :]
        for found in older:
            if found not in kept:
                self._put_away(found)

    def _put_away(self, checkpoint: Path) -> None:
        """Remove a checkpoint, which loses its name before its files."""
        if checkpoint.exists():
            removed = checkpoint.with_name(f".{checkpoint.name}.removed")
            checkpoint.rename(removed)
            shutil.rmtree(removed, ignore_errors=True)


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Return what a whole checkpoint holds beside tensors."""
    state: dict[str, Any] = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
    return state


def _write(folder: Path, tensors: Mapping[str, dict[str, Tensor]], state: Mapping[str, Any]) -> None:
    folder.mkdir()
    sizes = {}
    for name, group in tensors.items():
        path = folder / name
        save_file({key: tensor.contiguous() for key, tensor in group.items()}, path)
        sizes[name] = path.stat().st_size
        _sync(path)
    path = folder / STATE
    path.write_text(json.dumps({"format": FORMAT, "sizes": sizes, **state}), encoding="utf-8")
    _sync(path)
    _sync(folder)


def _fault(checkpoint: Path) -> str | None:
    """Return why a checkpoint cannot be taken, None if it is whole."""
    try:
        state = read_state(checkpoint)
        if state["format"] != FORMAT:
            return f"{STATE} is of format {state['format']}, this code reads {FORMAT}"
        for name, size in state["sizes"].items():
            found = (checkpoint / name).stat().st_size
            if found != size:
                return f"{name} has {found} bytes of {size}"
    except OSError as error:
        return _reason(error)
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{STATE} is damaged"
    return None


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


def _is_full(error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno in DISK_IS_FULL
    return any(f"os error {number}" in str(error) for number in DISK_IS_FULL)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
