"""How an argument vector is put for `pct exec`, and what is made of what `pct` says."""

import os
import subprocess
from collections.abc import Sequence
from typing import Self

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.errors import (
    AuthenticationFailed,
    ContainerStopped,
    ContainerUnknown,
    HostError,
    HostUnfit,
    Unreachable,
)
from orchestrator.inventory import Host
from orchestrator.transports import Channel, Transport, connect
from orchestrator.transports.proxmox import ProxmoxTransport

NODE = Host(name="pve", transport="ssh", address="192.0.2.5")
CONTAINER = Host(name="pve-200", transport="proxmox", address="192.0.2.5", node=NODE, vmid=200)

SHOW = "import os, sys; sys.stdout.buffer.write(b'\\0'.join(map(os.fsencode, sys.argv[1:])))"
NASTY = [
    "",
    " ",
    "-n",
    "--",
    "it's",
    '"',
    "$(id)",
    "`id`",
    "a;b|c&d>e",
    "two\nlines",
    "~",
    "*",
    "\\",
    "é",
    "\udcff",
]


class Saying:
    """A channel whose program has ended: status, stdout and stderr are given."""

    def __init__(self, status: int, out: bytes, err: str) -> None:
        self._status, self._out, self._err = status, out, err

    def send(self, data: bytes) -> None:
        raise AssertionError(data)

    def recv(self, max_bytes: int, timeout_s: float) -> bytes:
        del max_bytes, timeout_s
        out, self._out = self._out, b""
        return out

    def finish_input(self) -> None:
        pass

    def stderr(self) -> bytes:
        return self._err.encode()

    def wait(self, timeout_s: float) -> int:
        del timeout_s
        return self._status

    def close(self) -> None:
        pass


class Node:
    """A transport that remembers what it was to start."""

    host = NODE

    def __init__(self, status: int = 0, out: bytes = b"", err: str = "") -> None:
        self.asked: list[list[str]] = []
        self.is_closed = False
        self.attached: Sequence[str] | None = None
        self._answer = (status, out, err)

    def open(self, argv: Sequence[str]) -> Channel:
        self.asked.append(list(argv))
        return Saying(*self._answer)

    def attach(self, argv: Sequence[str] | None) -> int:
        self.attached = argv
        return 7

    def close(self) -> None:
        self.is_closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def rewritten(argv: Sequence[str]) -> list[str]:
    node = Node()
    ProxmoxTransport(CONTAINER, lambda _: node).open(argv)
    (asked,) = node.asked
    return asked


def ended(status: int, err: str, out: bytes = b"") -> int:
    with ProxmoxTransport(CONTAINER, lambda _: Node(status, out, err)) as transport:
        channel = transport.open(["python3"])
        while channel.recv(100, 1.0):
            pass
        return channel.wait(1.0)


def test_the_container_is_named_once_and_the_words_stand_last_as_they_are() -> None:
    asked = rewritten(["/opt/my env/bin/python", *NASTY])
    assert asked[:4] == ["pct", "exec", "200", "--"]
    assert asked[-len(NASTY) - 1 :] == ["/opt/my env/bin/python", *NASTY]
    assert all(isinstance(word, str) for word in asked)


def test_nothing_of_the_words_gets_into_the_script() -> None:
    assert rewritten(NASTY)[: -len(NASTY)] == rewritten(["x"])[:-1]


@given(st.lists(st.text(st.characters(exclude_characters="\0", codec="utf-8")), max_size=5))
def test_what_starts_inside_gets_exactly_its_words(words: list[str]) -> None:
    asked = rewritten(["python3", "-I", "-S", "-c", SHOW, *words])
    done = subprocess.run(asked[4:], check=True, capture_output=True, env={"LEAK": "of the node"})
    assert done.stdout == b"\0".join(word.encode() for word in words)


def test_what_starts_inside_has_the_variables_of_a_log_in_alone_and_is_at_home() -> None:
    asked = rewritten(["/usr/bin/env"])
    out = subprocess.run(
        asked[4:], check=True, capture_output=True, text=True, env={"LEAK": "of the node"}
    ).stdout
    env = dict(line.split("=", 1) for line in out.splitlines())
    by_the_shell = {"PWD", "OLDPWD", "SHLVL", "_"}
    assert env.keys() - by_the_shell == {"PATH", "LANG", "USER", "LOGNAME", "HOME"}
    assert env["HOME"] == env["PWD"] == os.path.expanduser("~root")  # noqa: PTH111  # whoever runs this


@pytest.mark.parametrize(
    ("status", "err", "kind", "next_step"),
    [
        (255, "container '200' not running!\n", ContainerStopped, "pct start 200"),
        (
            1,
            "lxc-attach: 200: attach.c: get_attach_context: 406 - Failed to get init pid\n",
            ContainerStopped,
            "pct start 200",
        ),
        (255, "Configuration file 'nodes/pve/lxc/200.conf' does not exist\n", ContainerUnknown, "pct list"),
        (255, "please run as root\n", HostUnfit, "user: root"),
        (127, "bash: line 1: pct: command not found\n", HostUnfit, "no Proxmox VE node"),
        (127, "sh: 1: pct: not found\n", HostUnfit, "no Proxmox VE node"),
    ],
)
def test_each_refusal_of_pct_is_an_error_of_its_own(
    status: int, err: str, kind: type[HostError], next_step: str
) -> None:
    with pytest.raises(kind) as caught:
        ended(status, err)
    assert type(caught.value) is kind
    assert str(caught.value).startswith("pve-200: ")
    assert next_step in str(caught.value)


@pytest.mark.parametrize(
    ("status", "err", "out"),
    [
        (255, "", b""),
        (3, "a payload's own words\n", b""),
        (255, "container '20' not running!\n", b""),
        (255, "Configuration file '/etc/app/200.yaml' does not exist\n", b""),
        (0, "container '200' not running!\n", b""),
        (127, "in-container: 1: exec: /opt/pct/bin/python: not found\n", b""),
    ],
)
def test_a_programs_own_end_is_no_refusal(status: int, err: str, out: bytes) -> None:
    assert ended(status, err, out) == status


def test_a_log_in_shell_that_talks_hides_no_refusal() -> None:
    with pytest.raises(ContainerStopped):
        ended(255, "noise\ncontainer '200' not running!\n", b"noise of the node's .bashrc\n")


@pytest.mark.parametrize("status", [137, 143])
def test_what_is_killed_after_it_answered_is_a_connection_that_broke(status: int) -> None:
    with pytest.raises(Unreachable, match="perhaps with its container"):
        ended(status, "", b"an answer")
    assert ended(status, "") == status


def test_what_pct_says_is_shown_without_its_escapes() -> None:
    with pytest.raises(HostUnfit) as caught:
        ended(127, "pct: \x1b[2Jnot found\n")
    assert str(caught.value).isprintable()


def test_the_three_that_a_script_may_tell_apart_have_exit_codes_of_their_own() -> None:
    assert len({kind.exit_code for kind in (ContainerStopped, ContainerUnknown, Unreachable)}) == 3


def test_a_node_that_cannot_be_reached_is_told_as_the_nodes_fault() -> None:
    def fail(node: Host) -> Transport:
        raise Unreachable("192.0.2.5 port 22: Connection refused", host=node.name)

    with pytest.raises(Unreachable) as caught:
        ProxmoxTransport(CONTAINER, fail)
    assert str(caught.value) == (
        "pve-200: its node cannot be reached: pve: 192.0.2.5 port 22: Connection refused"
    )
    assert caught.value.host == "pve-200"


def test_why_the_node_lets_nobody_in_stays_what_it_is() -> None:
    def fail(node: Host) -> Transport:
        raise AuthenticationFailed("no key fits", host=node.name)

    with pytest.raises(AuthenticationFailed, match=r"^pve: no key fits"):
        ProxmoxTransport(CONTAINER, fail)


def test_a_local_node_without_pct_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    here = Host(name="here", transport="local", address="here")
    host = Host(name="inside", transport="proxmox", address="here", node=here, vmid=200)
    with connect(host) as transport, pytest.raises(HostUnfit, match="no pct on its node"):
        transport.open(["true"])


def test_closing_closes_the_way_to_the_node() -> None:
    node = Node()
    with ProxmoxTransport(CONTAINER, lambda _: node) as transport:
        assert transport.host is CONTAINER
        assert not node.is_closed
    assert node.is_closed


def test_a_shell_is_that_of_the_container_s_root_and_a_command_stays_its_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    node = Node()
    transport = ProxmoxTransport(CONTAINER, lambda _: node)
    assert transport.attach(NASTY) == 7
    assert node.attached is not None
    assert node.attached[:6] == ["pct", "exec", "200", "--", "/usr/bin/env", "-i"]
    assert "TERM=xterm-256color" in node.attached
    assert node.attached[-len(NASTY) :] == list(NASTY)
    assert transport.attach(None) == 7
    assert node.attached[-1] == "in-container"
    assert "/etc/passwd" in node.attached[-2]


def test_a_container_that_is_stopped_has_no_shell() -> None:
    node = Node(255, err="container '200' not running!\n")
    with pytest.raises(ContainerStopped):
        ProxmoxTransport(CONTAINER, lambda _: node).attach(None)
    assert node.attached is None
