"""A real OpenSSH server for tests: own port, own keys, own folder, ended by process id.

It knows how to write an ``sshd_config``, run ``sshd -D`` (on 127.0.0.1, or in a network namespace on an
address there) and find the processes that serve its connections. What a test says to the server over ssh is
the test's affair. Several can run side by side, one as the jump host of another. Log-ins are by
``client_key`` as the user who runs the tests; ``HOME`` is an empty folder, so that nobody's shell start-up
files take part.
"""

from __future__ import annotations

import base64
import getpass
import hashlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import pytest

from orchestrator.inventory import Host

SSHD = Path("/usr/sbin/sshd")
PRIVILEGE_SEPARATION_DIR = Path("/run/sshd")
START_TIMEOUT_S = 10.0


def require_sshd() -> None:
    """Skip the test where sshd cannot run; the root conftest makes that a failure in CI."""
    reason = _why_sshd_cannot_run()
    if reason is not None:
        pytest.skip(reason)


class Sshd:
    """One server; ``options`` are sshd_config lines that win over ours (``{"MaxStartups": "1:100:1"}``).

    ``variables`` are those of its sessions besides ``HOME``. ``enter`` is put before the server's own words:
    what takes it into the namespace that has ``address``.
    """

    def __init__(
        self,
        folder: Path,
        *,
        options: Mapping[str, str] | None = None,
        variables: Mapping[str, str] | None = None,
        key_types: Sequence[str] = ("ed25519",),
        address: str = "127.0.0.1",
        enter: Sequence[str] = (),
    ) -> None:
        self.folder = folder
        self.address = address
        self.port = _free_port()
        self.user = getpass.getuser()
        self.client_key = folder / "client key"
        self.home = folder / "home"
        self.log = folder / "sshd.log"
        self._key_types = tuple(key_types)
        self._options = dict(options or {})
        self._enter = tuple(enter)
        self._variables = {"HOME": str(self.home), **(variables or {})}
        self._process: subprocess.Popen[bytes] | None = None
        self.home.mkdir(parents=True)
        generate_key(self.client_key)
        shutil.copy(self.client_key.with_name("client key.pub"), folder / "authorized_keys")
        for key_type in self._key_types:
            generate_key(self._host_key(key_type), key_type)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server is not running"
        return self._process.pid

    def host_key(self, key_type: str | None = None) -> str:
        """``ssh-ed25519 AAAA…``, as an inventory pins it."""
        public = self._host_key(key_type or self._key_types[0]).with_suffix(".pub")
        return " ".join(public.read_text().split()[:2])

    def fingerprint(self, key_type: str | None = None) -> str:
        return fingerprint(self.host_key(key_type))

    def known_hosts_line(self, key_type: str | None = None) -> str:
        return f"[{self.address}]:{self.port} {self.host_key(key_type)}\n"

    def inventory_host(self, **changes: Any) -> Host:
        """An inventory entry that pins this server's key; ``changes`` are other fields."""
        fields: dict[str, Any] = {
            "name": "gpu-box",
            "transport": "ssh",
            "address": self.address,
            "port": self.port,
            "user": self.user,
            "identity": self.client_key,
            "host_key": self.host_key(),
            "python": sys.executable,
        }
        return Host(**(fields | changes))

    def inventory_entry(self, **changes: Any) -> dict[str, Any]:
        """The same as it would stand in inventory.yaml."""
        fields = {
            "transport": "ssh",
            "address": self.address,
            "port": self.port,
            "user": self.user,
            "identity": str(self.client_key),
            "host_key": self.host_key(),
            "python": sys.executable,
        }
        return fields | changes

    def start(self) -> None:
        assert self._process is None, "the server is running already"
        config = self.folder / "sshd_config"
        config.write_text(self._config())
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [*self._enter, SSHD, "-D", "-e", "-f", config],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._wait_until_listening()

    def stop(self) -> None:
        """End the sessions and the server; harmless when it is not running."""
        if self._process is None:
            return
        try:
            self.kill_sessions()
        finally:
            self.stop_listening()

    def stop_listening(self) -> None:
        """End the server only: connections that exist live on, new ones are refused."""
        assert self._process is not None, "the server is not running"
        self._process.terminate()
        self._process.wait(timeout=START_TIMEOUT_S)
        self._process = None

    def restart(self) -> None:
        """The same port and keys in a new process; connections that exist live on."""
        self.stop_listening()
        self.start()

    def rotate_host_key(self) -> None:
        """Other keys of the same types from the next connection on."""
        for key_type in self._key_types:
            for path in (self._host_key(key_type), self._host_key(key_type).with_suffix(".pub")):
                path.unlink()
            generate_key(self._host_key(key_type), key_type)
        self.restart()

    def session_pids(self) -> list[int]:
        """The processes of sshd, this server's only, that serve one connection each."""
        return [pid for pid in _descendants(self.pid) if _process_name(pid).startswith("sshd")]

    def kill_sessions(self) -> None:
        """SIGKILL for the server's side of every connection: the client sees it break."""
        for pid in self.session_pids():
            _signal(pid, signal.SIGKILL)
        _wait_until(lambda: not self.session_pids(), "the sessions to end")

    def pause_sessions(self) -> None:
        """SIGSTOP: the connections stay up and answer nothing, until `kill_sessions`."""
        for pid in self.session_pids():
            _signal(pid, signal.SIGSTOP)

    def _config(self) -> str:
        ours = {
            "ListenAddress": self.address,
            "Port": str(self.port),
            "AuthorizedKeysFile": f'"{self.folder}/authorized_keys"',
            "PidFile": f'"{self.folder}/sshd.pid"',
            "SetEnv": " ".join(f'"{name}={value}"' for name, value in self._variables.items()),
            "UsePAM": "no",
            "StrictModes": "no",
            "PermitRootLogin": "yes",
            "PasswordAuthentication": "no",
            "LogLevel": "VERBOSE",
        }
        lines = [f"{name} {value}" for name, value in (ours | self._options).items()]
        lines += [f'HostKey "{self._host_key(key_type)}"' for key_type in self._key_types]
        return "\n".join(lines) + "\n"

    def _host_key(self, key_type: str) -> Path:
        return self.folder / f"host_{key_type}"

    def _wait_until_listening(self) -> None:
        def is_listening() -> bool:
            assert self._process is not None
            if self._process.poll() is not None:
                pytest.fail(f"sshd ended at once:\n{self.log.read_text()}")
            return b"Server listening on" in self.log.read_bytes()

        _wait_until(is_listening, "sshd to listen")


def generate_key(path: Path, key_type: str = "ed25519", *, passphrase: str = "") -> None:
    size = ["-b", "2048"] if key_type == "rsa" else []
    subprocess.run(
        ["ssh-keygen", "-q", "-t", key_type, *size, "-N", passphrase, "-C", "test", "-f", path], check=True
    )


def fingerprint(public_key: str) -> str:
    """``SHA256:…`` of ``<type> <base64>``, as ssh-keygen -l prints it."""
    digest = hashlib.sha256(base64.b64decode(public_key.split()[1])).digest()
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


def _why_sshd_cannot_run() -> str | None:
    if not SSHD.exists():
        return f"{SSHD} is missing: install openssh-server"
    if PRIVILEGE_SEPARATION_DIR.is_dir():
        return None
    if os.geteuid() != 0:
        return f"{PRIVILEGE_SEPARATION_DIR} is missing, and only root can make it"
    PRIVILEGE_SEPARATION_DIR.mkdir(mode=0o755, exist_ok=True)
    return None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_until(is_done: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not is_done():
        if time.monotonic() > deadline:
            pytest.fail(f"waited {START_TIMEOUT_S:g} s for {what}")
        time.sleep(0.005)


def _descendants(pid: int) -> Iterator[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return
    for child in children:
        yield int(child)
        yield from _descendants(int(child))


def _process_name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
