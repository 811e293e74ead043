"""What a host's NVIDIA driver, its device nodes and cards mean for runs (pure).

``facts`` are as `supervisor.doctor` gathers them; what another form raises `diagnosis.diagnosed` catches.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.finding import Finding
from orchestrator.inventory import Host
from orchestrator.machine_checks import gib, lxc_config
from orchestrator.supervisor.gpus import BUSY_MIB
from orchestrator.text import counted

__all__ = ["cards", "has_driver"]

MIB = 1024**2
NVIDIA_MAJOR = 195
MOST_NAMED = 4


def cards(host: Host, facts: Mapping[str, Any]) -> Iterator[Finding]:
    """Yields what there is to say of driver, device nodes, and cards that are in use."""
    nvidia, listed = facts["nvidia"], facts["cards"]
    place = _place(host, facts["container"]["kind"])
    if not has_driver(nvidia, listed):
        yield _no_driver(nvidia, place)
        return
    yield _driver(nvidia, listed, place)
    if nvidia["nodes"] or not facts["torch"]["found"].get("devices"):  # WSL has none and needs none
        yield _nodes(nvidia, place)
        yield _uvm(nvidia, place)
    if listed["lost"]:
        yield Finding.fault(
            "lost cards",
            f"the driver lists {', '.join(listed['lost'])}",
            "dmesg there says why (Xid); a card that fell off the bus needs a reboot",
        )
    if listed["cards"]:
        yield _use(listed)


def has_driver(nvidia: Mapping[str, Any], listed: Mapping[str, Any]) -> bool:
    """There is something of a driver here, whole or not."""
    return bool(nvidia["kernel"] or nvidia["nodes"] or listed["is_smi_there"])


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """What to do about driver and nodes, by where they are: on a machine, in LXC, in another container."""

    same_driver: str
    as_root: str
    node: str
    uvm: str
    rights: str
    stale: str


def _place(host: Host, container: str | None) -> _Place:
    modprobe = "nvidia-modprobe -u -c 0"
    if host.vmid is not None or container == "lxc":
        config = lxc_config(host)
        bind = "lxc.mount.entry: /dev/{name} dev/{name} none bind,optional,create=file, in " + config
        return _Place(
            same_driver="install exactly {version} in the container: its installer with --no-kernel-module",
            as_root="on the node",
            node=f"bind it: {bind}",
            uvm=f"run {modprobe} on the node, bind it ({bind}) and restart the container",
            rights=f"lxc.cgroup2.devices.allow: c {{major}}:* rwm, in {config}, and restart the container",
            stale="restart the container",
        )
    if container is not None:
        start = "start the container with its cards: docker run --gpus all"
        return _Place(
            same_driver=f"install exactly {{version}} on the machine below, then {start}",
            as_root="on the machine below",
            node=start,
            uvm=f"run {modprobe} on the machine below, then {start}",
            rights="restart the container",
            stale="restart the container",
        )
    return _Place(
        same_driver="reboot, or reinstall the driver",
        as_root="there as root",
        node="run nvidia-smi there as root, which makes it",
        uvm=f"run {modprobe} there as root",
        rights="log in anew, or allow it in the DeviceAllow= of the unit that we run in",
        stale=f"rm /dev/nvidia-uvm there, then {modprobe}",
    )


def _no_driver(nvidia: Mapping[str, Any], place: _Place) -> Finding:
    if not nvidia["pci"]:
        return Finding.ok("driver", "no NVIDIA driver and no such card: runs here need 'devices: none'")
    return Finding.fault(
        "driver",
        f"{counted(nvidia['pci'], 'NVIDIA card')} on the PCI bus, and no driver is loaded",
        f"install NVIDIA's driver {place.as_root} and load it: modprobe nvidia",
    )


def _driver(nvidia: Mapping[str, Any], listed: Mapping[str, Any], place: _Place) -> Finding:
    kernel, error = nvidia["kernel"], listed["error"]
    library = _library_in(str(error)) or nvidia["library"]
    make_equal = place.same_driver.format(version=kernel or "the version of the kernel module")
    if kernel and library and kernel != library:
        says = f"kernel module {kernel}, libraries {library}: they must be the same"
        return Finding.fault("driver", says, make_equal)
    if error and listed["is_smi_there"]:
        look = f"run nvidia-smi there; what the kernel says {place.as_root}: dmesg | grep -i nvrm"
        return Finding.fault("driver", str(error), look)
    if error:
        libraries = f"libraries {library}" if library else "no libraries"
        return Finding.fault("driver", f"kernel module {kernel}, {libraries}, and no nvidia-smi", make_equal)
    if kernel and library:
        return Finding.ok("driver", f"{kernel}, kernel module and libraries agree")
    return Finding.ok("driver", f"{kernel or library or 'of unknown version'}; nvidia-smi works")


def _library_in(words: str) -> str | None:
    """Returns the version that nvidia-smi names where it fails because of it."""
    found = re.search(r"NVML library version: (\d+(?:\.\d+)+)", words)
    return found[1] if found else None


def _nodes(nvidia: Mapping[str, Any], place: _Place) -> Finding:
    nodes = {node["name"]: node for node in nvidia["nodes"] if not node["name"].startswith("nvidia-")}
    numbered = [name for name in nodes if name != "nvidiactl"]
    if missing := [*([] if numbered else ["nvidia0"]), *([] if "nvidiactl" in nodes else ["nvidiactl"])]:
        return Finding.fault("devices", f"{_paths(missing)} not there", place.node.format(name=missing[0]))
    if refused := [node for node in nodes.values() if node["refusal"]]:
        return _refused("devices", refused, NVIDIA_MAJOR, place)
    known = f" of the {nvidia['known']} that the driver has" if nvidia["known"] > len(numbered) else ""
    return Finding.ok("devices", f"nvidiactl and {counted(len(numbered), 'card')}{known} can be opened")


def _uvm(nvidia: Mapping[str, Any], place: _Place) -> Finding:
    node = next((node for node in nvidia["nodes"] if node["name"] == "nvidia-uvm"), None)
    if node is None:
        says = "/dev/nvidia-uvm is not there: CUDA does not come up"
        return Finding.fault("uvm", says, place.uvm.format(name="nvidia-uvm"))
    major, its_major = nvidia["uvm_major"], node["major"]
    if None not in (major, its_major) and its_major != major:
        says = f"/dev/nvidia-uvm has major number {its_major}, the kernel's is {major} since its last boot"
        return Finding.fault("uvm", says, place.stale)
    if node["refusal"]:
        return _refused("uvm", [node], major or its_major, place)
    return Finding.ok("uvm", "/dev/nvidia-uvm can be opened")


def _refused(name: str, nodes: Sequence[Mapping[str, Any]], major: int | None, place: _Place) -> Finding:
    """Each error has its own cure: for rights by cgroup, rights by file mode, a node without a driver."""
    error = nodes[0]["refusal"]
    says = f"{_paths([node['name'] for node in nodes])} cannot be opened: {error}"
    if error == "EPERM":
        says = f"{says}: the cgroup's device rights (a systemctl daemon-reload can take them away)"
        return Finding.fault(name, says, place.rights.format(major=major or "MAJOR"))
    if error == "EACCES":
        give = "give us the rights: chmod 666 that node, or our user its group; no mount with nodev"
        return Finding.fault(name, says, give)
    look = f"the driver does not answer for it: see dmesg | grep -i nvrm {place.as_root}, then reboot"
    return Finding.fault(name, says, look)


def _paths(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(f"/dev/{name}" for name in names[:MOST_NAMED]) + more


def _use(listed: Mapping[str, Any]) -> Finding:
    """A card is a run's, or a stranger's where its memory or a program on it has no run to belong to."""
    runs, programs = listed["runs"], listed["programs"]
    free, ours, strange = [], [], []
    for card in listed["cards"]:
        on_it = [program for program in programs if program["uuid"] == card["uuid"]]
        if card["uuid"] in runs:
            ours.append(f"{card['index']} by run {', '.join(runs[card['uuid']])}")
        elif card["is_leased"]:
            ours.append(f"{card['index']} by a run of another user, container or root")
        elif on_it or card["used_mib"] > BUSY_MIB:
            names = ", ".join(f"{program['name'] or '?'} pid {program['pid']}" for program in on_it)
            who = names or "nobody we can see"
            strange.append(f"{card['index']} by {who} ({gib(card['used_mib'] * MIB)})")
        else:
            free.append(str(card["index"]))
    first = listed["cards"][0]
    says = f"{len(free)} of {counted(len(listed['cards']), 'card')} free"
    says += f" ({first['name']}, {gib(first['total_mib'] * MIB)})"
    says += f": {','.join(free)}" if free else ""
    says += f"; held: {', '.join(ours)}" if ours else ""
    if not strange:
        return Finding.ok("cards", says)
    return Finding.warning(
        "cards",
        f"{says}; in use by strangers: {', '.join(strange)}",
        "ask for others in 'devices:', or find out whose they are: nvidia-smi there, or on its node",
    )
