"""Folders that are for this user alone, whatever the umask is (stdlib only)."""

from __future__ import annotations

from pathlib import Path

__all__ = ["make_private"]


def make_private(folder: Path) -> None:
    """Makes ``folder`` and what is missing above it, each 0700; what is there already stays as it is."""
    if not folder.is_dir():
        make_private(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
