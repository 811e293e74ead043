"""Two hosts behind a jump host, each in a network of its own, and what happens when a link between is cut."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

import pytest

from tests.netns import Network, make_network
from tests.project import ORCH, Done, Project, wait_until
from tests.sshd import Sshd, require_sshd

HOSTS = ("east", "west")
SILENCE_S = 1.0
IMPATIENT = f"""
from orchestrator import conversation
from orchestrator.cli.main import main
conversation.SILENCE_TIMEOUT_S = {SILENCE_S}
main()
"""
TICKING = """
import os, time
number = 0
while not os.path.exists(os.environ["GATE"]):
    print("tick", number, flush=True)
    number += 1
    time.sleep(0.05)
"""
CONFIG = """\
Host bastion
 HostName {jump.address}
 Port {jump.port}
 IdentityFile "{jump.client_key}"
Host 10.77.*
 ProxyJump bastion
"""


class Site:
    """The network with its servers, and a project whose commands run at its controller."""

    def __init__(self, network: Network, folder: Path, dot_ssh: Path) -> None:
        self.network = network
        self.jump = Sshd(folder / "jump", address=network.jump.far, enter=network.jump.beyond.enter)
        self.hosts = {
            name: Sshd(folder / name, address=link.far, enter=link.beyond.enter)
            for name, link in network.hosts.items()
        }
        self.gate = folder / "gate"
        self._known_hosts = dot_ssh / "known_hosts"
        (dot_ssh / "config").write_text(CONFIG.format(jump=self.jump))
        self.project = Project(folder / "my project", {name: self._entry(name) for name in self.hosts})
        self.orch = (*network.controller.enter, str(ORCH))
        self.impatient = (*network.controller.enter, sys.executable, "-c", IMPATIENT)

    def trust_the_jump_host(self) -> None:
        self._known_hosts.write_text(self.jump.known_hosts_line())

    def run(self, *hosts: str) -> Done:
        path = self.project.experiment("print('up')")
        chosen = [word for host in hosts for word in ("--host", host)]
        return self.project.orch("run", path, *chosen, program=self.orch)

    @contextmanager
    def following(self, path: Path) -> Iterator[subprocess.Popen[bytes]]:
        """A group on all hosts, whose runs end with the block, whatever happens there."""
        chosen = [word for host in self.hosts for word in ("--host", host)]
        with self.project.start("run", path, *chosen, program=self.impatient) as orch:
            try:
                yield orch
            except BaseException:
                orch.kill()
                raise
            finally:
                self.gate.touch()

    def written(self, host: str) -> bytes:
        """Returns all bytes of the one run that a host has."""
        segments = sorted((self.hosts[host].home / "root").glob("runs/*/records/*.jsonl"))
        return b"".join(path.read_bytes() for path in segments)

    def _entry(self, name: str) -> dict[str, object]:
        server = self.hosts[name]
        return server.inventory_entry(root=str(server.home / "root"), env={"GATE": str(self.gate)})


@pytest.fixture
def site(tmp_path: Path, dot_ssh: Path) -> Iterator[Site]:
    require_sshd()
    with make_network(*HOSTS) as network, ExitStack() as servers:
        site = Site(network, tmp_path, dot_ssh)
        for server in (site.jump, *site.hosts.values()):
            servers.enter_context(server)
        site.trust_the_jump_host()
        yield site


class Heard:
    """What a program has said so far on one of its streams."""

    def __init__(self, stream: IO[bytes] | None) -> None:
        assert stream is not None
        self.lines: list[str] = []
        self._thread = threading.Thread(target=self._listen, args=(stream,))
        self._thread.start()

    def count(self, beginning: str) -> int:
        return sum(line.startswith(beginning) for line in self.lines)

    def wait_for(self, beginning: str, more_than: int = 0) -> None:
        """Returns when more lines than these began so."""
        wait_until(lambda: self.count(beginning) > more_than, f"{beginning!r} to be said")

    def to_the_end(self) -> list[str]:
        self._thread.join()
        return self.lines

    def _listen(self, stream: IO[bytes]) -> None:
        self.lines.extend(line.decode().rstrip("\n") for line in stream)


def test_a_group_behind_a_jump_host_is_followed_through_every_cut(site: Site) -> None:
    path = site.project.experiment(TICKING, timeout="60s")
    network = site.network
    with site.following(path) as orch:
        lines, notes = Heard(orch.stdout), Heard(orch.stderr)
        for host in HOSTS:
            lines.wait_for(host)

        network.hosts["east"].cut()
        notes.wait_for("orch: UNREACHABLE east")
        seen, there = lines.count("east"), len(site.written("east"))
        lines.wait_for("west", lines.count("west"))
        wait_until(lambda: len(site.written("east")) > there, "the run at the host that is cut off")
        assert lines.count("east") == seen
        assert notes.count("orch: UNREACHABLE west") == 0

        network.jump.cut()
        notes.wait_for("orch: UNREACHABLE west")
        rows = site.project.orch("ps", "--json", program=site.orch).json
        stands = {row["host"]: (row["state"], "bastion" in row["observed"]["unreachable"]) for row in rows}
        assert stands == {"east": ("running", True), "west": ("running", True)}
        network.mend()
        for host in HOSTS:
            notes.wait_for(f"orch: {host} answers again")
            lines.wait_for(host, lines.count(host))
        site.gate.touch()
        shown, said = lines.to_the_end(), notes.to_the_end()
    assert orch.returncode == 0, said
    runs = {row["host"]: row["run_id"] for row in site.project.runs()}
    for host, run_id in runs.items():
        assert site.project.mirrored(run_id) == site.written(host)
        told = "\n".join(line for line in shown if line.startswith(f"{host} "))
        source = rf"{host} {run_id[:8]}/main\.stdout:"
        ticks = re.findall(rf"^{source}([0-9]+) \| tick ([0-9]+)$", told, re.MULTILINE)
        assert [(int(line), int(tick)) for line, tick in ticks] == [(n + 1, n) for n in range(len(ticks))]
        assert len(ticks) == len(told.splitlines())
        assert len(ticks) == site.project.output(run_id).count("tick")


def test_a_link_that_is_down_at_the_start_is_named(site: Site) -> None:
    bastion = f"jump host bastion ({site.jump.address} port {site.jump.port})"
    site.network.jump.cut()
    refused = site.run("east")
    assert refused.code == 3
    assert f"orch: east: {bastion}: Network is unreachable" in refused.err
    site.network.mend()
    site.network.hosts["east"].cut()
    done = site.run("east", "west")
    assert done.code == 3
    east = site.hosts["east"]
    assert f"orch: east: {east.address} port {east.port} from {bastion}: Connect failed" in done.err
    assert {row["host"]: row["verdict"] for row in site.project.runs()[:2]} == {
        "east": "refused",
        "west": "ok",
    }
