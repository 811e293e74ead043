"""The environment a payload gets: a stated base, what the run asked for, and what this host decides (pure).

Nothing of the supervisor's own environment reaches the payload but `BASE_VARIABLES`, and nothing of PID 1's
unless the host's entry asks for it. The run's own variables win over the defaults; those that carry the run's
provenance cannot be overridden (the controller refuses them as input).
"""

import hashlib
import json
import os
import re
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

from .gpus import Card

BASE_VARIABLES = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "TZ", "TMPDIR")
DEFAULTS = {
    "CUDA_MODULE_LOADING": "LAZY",
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    "PYTHONUNBUFFERED": "1",
    "PYTHONFAULTHANDLER": "1",
    "PYTHONDONTWRITEBYTECODE": "1",  # a bundle's tree stays what it was
}
DEFAULTS_OF_RANKS = {"OMP_NUM_THREADS": "1"}  # as torchrun: each would take all cores
MEMORY_LIMIT_VARIABLE = "ORCH_MEMORY_LIMIT_BYTES"
OF_ITS_USER = ("HOME", "USER", "LOGNAME", "SHELL", "PWD", "OLDPWD", "SHLVL", "TERM", "HOSTNAME", "_")
OF_THE_RUN = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
SECRET_NAME = re.compile("TOKEN|SECRET|PASS|KEY|CREDENTIAL|AUTH|COOKIE|SESSION|PRIVATE", re.IGNORECASE)
_MIB = 1024 * 1024


def of_container(first: Mapping[str, str]) -> Tuple[Dict[str, str], List[str]]:
    """Returns what a payload gets of the environment of PID 1, and the names that look like secrets.

    Those stay out: no record would mask their values. Who needs one names it as a secret of the run.
    """
    kept = {name: value for name, value in first.items() if name not in OF_ITS_USER + OF_THE_RUN}
    hidden = sorted(name for name in kept if SECRET_NAME.search(name))
    return {name: value for name, value in kept.items() if name not in hidden}, hidden


def build(
    job: Mapping[str, Any],
    base: Mapping[str, str],
    code_dir: str,
    artifacts: str,
    cards: Sequence[Card],
    secrets: Mapping[str, str],
    container: Mapping[str, str],
    prepared: Sequence[str] = (),
) -> Dict[str, str]:
    """Returns what all processes of a run get; ``secrets`` are the variables that no record may show.

    ``container`` is what `of_container` returned, or empty; it wins over the base alone. A virtual
    environment comes before both on PATH, those that were ``prepared`` before that, the last one first, and
    the run's own PATH before all.

    ``CUDA_VISIBLE_DEVICES`` is always set, to UUIDs or to nothing: a run without devices sees no card.
    """
    env = {name: base[name] for name in BASE_VARIABLES if name in base}
    env.update(container)
    defaults = {**DEFAULTS, **(DEFAULTS_OF_RANKS if job.get("processes", 1) > 1 else {})}
    env.update({name: value for name, value in defaults.items() if name not in container})
    for venv in ([os.path.expanduser(job["venv"])] if job.get("venv") else []) + list(prepared):
        env["VIRTUAL_ENV"] = venv
        env["PATH"] = os.pathsep.join([env["VIRTUAL_ENV"] + "/bin", env.get("PATH", os.defpath)])
    env.update(job["env"])
    env.update(secrets)
    if job.get("alloc_conf"):
        env["PYTORCH_CUDA_ALLOC_CONF"] = job["alloc_conf"]
    env["CUDA_VISIBLE_DEVICES"] = ",".join(card.uuid for card in cards)
    env["PYTHONPATH"] = code_dir
    env["ORCH_RUN_ID"] = job["run_id"]
    if job.get("memory_limit_bytes"):
        env[MEMORY_LIMIT_VARIABLE] = str(job["memory_limit_bytes"])
    env["ORCH_ARTIFACTS"] = artifacts
    return env


def of_process(shared: Mapping[str, str], events: str, rank: Mapping[str, str]) -> Dict[str, str]:
    """Returns one process's whole environment: what `build` made, the variables of its ``rank``, its events.

    ``events`` is the events descriptor as ``number:inode``: in a process that did not inherit it the number
    may be another file, which the inode tells.
    """
    return {**shared, **rank, "ORCH_EVENTS_FD": events}


def digest(env: Mapping[str, str]) -> str:
    """Returns a SHA-256 over names and values; of a masked environment it says nothing of the secrets."""
    return hashlib.sha256(json.dumps(sorted(env.items())).encode("utf-8")).hexdigest()


def differences(
    asked: Mapping[str, str], got: Mapping[str, Optional[str]], names: Iterable[str]
) -> List[str]:
    """Returns a sentence for each of ``names`` whose value is not the one asked for."""
    return [
        "%s: asked for %r, the process has %r" % (name, asked.get(name), got.get(name))
        for name in names
        if asked.get(name) != got.get(name)
    ]


def mismatches(asked: Mapping[str, str], facts: Mapping[str, Any]) -> List[str]:
    """Returns what the process reported from inside that is not what was asked for."""
    found: List[str] = []
    inside = facts.get("environment")
    if isinstance(inside, dict):
        found += differences(asked, inside, inside)
    if "allocator" in facts:
        found += _allocator(asked.get("PYTORCH_CUDA_ALLOC_CONF", ""), facts)
    devices = facts.get("devices")
    if isinstance(devices, list):
        found += _devices(asked.get("CUDA_VISIBLE_DEVICES", ""), devices)
    limits = facts.get("memory_limit")
    if isinstance(limits, list):
        found += _memory_limit(asked.get(MEMORY_LIMIT_VARIABLE, ""), limits)
    return found


def _memory_limit(asked: str, told: List[Any]) -> List[str]:
    found = []
    for card in told:
        problem = card.get("problem")
        if problem is None and str(card.get("limit_bytes")) != asked:
            problem = "is kept to %s bytes" % card.get("limit_bytes")
        if problem is not None:
            asked_gib = int(asked or 0) / _MIB / 1024
            found.append("memory limit: asked for %.2f GiB, cuda:%s %s" % (asked_gib, card["index"], problem))
    return found


def _devices(asked: str, seen: List[Any]) -> List[str]:
    expected = [uuid for uuid in asked.split(",") if uuid]
    got = [str(device.get("uuid")) for device in seen if isinstance(device, dict)]
    if len(expected) == len(got) and all(
        uuid in (wanted, "None") or wanted.startswith("MIG-") for wanted, uuid in zip(expected, got)
    ):
        return []  # torch before 2.4 tells no UUID, of a MIG instance perhaps its card's: the count must do
    return ["devices: asked for %s, the process sees %s" % (expected, got)]


def _allocator(asked: str, facts: Mapping[str, Any]) -> List[str]:
    """Compares each key where torch shows it, and for the others the text that torch parsed."""
    shown = facts.get("allocator_settings")
    settings: Mapping[str, Any] = shown if isinstance(shown, dict) else {}
    found = []
    effective: Any
    wanted: Any
    for key, text in parse(asked).items():
        if key == "backend":
            effective, wanted = facts["allocator"], text
        elif key == "max_split_size_mb" and "max_split_size" in settings:
            effective, wanted = settings["max_split_size"], int(text) * _MIB
        elif key in settings and not isinstance(settings[key], dict):
            effective, wanted = settings[key], _value(text)
        elif "PYTORCH_CUDA_ALLOC_CONF" in settings:
            effective, wanted = settings["PYTORCH_CUDA_ALLOC_CONF"], asked
        else:
            continue
        if not _same(effective, wanted):
            found.append("allocator %s: asked for %s, in effect is %s" % (key, text, effective))
    return found


def _same(effective: Any, wanted: Any) -> bool:
    if isinstance(effective, float) or isinstance(wanted, float):
        return abs(float(effective) - float(wanted)) < 1e-6
    return bool(effective == wanted)


def parse(alloc_conf: str) -> Dict[str, str]:
    """Returns ``key:value`` pairs; values in brackets keep their commas."""
    pairs: Dict[str, str] = {}
    depth, part = 0, ""
    for character in alloc_conf + ",":
        depth += (character == "[") - (character == "]")
        if character == "," and depth == 0:
            key, colon, value = part.partition(":")
            if colon:
                pairs[key.strip()] = value.strip()
            part = ""
        else:
            part += character
    return pairs


def _value(text: str) -> Any:
    if text in ("True", "False"):
        return text == "True"
    try:
        return float(text) if "." in text else int(text)
    except ValueError:
        return text
