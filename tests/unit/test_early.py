"""Connections that are begun before they are asked for."""

import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, Self

import pytest
import yaml

from orchestrator import transports
from orchestrator.cli.early import connect_early
from orchestrator.errors import Unreachable
from orchestrator.inventory import Host
from orchestrator.transports import Channel, early

HOST = Host(name="box", transport="ssh", address="box")


class Way:
    """A transport that only knows whether it was closed."""

    host = HOST

    def __init__(self) -> None:
        self.is_closed = False

    def attach(self, argv: Sequence[str] | None) -> int:
        raise NotImplementedError

    def open(self, argv: Sequence[str]) -> Channel:
        raise AssertionError(argv)

    def close(self) -> None:
        self.is_closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@pytest.fixture(autouse=True)
def _nothing_left_over() -> Iterator[None]:
    yield
    early.drop()


def test_the_first_who_asks_for_the_host_gets_the_connection() -> None:
    way = Way()
    early.begin(HOST, lambda: way)
    assert early.taken(HOST) is way
    assert early.taken(HOST) is None
    early.drop()
    assert not way.is_closed


def test_another_entry_of_the_same_name_does_not_get_it() -> None:
    early.begin(HOST, Way)
    assert early.taken(Host(name="box", transport="ssh", address="elsewhere")) is None


def test_a_host_is_connected_to_once_however_often_it_is_named() -> None:
    made: list[Way] = []

    def connect() -> Way:
        made.append(Way())
        return made[-1]

    early.begin(HOST, connect)
    early.begin(HOST, connect)
    assert early.taken(HOST) in made
    assert len(made) == 1


def test_a_failure_is_raised_where_the_host_is_asked_for() -> None:
    def refuse() -> Way:
        raise Unreachable("is down", host="box")

    early.begin(HOST, refuse)
    with pytest.raises(Unreachable, match="is down"):
        early.taken(HOST)


def test_what_nobody_took_is_closed() -> None:
    way, was_made = Way(), threading.Event()

    def connect() -> Way:
        was_made.set()
        return way

    early.begin(HOST, connect)
    was_made.wait()
    early.drop()
    assert way.is_closed


@pytest.mark.parametrize(("node", "is_begun"), [("ssh", True), ("local", False)])
def test_the_way_to_a_container_is_begun_where_its_node_is_behind_ssh(
    monkeypatch: pytest.MonkeyPatch, node: Literal["ssh", "local"], is_begun: bool
) -> None:
    begun: list[str] = []
    monkeypatch.setattr(early, "begin", lambda host, _: begun.append(host.name))
    way = Host(name="pve", transport=node, address="pve")
    transports.connect_early(Host(name="pve-200", transport="proxmox", address="pve", node=way, vmid=200))
    assert begun == ["pve-200"] * is_begun


@pytest.fixture
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the hosts that a command line begins to connect to, in a project with hosts one and two."""
    hosts = {name: {"transport": "ssh", "address": "192.0.2.1"} for name in ("one", "two")}
    (tmp_path / "inventory.yaml").write_text(yaml.safe_dump({"hosts": hosts}))
    monkeypatch.chdir(tmp_path)
    names: list[str] = []
    monkeypatch.setattr(transports, "connect_early", lambda host: names.append(host.name))
    return names


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("run trial.yaml --host one", ["one"]),
        ("run trial.yaml --host=two --detach", ["two"]),
        ("run --host one --host two trial.yaml", ["one", "two"]),
        ("run trial.yaml", []),
        ("run trial.yaml --host one --dry-run", []),
        ("run trial.yaml --host nowhere", []),
        ("run trial.yaml --host", []),
        ("run script.py --host one -- --host two --dry-run", ["one"]),
        ("run trial.yaml --host one --inventory absent.yaml", []),
        ("rerun last --host two", ["two"]),
        ("rerun last", []),
        ("exec one -- nvidia-smi --host two", ["one"]),
        ("exec --timeout 1m one -- true", []),
        ("run", []),
        ("run -- --host one", []),
        ("rerun", []),
        ("exec", []),
    ],
)
def test_a_command_line_begins_to_connect_to_the_hosts_that_it_names(
    begun: list[str], line: str, expected: list[str]
) -> None:
    command, *arguments = line.split()
    connect_early(command, arguments)
    assert begun == expected


def test_connecting_imports_no_mock_and_leaves_the_real_one_to_others() -> None:
    code = (
        "import sys\n"
        "from orchestrator import transports\n"
        "transports._import_ssh()\n"
        "assert 'fabric' in sys.modules\n"
        "assert not {'asyncio', 'unittest.mock'} & set(sys.modules)\n"
        "from unittest.mock import Mock\n"
        "assert Mock()() is not None\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_run_needs_neither_tables_nor_ssh_before_it_has_a_host() -> None:
    code = (
        "import sys, orchestrator.cli.run\n"
        "print(*sorted({'rich', 'fabric', 'paramiko', 'pydantic'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == []
