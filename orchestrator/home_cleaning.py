"""What `orch gc` removes from this machine: mirrors of runs whose end is known, and what no run needs then.

A run's row stays in the ledger with its verdict, and so do the observations that a row can be made from, and
the files that were fetched. What
goes is renamed away first and then deleted; no link is followed. One `orch gc` works here at a time, and a
start that has no row in the ledger yet is protected by when its code was last used.
"""

from __future__ import annotations

import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from orchestrator.cleaning import Item, Policy, Surveyed, choose, known_row
from orchestrator.errors import StorageError, UnknownName
from orchestrator.ledger import RunRow
from orchestrator.lifecycle import is_settled
from orchestrator.run_folder import RunFolder
from orchestrator.supervisor.locks import take
from orchestrator.workspace import Workspace

HOME = "home"
JUST_USED_S = 3600.0


def clean_home(workspace: Workspace, policy: Policy, *, is_real: bool) -> list[Item]:
    """Removes from this machine the mirrors that the policy lets go, and what then no run needs here.

    Raises:
        StorageError: another `orch gc` is at work here, or this disk fails.
    """
    try:
        with _alone(workspace.home):
            if is_real:
                _empty(workspace.home / "removing")
            mirrors = list(_mirrors(workspace, policy, is_real=is_real))
            gone = {item.name for item in mirrors if item.goes}
            return [*mirrors, *_artifacts(workspace, gone), *_objects(workspace, gone, is_real=is_real)]
    except OSError as error:
        raise StorageError(f"{workspace.home}: cannot be cleaned up: {error}") from error


def _mirrors(workspace: Workspace, policy: Policy, *, is_real: bool) -> Iterator[Item]:
    now = time.time()
    found = []
    for name, path in _folders(workspace.home / "runs"):
        files = list(_files(path / "records"))
        if files:
            age_s = now - max(status.st_mtime for _, status in files)
            size_bytes = sum(status.st_blocks * 512 for _, status in files)
            found.append(
                Surveyed(run_id=name, standing="ended", age_s=age_s, size_bytes=size_bytes, end=None)
            )
    why_kept = choose(found, policy, lambda run: _why_not_from_here(workspace, run.run_id))
    for run in sorted(found, key=lambda run: run.age_s):
        why = why_kept.get(run.run_id, "")
        if not why and is_real:
            why = _forget(workspace, workspace.folder(run.run_id))
        yield Item(
            place=HOME, what="mirror", name=run.run_id, size_bytes=run.size_bytes, age_s=run.age_s, why=why
        )


def _why_not_from_here(workspace: Workspace, run_id: str) -> str:
    row = known_row(workspace, run_id)
    if row is None:
        return "not in the ledger: `orch ledger rebuild` enters it"
    return "" if is_settled(row.state) else "its end is not known here"


def _forget(workspace: Workspace, folder: RunFolder) -> str:
    """Removes a run's mirror; returns why it could not, or nothing."""
    fd = os.open(folder.path / "pull.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        if not take(fd, exclusive=True):
            return "another command is mirroring it"
        folder.forget_seals()
        _delete(workspace.home, folder.records)
    finally:
        os.close(fd)
    return ""


def _artifacts(workspace: Workspace, gone: set[str]) -> Iterator[Item]:
    """Yields the files that were fetched of runs without a mirror: what they are worth is not known."""
    for name, path in _folders(workspace.home / "runs"):
        files = list(_files(path / "artifacts"))
        if files and (name in gone or next(_files(path / "records"), None) is None):
            size_bytes = sum(status.st_blocks * 512 for _, status in files)
            why = f"fetched files are for you to remove: {path / 'artifacts'}"
            yield Item(place=HOME, what="artifacts", name=name, size_bytes=size_bytes, why=why)


def _objects(workspace: Workspace, gone: set[str], *, is_real: bool) -> Iterator[Item]:
    """Yields what the runs that stay do not need: their code and uncommitted changes do."""
    store, home = workspace.store, workspace.home
    bundles, objects = set(), set()
    for row in _kept_rows(workspace, gone):
        if row is None:
            yield Item(place=HOME, what="objects", name="", size_bytes=0, why="a run is not in the ledger")
            return
        bundles.add(row.bundle)
        bundles.update(spec["bundle"] for spec in row.job.get("setup") or ())
        objects.add(row.job.get("provenance", {}).get("diff_sha256"))
    manifests = [(path, status) for path, status in _files(home / "bundles") if path.suffix == ".json"]
    for path, status in manifests:
        if path.stem in bundles or _is_just_used(status):
            bundles.add(path.stem)
            try:
                objects.update(entry.sha256 for entry in store.load_manifest(path.stem).entries)
            except (UnknownName, StorageError) as error:
                yield Item(place=HOME, what="objects", name="", size_bytes=0, why=str(error))
                return
    yield from _sweep("bundles", [found for found in manifests if found[0].stem not in bundles], is_real)
    unneeded = [
        (path, status)
        for path, status in _files(home / "objects")
        if path.name not in objects and not _is_just_used(status)
    ]
    yield from _sweep("objects", unneeded, is_real)


def _sweep(what: str, files: list[tuple[Path, os.stat_result]], is_real: bool) -> Iterator[Item]:
    """Removes files, but for those that somebody has taken into use since they were looked at."""
    if is_real:
        files = [(path, status) for path, status in files if _was_removed(path, status)]
    size_bytes = sum(status.st_size for _, status in files)
    why = "" if files else "runs that stay need all of them"
    yield Item(place=HOME, what=what, name=str(len(files)), size_bytes=size_bytes, why=why)


def _was_removed(path: Path, seen: os.stat_result) -> bool:
    try:
        now = path.stat()
        if (now.st_atime_ns, now.st_mtime_ns) != (seen.st_atime_ns, seen.st_mtime_ns):
            return False
        path.unlink()
    except FileNotFoundError:
        return False
    return True


def _kept_rows(workspace: Workspace, gone: set[str]) -> Iterator[RunRow | None]:
    """Yields the rows of the runs that stay: those with a mirror, and all whose end is not known."""
    yield from workspace.ledger.open_runs()
    for name, path in _folders(workspace.home / "runs"):
        if name not in gone and next(_files(path / "records"), None) is not None:
            yield known_row(workspace, name)


def _is_just_used(status: os.stat_result) -> bool:
    return time.time() - max(status.st_atime, status.st_mtime) < JUST_USED_S


def _folders(folder: Path) -> list[tuple[str, Path]]:
    try:
        with os.scandir(folder) as entries:
            return [
                (entry.name, Path(entry.path)) for entry in entries if entry.is_dir(follow_symlinks=False)
            ]
    except FileNotFoundError:
        return []


def _files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yields the regular files below ``folder``, itself no link; `os.walk` follows none."""
    if folder.is_symlink():
        return
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            status = path.lstat()
            if stat.S_ISREG(status.st_mode):
                yield path, status


def _delete(home: Path, folder: Path) -> None:
    aside = home / "removing"
    aside.mkdir(mode=0o700, exist_ok=True)
    target = aside / f"{folder.parent.name}.{secrets.token_hex(6)}"
    folder.rename(target)
    shutil.rmtree(target)


def _empty(folder: Path) -> None:
    """Deletes what an earlier attempt renamed away and did not live to delete."""
    for _, path in _folders(folder):
        shutil.rmtree(path)


@contextmanager
def _alone(home: Path) -> Iterator[None]:
    fd = os.open(home / "gc.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        if not take(fd, exclusive=True):
            raise StorageError(f"{home}: another `orch gc` is at work here; wait for it")
        yield
    finally:
        os.close(fd)
