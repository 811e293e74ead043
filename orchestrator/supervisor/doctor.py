"""The facts about this host that decide whether runs can work here, as plain values: nothing is judged.

Each is looked at as a run would meet it: in its root folder, with the interpreter that runs payloads, in the
environment that a payload gets. What is made for a look (a file, a cgroup) is removed again.
"""

import importlib.util
import json
import os
import re
import select
import signal
import stat
import subprocess
import sys
import tempfile
import time
from typing import Any, Dict, List, Optional, Set, Tuple

from . import cgroups, device_nodes, environment, gpus, processes, torch_probe
from .leases import is_leased
from .sampling import Look

TORCH_LIMIT_S = 90.0
CARDS_LIMIT_S = 40.0
MAX_WORDS = 2000
REAPING_S = 1.0
CANNOT = "orch-doctor"  # the id of no run
MODULES = (
    "_bz2",
    "_ctypes",
    "_lzma",
    "_multiprocessing",
    "_posixshmem",
    "_ssl",
    "ctypes",
    "dataclasses",
    "multiprocessing",
    "tarfile",
    "typing",
    "zipfile",
    "zlib",
)
_PROFILES = ("/etc/environment", "/etc/profile", "~/.profile", "~/.bash_profile", "~/.bashrc", "~/.zshenv")
_OF_A_RUN = ("PYTHONPATH", "ORCH_RUN_ID", "ORCH_ARTIFACTS")


def gather(root: str, asked: Dict[str, Any]) -> Dict[str, Any]:
    """Returns the facts; ``asked`` has the host's ``env``, ``venv``, ``workdir``, ``import_container_env``
    and the ``allocator`` settings to try.
    """
    zombies = _unreaped()
    cards = _cards(root)
    env = _payload_env(asked, cards["cards"])
    facts = {
        "missing_modules": [name for name in MODULES if importlib.util.find_spec(name) is None],
        "root": dict(_folder(root), **_room(root)),
        "venv": asked["venv"] and _venv(asked["venv"]),
        "workdir": asked["workdir"] and _folder(asked["workdir"]),
        "shm_bytes": _size("/dev/shm"),  # noqa: S108  (its size alone)
        "cgroup": _cgroup(),
        "container": _container(),
        "nvidia": device_nodes.look(),
        "cards": cards,
        "torch": probe_torch(env, root, asked["allocator"]),
        "alloc_conf": _alloc_conf(),
    }
    facts["unreaped"] = _never_reaped(zombies)
    return facts


def probe_torch(
    env: Dict[str, str], cwd: str, settings: Dict[str, str], limit_s: float = TORCH_LIMIT_S
) -> Dict[str, Any]:
    """Returns what `torch_probe` found, how it ended (None: not within ``limit_s``) and its last words."""
    probe = os.path.join(os.path.dirname(os.path.abspath(__file__)), "torch_probe.py")
    child = subprocess.Popen(
        [sys.executable, probe, json.dumps(settings)],
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        out, err = child.communicate(timeout=limit_s)
        status: Optional[int] = child.returncode
    except subprocess.TimeoutExpired:
        status = None
        os.killpg(child.pid, signal.SIGKILL)
        out, err = child.communicate()
    return {
        "found": torch_probe.found_in(out.decode("utf-8", "replace")),
        "status": status,
        "limit_s": limit_s,
        "said": err.decode("utf-8", "replace").strip()[-MAX_WORDS:],
    }


def _payload_env(asked: Dict[str, Any], cards: List[Dict[str, Any]]) -> Dict[str, str]:
    """Returns what a payload that asks for every card gets, without what belongs to one run."""
    container: Dict[str, str] = {}
    if asked["import_container_env"]:
        container, _ = environment.of_container(processes.environment(1))
    job = {"run_id": CANNOT, "env": asked["env"], "venv": asked["venv"]}
    env = environment.build(job, os.environ, "", "", [], {}, container)
    env["CUDA_VISIBLE_DEVICES"] = ",".join(card["uuid"] for card in cards)
    return {name: value for name, value in env.items() if name not in _OF_A_RUN}


def _folder(path: str) -> Dict[str, Any]:
    path = os.path.expanduser(path)
    try:
        found = os.stat(path)
    except OSError as error:
        return {"path": path, "error": error.strerror}
    is_folder = stat.S_ISDIR(found.st_mode)
    return {
        "path": path,
        "error": None if is_folder else "not a folder",
        "mode": stat.S_IMODE(found.st_mode),
        "is_writable": os.access(path, os.W_OK | os.X_OK),
    }


def _venv(path: str) -> Dict[str, Any]:
    path = os.path.expanduser(path)
    marks = ("pyvenv.cfg", "conda-meta")
    return {"path": path, "is_venv": any(os.path.exists(os.path.join(path, mark)) for mark in marks)}


def _room(path: str) -> Dict[str, Any]:
    """Returns what is free for us below ``path``, and why a small file cannot be kept there, if it cannot."""
    room = os.statvfs(path)
    try:
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(b"\0" * 4096)
            file.flush()
            os.fsync(file.fileno())
        refusal = None
    except OSError as error:
        refusal = error.strerror
    return {
        "free_bytes": room.f_bavail * room.f_frsize,
        "total_bytes": room.f_blocks * room.f_frsize,
        "free_inodes": room.f_favail,
        "total_inodes": room.f_files,
        "refusal": refusal,
    }


def _size(path: str) -> Optional[int]:
    try:
        room = os.statvfs(path)
    except OSError:
        return None
    return room.f_blocks * room.f_frsize if os.path.ismount(path) else None


def _cgroup() -> Dict[str, Any]:
    """Makes a cgroup as a run does, lets a process move in, and looks where its memory kills are counted."""
    place = cgroups.place("%s-%d" % (CANNOT, os.getpid()))
    made = cgroups.make(place)
    try:
        can_enter = made is not None and _can_enter(made)
        counter = processes.OomCounter(made if can_enter else None)
        is_own = can_enter and os.path.exists(os.path.join(str(made), "memory.events"))
        return {
            "place": place,
            "can_enter": can_enter,
            "is_own": is_own,
            "scope": counter.scope,
        }
    finally:
        cgroups.remove(made)


def _can_enter(path: str) -> bool:
    fd = cgroups.opened(path)
    if fd is None:
        return False
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.write(fd, b"0")
            status = 0
        finally:
            os._exit(status)
    os.close(fd)
    return os.waitpid(child, 0)[1] == 0


def _container(root: str = "/") -> Dict[str, Any]:
    """Returns which kind of container this is, None for none, and the name of its first process."""
    kind = processes.environment(1).get("container")
    kind = kind or processes.read_text(os.path.join(root, "run/systemd/container")).strip() or None
    for mark, name in (("run/.containerenv", "podman"), (".dockerenv", "docker")):
        if kind is None and os.path.exists(os.path.join(root, mark)):
            kind = name
    return {"kind": kind, "init": processes.read_text("/proc/1/comm").strip()}


def _unreaped() -> Dict[Tuple[int, int], str]:
    """Returns the ended processes whose parent is process 1, by pid and start time, with their names."""
    return {
        (process.pid, process.started): processes.read_text("/proc/%d/comm" % process.pid).strip()
        for process in processes.everything()
        if process.parent == 1 and process.state == "Z"
    }


def _never_reaped(zombies: Dict[Tuple[int, int], str]) -> List[str]:
    """Returns the names of those that are left of ``zombies``, once process 1 has had time for them."""
    give_up_at = time.monotonic() + REAPING_S
    while True:
        still = _unreaped()
        left = sorted(name for key, name in zombies.items() if key in still)
        if not left or time.monotonic() >= give_up_at:
            return left
        time.sleep(0.05)


def _cards(root: str) -> Dict[str, Any]:
    """Returns the cards that programs can see, which do not answer, which programs use their memory, and
    which runs were given which of them.
    """
    try:
        found = _look()
    except gpus.DeviceError as error:
        is_there = any(
            os.access(os.path.join(folder, "nvidia-smi"), os.X_OK) for folder in os.get_exec_path()
        )
        return {
            "cards": [],
            "error": str(error),
            "is_smi_there": is_there,
            "lost": [],
            "programs": [],
            "runs": {},
        }
    usable = [card for card in found if not card.fault and not card.has_instances]
    return {
        "cards": [
            dict(entry, is_leased=is_leased(root, card))
            for entry, card in zip(gpus.as_record(usable), usable)
        ],
        "error": None,
        "is_smi_there": True,
        "lost": [
            card.fault if card.number == gpus.NO_CARD else "%d: %s" % (card.number, card.fault)
            for card in found
            if card.fault
        ],
        "programs": [
            {"uuid": card.uuid, "pid": pid, "name": (processes.command_line(pid) or [""])[0]}
            for card in found
            for pid, _ in card.processes
        ],
        "runs": _runs(),
    }


def _look() -> List[gpus.Card]:
    """Returns the cards; a driver that hangs costs `CARDS_LIMIT_S` and no other check."""
    look = Look()
    give_up_at = time.monotonic() + CARDS_LIMIT_S
    while look.is_open:
        left_s = give_up_at - time.monotonic()
        if left_s <= 0:
            look.end()
            raise gpus.DeviceError("the NVIDIA driver does not answer within %d s" % CARDS_LIMIT_S)
        if select.select([look.fd], [], [], left_s)[0]:
            look.read()
    return look.cards()


def _runs() -> Dict[str, List[str]]:
    """Returns for each card the ids of the runs whose living processes were given it."""
    found: Dict[str, Set[str]] = {}
    for process in processes.everything():
        env = processes.environment(process.pid) if process.is_running else {}
        run_id = env.get(processes.RUN_ID_VARIABLE)
        for uuid in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if run_id else ():
            found.setdefault(uuid, set()).add(str(run_id))
    return {uuid: sorted(ids) for uuid, ids in found.items() if uuid}


def _alloc_conf() -> List[Dict[str, str]]:
    """Returns where allocator settings are made that no run gets: name of the place, and the variable."""
    names = environment.OF_THE_RUN
    found = [
        {"place": place, "name": name}
        for place, env in (("process 1", processes.environment(1)), ("the log-in", os.environ))
        for name in names
        if env.get(name)
    ]
    for path in _PROFILES:
        text = processes.read_text(os.path.expanduser(path))
        found += [
            {"place": path, "name": name}
            for name in names
            if re.search(r"^[^#\n]*\b%s=" % name, text, re.MULTILINE)
        ]
    return found
