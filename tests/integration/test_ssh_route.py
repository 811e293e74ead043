"""The way to a host: what ssh_config and the inventory say about jumps, commands, users, ports and keys."""

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orchestrator.errors import AuthenticationFailed, HostUnfit, Unreachable, UsageError
from orchestrator.inventory import Host
from orchestrator.transports import Transport, connect, ssh_config
from orchestrator.transports.ssh_config import Jump
from tests.sshd import Sshd, generate_key

StartSshd = Callable[..., Sshd]

PATIENCE_S = 30.0

pytestmark = pytest.mark.usefixtures("no_thread_is_left")


@pytest.fixture
def agent(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], None]]:
    """An ssh-agent of the test's own, as a function that adds a key to it."""
    path = home / "agent"
    process = subprocess.Popen(["ssh-agent", "-D", "-a", path], stdout=subprocess.DEVNULL)
    while not path.exists():
        time.sleep(0.005)
    monkeypatch.setenv("SSH_AUTH_SOCK", str(path))

    def add(key: Path) -> None:
        subprocess.run(["ssh-add", "-q", key], check=True, stderr=subprocess.DEVNULL)

    yield add
    process.terminate()
    process.wait()


# Jump hosts and proxy commands


def test_a_jump_host_is_passed_on_the_way(start_sshd: StartSshd, dot_ssh: Path) -> None:
    jump, target = start_sshd(), start_sshd(options={"ForceCommand": "echo the target"})
    configure(dot_ssh, f"Host 127.0.0.1\n ProxyJump bastion\n{block('bastion', jump)}", jump)
    with connect(target.inventory_host()) as transport:
        assert output(transport, "true") == b"the target\n"
        until(lambda: len(jump.session_pids()) == 1)
    until(lambda: not jump.session_pids())


def test_several_jump_hosts_are_passed_in_the_order_of_ssh(start_sshd: StartSshd, dot_ssh: Path) -> None:
    target = start_sshd()
    second = start_sshd(options={"PermitOpen": f"127.0.0.1:{target.port}"})
    first = start_sshd(options={"PermitOpen": f"127.0.0.1:{second.port}"})
    configure(
        dot_ssh,
        f"Host target\n HostName 127.0.0.1\n Port {target.port}\n ProxyJump first,second\n"
        + block("first", first)
        + block("second", second),
        first,
        second,
    )
    host = target.inventory_host(address="target", port=None)
    with connect(host) as transport:
        assert output(transport, "echo", "through both") == b"through both\n"
    (dot_ssh / "config").write_text((dot_ssh / "config").read_text().replace("first,second", "second,first"))
    with pytest.raises(HostUnfit, match=r"jump host second \(.*AllowTcpForwarding"):
        connect(host)


def test_a_jump_host_has_its_own_jump_host(start_sshd: StartSshd, dot_ssh: Path) -> None:
    target, inner, outer = start_sshd(), start_sshd(), start_sshd()
    configure(
        dot_ssh,
        f"Host target\n HostName 127.0.0.1\n Port {target.port}\n ProxyJump inner\n"
        + block("inner", inner)
        + " ProxyJump outer\n"
        + block("outer", outer),
        inner,
        outer,
    )
    with connect(target.inventory_host(address="target", port=None)):
        until(lambda: [len(server.session_pids()) for server in (outer, inner, target)] == [1, 1, 1])


def test_jump_hosts_that_go_round_in_a_circle_are_refused(dot_ssh: Path) -> None:
    (dot_ssh / "config").write_text("Host a\n ProxyJump b\nHost b\n ProxyJump a\n")
    with pytest.raises(UsageError, match="circle"):
        connect(ssh_host("a"))


def test_a_jump_host_for_everything_is_not_reached_through_itself(
    start_sshd: StartSshd, dot_ssh: Path
) -> None:
    jump, target = start_sshd(), start_sshd()
    configure(dot_ssh, f"{block('bastion', jump)}Host *\n ProxyJump bastion\n", jump)
    with connect(target.inventory_host()):
        until(lambda: len(jump.session_pids()) == 1)


def test_proxy_jump_none_means_directly(sshd: Sshd, dot_ssh: Path) -> None:
    (dot_ssh / "config").write_text("Host 127.0.0.1\n ProxyJump none\nHost *\n ProxyJump nowhere.invalid\n")
    with connect(sshd.inventory_host()):
        pass


def test_a_killed_jump_host_breaks_the_connection(start_sshd: StartSshd, dot_ssh: Path) -> None:
    jump, target = start_sshd(), start_sshd()
    configure(dot_ssh, f"Host 127.0.0.1\n ProxyJump bastion\n{block('bastion', jump)}", jump)
    with connect(target.inventory_host()) as transport:
        channel = transport.open(["cat"])
        jump.kill_sessions()
        with pytest.raises(Unreachable):
            channel.recv(1, PATIENCE_S)


def test_a_proxy_command_sees_the_inventorys_port_and_user_and_ends_with_the_transport(
    sshd: Sshd, dot_ssh: Path, tmp_path: Path
) -> None:
    relay = tmp_path / "relay"
    relay.write_text(RELAY)
    seen = tmp_path / "seen"
    (dot_ssh / "config").write_text(f'Host 127.0.0.1\n ProxyCommand python3 "{relay}" %h %p %r "{seen}"\n')
    with connect(sshd.inventory_host()) as transport:
        assert output(transport, "echo", "relayed") == b"relayed\n"
        pid, *arguments = seen.read_text().split()
        assert arguments == ["127.0.0.1", str(sshd.port), sshd.user]
    assert not Path(f"/proc/{pid}").exists()


def test_a_proxy_command_that_dies_breaks_the_connection(sshd: Sshd, dot_ssh: Path, tmp_path: Path) -> None:
    relay, seen = tmp_path / "relay", tmp_path / "seen"
    relay.write_text(RELAY)
    (dot_ssh / "config").write_text(f"Host 127.0.0.1\n ProxyCommand python3 {relay} %h %p %r {seen}\n")
    with connect(sshd.inventory_host()) as transport:
        channel = transport.open(["cat"])
        os.kill(int(seen.read_text().split()[0]), 9)
        with pytest.raises(Unreachable):
            channel.recv(1, PATIENCE_S)


def test_a_proxy_command_that_fails_is_quoted(dot_ssh: Path) -> None:
    (dot_ssh / "config").write_text("Host box\n ProxyCommand sh -c 'echo no route today >&2; exit 3'\n")
    with pytest.raises(Unreachable, match="ProxyCommand failed: no route today"):
        connect(ssh_host("box"))


# Users, ports, addresses


def test_ssh_config_names_address_port_user_and_identity(sshd: Sshd, dot_ssh: Path) -> None:
    configure(dot_ssh, block("pve-200", sshd), sshd)
    with connect(ssh_host("pve-200")) as transport:
        assert output(transport, "id", "-un") == f"{sshd.user}\n".encode()


def test_the_inventory_wins_over_ssh_config(sshd: Sshd, dot_ssh: Path) -> None:
    (dot_ssh / "config").write_text("Host *\n Port 1\n User nobody-at-all\n ConnectTimeout soon\n")
    with connect(sshd.inventory_host()):
        pass


def test_includes_are_followed_and_do_not_swallow_what_comes_after(sshd: Sshd, dot_ssh: Path) -> None:
    (dot_ssh / "known_hosts").write_text(sshd.known_hosts_line())
    (dot_ssh / "conf.d").mkdir()
    (dot_ssh / "conf.d" / "box.conf").write_text(block("box", sshd))
    (dot_ssh / "config").write_text("Include conf.d/*.conf ~/.ssh/none\nHostKeyAlias seen-after-include\n")
    options = ssh_config.load().lookup("box")
    assert (options["hostname"], options["port"]) == ("127.0.0.1", str(sshd.port))
    assert ssh_config.load().lookup("other")["hostkeyalias"] == "seen-after-include"


def test_an_include_of_itself_is_refused(dot_ssh: Path) -> None:
    (dot_ssh / "config").write_text("Include config\n")
    with pytest.raises(UsageError, match="include itself"):
        connect(ssh_host("box"))


@pytest.mark.parametrize("text", ["Port many\n", "Host *\n nonsense\n", 'UserKnownHostsFile "open\n'])
def test_an_ssh_config_that_cannot_be_read_is_the_users_error(dot_ssh: Path, text: str) -> None:
    (dot_ssh / "config").write_text(text)
    with pytest.raises(UsageError):
        connect(ssh_host("box"))


@pytest.mark.parametrize(
    ("value", "jumps"),
    [
        ("a", (Jump(address="a"),)),
        ("me@a:2222, b", (Jump(address="a", user="me", port=2222), Jump(address="b"))),
        ("ssh://me@a:2222", (Jump(address="a", user="me", port=2222),)),
        ("[2001:db8::1]:22", (Jump(address="2001:db8::1", port=22),)),
        ("2001:db8::1", (Jump(address="2001:db8::1"),)),
        ("none", ()),
    ],
)
def test_proxy_jump_is_read_as_ssh_reads_it(value: str, jumps: tuple[Jump, ...]) -> None:
    assert ssh_config.jumps({"proxyjump": value}, alias="box") == jumps


def test_fabrics_own_configuration_is_not_read(sshd: Sshd, home: Path, dot_ssh: Path) -> None:
    ran = home / "ran"
    (home / ".fabric.py").write_text(f"open({str(ran)!r}, 'w')\nport = 1\n")
    (home / ".fabric.yaml").write_text(
        "user: nobody\ngateway: nowhere\nauthentication: {strategy_class: nonsense}\n"
        "connect_kwargs: {password: secret}\n"
    )
    with connect(sshd.inventory_host()):
        assert not ran.exists()


# Logging in


def test_a_refused_key_is_named_with_the_next_step(sshd: Sshd, tmp_path: Path) -> None:
    key = tmp_path / "wrong"
    generate_key(key)
    with pytest.raises(AuthenticationFailed) as caught:
        connect(sshd.inventory_host(identity=key))
    assert f"{key} (refused)" in str(caught.value)
    assert "authorized_keys" in str(caught.value)


def test_an_encrypted_key_without_an_agent_is_never_asked_about(sshd: Sshd, tmp_path: Path) -> None:
    key = tmp_path / "locked key"
    generate_key(key, passphrase="secret")
    with pytest.raises(AuthenticationFailed, match=f"{key} .is encrypted.*run: ssh-add '{key}'"):
        connect(sshd.inventory_host(identity=key))


def test_an_encrypted_key_is_used_through_the_agent(
    sshd: Sshd, agent: Callable[[Path], None], dot_ssh: Path
) -> None:
    (dot_ssh / "config").write_text("IdentitiesOnly yes\n")
    agent(sshd.client_key)
    subprocess.run(["ssh-keygen", "-q", "-p", "-N", "secret", "-f", sshd.client_key], check=True)
    with connect(sshd.inventory_host()):
        pass


def test_the_agents_keys_are_offered_without_any_identity(
    sshd: Sshd, agent: Callable[[Path], None], tmp_path: Path
) -> None:
    with pytest.raises(AuthenticationFailed, match=r"no key, none was found.*set 'identity:'"):
        connect(sshd.inventory_host(identity=None))
    agent(sshd.client_key)
    with connect(sshd.inventory_host(identity=None)):
        pass


def test_identities_only_keeps_the_agents_other_keys_back(
    sshd: Sshd, agent: Callable[[Path], None], dot_ssh: Path, tmp_path: Path
) -> None:
    wrong = tmp_path / "wrong"
    generate_key(wrong)
    agent(sshd.client_key)
    with connect(sshd.inventory_host(identity=wrong)):
        pass
    (dot_ssh / "config").write_text("IdentitiesOnly yes\n")
    with pytest.raises(AuthenticationFailed):
        connect(sshd.inventory_host(identity=wrong))
    with connect(sshd.inventory_host()):
        pass


def test_the_default_key_files_are_tried_when_none_is_named(sshd: Sshd, dot_ssh: Path) -> None:
    (dot_ssh / "id_ed25519").write_bytes(sshd.client_key.read_bytes())
    with connect(sshd.inventory_host(identity=None)):
        pass


@pytest.mark.parametrize(
    "content", [None, b"", b"\xff\xfe not a key", b"-----BEGIN OPENSSH PRIVATE KEY-----\n"]
)
def test_a_key_file_that_is_no_key_does_not_stop_the_next_one(
    sshd: Sshd, dot_ssh: Path, tmp_path: Path, content: bytes | None
) -> None:
    broken = tmp_path / "broken key"
    if content is not None:
        broken.write_bytes(content)
    (dot_ssh / "config").write_text(f'IdentityFile "{sshd.client_key}"\n')
    with connect(sshd.inventory_host(identity=broken)):
        pass


def test_too_many_refused_keys_end_with_all_of_them_named(
    start_sshd: StartSshd, agent: Callable[[Path], None], tmp_path: Path
) -> None:
    server = start_sshd(options={"MaxAuthTries": "2"})
    for name in ("a", "b", "c"):
        generate_key(tmp_path / name)
        agent(tmp_path / name)
    with pytest.raises(AuthenticationFailed, match="closed the connection"):
        connect(server.inventory_host(identity=None))


def test_a_host_that_wants_a_second_factor_says_so(start_sshd: StartSshd) -> None:
    server = start_sshd(
        options={"AuthenticationMethods": "publickey,password", "PasswordAuthentication": "yes"}
    )
    with pytest.raises(AuthenticationFailed, match="also wants password"):
        connect(server.inventory_host())


RELAY = """\
import os, select, socket, sys
address, port, user, seen = sys.argv[1:]
with socket.create_connection((address, int(port))) as far:
    with open(seen, "w") as file:
        file.write(f"{os.getpid()} {address} {port} {user}")
    while True:
        for ready in select.select([0, far], [], [])[0]:
            data = far.recv(65536) if ready is far else os.read(0, 65536)
            if not data:
                sys.exit()
            os.write(1, data) if ready is far else far.sendall(data)
"""


def block(alias: str, server: Sshd) -> str:
    return (
        f"Host {alias}\n HostName {server.address}\n Port {server.port}\n User {server.user}\n"
        f' IdentityFile "{server.client_key}"\n'
    )


def configure(dot_ssh: Path, text: str, *known: Sshd) -> None:
    (dot_ssh / "config").write_text(text)
    (dot_ssh / "known_hosts").write_text("".join(server.known_hosts_line() for server in known))


def ssh_host(address: str) -> Host:
    return Host(name="gpu-box", transport="ssh", address=address)


def output(transport: Transport, *argv: str) -> bytes:
    channel = transport.open(argv)
    channel.finish_input()
    return b"".join(iter(lambda: channel.recv(65536, PATIENCE_S), b""))


def until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)
