"""NVIDIA's driver on this host as files show it: kernel module, libraries, device nodes that we may open.

Asks no program and no library, so it tells also where nvidia-smi is missing or fails. What a fact means is
for the controller to say.
"""

import errno
import os
import re
import stat
from typing import Any, Dict, List, Optional, Sequence

from . import processes

LIBRARY_FOLDERS = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/nvidia/lib64",
    "/usr/local/nvidia/lib",
)
_NODE = re.compile(r"nvidia(\d+|ctl|-uvm|-uvm-tools|-modeset)")
_VENDOR, _DISPLAY_CLASS = "0x10de", "0x03"


def look(
    dev: str = "/dev",
    proc: str = "/proc",
    pci: str = "/sys/bus/pci/devices",
    libraries: Sequence[str] = LIBRARY_FOLDERS,
) -> Dict[str, Any]:
    """Returns what the kernel and the file system tell of NVIDIA's cards."""
    return {
        "kernel": _kernel_version(os.path.join(proc, "driver/nvidia/version")),
        "library": _library_version(libraries),
        "known": len(_names(os.path.join(proc, "driver/nvidia/gpus"))),
        "pci": sum(_is_card(os.path.join(pci, name)) for name in _names(pci)),
        "uvm_major": _major_of("nvidia-uvm", os.path.join(proc, "devices")),
        "nodes": [_node(dev, name) for name in _names(dev) if _NODE.fullmatch(name)],
    }


def _kernel_version(path: str) -> Optional[str]:
    found = re.search(r"Kernel Module\s+(?:for \S+\s+)?(\d+(?:\.\d+)+)", processes.read_text(path))
    return found.group(1) if found else None


def _library_version(folders: Sequence[str]) -> Optional[str]:
    """Returns the version of the libnvidia-ml that nvidia-smi would load, by the name of the file itself."""
    for folder in folders:
        path = os.path.realpath(os.path.join(folder, "libnvidia-ml.so.1"))
        found = re.search(r"\.so\.(\d+(?:\.\d+)+)$", path)
        if found and os.path.exists(path):
            return found.group(1)
    return None


def _is_card(folder: str) -> bool:
    is_display = processes.read_text(os.path.join(folder, "class")).startswith(_DISPLAY_CLASS)
    return is_display and processes.read_text(os.path.join(folder, "vendor")).strip() == _VENDOR


def _major_of(driver: str, path: str) -> Optional[int]:
    """Returns the number that the kernel gave a character device's driver; each boot may change it."""
    for line in processes.read_text(path).partition("Block devices")[0].splitlines():
        number, _, name = line.strip().partition(" ")
        if name == driver:
            return int(number)
    return None


def _node(dev: str, name: str) -> Dict[str, Any]:
    path = os.path.join(dev, name)
    found = os.stat(path) if os.path.exists(path) else None
    is_device = found is not None and stat.S_ISCHR(found.st_mode)
    return {
        "name": name,
        "major": os.major(found.st_rdev) if found is not None and is_device else None,
        "refusal": _refusal(path),
    }


def _refusal(path: str) -> Optional[str]:
    """Returns the name of the error with which opening to read and write fails; None when it does not."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, str(error))
    return None


def _names(folder: str) -> List[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []
