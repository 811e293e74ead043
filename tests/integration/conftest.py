"""Real ssh servers for the tests in this folder; `tests.sshd` knows how to run one."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

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
