"""One project on this machine: its inventory, and the folder where its runs, objects and ledger are kept."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from orchestrator.bundle import ObjectStore
from orchestrator.errors import StorageError, UsageError
from orchestrator.folders import make_private
from orchestrator.inventory import Inventory, find_inventory, load_inventory
from orchestrator.ledger import Ledger
from orchestrator.run_folder import RunFolder


def find_project(inventory: Path | None = None) -> Inventory:
    """Returns the named inventory, or the nearest one upward; makes nothing.

    Raises:
        UsageError: there is none, or it cannot be read.
    """
    try:
        here = Path.cwd()
    except FileNotFoundError as error:
        raise UsageError("the current folder is gone; change to one that exists") from error
    return load_inventory(inventory or find_inventory(here))


def find_home(inventory: Path | None = None, home: Path | None = None) -> tuple[Inventory, Path]:
    """Returns the inventory and the folder that `Workspace.open` uses, made when it is not there.

    Raises:
        UsageError, StorageError: as there.
    """
    loaded = find_project(inventory)
    folder = (home or loaded.path.parent / ".orch").absolute()
    try:
        make_private(folder)
    except OSError as error:
        raise StorageError(f"{folder}: cannot keep runs there: {error}; set ORCH_HOME") from error
    return loaded, folder


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """One project on this machine: its inventory, and the folder where its runs are kept.

    ``lost_ledger``: there were runs and no ledger, and the new one knows none of them.
    """

    inventory: Inventory
    home: Path
    ledger: Ledger
    store: ObjectStore
    lost_ledger: bool = False

    @classmethod
    def open(cls, inventory: Path | None = None, home: Path | None = None) -> Self:
        """Opens what ``--inventory`` and ``ORCH_HOME`` name: by default the nearest inventory.yaml upward,
        and ``.orch`` beside it, made 0700 when it is not there.

        Raises:
            UsageError: no inventory, or one that cannot be read.
            StorageError: the folder or the ledger cannot be used.
        """
        loaded, folder = find_home(inventory, home)
        ledger = folder / "ledger.db"
        lost_ledger = not ledger.exists() and any((folder / "runs").glob("*"))
        return cls(
            inventory=loaded,
            home=folder,
            ledger=Ledger.open(ledger),
            store=ObjectStore(folder),
            lost_ledger=lost_ledger,
        )

    @property
    def project(self) -> Path:
        """Returns the folder that holds inventory.yaml and payloads/."""
        return self.inventory.path.parent

    def folder(self, run_id: str) -> RunFolder:
        """Returns a run's folder on this machine."""
        return RunFolder(self.home, run_id)

    def close(self) -> None:
        """Closes the ledger."""
        self.ledger.close()
