"""A real LXC container for tests, called 200 as on a Proxmox VE node, and a `pct` in front of it.

It knows how to make the container's files, start and stop it, and take all of that away. Programs and Python
are this machine's, mounted read-only; the rest is the container's own: process ids, host name, root's home,
cgroups, no network. Its process 1 reaps nothing, so ended daemons stay as zombies; it ends by itself after an
hour, whatever became of the tests. `pct` answers in the words and with the exit codes of Proxmox VE; what it
starts, `lxc-attach` starts.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

VMID = 200
NO_VMID = 999
NEEDED = ("lxc-start", "lxc-stop", "lxc-info", "lxc-attach")

_CONFIG = """\
lxc.uts.name = container-{vmid}
lxc.rootfs.path = dir:{rootfs}
lxc.net.0.type = empty
lxc.mount.auto = proc:mixed sys:mixed cgroup:mixed:force
lxc.apparmor.profile = unconfined
lxc.init.cmd = /bin/sleep 3600
lxc.environment = IMAGE_HOME=/models
"""

_PCT = """\
#!/bin/sh
[ "$1 $3" = "exec --" ] || {{ echo "400 not enough arguments" >&2; exit 255; }}
vmid=$2
shift 3
if [ ! -e {path}/"$vmid"/config ]; then
    echo "Configuration file 'nodes/pve/lxc/$vmid.conf' does not exist" >&2
    exit 255
fi
if [ {looks} = yes ] && [ "$(lxc-info -P {path} -n "$vmid" -sH)" != RUNNING ]; then
    echo "container '$vmid' not running!" >&2
    exit 255
fi
exec lxc-attach -P {path} -n "$vmid" --keep-env -- "$@"
"""


class Container:
    """Container 200, all in ``folder``; ``bin`` has its `pct`, ``old_bin`` one that does not look first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rootfs = folder / "rootfs"
        self.home = self.rootfs / "root"
        self.bin = folder / "bin"
        self.old_bin = folder / "old-bin"
        self._path = folder / "lxc"
        self._log = folder / "lxc.log"
        self._make_rootfs()
        (self._path / str(VMID)).mkdir(parents=True)
        config = _CONFIG.format(vmid=VMID, rootfs=self.rootfs)
        (self._path / str(VMID) / "config").write_text(config + "".join(map(_mount, _mounted())))
        for place, looks in ((self.bin, "yes"), (self.old_bin, "no")):
            place.mkdir()
            (place / "pct").write_text(_PCT.format(path=shlex.quote(str(self._path)), looks=looks))
            (place / "pct").chmod(0o755)

    @property
    def is_running(self) -> bool:
        return self._lxc("lxc-info", "-sH").stdout.strip() == "RUNNING"

    def start(self) -> None:
        """Start it unless it runs; a failure says what this kernel refused."""
        if self.is_running:
            return
        done = self._lxc("lxc-start", "-o", str(self._log), "-l", "ERROR")
        if done.returncode != 0:
            said = self._log.read_text().strip() if self._log.exists() else ""
            raise OSError(f"lxc-start failed here: {said or done.stderr.strip()}")

    def stop(self) -> None:
        """End every process in it; harmless when it does not run."""
        if self.is_running:
            self._lxc("lxc-stop", "-k").check_returncode()

    def destroy(self) -> None:
        self.stop()
        shutil.rmtree(self.folder)

    def run(self, *argv: str) -> str:
        """What a program in it prints; not by way of `pct`."""
        done = self._lxc("lxc-attach", "--clear-env", "--", *argv)
        done.check_returncode()
        return done.stdout

    def _make_rootfs(self) -> None:
        for name in ("dev", "etc", "proc", "root", "run", "sys", "tmp", "usr", "var/tmp"):
            (self.rootfs / name).mkdir(parents=True)
        self.home.chmod(0o700)
        (self.rootfs / "etc" / "passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
        (self.rootfs / "etc" / "group").write_text("root:x:0:\n")
        if Path("/etc/ld.so.cache").exists():
            shutil.copy("/etc/ld.so.cache", self.rootfs / "etc")
        for name in ("bin", "sbin", "lib", "lib64"):
            if (place := Path("/") / name).is_symlink():
                (self.rootfs / name).symlink_to(place.readlink())

    def _lxc(self, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [program, "-P", str(self._path), "-n", str(VMID), *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )


def make_container(folder: Path) -> Container:
    """A running container; skips the test where there can be none, which is a failure in CI."""
    missing = [program for program in NEEDED if shutil.which(program) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} missing: install lxc")
    if os.geteuid() != 0:
        pytest.skip("only root can start an LXC container like a node's")
    container = Container(folder)
    try:
        container.start()
    except OSError as error:
        pytest.skip(str(error))
    return container


def _mounted() -> list[Path]:
    """What the container sees of this machine: its programs, and the Python that runs the tests."""
    places = [
        place for name in ("bin", "sbin", "lib", "lib64") if not (place := Path("/") / name).is_symlink()
    ]
    places += [Path("/usr"), Path(sys.base_prefix), Path(sys.prefix)]
    return [
        place
        for place in dict.fromkeys(places)
        if place.is_dir() and not any(other in place.parents for other in places)
    ]


def _mount(place: Path) -> str:
    source = str(place).replace("\\", r"\134").replace(" ", r"\040")
    return f"lxc.mount.entry = {source} {source[1:]} none rbind,ro,create=dir 0 0\n"
