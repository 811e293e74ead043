"""What torch is on a host, and whether it agrees with the host's driver and cards (pure).

``facts`` are as `supervisor.doctor` gathers them; what another form raises `diagnosis.diagnosed` catches.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from orchestrator.card_checks import has_driver
from orchestrator.finding import Finding
from orchestrator.text import counted

__all__ = ["torch"]

OLDEST_DRIVER = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}  # by CUDA's major version; NVIDIA's table


def torch(facts: Mapping[str, Any]) -> Iterator[Finding]:
    """Yields what there is to say of torch, its kernels, the cards that it sees, and its allocator."""
    probe, nvidia, listed = facts["torch"], facts["nvidia"], facts["cards"]
    found = probe["found"]
    has_cards = bool(listed["cards"]) or has_driver(nvidia, listed)
    yield _torch(probe, nvidia["kernel"], has_cards=has_cards)
    if found.get("devices"):
        if found["arches"]:
            yield _arches(found["arches"], found["devices"])
        if listed["cards"]:
            yield _agreement(listed["cards"], found["devices"])
    if "version" in found:
        yield from _allocator(probe)
    if facts["alloc_conf"]:
        yield _alloc_conf(facts["alloc_conf"])


def _torch(probe: Mapping[str, Any], kernel: str | None, *, has_cards: bool) -> Finding:
    found = probe["found"]
    if "version" not in found:
        return _no_torch(probe, has_cards=has_cards)
    version, cuda = found["version"], found["cuda"]
    says = f"{version}, built {'without CUDA' if cuda is None else f'for CUDA {cuda}'}"
    if not has_cards:
        return Finding.ok("torch", f"{says}; there is no card here")
    if cuda is None:
        return Finding.fault(
            "torch", says, "install a build for CUDA: pytorch.org says which, and from where"
        )
    why_not = found.get("why_not", _end(probe))
    if why_not is None:
        return Finding.ok("torch", f"{says}, which it can use{_driver_api(found)}")
    oldest = OLDEST_DRIVER.get(int(cuda.partition(".")[0]))
    if kernel and oldest and _numbers(kernel) < _numbers(oldest):
        return Finding.fault(
            "torch",
            f"{says}, which needs driver {oldest}: this one is {kernel}{_driver_api(found)}",
            "update the driver (on the node and in the container), or install a torch for an older CUDA",
        )
    return Finding.fault("torch", f"{says}: {why_not}", "mend what stands above, or reinstall torch")


def _no_torch(probe: Mapping[str, Any], *, has_cards: bool) -> Finding:
    found = probe["found"]
    if found.get("missing") == "torch":
        judge = Finding.fault if has_cards else Finding.warning
        return judge("torch", "this Python has none", "pip install torch there, or set 'venv:' or 'python:'")
    if "missing" in found:
        why = f"it is there and lacks the module {found['missing']}"
    else:
        why = f"it cannot be imported: {found.get('broken') or _end(probe)}"
    return Finding.fault("torch", why, "reinstall it: pip install --force-reinstall torch")


def _driver_api(found: Mapping[str, Any]) -> str:
    api = found.get("driver_api")
    return f" (the driver has CUDA {api // 1000}.{api % 1000 // 10})" if api else ""


def _end(probe: Mapping[str, Any]) -> str:
    """Returns how a probe ended that did not tell all."""
    status = probe["status"]
    if status is None:
        return f"it took more than {probe['limit_s']:.0f} s"
    how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
    last = probe["said"].splitlines()[-1:]
    return f"its process ended with {how}{': ' if last else ''}{''.join(last)}"


def _arches(built: Sequence[str], devices: Sequence[Mapping[str, Any]]) -> Finding:
    """A kernel runs on its architecture and later ones of the same major version, PTX on all later ones."""
    without = sorted({device["arch"] for device in devices if not _runs_on(device["arch"], built)})
    if not without:
        return Finding.ok(
            "kernels", f"this torch has kernels for {', '.join(sorted({d['arch'] for d in devices}))}"
        )
    return Finding.fault(
        "kernels",
        f"this torch has no kernels for {', '.join(without)}, only {' '.join(built)}",
        "install a torch built for a newer CUDA: sm_100 and sm_120 need 12.8",
    )


def _runs_on(arch: str, built: Iterable[str]) -> bool:
    major, minor = _arch(arch)
    for name in built:
        its_major, its_minor = _arch(name)
        if name.endswith("a"):
            is_fit = (its_major, its_minor) == (major, minor)
        elif name.startswith("compute_"):
            is_fit = (its_major, its_minor) <= (major, minor)
        else:
            is_fit = its_major == major and its_minor <= minor
        if is_fit:
            return True
    return False


def _arch(name: str) -> tuple[int, int]:
    digits = re.sub(r"\D", "", name)
    return int(digits[:-1]), int(digits[-1])


def _agreement(listed: Sequence[Mapping[str, Any]], seen: Sequence[Mapping[str, Any]]) -> Finding:
    asked, got = [card["uuid"] for card in listed], [device["uuid"] for device in seen]
    if any(uuid.startswith("MIG-") for uuid in asked):
        seen_there = counted(len(got), "device")
        return Finding.ok(
            "agreement", f"torch sees {seen_there}; with MIG a process sees one instance of all"
        )
    if asked == got or (len(asked) == len(got) and not any(got)):
        how = "by UUID and in the same order" if any(got) else "by their number; this torch tells no UUID"
        return Finding.ok("agreement", f"torch sees the {counted(len(got), 'card')} of nvidia-smi, {how}")
    lost = [str(card["index"]) for card in listed if card["uuid"] not in got]
    which = f"; not seen: {', '.join(lost)}" if lost and any(got) else ""
    return Finding.fault(
        "agreement",
        f"nvidia-smi lists {counted(len(asked), 'card')}, torch sees {len(got)}{which}",
        "nvidia-smi -q there says what is wrong with a card; one that fell off the bus needs a reboot",
    )


def _allocator(probe: Mapping[str, Any]) -> Iterator[Finding]:
    taken = probe["found"].get("allocator")
    if taken is None:
        if "allocator" in probe["found"]:
            yield Finding.ok("allocator", "this torch checks no setting: which it takes cannot be told here")
        elif probe["found"]["cuda"] is None or probe["found"].get("why_not", "") is None:
            yield Finding.warning("allocator", _end(probe), "try the settings one by one: orch exec")
        return
    refused = [key for key, why in taken.items() if why is not None]
    says = f"takes {len(taken) - len(refused)} of {len(taken)} settings"
    yield Finding.ok("allocator", f"{says}; not {', '.join(refused)}" if refused else says)


def _alloc_conf(found: Sequence[Mapping[str, Any]]) -> Finding:
    places = ", ".join(f"{entry['name']} in {entry['place']}" for entry in found)
    return Finding.warning("alloc_conf", f"{places}: no run gets it", "say it in the experiment: alloc_conf:")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))
