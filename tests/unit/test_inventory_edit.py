"""An edited inventory differs from the one before in the one host, and in no other byte."""

import os
import stat
from pathlib import Path

import pytest

from orchestrator.errors import ConfigError, StorageError, UsageError
from orchestrator.inventory import load_inventory
from orchestrator.inventory_edit import draft_host, draft_host_key

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIB1uX3xkM0e3C8Zc9V1TjUo6F0c9v7m2v0o3iT5m5c1R"
OTHER = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIMm0mZ2tq8cWQj1mC7mZk3o4mJwq5p1pP7b2R6n1l9aB"
TEXT = """\
# hosts of ours
hosts:
  local: {transport: local}   # here

  # rented by the hour
  gpu-1:
    transport: ssh     # what else
    address: 192.0.2.1
    port: 2222
    env:
      HF_HOME: /data   # a large disk

  # the end, not of the host above
# and after it
"""
FIELDS: dict[str, str | int] = {"transport": "ssh", "address": "192.0.2.9", "port": 10638, "user": "root"}


def written(folder: Path, text: str) -> Path:
    path = folder / "inventory.yaml"
    path.write_bytes(text.encode())
    return path


def inserted(before: str, after: str) -> str:
    """Return what was inserted, which must be all that changed."""
    added = len(after) - len(before)
    start = next(at for at in range(len(before) + 1) if before == after[:at] + after[at + added :])
    return after[start : start + added]


def test_host_is_written_behind_the_last_and_every_comment_stays(tmp_path: Path) -> None:
    path = written(tmp_path, TEXT)
    draft = draft_host(load_inventory(path), "gpu-2", FIELDS)
    assert path.read_text() == TEXT, "a draft is not written"
    draft.write()
    expected = "  gpu-2:\n    transport: ssh\n    address: 192.0.2.9\n    port: 10638\n    user: root\n"
    assert inserted(TEXT, path.read_text()).strip() == expected.strip()
    hosts = load_inventory(path).hosts
    assert list(hosts) == ["local", "gpu-1", "gpu-2"]
    assert (hosts["gpu-2"].address, hosts["gpu-2"].port, hosts["gpu-2"].user) == ("192.0.2.9", 10638, "root")
    assert hosts == draft.inventory.hosts
    assert path.read_text().index("gpu-2") < path.read_text().index("# the end")


def test_key_is_added_to_its_host_and_then_replaced(tmp_path: Path) -> None:
    path = written(tmp_path, TEXT)
    draft_host_key(load_inventory(path), "gpu-1", KEY).write()
    once = path.read_text()
    assert inserted(TEXT, once).strip() == f"host_key: {KEY}"
    draft_host_key(load_inventory(path), "gpu-1", OTHER).write()
    assert path.read_text() == once.replace(KEY, OTHER)
    assert load_inventory(path).hosts["gpu-1"].host_key == OTHER


@pytest.mark.parametrize("quote", ["'", '"'])
def test_quoted_key_with_a_comment_is_replaced_in_its_place(tmp_path: Path, quote: str) -> None:
    text = f"hosts:\n  a:\n    host_key: {quote}{KEY}{quote}  # theirs\n    transport: ssh\n"
    path = written(tmp_path, text)
    draft_host_key(load_inventory(path), "a", OTHER).write()
    assert path.read_text() == f"hosts:\n  a:\n    host_key: {OTHER}  # theirs\n    transport: ssh\n"


@pytest.mark.parametrize(
    "text",
    [
        "hosts:\n  a:\n    transport: ssh",
        "hosts:\n    a:\n        transport: ssh\n",
        "hosts:\r\n  a:\r\n    transport: ssh\r\n",
        "hosts: # all\n  a: {transport: ssh}\n",
        "hosts:\n  'a':\n    transport: ssh\n    env: {}\n# end",
        "hosts:\n  a:\n    transport: ssh\n    env:\n      X: |\n        one\n        two\n\n",
    ],
)
def test_other_forms_take_a_host_too(tmp_path: Path, text: str) -> None:
    path = written(tmp_path, text)
    before = load_inventory(path)
    draft_host(before, "b", FIELDS).write()
    after = load_inventory(path)
    assert {**after.hosts, "b": None} == {**before.hosts, "b": None}
    assert after.hosts["b"].port == 10638
    after_text = path.read_bytes().decode()
    assert after_text.count("\r\n") == (after_text.count("\n") if "\r\n" in text else 0)


@pytest.mark.parametrize(
    "text", ["hosts: {a: {transport: ssh}}\n", "{hosts: {a: {transport: ssh}}}\n"], ids=["flow", "all flow"]
)
def test_form_without_a_line_for_a_host_is_refused_and_nothing_written(tmp_path: Path, text: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(UsageError, match=r"line 1: .* by hand"):
        draft_host(load_inventory(path), "b", FIELDS)
    assert path.read_text() == text


def test_key_of_a_host_on_one_line_is_refused_with_the_words_to_write(tmp_path: Path) -> None:
    path = written(tmp_path, "hosts:\n  a: {transport: ssh}\n")
    with pytest.raises(UsageError, match=rf"line 2: .*host_key: {KEY[:30]}"):
        draft_host_key(load_inventory(path), "a", KEY)


def test_fields_that_an_inventory_refuses_are_refused_with_its_name_and_line(tmp_path: Path) -> None:
    path = written(tmp_path, TEXT)
    with pytest.raises(ConfigError) as caught:
        draft_host(load_inventory(path), "gpu-2", {**FIELDS, "address": "-oProxyCommand=x"})
    assert caught.value.file == path
    assert caught.value.line is not None
    assert path.read_text() == TEXT
    assert [file.name for file in tmp_path.iterdir()] == ["inventory.yaml"]


@pytest.mark.parametrize("address", ["a\n  evil: {transport: local}", "a # b", "{a: b}", "[x]", "a: b", "'"])
def test_address_cannot_become_yaml(tmp_path: Path, address: str) -> None:
    path = written(tmp_path, TEXT)
    with pytest.raises(UsageError):
        draft_host(load_inventory(path), "gpu-2", {**FIELDS, "address": address})
    assert path.read_text() == TEXT


def test_link_and_mode_stay(tmp_path: Path) -> None:
    folder = tmp_path / "real"
    folder.mkdir()
    real = written(folder, TEXT)
    real.chmod(0o640)
    link = tmp_path / "inventory.yaml"
    link.symlink_to(real)
    draft_host(load_inventory(link), "gpu-2", FIELDS).write()
    assert link.is_symlink()
    assert stat.S_IMODE(real.stat().st_mode) == 0o640
    assert "gpu-2" in real.read_text()
    assert [file.name for file in folder.iterdir()] == ["inventory.yaml"]


def test_file_that_cannot_be_written_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, TEXT)
    draft = draft_host(load_inventory(path), "gpu-2", FIELDS)

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="No space left"):
        draft.write()
    assert path.read_text() == TEXT
    assert [file.name for file in tmp_path.iterdir()] == ["inventory.yaml"]
