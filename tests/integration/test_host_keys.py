"""No connection to a host whose key nobody has confirmed: changed, unknown, revoked, on every hop."""

import base64
import getpass
import hashlib
import hmac
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.errors import HostKeyChanged, HostKeyUnknown, StorageError
from orchestrator.transports import connect
from orchestrator.transports.host_keys import fingerprint, known_host_name
from tests.sshd import Sshd

StartSshd = Callable[..., Sshd]

pytestmark = pytest.mark.usefixtures("no_thread_is_left")


def test_a_changed_key_is_refused_with_both_fingerprints_and_the_line_to_re_pin(sshd: Sshd) -> None:
    host = sshd.inventory_host()
    old = sshd.fingerprint()
    sshd.rotate_host_key()
    with pytest.raises(HostKeyChanged) as caught:
        connect(host)
    assert (caught.value.pinned, caught.value.fingerprint) == (old, sshd.fingerprint())
    message = str(caught.value)
    assert old in message
    assert sshd.fingerprint() in message
    assert f"under gpu-box in inventory.yaml: host_key: {sshd.host_key()}" in message
    assert "Accepted publickey" not in sshd.log.read_text(), "nothing was sent to the wrong host"


def test_the_changed_key_of_a_jump_host_is_refused(start_sshd: StartSshd, dot_ssh: Path) -> None:
    jump, target = start_sshd(), start_sshd()
    known_hosts = dot_ssh / "known_hosts"
    known_hosts.write_text(jump.known_hosts_line())
    configure_jump(dot_ssh, jump)
    old = jump.fingerprint()
    jump.rotate_host_key()
    with pytest.raises(HostKeyChanged, match=r"jump host bastion") as caught:
        connect(target.inventory_host())
    assert (caught.value.pinned, caught.value.fingerprint) == (old, jump.fingerprint())
    assert "inventory.yaml" not in str(caught.value), "the inventory pins the host, not its jump hosts"
    assert "Connection from" not in target.log.read_text()


def test_the_changed_key_of_a_host_behind_a_jump_host_is_refused(
    start_sshd: StartSshd, dot_ssh: Path
) -> None:
    jump, target = start_sshd(), start_sshd()
    (dot_ssh / "known_hosts").write_text(jump.known_hosts_line())
    configure_jump(dot_ssh, jump)
    host = target.inventory_host()
    target.rotate_host_key()
    with pytest.raises(HostKeyChanged) as caught:
        connect(host)
    assert caught.value.fingerprint == target.fingerprint()


def test_a_key_that_changed_against_known_hosts_comes_with_the_commands_to_re_pin(
    sshd: Sshd, dot_ssh: Path
) -> None:
    known_hosts = dot_ssh / "known_hosts"
    known_hosts.write_text(sshd.known_hosts_line())
    sshd.rotate_host_key()
    with pytest.raises(HostKeyChanged) as caught:
        connect(sshd.inventory_host(host_key=None))
    assert f"{known_hosts}:1" in str(caught.value)
    run_printed_command(caught.value)
    with connect(sshd.inventory_host(host_key=None)):
        pass


def test_an_unknown_key_is_refused_with_its_fingerprint_and_both_ways_to_trust_it(
    sshd: Sshd, dot_ssh: Path
) -> None:
    with pytest.raises(HostKeyUnknown) as caught:
        connect(sshd.inventory_host(host_key=None))
    assert caught.value.fingerprint == sshd.fingerprint()
    message = str(caught.value)
    assert sshd.fingerprint() in message
    assert "ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub" in message
    assert f"under gpu-box in inventory.yaml: host_key: {sshd.host_key()}" in message
    assert list(dot_ssh.iterdir()) == [], "no file of the user's was written"
    run_printed_command(caught.value)
    with connect(sshd.inventory_host(host_key=None)):
        pass


def test_an_unknown_jump_host_is_refused_before_the_host_hears_of_us(
    start_sshd: StartSshd, dot_ssh: Path
) -> None:
    jump, target = start_sshd(), start_sshd()
    configure_jump(dot_ssh, jump)
    with pytest.raises(HostKeyUnknown, match=r"jump host bastion") as caught:
        connect(target.inventory_host())
    assert caught.value.fingerprint == jump.fingerprint()
    assert "Connection from" not in target.log.read_text()


def test_ssh_config_cannot_switch_the_check_off(sshd: Sshd, dot_ssh: Path) -> None:
    (dot_ssh / "config").write_text("Host *\n  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n")
    with pytest.raises(HostKeyUnknown):
        connect(sshd.inventory_host(host_key=None))


def test_a_pinned_key_counts_alone(sshd: Sshd, start_sshd: StartSshd, dot_ssh: Path) -> None:
    other = start_sshd()
    known_hosts = dot_ssh / "known_hosts"
    known_hosts.write_text(f"@revoked * {sshd.host_key()}\n")
    with connect(sshd.inventory_host()):
        pass
    known_hosts.write_text(sshd.known_hosts_line())
    with pytest.raises(HostKeyChanged):
        connect(sshd.inventory_host(host_key=other.host_key()))


def test_the_trusted_key_decides_which_of_its_keys_the_server_shows(
    start_sshd: StartSshd, dot_ssh: Path
) -> None:
    server = start_sshd(key_types=("ed25519", "ecdsa", "rsa"))
    for key_type in ("ed25519", "ecdsa", "rsa"):
        with connect(server.inventory_host(host_key=server.host_key(key_type))):
            pass
        (dot_ssh / "known_hosts").write_text(server.known_hosts_line(key_type))
        with connect(server.inventory_host(host_key=None)):
            pass


def test_a_pin_of_a_type_that_the_server_lost_shows_the_key_it_has_now(start_sshd: StartSshd) -> None:
    server, other = start_sshd(), start_sshd(key_types=("ecdsa",))
    with pytest.raises(HostKeyChanged) as caught:
        connect(server.inventory_host(host_key=other.host_key()))
    assert (caught.value.pinned, caught.value.fingerprint) == (other.fingerprint(), server.fingerprint())


@pytest.mark.parametrize(
    "line",
    [
        "{name} {key}",
        "other.example,{name} {key} a comment",
        "{hashed} {key}",
        "[127.0.0.*]:* {key}",
        "[127.0.?.1]:{port}\t{key}",
        "not a line\n\n# {name} {key}\n{name} ssh-ed25519 !!!\n{name} {key}",
        "{name} {other}\n{name} {key}",
        "{name} {key}\n{name} {other}",
    ],
)
def test_known_hosts_is_read_as_ssh_reads_it(
    sshd: Sshd, start_sshd: StartSshd, dot_ssh: Path, line: str
) -> None:
    (dot_ssh / "known_hosts").write_text(filled(line, sshd, start_sshd()))
    with connect(sshd.inventory_host(host_key=None)):
        pass


@pytest.mark.parametrize(
    "line",
    [
        "127.0.0.1 {key}",
        "[127.0.0.1]:1 {key}",
        "*,!{name} {key}",
        "[127x0.0.1]:{port} {key}",
        "|1|broken {key}",
        "{other_hashed} {key}",
        "# {name} {key}",
    ],
)
def test_a_line_about_another_server_gives_no_trust(sshd: Sshd, dot_ssh: Path, line: str) -> None:
    (dot_ssh / "known_hosts").write_text(filled(line, sshd, sshd))
    with pytest.raises(HostKeyUnknown):
        connect(sshd.inventory_host(host_key=None))


def test_a_revoked_key_is_refused_although_another_line_trusts_it(sshd: Sshd, dot_ssh: Path) -> None:
    (dot_ssh / "known_hosts").write_text(f"{sshd.known_hosts_line()}@revoked * {sshd.host_key()}\n")
    with pytest.raises(HostKeyChanged, match=r"@revoked in .*known_hosts:2"):
        connect(sshd.inventory_host(host_key=None))


def test_a_certificate_authority_gives_no_trust_and_the_refusal_says_so(sshd: Sshd, dot_ssh: Path) -> None:
    (dot_ssh / "known_hosts").write_text(f"@cert-authority * {sshd.host_key()}\n")
    with pytest.raises(HostKeyUnknown, match="@cert-authority"):
        connect(sshd.inventory_host(host_key=None))


def test_several_known_hosts_files_with_spaces_are_all_read(
    sshd: Sshd, dot_ssh: Path, tmp_path: Path
) -> None:
    second = tmp_path / "known hosts"
    second.write_text(sshd.known_hosts_line())
    (dot_ssh / "config").write_text(f'Host *\n  UserKnownHostsFile ~/.ssh/none "{second}"\n')
    with connect(sshd.inventory_host(host_key=None)):
        pass
    (dot_ssh / "config").write_text(f'UserKnownHostsFile none\nGlobalKnownHostsFile="{second}"\n')
    with connect(sshd.inventory_host(host_key=None)):
        pass


def test_a_host_key_alias_is_the_name_to_look_up(sshd: Sshd, dot_ssh: Path) -> None:
    (dot_ssh / "config").write_text("Host box\n  HostName 127.0.0.1\n  HostKeyAlias box.internal\n")
    (dot_ssh / "known_hosts").write_text(f"box.internal {sshd.host_key()}\n")
    with connect(sshd.inventory_host(address="box", host_key=None)):
        pass


def test_a_known_hosts_file_that_cannot_be_read_stops_the_connection(sshd: Sshd, dot_ssh: Path) -> None:
    (dot_ssh / "known_hosts").mkdir()
    with pytest.raises(StorageError, match="known_hosts"):
        connect(sshd.inventory_host(host_key=None))


def test_fingerprints_are_those_of_ssh_keygen(sshd: Sshd) -> None:
    printed = subprocess.run(
        ["ssh-keygen", "-lf", sshd.folder / "host_ed25519.pub"], check=True, capture_output=True, text=True
    ).stdout
    assert fingerprint(base64.b64decode(sshd.host_key().split()[1])) == printed.split()[1]


def test_names_are_those_of_ssh_keyscan() -> None:
    assert known_host_name("Box.Example", 22) == "box.example"
    assert known_host_name("192.0.2.10", 10638) == "[192.0.2.10]:10638"


def configure_jump(dot_ssh: Path, jump: Sshd) -> None:
    (dot_ssh / "config").write_text(
        f"Host bastion\n  HostName {jump.address}\n  Port {jump.port}\n  User {getpass.getuser()}\n"
        f'  IdentityFile "{jump.client_key}"\n'
        f"Host {jump.address}\n  ProxyJump bastion\n"
    )


def filled(line: str, server: Sshd, other: Sshd) -> str:
    name = f"[{server.address}]:{server.port}"
    return line.format(
        name=name,
        port=server.port,
        hashed=hashed(name),
        other_hashed=hashed("other.example"),
        key=server.host_key(),
        other=other.host_key(),
    )


def hashed(name: str) -> str:
    salt = b"0123456789abcdefghij"
    digest = hmac.digest(salt, name.encode(), hashlib.sha1)
    return f"|1|{base64.b64encode(salt).decode()}|{base64.b64encode(digest).decode()}"


def run_printed_command(error: HostKeyUnknown | HostKeyChanged) -> None:
    """Does what the message tells a person to do."""
    command = re.search(r"run: (.*)", str(error))
    assert command is not None
    subprocess.run(
        ["sh", "-ec", command[1]], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
