"""inventory.yaml: where it is found, what a host may be called and how it is reached."""

import base64
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import ConfigError, UnknownName, UsageError
from orchestrator.fields import Secret
from orchestrator.inventory import Host, find_inventory, load_inventory

ED25519 = "ssh-ed25519 " + base64.b64encode(b"\0\0\0\x0bssh-ed25519\0\0\0 " + bytes(range(32))).decode()


def _write(folder: Path, hosts: dict[str, Any]) -> Path:
    path = folder / "inventory.yaml"
    path.write_text(json.dumps({"hosts": hosts}))
    return path


def _host(folder: Path, **entry: Any) -> Host:
    return load_inventory(_write(folder, {"h": {"transport": "ssh", **entry}})).host("h")


def test_a_local_host_needs_nothing_but_its_transport(tmp_path: Path) -> None:
    host = load_inventory(_write(tmp_path, {"local": {"transport": "local"}})).host("local")
    assert host == Host(name="local", transport="local", address="local", python=sys.executable)
    assert host.root == "~/.orch"


def test_every_field_of_an_ssh_host_arrives(tmp_path: Path, home: Path) -> None:
    host = _host(
        tmp_path,
        address="192.0.2.10",
        port=10638,
        user="root",
        identity="~/.ssh/id_ed25519",
        host_key=ED25519,
        python="/opt/my env/bin/python",
        root="/work space/.orch",
        env={"HF_HOME": "/models"},
    )
    assert host == Host(
        name="h",
        transport="ssh",
        address="192.0.2.10",
        port=10638,
        user="root",
        identity=home / ".ssh/id_ed25519",
        host_key=ED25519,
        python="/opt/my env/bin/python",
        root="/work space/.orch",
        env={"HF_HOME": "/models"},
    )


def test_ssh_config_decides_what_is_left_out(tmp_path: Path) -> None:
    assert _host(tmp_path) == Host(name="h", transport="ssh", address="h", python="python3")


def test_a_relative_identity_lies_beside_the_inventory(tmp_path: Path) -> None:
    assert _host(tmp_path, identity="keys/a b").identity == tmp_path / "keys/a b"


def test_the_home_in_root_is_left_to_the_host(tmp_path: Path) -> None:
    assert _host(tmp_path, root="~/x").root == "~/x"


@pytest.mark.parametrize(
    "python", ["python3.12", "/opt/my env/bin/python", "~/venv/bin/python", "~/my python"]
)
def test_an_interpreter_is_a_name_on_path_or_a_path_from_root_or_home(tmp_path: Path, python: str) -> None:
    assert _host(tmp_path, python=python).python == python


def test_a_host_printed_by_accident_shows_no_environment(tmp_path: Path) -> None:
    assert "s3cret" not in repr(_host(tmp_path, env={"TOKEN": "s3cret"}))


def test_hosts_are_values(tmp_path: Path) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        _host(tmp_path).port = 1  # type: ignore[misc]  # that is the point


@pytest.mark.parametrize(
    "address", ["host", "a-b.example.org", "10.0.0.1", "::1", "fe80::1%eth0", "my_alias"]
)
def test_what_ssh_takes_as_a_host_is_accepted(tmp_path: Path, address: str) -> None:
    assert _host(tmp_path, address=address).address == address


AWKWARD = [
    "",
    " ",
    "-oProxyCommand=x",
    "--",
    "a\nb",
    "a\rb",
    "a\0b",
    "a\x1b[2J",
    "a\x9bb",
    "a\u202eb",
    " a",
    "a ",
]
NO_SPACES = [*AWKWARD, "a b", "a'b", 'a"b', "a;b", "$(a)", "a`b`", "a|b", "ä"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("address", text) for text in (*NO_SPACES, "root@host", "host:22", "a/b", "[::1]")),
        pytest.param("address", "a" * 300, id="address-too long"),
        *(("user", text) for text in (*NO_SPACES, "a/b", "a:b")),
        *(("python", text) for text in (*AWKWARD, "venv/bin/python", "./python", "~other/bin/python")),
        *(("identity", text) for text in (*AWKWARD, "~nobody-of-this-name/key")),
        *(("root", text) for text in (*AWKWARD, "relative", "~", "~other/x", "/a/../b", "..", "/", "//")),
        *(
            ("host_key", text)
            for text in (*AWKWARD, "ssh-ed25519", ED25519[:-20], f"{ED25519} comment", f"h {ED25519}")
        ),
        ("host_key", ED25519.replace("ssh-ed25519 ", "ssh-rsa ")),
        ("host_key", "ssh-ed25519 " + "A" * 68),
        *(("port", port) for port in (0, -1, 65536, 22.0, "22", True)),
        *(
            ("env", env)
            for env in ({"A B": "x"}, {"A": True}, {"A": 1}, {"PYTHONPATH": "x"}, {"ORCH_X": "x"}, ["A=x"])
        ),
        *((key, 5) for key in ("address", "user", "python", "identity", "root", "host_key", "transport")),
        ("transport", "shh"),
        ("prot", 22),
    ],
)
def test_a_field_that_cannot_be_meant_is_refused_at_its_line(tmp_path: Path, key: str, value: Any) -> None:
    path = tmp_path / "inventory.yaml"
    transport = "" if key == "transport" else "\n    transport: ssh"
    path.write_text(f"hosts:\n  ok: {{transport: local}}\n  h: {transport}\n    {key}: {json.dumps(value)}\n")
    with pytest.raises(ConfigError) as caught:
        load_inventory(path)
    assert caught.value.line == len(path.read_text().splitlines())
    assert key in str(caught.value)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("entry", "hint"),
    [
        ({"address": "root@host"}, "user:"),
        ({"address": "host:22"}, "port:"),
        ({"prot": 22}, "did you mean 'port'"),
        (
            {"transport": "shh"},
            "transport: must be 'local', 'ssh' or 'proxmox', not 'shh'; did you mean 'ssh'",
        ),
        ({"port": 65536}, "hosts.h.port: must be less than or equal to 65535$"),
        ({"transport": 5}, "transport: must be 'local', 'ssh' or 'proxmox', not a number"),
        ({"python": "venv/bin/python"}, "python: 'venv/bin/python' must be a name on PATH, or begin with"),
        (
            {"env": {"PYTORCH_CUDA_ALLOC_CONF": "x"}},
            "PYTORCH_CUDA_ALLOC_CONF: is set by orch: use alloc_conf:",
        ),
        ({"env": {"FLAG": True}}, "hosts.h.env.FLAG: is a boolean, a variable is text: quote it"),
    ],
)
def test_the_message_says_what_to_write_instead(tmp_path: Path, entry: dict[str, Any], hint: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        _host(tmp_path, **entry)


@pytest.mark.parametrize("name", ["a b", "-a", "a\n", 'a"', "a'", "../a", "", ".a", "ä"])
def test_a_name_that_is_no_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_inventory(_write(tmp_path, {name: {"transport": "local"}}))
    assert f"hosts: {name!r} is no host name" in str(caught.value)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("key", ["address", "port", "user", "identity", "host_key"])
def test_a_local_host_has_no_connection(tmp_path: Path, key: str) -> None:
    value = 22 if key == "port" else "x"
    with pytest.raises(ConfigError, match=f"hosts.a.{key}: has no meaning"):
        load_inventory(_write(tmp_path, {"a": {"transport": "local", key: value}}))


def test_a_containers_environment_is_imported_only_when_asked(tmp_path: Path) -> None:
    assert not _host(tmp_path).import_container_env
    assert _host(tmp_path, import_container_env=True).import_container_env
    with pytest.raises(ConfigError, match=r"hosts\.h\.import_container_env"):
        _host(tmp_path, import_container_env="yes please")


@pytest.mark.parametrize("folder", ["~/venv", "/workspace/a venv", "/workspace/venv/"])
def test_a_virtual_environment_names_its_interpreter(tmp_path: Path, folder: str) -> None:
    host = _host(tmp_path, venv=folder)
    assert host.venv == folder.rstrip("/")
    assert host.python == f"{folder.rstrip('/')}/bin/python"


def test_python_beside_a_virtual_environment_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"hosts\.h\.python: has no meaning beside venv"):
        _host(tmp_path, venv="/venv", python="python3.12")


@pytest.mark.parametrize("key", ["venv", "workdir", "root"])
@pytest.mark.parametrize(
    "folder", ["venv", "./venv", "~", "/", "~user/venv", "/a/../b", "-x", "", "/a\nb", "$(id)", "/a\0b"]
)
def test_what_is_no_folder_of_the_host_is_refused(tmp_path: Path, key: str, folder: str) -> None:
    with pytest.raises(ConfigError, match=rf"hosts\.h\.{key}"):
        _host(tmp_path, **{key: folder})


def test_an_inventory_without_hosts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least one host"):
        load_inventory(_write(tmp_path, {}))


def test_an_unknown_host_lists_the_known_ones(tmp_path: Path) -> None:
    inventory = load_inventory(
        _write(tmp_path, {"pve-200": {"transport": "ssh"}, "local": {"transport": "local"}})
    )
    with pytest.raises(
        UnknownName, match=r"no host 'pve200'.*known are pve-200, local; did you mean 'pve-200'"
    ):
        inventory.host("pve200")


def test_the_nearest_inventory_upward_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = tmp_path / 'it\'s a "project"\n' / "experiments"
    inner.mkdir(parents=True)
    outer = _write(tmp_path, {"a": {"transport": "local"}})
    assert find_inventory(inner) == outer
    nearer = _write(inner.parent, {"b": {"transport": "local"}})
    (inner / "inventory.yaml").mkdir()
    assert find_inventory(inner) == nearer
    monkeypatch.chdir(inner)
    assert list(load_inventory(find_inventory(Path())).hosts) == ["b"]


def test_a_missing_inventory_says_where_it_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"no inventory.yaml in {tmp_path} or any folder above"):
        find_inventory(tmp_path)


def test_a_host_may_ask_for_a_secret(tmp_path: Path) -> None:
    host = _host(tmp_path, env={"HF_TOKEN": {"secret": True, "from_env": "MY_TOKEN"}})
    where = f"{tmp_path / 'inventory.yaml'}:1"
    assert host.env == {"HF_TOKEN": Secret(name="HF_TOKEN", from_env="MY_TOKEN", where=where)}


def test_a_container_is_reached_by_way_of_the_node_that_stands_in_its_place(tmp_path: Path) -> None:
    host = _host(
        tmp_path,
        transport="proxmox",
        node={"transport": "ssh", "address": "pve.example", "user": "root", "port": 2222, "identity": "k"},
        vmid=200,
        python="~/venv/bin/python",
        root="/data/orch",
        env={"HF_HOME": "/models"},
        import_container_env=True,
    )
    node = Host(
        name="h.node", transport="ssh", address="pve.example", user="root", port=2222, identity=tmp_path / "k"
    )
    assert host == Host(
        name="h",
        transport="proxmox",
        address="pve.example",
        node=node,
        vmid=200,
        python="~/venv/bin/python",
        root="/data/orch",
        env={"HF_HOME": "/models"},
        import_container_env=True,
    )


@pytest.mark.parametrize("order", [["pve", "pve-200", "here"], ["pve-200", "here", "pve"]])
def test_a_node_may_be_another_host_by_its_name(tmp_path: Path, order: list[str]) -> None:
    entries = {
        "pve": {"transport": "ssh", "address": "192.0.2.5", "host_key": ED25519},
        "pve-200": {"transport": "proxmox", "node": "pve", "vmid": 200},
        "here": {"transport": "local"},
    }
    inventory = load_inventory(_write(tmp_path, {name: entries[name] for name in order}))
    assert inventory.host("pve-200").node == inventory.host("pve")
    assert inventory.host("pve-200").python == "python3"
    assert list(inventory.hosts) == order


def test_this_machine_may_be_the_node(tmp_path: Path) -> None:
    host = _host(tmp_path, transport="proxmox", node={"transport": "local"}, vmid=100)
    assert (host.node, host.vmid) == (Host(name="h.node", transport="local", address="h.node"), 100)


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("node: pvee", r"node: no host 'pvee' in this file; did you mean 'pve'\?"),
        ("node: zz", r"node: no host 'zz' in this file; known are pve, h$"),
        ("node: h", "node: h is a container itself: a node is a local or an ssh host"),
        ("node: [pve]", "node: must be a host's name, or a mapping with transport and address, not a list"),
        ("node: {transport: shh}", "node.transport: must be 'local' or 'ssh', not 'shh'; did you mean 'ssh'"),
        ("node: {transport: proxmox}", "node.transport: must be 'local' or 'ssh', not 'proxmox'"),
        ("node: {address: pve}", "node.transport: is missing"),
        ("node: {transport: ssh}", "node.address: is missing"),
        ("node: {transport: ssh, adress: pve}", "node: unknown key 'adress'; did you mean 'address'"),
        (
            "node: {transport: ssh, address: pve, python: x}",
            "node: unknown key 'python'; known are transport,",
        ),
        ("node: {transport: ssh, address: root@pve}", "node.address: must be the host alone"),
        ("node: {transport: ssh, address: -oProxyCommand=x}", "node.address: '-oProxyCommand=x' is no host"),
        ("node: {transport: local, port: 22}", "node.port: has no meaning for transport local"),
        ("address: pve", "h.address: has no meaning for transport proxmox: say it of its node"),
        ("host_key: x", "h.host_key: has no meaning for transport proxmox: say it of its node"),
        *(
            (f"vmid: {vmid}", "h.vmid: must be ")
            for vmid in ("0", "-200", "99", "1000000000", '"200"', "2.5")
        ),
        ('vmid: "200; id"', "h.vmid: must be an integer, not text"),
        ("nod: pve", "hosts.h: unknown key 'nod'; did you mean 'node'"),
    ],
)
def test_a_container_that_cannot_be_meant_is_refused_at_its_line(
    tmp_path: Path, line: str, hint: str
) -> None:
    path = tmp_path / "inventory.yaml"
    keys = ["transport: proxmox", *(key for key in ("node: pve", "vmid: 200") if key[:4] != line[:4]), line]
    text = "hosts:\n  pve: {transport: ssh}\n  h:\n    " + "\n    ".join(keys) + "\n"
    path.write_text(text)
    with pytest.raises(ConfigError, match=hint) as caught:
        load_inventory(path)
    assert caught.value.line == len(text.splitlines())


@pytest.mark.parametrize("key", ["node", "vmid"])
def test_a_container_needs_node_and_id_and_nobody_else_has_them(tmp_path: Path, key: str) -> None:
    whole = {"transport": "proxmox", "node": {"transport": "local"}, "vmid": 200}
    with pytest.raises(ConfigError, match=f"hosts.h.{key}: is missing: transport proxmox needs it"):
        _host(tmp_path, **{name: value for name, value in whole.items() if name != key})
    with pytest.raises(ConfigError, match=f"hosts.h.{key}: has no meaning for transport ssh"):
        _host(tmp_path, **{key: whole[key]})
