"""File systems of every size that is too small, on both sides: real ones, in memory, of a test's own.

Whatever they have no room for, the error says so, what is there stays right, and with more room everything
works without repair.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.project import Project

PAYLOAD = """
for i in range(20_000):
    print("line", i, "x" * 80)
"""
OUTPUT = "".join(f"line {i} {'x' * 80}\n" for i in range(20_000))
KIB = 1024
STORAGE, HOST = 4, 3

Choose = Callable[[Sequence[int]], list[int]]
Tally = Callable[[str], None]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    if os.geteuid() != 0:
        pytest.skip("only root can mount a file system")
    disk = Disk(tmp_path / "a small disk")
    yield disk
    disk.unmount()


class Disk:
    """A file system in memory at ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._is_mounted = False
        folder.mkdir()

    def make(self, size_bytes: int) -> None:
        """An empty one of that size."""
        self.unmount()
        self._mount("-t", "tmpfs", "-o", f"size={size_bytes},mode=0700", "tmpfs")
        self._is_mounted = True

    def grow(self, size_bytes: int) -> None:
        self._mount("-o", f"remount,size={size_bytes}")

    def unmount(self) -> None:
        if self._is_mounted:
            subprocess.run(["umount", "--lazy", self.folder], check=True)
            self._is_mounted = False

    def _mount(self, *arguments: str) -> None:
        subprocess.run(["mount", *arguments, self.folder], check=True)


def test_here(project: Project, disk: Disk, some_of: Choose, tally: Tally) -> None:
    path = project.experiment(PAYLOAD)
    home = {"ORCH_HOME": str(disk.folder)}
    for size in some_of(range(16 * KIB, 2000 * KIB, 48 * KIB)):
        disk.make(size)
        done = project.orch("run", path, "--host", "here", env=home)
        assert done.code in (0, STORAGE), (size, done.err)
        assert "Traceback" not in done.err, (size, done.err)
        disk.grow(64 * KIB**2)
        for run_id in [row["run_id"] for row in project.orch("ps", "--json", env=home).json]:
            project.orch("wait", run_id, env=home)
            row = project.orch("show", run_id, "--json", env=home).json["run"]
            assert row["state"] in ("succeeded", "refused"), (size, row)
            if row["state"] == "succeeded":
                raw = project.orch("logs", run_id, "--raw", "--stream", "stdout", env=home)
                assert raw.out == OUTPUT, size
                assert project.orch("verify", run_id, env=home).code == 0, size
        assert project.orch("run", path, "--host", "here", env=home).code == 0, size
        tally("the controller's disk is full, at any size")


def test_there(project: Project, disk: Disk, some_of: Choose, tally: Tally) -> None:
    project.write_inventory({"here": {"transport": "local", "root": str(disk.folder)}})
    path = project.experiment(PAYLOAD, on_disk_full="stop")
    for size in some_of([*range(16 * KIB, 512 * KIB, 32 * KIB), *range(8 * KIB**2, 11 * KIB**2, 128 * KIB)]):
        disk.make(size)
        done = project.orch("run", path, "--host", "here", "--json")
        assert done.code in (0, 1, HOST), (size, done.err)
        assert "Traceback" not in done.err, (size, done.err)
        row = project.runs()[0]
        assert row["state"] in ("succeeded", "killed", "refused"), (size, row)
        if row["state"] == "killed":
            assert "disk" in row["reason"], (size, row)
            assert OUTPUT.startswith(project.output(row["run_id"])), size
        disk.grow(64 * KIB**2)
        if row["state"] != "refused":
            assert project.orch("verify", row["run_id"]).code == 0, size
        assert project.orch("run", path, "--host", "here").code == 0, size
        tally("the host's disk is full, at any size")
