"""Removes from a host the runs that the controller chose, and what nobody needs then: objects, old
supervisors, turns.

The controller chooses runs by what `survey` says; this side lets none go that lives, waits, has processes
left, ended a moment ago or is not as it was surveyed. What goes is renamed away first and then deleted, so
that nothing half-removed stands where something is looked for. No link is followed. Starts hold ``gc.lock``
shared from the look for missing objects until their code is unpacked; objects go under it held exclusively.
"""

import hashlib
import os
import shutil
import stat
import time
from contextlib import suppress
from typing import Any, Dict, Iterator, List, Optional, Sequence, Set, Tuple

from . import locks
from .cuts import segment_name
from .listing import last_written_t, run_names, standing
from .rundir import RunDir, supervisor_digest
from .wire import PIECE_BYTES

MIN_AGE_S = 600.0
PATIENCE_S = 5.0
PAGE_ITEMS = 500
Item = Dict[str, Any]


def survey(root: str) -> Iterator[List[Item]]:
    """Yields pages of runs: how each stands, its age since it was last written, its size and its end."""
    page: List[Item] = []
    for name in sorted(run_names(root)):
        run = RunDir(root, name)
        item = {"run": name, "standing": standing(run), "age_s": time.time() - last_written_t(run)}
        page.append(dict(item, bytes=_size(run.path), end=_end(run)))
        if len(page) >= PAGE_ITEMS:
            yield page
            page = []
    yield page


def clean(root: str, chosen: Sequence[Item], is_real: bool) -> Iterator[List[Item]]:
    """Removes the ``chosen`` runs (their ``run`` and ``end``) and what is then not needed, or, unless
    ``is_real``, only looks; yields pages of what went and what stayed, and why.
    """
    runs = [(RunDir(root, choice["run"]), choice["end"]) for choice in chosen]  # a wrong name ends all of it
    ours = ("runs", "objects", "supervisor", "turns", "envs", "removing")
    links = [name for name in ours if _is_link(root, name)]
    for name in links:
        yield [_item("folder", name, 0, "it is a link, and nothing behind it was touched")]
    if links:
        return
    if not is_real:
        yield from _clean(root, runs, is_real=False)
        return
    fd = _take_removing(root)
    if fd is None:
        yield [_item("folder", "removing", 0, "another `orch gc` is at work here; wait for it")]
        return
    try:
        yield list(_sweep_removing(root))
        yield from _clean(root, runs, is_real=True)
    finally:
        os.close(fd)


def _clean(root: str, runs: Sequence[Tuple[RunDir, Any]], is_real: bool) -> Iterator[List[Item]]:
    gone = set()
    page = []
    for run, end in runs:
        size, why_kept = _remove_run(root, run, end, is_real)
        if why_kept is None:
            gone.add(run.run_id)
        page.append(_item("run", run.run_id, size, why_kept))
        if len(page) >= PAGE_ITEMS:
            yield page
            page = []
    yield page
    yield [_sweep_objects(root, gone, is_real)]
    yield list(_sweep_supervisors(root, is_real))
    yield list(_sweep_turns(root, is_real))
    yield list(_sweep_environments(root, gone, is_real))


def _remove_run(root: str, run: RunDir, end: Optional[List[int]], is_real: bool) -> Tuple[int, Optional[str]]:
    """Returns a run's size in bytes, and why it stays or None."""
    if os.path.islink(run.path) or not os.path.isdir(run.path):
        return 0, "it is not there"
    size = _size(run.path)
    if not is_real:
        return size, "it is alive" if run.is_alive else _why_not(run, end)
    try:
        fd = os.open(run.lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        return size, "its lock cannot be taken: %s" % error
    try:
        if not locks.take(fd, exclusive=True, patience_s=1.0):
            return size, "it is alive"
        why_kept = _why_not(run, end)
        if why_kept is not None:
            return size, why_kept
        run.tree().forget()  # a supervisor that was killed has left its cgroup
        aside = _put_aside(root, run.path)
    finally:
        os.close(fd)
    return size, _delete(aside)


def _why_not(run: RunDir, end: Optional[List[int]]) -> Optional[str]:
    """Tells why a run without a supervisor must stay; its lock may be held by us."""
    if not run.was_rebooted and run.tree().members():
        return "some of its processes still run"
    age_s = time.time() - last_written_t(run)
    if age_s < MIN_AGE_S:
        return "it ended less than %d min ago" % (MIN_AGE_S // 60)
    if _end(run) != end:
        return "its records are not those that were looked at before"
    if _holds_a_mount(run.path):
        return "something is mounted in it"
    return None


def _sweep_objects(root: str, gone: Set[str], is_real: bool) -> Item:
    os.makedirs(os.path.join(root, "objects"), mode=0o700, exist_ok=True)
    fd = os.open(
        os.path.join(root, locks.OBJECTS), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
    )
    try:
        if not locks.take(fd, exclusive=True, patience_s=PATIENCE_S):
            return _item("objects", "", 0, "runs are being started")
        needed = _needed(root, gone)
        count = size = 0
        for path, status in _files(os.path.join(root, "objects")):
            if os.path.basename(path) not in needed and _is_old(status):
                count, size = count + 1, size + status.st_size
                if is_real:
                    os.unlink(path)
        return _item("objects", str(count), size, None if count else "kept runs need all of them")
    finally:
        os.close(fd)


def _needed(root: str, gone: Set[str]) -> Set[str]:
    """Returns the objects of all runs that stay; of a run without a manifest its code's hashes."""
    needed: Set[str] = set()
    for name in run_names(root):
        if name not in gone:
            run = RunDir(root, name)
            manifest = _manifest(run)
            needed.update(manifest["objects"] if manifest else _code_hashes(run))
    return needed


def _sweep_supervisors(root: str, is_real: bool) -> Iterator[Item]:
    """Yields other versions: those of runs that live stay, and so does one that was used a moment ago."""
    living = [run for run in (RunDir(root, name) for name in run_names(root)) if run.is_alive]
    manifests = [_manifest(run) for run in living]
    used = {manifest["supervisor"] for manifest in manifests if manifest}
    for name, path, status in _folders(os.path.join(root, "supervisor")):
        if name == supervisor_digest():
            continue
        why_kept = None
        if name in used or None in manifests:
            why_kept = "a run that lives may need it"
        elif not _is_old(status):
            why_kept = "it was used less than %d min ago" % (MIN_AGE_S // 60)
        size = _size(path)
        if why_kept is None and is_real:
            why_kept = _delete(_put_aside(root, path))
        yield _item("supervisor", name, size, why_kept)


def _sweep_turns(root: str, is_real: bool) -> Iterator[Item]:
    """Yields queues in which no run is left; a queue in use is no matter of ours."""
    for name, path, _ in _folders(os.path.join(root, "turns")):
        size = _size(path)
        fd = _take_queue(path)
        try:
            if fd is not None and not _has_tickets(root, path):
                yield _item("turns", name, size, _delete(_put_aside(root, path)) if is_real else None)
        finally:
            if fd is not None:
                os.close(fd)


def _sweep_environments(root: str, gone: Set[str], is_real: bool) -> Iterator[Item]:
    """Yields the environments that were prepared: those that no run that stays has used or made may go, and
    so may what a preparation that was killed has left.
    """
    users: Dict[str, int] = {}
    for name in run_names(root):
        for digest in RunDir(root, name).environments if name not in gone else ():
            users[digest] = users.get(digest, 0) + 1
    for name, path, status in _folders(os.path.join(root, "envs")):
        try:
            last_used_t = os.lstat(path + ".lock").st_mtime
        except OSError:
            last_used_t = status.st_mtime
        age_s, why_kept = time.time() - last_used_t, None
        if name in users and os.path.exists(os.path.join(path, "done")):
            count = users[name]
            why_kept = "%d run%s here used it" % (count, "" if count == 1 else "s")
        elif age_s < MIN_AGE_S:
            why_kept = "it was used less than %d min ago" % (MIN_AGE_S // 60)
        size = _size(path)
        if why_kept is None:
            why_kept = _remove_environment(root, path, is_real)
        yield dict(_item("environment", name, size, why_kept), age_s=age_s)


def _remove_environment(root: str, path: str, is_real: bool) -> Optional[str]:
    """Returns why it stays or None; who waits for the lock finds out that its file has gone."""
    lock = path + ".lock"
    fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        if locks.is_held(path + ".next") or not locks.take(fd, exclusive=True):
            return "a run is using or preparing it"
        if not is_real:
            return None
        aside = _put_aside(root, path)
        os.unlink(lock)
        with suppress(FileNotFoundError):
            os.unlink(path + ".next")  # of one that was ended while it waited to prepare it
    finally:
        os.close(fd)
    return _delete(aside)


def _take_queue(path: str) -> Optional[int]:
    """Returns a descriptor that holds a queue's lock: who waits for it finds out that its folder has gone."""
    try:
        fd = os.open(os.path.join(path, "lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        return None  # its last run has just left and taken it away
    if locks.take(fd, exclusive=True):
        return fd
    os.close(fd)
    return None


def _has_tickets(root: str, path: str) -> bool:
    """Tells whether a ticket is held, or something of its run is left."""
    for name in os.listdir(path):
        run_id = name.split("-", 2)[-1]
        if name == "lock" or not run_id or run_id.startswith("."):
            continue
        if locks.is_held(os.path.join(path, name)) or RunDir(root, run_id).tree().members():
            return True
    return False


def _sweep_removing(root: str) -> Iterator[Item]:
    """Yields what an earlier attempt renamed away and did not live to delete."""
    for name, path, _ in _folders(os.path.join(root, "removing")):
        yield _item("leftover", name, _size(path), _delete(path))


def _take_removing(root: str) -> Optional[int]:
    """Returns a descriptor that keeps others from deleting what is put aside; None while they do."""
    folder = os.path.join(root, "removing")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    if locks.take(fd, exclusive=True):
        return fd
    os.close(fd)
    return None


def _put_aside(root: str, path: str) -> str:
    aside = os.path.join(root, "removing", "%s.%s" % (os.path.basename(path), os.urandom(6).hex()))
    os.rename(path, aside)
    return aside


def _delete(path: str) -> Optional[str]:
    """Deletes a folder that nobody looks for; returns why it could not, or None."""
    try:
        _open_up(path)
        shutil.rmtree(path)
    except (OSError, RecursionError) as error:  # a payload may nest folders as deep as it likes
        return "renamed to %s, and not deleted: %s" % (path, error)
    return None


def _open_up(folder: str) -> None:
    """A payload may have left folders that not even their owner can change."""
    folders = [folder]
    while folders:
        inside = folders.pop()
        os.chmod(inside, 0o700)
        with os.scandir(inside) as entries:
            folders += [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]


def _item(what: str, name: str, size: int, why_kept: Optional[str]) -> Item:
    return {"what": what, "name": name, "bytes": size, "removed": why_kept is None, "why": why_kept or ""}


def _manifest(run: RunDir) -> Optional[Dict[str, Any]]:
    noted = run.manifest
    try:
        return {"supervisor": noted["supervisor"], "objects": [entry[3] for entry in noted["entries"]]}
    except (KeyError, TypeError, IndexError):
        return None


def _code_hashes(run: RunDir) -> Iterator[str]:
    for path, _ in _files(run.code):
        total = hashlib.sha256()
        with open(path, "rb") as file:
            for part in iter(lambda: file.read(PIECE_BYTES), b""):
                total.update(part)
        yield total.hexdigest()


def _end(run: RunDir) -> Optional[List[int]]:
    """Returns the index of a run's last segment and its size in bytes."""
    try:
        indexes = [int(name[:6]) for name in os.listdir(run.records) if name.endswith(".jsonl")]
        return [max(indexes), os.lstat(os.path.join(run.records, segment_name(max(indexes)))).st_size]
    except (OSError, ValueError):
        return None


def _files(folder: str) -> Iterator[Tuple[str, os.stat_result]]:
    """Yields the regular files below ``folder``; `os.walk` follows no link."""
    for parent, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(parent, name)
            status = os.lstat(path)
            if stat.S_ISREG(status.st_mode):
                yield path, status


def _folders(folder: str) -> List[Tuple[str, str, os.stat_result]]:
    try:
        with os.scandir(folder) as entries:
            found = [entry for entry in entries if entry.is_dir(follow_symlinks=False)]
            return [(entry.name, entry.path, entry.stat(follow_symlinks=False)) for entry in found]
    except FileNotFoundError:
        return []


def _size(folder: str) -> int:
    """Returns the bytes that a folder's files take on the disk; `os.walk` gives up on folders nested deep."""
    size, folders = 0, [folder]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                found = list(entries)
        except OSError:
            continue  # gone meanwhile, or closed to us
        folders += [entry.path for entry in found if entry.is_dir(follow_symlinks=False)]
        for entry in found:
            try:
                size += entry.stat(follow_symlinks=False).st_blocks * 512
            except OSError:
                continue
    return size


def _is_old(status: os.stat_result) -> bool:
    return time.time() - status.st_mtime >= MIN_AGE_S


def _is_link(root: str, name: str) -> bool:
    return os.path.islink(os.path.join(root, name))


def _holds_a_mount(folder: str) -> bool:
    try:
        with open("/proc/self/mountinfo", "rb") as file:
            points = [line.split()[4] for line in file]
    except OSError:
        return False
    inside = os.fsencode(os.path.realpath(folder)) + b"/"
    escaped = inside.replace(b"\\", b"\\134").replace(b" ", b"\\040").replace(b"\t", b"\\011")
    return any((point + b"/").startswith(escaped.replace(b"\n", b"\\012")) for point in points)
