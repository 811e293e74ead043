"""Logs in by key without waiting for the host's word that one may: a round trip less on each connection.

A server reads its messages in order, so the log-in may travel right behind the request for the service that
takes it (RFC 4253, section 10, asks for no pause). An RSA key waits, because how it signs is for the server
to say. paramiko's handler does the rest; what it is asked here are its own steps in their own order.
"""

from __future__ import annotations

import threading
from typing import Any

import paramiko
from paramiko.auth_handler import AuthHandler

__all__ = ["auth_publickey"]

_SERVICE = "ssh-userauth"


def auth_publickey(transport: paramiko.Transport, username: str, key: paramiko.PKey) -> list[str]:
    """Does and returns what ``paramiko.Transport.auth_publickey`` does.

    Raises:
        paramiko.SSHException: as that method does.
    """
    if not transport.is_active() or not transport.initial_kex_done:
        raise paramiko.SSHException("No existing session")
    answered = threading.Event()
    handler = transport.auth_handler = _EagerHandler(transport)
    handler.auth_publickey(username, key, answered)
    return handler.wait_for_response(answered)


class _EagerHandler(AuthHandler):
    """paramiko's, which sends its log-in when the service is accepted; this one sends it before."""

    _is_eager = False

    def _request_auth(self) -> None:
        self._is_eager = not isinstance(self.private_key, paramiko.RSAKey)  # before the answer can come
        super()._request_auth()  # type: ignore[misc]  # private, as all below
        if self._is_eager:
            accepted = paramiko.Message()
            accepted.add_string(_SERVICE)
            accepted.rewind()
            super()._parse_service_accept(accepted)  # type: ignore[misc]

    def _parse_service_accept(self, message: Any) -> None:
        if not self._is_eager:
            super()._parse_service_accept(message)  # type: ignore[misc]
