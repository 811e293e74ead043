"""The log-in travels behind the request for its service, where the kind of key allows it."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import AuthenticationFailed
from orchestrator.transports import connect
from orchestrator.transports.eager_auth import _EagerHandler
from tests.sshd import Sshd, generate_key


@pytest.fixture
def needed_no_word(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each word of the server that one may log in: whether nobody had waited for it."""
    told: list[bool] = []
    take = _EagerHandler._parse_service_accept

    def note(self: _EagerHandler, message: Any) -> None:
        told.append(self._is_eager)
        take(self, message)

    monkeypatch.setattr(_EagerHandler, "_parse_service_accept", note)
    return told


@pytest.mark.parametrize(("key_type", "expected"), [("ed25519", True), ("ecdsa", True), ("rsa", False)])
def test_a_key_logs_in_and_only_rsa_waits_for_the_servers_word(
    sshd: Sshd, tmp_path: Path, needed_no_word: list[bool], key_type: str, expected: bool
) -> None:
    key, allowed = tmp_path / "key", sshd.folder / "authorized_keys"
    generate_key(key, key_type)
    kept = allowed.read_text()
    allowed.write_text(kept + key.with_suffix(".pub").read_text())
    try:
        with connect(sshd.inventory_host(identity=key)) as transport:
            assert transport.open(["echo", "in"]).recv(10, 10.0) == b"in\n"
    finally:
        allowed.write_text(kept)
    assert needed_no_word == [expected]
    assert sshd.log.read_text().count("Accepted key") == 1


def test_a_key_that_is_refused_is_followed_by_the_next_one(
    sshd: Sshd, tmp_path: Path, needed_no_word: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    (home / ".ssh").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    generate_key(tmp_path / "stranger")
    shutil.copy(sshd.client_key, home / ".ssh" / "known")
    config = f"Host {sshd.address}\n  IdentityFile {home / '.ssh' / 'known'}\n"
    (home / ".ssh" / "config").write_text(config)
    with connect(sshd.inventory_host(identity=tmp_path / "stranger")):
        assert needed_no_word == [True, True]
    (home / ".ssh" / "config").unlink()
    with pytest.raises(AuthenticationFailed):
        connect(sshd.inventory_host(identity=tmp_path / "stranger"))
