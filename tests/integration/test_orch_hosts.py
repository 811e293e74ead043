"""`orch hosts add` and `repin`: a key is shown once, compared by a person, and pinned."""

import os
import pty
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.enrolling import parse_target
from tests.project import Done, Project
from tests.sshd import Sshd

StartSshd = Callable[..., Sshd]


def target(server: Sshd) -> str:
    return f"{server.user}@{server.address}:{server.port}"


def hosts_of(project: Project) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((project.folder / "inventory.yaml").read_text())["hosts"]
    return found


def log_in_by_default(server: Sshd, dot_ssh: Path) -> None:
    """The server's user key as ssh_config's for everybody: an added host has no identity of its own."""
    key = dot_ssh / "id_test"
    shutil.copy(server.client_key, key)
    key.chmod(0o600)
    (dot_ssh / "config").write_text("Host *\n  IdentityFile ~/.ssh/id_test\n")


def answered(project: Project, answer: str, *arguments: str) -> Done:
    """Run orch with a terminal as standard input, on which somebody types an answer."""
    controller, terminal = pty.openpty()
    os.write(controller, answer.encode())
    process = project.start(*arguments, stdin=terminal)
    out, err = process.communicate(timeout=60)
    os.close(terminal)
    os.close(controller)
    return Done(code=process.returncode, out=out.decode(), err=err.decode())


def test_added_host_is_pinned_after_one_question_and_can_be_used(
    project: Project, sshd: Sshd, dot_ssh: Path
) -> None:
    log_in_by_default(sshd, dot_ssh)
    path = project.folder / "inventory.yaml"
    path.write_text("# ours\n" + path.read_text() + "# the end\n")
    done = answered(project, "y\n", "hosts", "add", "rented", target(sshd))
    assert done.code == 0, done.err
    assert done.err.count(sshd.fingerprint()) == 1
    assert done.err.count("Is this the key of rented?") == 1
    assert "ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub" in done.err
    assert "logged in" in done.err
    assert hosts_of(project)["rented"] == {
        "transport": "ssh",
        "address": sshd.address,
        "port": sshd.port,
        "user": sshd.user,
        "host_key": sshd.host_key(),
    }
    text = path.read_text()
    assert text.startswith("# ours\n")
    assert text.endswith("# the end\n")
    assert project.orch("exec", "rented", "--", "true").code == 0
    assert not (dot_ssh / "known_hosts").exists()


@pytest.mark.parametrize("answer", ["n\n", "\n"])
def test_no_is_the_default_and_writes_nothing(
    project: Project, sshd: Sshd, dot_ssh: Path, answer: str
) -> None:
    before = (project.folder / "inventory.yaml").read_bytes()
    done = answered(project, answer, "hosts", "add", "rented", target(sshd))
    assert (done.code, "not confirmed" in done.err) == (1, True)
    assert (project.folder / "inventory.yaml").read_bytes() == before
    assert "Accepted publickey" not in sshd.log.read_text()


def test_nobody_to_ask_is_an_error_with_the_words_that_confirm(
    project: Project, sshd: Sshd, dot_ssh: Path
) -> None:
    log_in_by_default(sshd, dot_ssh)
    refused = project.orch("hosts", "add", "rented", target(sshd))
    assert refused.code == 2
    assert f"--fingerprint {sshd.fingerprint()}" in refused.err
    assert "rented" not in hosts_of(project)
    wrong = project.orch("hosts", "add", "rented", target(sshd), "--fingerprint", "SHA256:" + "A" * 43)
    assert (wrong.code, "rented" in hosts_of(project)) == (2, False)
    assert sshd.fingerprint() in wrong.err
    right = project.orch("hosts", "add", "rented", target(sshd), "--fingerprint", sshd.fingerprint())
    assert (right.code, hosts_of(project)["rented"]["host_key"]) == (0, sshd.host_key())


def test_host_whose_log_in_fails_is_added_and_the_failure_told(
    project: Project, sshd: Sshd, dot_ssh: Path
) -> None:
    done = project.orch("hosts", "add", "rented", target(sshd), "--fingerprint", sshd.fingerprint())
    assert done.code == 3
    assert "it cannot be used yet" in done.err
    assert hosts_of(project)["rented"]["host_key"] == sshd.host_key()


def test_key_that_known_hosts_has_is_not_asked_about_nor_pinned(
    project: Project, sshd: Sshd, dot_ssh: Path
) -> None:
    log_in_by_default(sshd, dot_ssh)
    (dot_ssh / "known_hosts").write_text(sshd.known_hosts_line())
    done = project.orch("hosts", "add", "rented", target(sshd))
    assert done.code == 0, done.err
    assert "host_key" not in hosts_of(project)["rented"]


def test_changed_key_is_refused_and_one_command_pins_the_new_one(project: Project, sshd: Sshd) -> None:
    project.write_inventory({"rented": sshd.inventory_entry()})
    old = sshd.fingerprint()
    sshd.rotate_host_key()
    refused = project.orch("exec", "rented", "--", "true")
    assert refused.code == 3
    assert "orch hosts repin rented" in refused.err
    done = answered(project, "y\n", "hosts", "repin", "rented")
    assert done.code == 0, done.err
    assert f"known until now: {old}" in done.err
    assert f"shown now:       {sshd.fingerprint()}" in done.err
    assert hosts_of(project)["rented"] == {
        **sshd.inventory_entry(),
        "host_key": sshd.host_key(),
        "root": str(project.host_root),
    }
    assert project.orch("exec", "rented", "--", "true").code == 0
    again = project.orch("hosts", "repin", "rented")
    assert (again.code, "nothing to do" in again.err) == (0, True)


def test_key_of_a_jump_host_is_never_pinned_for_the_host_behind_it(
    project: Project, start_sshd: StartSshd, dot_ssh: Path
) -> None:
    jump, behind = start_sshd(), start_sshd()
    (dot_ssh / "config").write_text(
        f"Host bastion\n  HostName {jump.address}\n  Port {jump.port}\n  User {jump.user}\n"
        f'  IdentityFile "{jump.client_key}"\n'
        f"Host {behind.address}\n  ProxyJump bastion\n"
    )
    done = project.orch("hosts", "add", "rented", target(behind), "--fingerprint", jump.fingerprint())
    assert done.code == 3
    assert "jump host" in done.err
    assert "rented" not in hosts_of(project)


def test_host_that_is_not_there_is_not_added(project: Project, sshd: Sshd) -> None:
    sshd.stop()
    done = project.orch("hosts", "add", "rented", target(sshd))
    assert (done.code, "rented" in hosts_of(project)) == (3, False)


@pytest.mark.parametrize(
    ("name", "address"),
    [
        ("-x", "root@192.0.2.1"),
        ("a b", "root@192.0.2.1"),
        ("here", "root@192.0.2.1"),
        ("rented", "root@"),
        ("rented", "-oProxyCommand=touch%20x"),
        ("rented", "root@host;touch x"),
        ("rented", "a@b@c"),
        ("rented", "host:99999"),
        ("rented", "host:0"),
        ("rented", "ho st"),
        ("rented", "ho\nst: {transport: local}"),
        ("rented", "$(touch x)@host"),
        ("rented", ""),
    ],
)
def test_what_is_no_host_is_refused_before_anybody_is_asked(
    project: Project, name: str, address: str
) -> None:
    before = (project.folder / "inventory.yaml").read_bytes()
    done = project.orch("hosts", "add", "--", name, address)
    assert done.code == 2, done.err
    assert len(done.err.strip().splitlines()) == 1
    assert (project.folder / "inventory.yaml").read_bytes() == before
    assert not (project.folder / "x").exists()


def test_listing_is_what_it_was(project: Project) -> None:
    done = project.orch("hosts")
    assert done.code == 0
    assert "here" in done.out
    assert [host["name"] for host in project.orch("hosts", "--json").json] == ["here"]


def test_repin_refuses_what_has_no_key(project: Project) -> None:
    assert "no host key" in project.orch("hosts", "repin", "here").err
    unknown = project.orch("hosts", "repin", "hera")
    assert (unknown.code, "did you mean 'here'" in unknown.err) == (2, True)


def test_ipv6_addresses_keep_their_colons() -> None:
    assert parse_target("root@[2001:db8::1]:2222") == {
        "transport": "ssh",
        "address": "2001:db8::1",
        "port": 2222,
        "user": "root",
    }
    assert parse_target("2001:db8::1") == {"transport": "ssh", "address": "2001:db8::1"}
    assert parse_target("::1")["address"] == "::1"
    assert parse_target("gpu") == {"transport": "ssh", "address": "gpu"}
