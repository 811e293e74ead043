"""Real ssh servers and a container for the tests in this folder; `tests.sshd` and `tests.lxc` run them."""

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lxc import Container, make_container
from tests.sshd import Sshd, require_sshd


@pytest.fixture
def start_sshd(tmp_path: Path) -> Iterator[Callable[..., Sshd]]:
    """Starts any number of servers, each in a folder of its own with a space in its path."""
    require_sshd()
    servers: list[Sshd] = []

    def start(**settings: Any) -> Sshd:
        server = Sshd(tmp_path / f"sshd {len(servers)}", **settings)
        servers.append(server)
        server.start()
        return server

    yield start
    for server in servers:
        server.stop()


@pytest.fixture
def sshd(start_sshd: Callable[..., Sshd]) -> Sshd:
    """One server with nothing special about it."""
    return start_sshd()


@pytest.fixture(scope="session")
def _container(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Container]:
    container = make_container(tmp_path_factory.mktemp("container") / "made here")
    yield container
    container.destroy()


@pytest.fixture
def container(_container: Container, monkeypatch: pytest.MonkeyPatch) -> Container:
    """Container 200, running; this machine is its node, and the node has a variable to hand on."""
    _container.start()
    monkeypatch.setenv("PATH", f"{_container.bin}:{os.environ['PATH']}")
    monkeypatch.setenv("LEAK_OF_NODE", "leaked")
    return _container


@pytest.fixture
def node_sshd(container: Container, start_sshd: Callable[..., Sshd]) -> Sshd:
    """The container's node behind ssh."""
    path = f"{container.bin}:/usr/sbin:/usr/bin:/sbin:/bin"
    return start_sshd(variables={"PATH": path, "LEAK_OF_NODE": "leaked"})


@pytest.fixture
def dot_ssh(home: Path) -> Path:
    """``~/.ssh`` of the test's own home, for ``config`` and ``known_hosts``."""
    folder = home / ".ssh"
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture
def no_thread_is_left() -> Iterator[None]:
    """Fails a test that ends with more threads than it began with; a cancelled timer needs a moment."""
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(5.0)
    assert set(threading.enumerate()) <= before
