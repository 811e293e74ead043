"""Network namespaces for tests: a controller, a jump host behind it, and two hosts behind that one.

It knows how to make them, which addresses they have, and how a link between two of them is cut. Nothing but
the jump host's sshd passes anything on. Files, processes and users are this machine's: only the network is
cut in pieces. A namespace lives as long as the process that holds it, which ends by itself after ten minutes:
whatever becomes of the tests, nothing is left behind.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Self

import pytest

NEEDED = ("ip", "nsenter", "unshare")
HOLD_S = 600


class Namespace:
    """One namespace, with its loopback up; a context manager that ends it."""

    def __init__(self) -> None:
        self._holder = subprocess.Popen(
            ["unshare", "--net", "--", "sh", "-c", f"echo made && exec sleep {HOLD_S}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != b"made\n":
            assert self._holder.stderr is not None
            said = self._holder.stderr.read().decode().strip()
            self.__exit__()
            raise OSError(f"no network namespace can be made here: {said}")
        self.ip("link set lo up")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._holder.kill()
        self._holder.communicate()

    @property
    def pid(self) -> int:
        return self._holder.pid

    @property
    def enter(self) -> tuple[str, ...]:
        """What to put before a program's words, so that it runs in here and keeps its process id."""
        return ("nsenter", f"--net=/proc/{self.pid}/ns/net", "--")

    def ip(self, words: str) -> None:
        done = subprocess.run(
            [*self.enter, "ip", *words.split()], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise OSError(f"ip {words}: {done.stderr.strip()}")


@dataclass(frozen=True, kw_only=True)
class Link:
    """A cable: ``near`` is the end that looks to the controller, ``far`` the address behind it."""

    near: Namespace
    beyond: Namespace
    name: str
    far: str

    def cut(self) -> None:
        """Nothing passes any more, and nobody is told: what is connected stays half open."""
        self.near.ip(f"link set dev {self.name} down")

    def mend(self) -> None:
        self.near.ip(f"link set dev {self.name} up")


@dataclass(frozen=True, kw_only=True)
class Network:
    """``jump`` is the link from the controller to the jump host, ``hosts`` are those from there on."""

    controller: Namespace
    jump: Link
    hosts: dict[str, Link]

    def mend(self) -> None:
        """Everything is connected again."""
        for link in (self.jump, *self.hosts.values()):
            link.mend()


@contextmanager
def make_network(*hosts: str) -> Iterator[Network]:
    """The network with these hosts; skips the test where there can be none, which is a failure in CI."""
    missing = [program for program in NEEDED if shutil.which(program) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} missing: install iproute2 and util-linux")
    if os.geteuid() != 0:
        pytest.skip("only root can make network namespaces")
    with ExitStack() as stack:
        try:
            controller, bastion = stack.enter_context(Namespace()), stack.enter_context(Namespace())
            jump = _link(controller, bastion, "jump", 0)
            links = {
                name: _link(bastion, stack.enter_context(Namespace()), name, number)
                for number, name in enumerate(hosts, 1)
            }
        except OSError as error:
            pytest.skip(str(error))
        yield Network(controller=controller, jump=jump, hosts=links)


def _link(near: Namespace, beyond: Namespace, name: str, number: int) -> Link:
    """Both ends are made where they belong: they never show up in this machine's own network."""
    cable = f"to-{name}"
    near.ip(f"link add dev {cable} type veth peer name uplink netns {beyond.pid}")
    for namespace, device, place in ((near, cable, 1), (beyond, "uplink", 2)):
        namespace.ip(f"address add 10.77.{number}.{place}/24 dev {device}")
        namespace.ip(f"link set dev {device} up")
    return Link(near=near, beyond=beyond, name=cable, far=f"10.77.{number}.2")
