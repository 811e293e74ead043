"""Runs in a real LXC container by way of `pct exec`: on this machine as its node, and behind a real sshd."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import ContainerStopped, ContainerUnknown, HostKeyUnknown, HostUnfit, Unreachable
from orchestrator.inventory import Host
from orchestrator.transports import Transport, connect
from tests.integration.test_orch_run import SLEEPER
from tests.integration.test_run_endings import HIDES
from tests.lxc import NO_VMID, VMID, Container
from tests.metacharacters import IN_PATHS
from tests.project import TIMEOUT_S, Project, wait_until
from tests.sshd import Sshd

REPOSITORY = Path(__file__).parents[2]

WHERE_AM_I = """
import json, os, socket
print(json.dumps({"host": socket.gethostname(), "home": os.path.expanduser("~"), "env": dict(os.environ)}))
"""
SLOW = """
import os, time
for i in range(30):
    while i == 15 and not os.path.exists(os.path.expanduser(os.environ["GATE"])):
        time.sleep(0.01)
    print("tick", i, flush=True)
"""
UP_AND_SLEEP = """
import os, time
os.write(1, b"up\\n")
time.sleep(100)
"""


def entry(node: Any, **changes: Any) -> dict[str, Any]:
    return {"transport": "proxmox", "node": node, "vmid": VMID, "python": sys.executable, **changes}


def in_container(container: Container, folder: Path, hosts: dict[str, Any]) -> Project:
    """A project whose hosts keep their runs in the container's own home, which is seen from here too."""
    root = f"orch of {folder.parent.name}"
    project = Project(folder, {name: {**host, "root": f"~/{root}"} for name, host in hosts.items()})
    project.host_root = container.home / root
    return project


@pytest.fixture
def local_project(container: Container, tmp_path: Path) -> Iterator[Project]:
    project = in_container(container, tmp_path / "my project", {"pve-200": entry({"transport": "local"})})
    yield project
    project.end_all()


@pytest.fixture(params=["local", "ssh"])
def project(request: pytest.FixtureRequest, container: Container, tmp_path: Path) -> Iterator[Project]:
    """Host ``pve-200`` is the container: its node described in its place, or named and behind sshd."""
    hosts = {"pve-200": entry({"transport": "local"})}
    if request.param == "ssh":
        hosts = {"pve-200": entry("pve"), "pve": request.getfixturevalue("node_sshd").inventory_entry()}
    project = in_container(container, tmp_path / "my project", hosts)
    yield project
    project.end_all()


def started(project: Project, experiment: Path, *words: str) -> str:
    """Starts a run and returns its id once its payload has printed ``words``."""
    done = project.orch("run", experiment, "--host", "pve-200", "--detach")
    assert done.code == 0, done.err
    run_id = done.out.split()[0]
    wait_until(lambda: set(words) <= set(printed(project, run_id).split()), "output")
    return run_id


def printed(project: Project, run_id: str) -> str:
    return "".join(record["text"] for record in records_there(project, run_id, "out"))


def records_there(project: Project, run_id: str, kind: str) -> list[dict[str, Any]]:
    """The whole records of a kind: the last line may still be on its way."""
    lines = [line for line in project.written(run_id).splitlines(keepends=True) if line.endswith(b"\n")]
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def end_of(transport: Transport, *argv: str) -> int:
    channel = transport.open(argv)
    channel.finish_input()
    while channel.recv(1000, 10.0):
        pass
    return channel.wait(10.0)


def left_of(container: Container, run_id: str) -> str:
    """The processes inside that carry a run's id and are no zombies."""
    return container.run("sh", "-c", f"grep -lsa ORCH_RUN_ID={run_id} /proc/[0-9]*/environ; true")


class TestAWholeRun:
    def test_it_runs_inside_to_its_verdict_and_sends_an_unchanged_payload_once(
        self, project: Project
    ) -> None:
        path = project.experiment(WHERE_AM_I)
        done = project.orch("run", path, "--host", "pve-200", "--json")
        assert done.code == 0, done.err
        assert "sent 2 files" in done.err
        run_id = done.json["run"]["run_id"]
        seen = json.loads(project.output(run_id))
        assert (seen["host"], seen["home"]) == (f"container-{VMID}", "/root")
        assert project.mirrored(run_id) == project.written(run_id) != b""
        assert f"pve-200 {run_id[:8]}/main.stdout:1 | " in project.orch("logs", run_id).out
        assert project.orch("verify", run_id).code == 0
        again = project.orch("run", path, "--host", "pve-200")
        assert (again.code, "no file sent" in again.err) == (0, True)

    def test_no_variable_of_the_node_reaches_the_payload(self, project: Project) -> None:
        done = project.orch("run", project.experiment(WHERE_AM_I), "--host", "pve-200", "--json")
        env = json.loads(project.output(done.json["run"]["run_id"]))["env"]
        assert not [name for name, value in env.items() if "LEAK" in name or "leaked" in value]
        assert str(Path.home()) not in env.values()
        assert (env["HOME"], env["USER"], env["LANG"]) == ("/root", "root", "C.UTF-8")
        assert env["PATH"] == "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

    def test_the_variables_of_the_containers_first_process_come_when_asked(
        self, container: Container, tmp_path: Path
    ) -> None:
        asking = entry({"transport": "local"}, import_container_env=True, env={"OWN": "a 'b' $(id)"})
        hosts = {"pve-200": entry({"transport": "local"}), "asking": asking}
        project = in_container(container, tmp_path / "my project", hosts)
        path = project.experiment(WHERE_AM_I)
        for host, image_home, own in (("pve-200", None, None), ("asking", "/models", "a 'b' $(id)")):
            done = project.orch("run", path, "--host", host, "--json")
            env = json.loads(project.output(done.json["run"]["run_id"]))["env"]
            assert (env.get("IMAGE_HOME"), env.get("OWN")) == (image_home, own)
            assert "LEAK_OF_NODE" not in env

    def test_venv_and_workdir_are_the_containers_whatever_they_are_called(
        self, container: Container, node_sshd: Sshd, tmp_path: Path
    ) -> None:
        odd = "/".join(("venv and work here", *IN_PATHS))
        (container.home / odd / "work").mkdir(parents=True)
        (container.home / odd / "venv").symlink_to(sys.prefix)
        host = {key: value for key, value in entry("pve").items() if key != "python"}
        host |= {"venv": f"~/{odd}/venv", "workdir": f"~/{odd}/work"}
        hosts = {"pve-200": host, "pve": node_sshd.inventory_entry()}
        project = in_container(container, tmp_path / "my project", hosts)
        done = project.orch("exec", "pve-200", "--json", "--", "sh", "-c", "pwd; echo $VIRTUAL_ENV")
        assert done.code == 0, done.err
        assert project.output(done.json["run"]["run_id"]) == f"/root/{odd}/work\n/root/{odd}/venv\n"

    def test_the_out_of_memory_probe_runs_inside(self, local_project: Project) -> None:
        shutil.copytree(REPOSITORY / "payloads" / "dflash", local_project.folder / "payloads" / "dflash")
        experiment = REPOSITORY / "experiments" / "oom_probe.yaml"
        done = local_project.orch("run", experiment, "--host", "pve-200", "--profile", "cpu", "--json")
        assert done.code == 0, done.err
        assert done.json["verdict"]["name"] == "ok"

    def test_a_matrix_queues_inside(self, local_project: Project) -> None:
        path = local_project.experiment(
            "print(1)", params={"x": 0}, matrix={"params": {"x": [1, 2]}, "at_once": 1}
        )
        done = local_project.orch("run", path, "--host", "pve-200", "--json")
        assert done.code == 0, done.err
        assert [row["verdict"] for row in local_project.runs()] == ["ok", "ok"]


class TestEnding:
    def test_cancel_ends_everything_inside(self, project: Project, container: Container) -> None:
        run_id = started(project, project.experiment(SLEEPER), "up")
        assert left_of(container, run_id)
        assert project.orch("cancel", run_id, "--grace", "1").code == 0
        (row,) = project.runs()
        assert (row["state"], row["verdict"]) == ("cancelled", "cancelled")
        assert left_of(container, run_id) == ""

    def test_a_process_without_the_runs_id_is_found_by_its_cgroup(
        self, local_project: Project, container: Container
    ) -> None:
        run_id = started(local_project, local_project.experiment(HIDES), "up", "hidden")
        (spawn,) = records_there(local_project, run_id, "spawn")
        assert spawn["cgroup"], "the container has a cgroup of its own to make one in"
        (start,) = records_there(local_project, run_id, "start")
        container.run("sh", "-c", f"kill -9 {start['identity']['pid']}")
        wait_until(lambda: "its supervisor is gone" in local_project.orch("show", run_id).out, "the loss")
        assert " sleep 100\n" in local_project.orch("cancel", run_id, "--grace", "1").err
        assert container.run("sh", "-c", f"test -e {spawn['cgroup']} || echo gone") == "gone\n"

    def test_a_killed_controller_costs_nothing(self, project: Project) -> None:
        path = project.experiment(SLOW, env={"GATE": f"~/{project.host_root.name}/gate"})
        with project.start("run", path, "--host", "pve-200") as controller:
            assert controller.stdout is not None
            controller.stdout.readline()
            controller.send_signal(signal.SIGKILL)
        (row,) = project.runs()
        run_id = row["run_id"]
        assert row["state"] == "running"
        (project.host_root / "gate").touch()
        wait_until(lambda: records_there(project, run_id, "end"), "the end inside")
        wait_until(
            lambda: project.orch("reconcile").code == 0 and project.runs()[0]["verdict"], "the verdict"
        )
        assert project.runs()[0]["verdict"] == "ok"
        assert project.output(run_id) == "".join(f"tick {i}\n" for i in range(30))
        assert project.mirrored(run_id) == project.written(run_id)


class TestAContainerThatStops:
    def test_a_follow_ends_with_it_and_the_run_is_lost_when_it_is_back(
        self, project: Project, container: Container
    ) -> None:
        run_id = started(project, project.experiment(UP_AND_SLEEP), "up")
        follow = project.start("logs", "-f", run_id)
        try:
            assert follow.stdout is not None
            assert follow.stdout.readline().endswith(b"| up\n")
            container.stop()
            _, err = follow.communicate(timeout=TIMEOUT_S)
        finally:
            follow.kill()
            follow.wait()
        assert b"container 200 is stopped" in err
        assert follow.returncode == ContainerStopped.exit_code
        (row,) = project.runs()
        assert (row["state"], "is stopped" in row["observed"]["unreachable"]) == ("running", True)
        container.start()
        (row,) = project.runs()
        assert (row["state"], "its host rebooted while it ran" in row["reason"]) == ("lost", True)
        assert project.orch("cancel", run_id).code == 0


class TestErrors:
    def test_stopped_wrong_and_unreachable_are_three_errors_with_three_exit_codes(
        self, container: Container, node_sshd: Sshd, tmp_path: Path
    ) -> None:
        hosts = {
            "pve": node_sshd.inventory_entry(),
            "pve-200": entry("pve"),
            "wrong": entry("pve", vmid=NO_VMID),
        }
        project = in_container(container, tmp_path / "my project", hosts)
        path = project.experiment(SLOW)
        container.stop()
        stopped = project.orch("run", path, "--host", "pve-200")
        wrong = project.orch("run", path, "--host", "wrong")
        node_sshd.stop()
        unreachable = project.orch("run", path, "--host", "pve-200")
        assert (
            "orch: pve-200: container 200 is stopped.\norch: next: run on its node: pct start 200\n"
            in stopped.err
        )
        assert f"orch: wrong: its node has no container {NO_VMID}; set 'vmid:' in inventory.yaml" in wrong.err
        assert (
            f"orch: pve-200: its node cannot be reached: pve: 127.0.0.1 port {node_sshd.port}: "
            in unreachable.err
        )
        assert (stopped.code, wrong.code, unreachable.code) == (6, 2, 3)
        assert [row["verdict"] for row in project.runs()] == ["refused"] * 3

    @pytest.mark.parametrize("kind", ["local", "ssh"])
    def test_a_pct_that_does_not_look_first_tells_the_same(
        self, container: Container, start_sshd: Any, monkeypatch: pytest.MonkeyPatch, kind: str
    ) -> None:
        path = f"{container.old_bin}:/usr/sbin:/usr/bin:/sbin:/bin"
        monkeypatch.setenv("PATH", path)
        container.stop()
        with (
            connect(_host(_node(kind, start_sshd, path))) as transport,
            pytest.raises(ContainerStopped),
        ):
            end_of(transport, "true")

    @pytest.mark.parametrize("kind", ["local", "ssh"])
    def test_a_node_without_pct_is_no_node(
        self, start_sshd: Any, monkeypatch: pytest.MonkeyPatch, kind: str
    ) -> None:
        monkeypatch.setenv("PATH", "/usr/bin:/bin")
        with (
            connect(_host(_node(kind, start_sshd, "/usr/bin:/bin"))) as transport,
            pytest.raises(HostUnfit, match="no pct on its node"),
        ):
            end_of(transport, "true")

    def test_a_python_that_the_container_lacks_is_named(self, container: Container, tmp_path: Path) -> None:
        host = entry({"transport": "local"}, python="python9.9")
        project = in_container(container, tmp_path / "my project", {"pve-200": host})
        done = project.orch("run", project.experiment(SLOW), "--host", "pve-200")
        assert (done.code, "there is no python9.9" in done.err, "set 'python:'" in done.err) == (
            3,
            True,
            True,
        )

    @pytest.mark.usefixtures("dot_ssh")
    def test_the_nodes_host_key_is_checked(self, node_sshd: Sshd) -> None:
        node = node_sshd.inventory_host(name="pve-200.node", host_key=None)
        with pytest.raises(HostKeyUnknown, match=r"put this line under pve-200\.node in inventory\.yaml"):
            connect(_host(node))

    def test_each_class_is_told_by_the_transport(self, container: Container) -> None:
        here = Host(name="here", transport="local", address="here")
        for vmid, kind in ((VMID, ContainerStopped), (NO_VMID, ContainerUnknown)):
            container.stop()
            with connect(_host(here, vmid)) as transport, pytest.raises(kind):
                end_of(transport, "true")
        gone = Host(name="pve", transport="ssh", address="127.0.0.1", port=1, host_key="ssh-ed25519 AAAA")
        with pytest.raises(Unreachable, match="its node cannot be reached"):
            connect(_host(gone))


class TestTheNodesKey:
    def test_that_of_a_node_described_in_its_place_is_pinned_there(
        self, container: Container, node_sshd: Sshd, tmp_path: Path
    ) -> None:
        node = {key: value for key, value in node_sshd.inventory_entry().items() if key != "python"}
        project = in_container(container, tmp_path / "my project", {"pve-200": entry(node)})
        node_sshd.rotate_host_key()
        refused = project.orch("exec", "pve-200", "--", "true")
        assert (refused.code, "orch hosts repin pve-200.node does" in refused.err) == (3, True)
        assert "orch hosts repin pve-200.node" in project.orch("hosts", "repin", "pve-200").err
        key = node_sshd.fingerprint()
        assert project.orch("hosts", "repin", "pve-200.node", "--fingerprint", key).code == 0
        assert project.orch("exec", "pve-200", "--", "true").code == 0

    def test_that_of_a_node_with_a_name_is_pinned_for_all_its_containers(
        self, container: Container, node_sshd: Sshd, tmp_path: Path
    ) -> None:
        hosts = {"pve-200": entry("pve"), "pve": node_sshd.inventory_entry()}
        project = in_container(container, tmp_path / "my project", hosts)
        node_sshd.rotate_host_key()
        key = node_sshd.fingerprint()
        assert project.orch("hosts", "repin", "pve", "--fingerprint", key).code == 0
        assert project.orch("exec", "pve-200", "--", "true").code == 0


def test_hosts_shows_the_container_and_the_way_to_it(project: Project) -> None:
    shown = project.orch("hosts", env={"COLUMNS": "200"}).out
    (line,) = [line for line in shown.splitlines() if line.startswith("pve-200")]
    assert "proxmox" in line
    assert f"container {VMID} at " in line
    (told,) = [host for host in project.orch("hosts", "--json").json if host["name"] == "pve-200"]
    assert (told["vmid"], told["node"]["transport"]) == (VMID, told["node"]["transport"])


def _node(kind: str, start_sshd: Any, path: str) -> Host:
    if kind == "local":
        return Host(name="here", transport="local", address="here")
    host: Host = start_sshd(variables={"PATH": path}).inventory_host(name="pve")
    return host


def _host(node: Host, vmid: int = VMID) -> Host:
    return Host(name="pve-200", transport="proxmox", address="node", node=node, vmid=vmid)
