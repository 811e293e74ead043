"""What paramiko and the socket layer raise, in the words of orch: the one place where they are translated."""

from __future__ import annotations

import paramiko

from orchestrator.errors import (
    AuthenticationFailed,
    HostKeyChanged,
    HostUnfit,
    OrchError,
    Unreachable,
    UsageError,
)
from orchestrator.text import printable
from orchestrator.transports.host_keys import fingerprint

__all__ = ["FOREIGN_ERRORS", "NO_SUCH_CHANNEL", "translate"]

FOREIGN_ERRORS = (paramiko.SSHException, OSError, EOFError)
"""All that a connection attempt or a channel raises; `TimeoutError` and socket errors are OSErrors."""

NO_SUCH_CHANNEL = (1, 3)
"""The codes for a channel that a server does not allow: administratively prohibited, unknown type."""


def translate(  # noqa: PLR0911  # a table
    error: Exception, *, host: str, where: str, next_step: str = ""
) -> OrchError:
    """Returns the error to raise instead of ``error``, which came up while talking to ``where``.

    ``host`` is the inventory's name; ``where`` is an address and port, or a jump host's;
    ``next_step`` is for a host that cannot be reached.
    """
    text = _text(error)
    match error:
        case paramiko.BadHostKeyException():
            return HostKeyChanged(
                f"{where} showed another host key than the known one",
                host=host,
                fingerprint=fingerprint(error.key.asbytes()),
                pinned=fingerprint(error.expected_key.asbytes()),
                pin=None,
            )
        case paramiko.AuthenticationException():
            return AuthenticationFailed(f"{where} refused the log-in: {text}", host=host)
        case paramiko.ConfigParseError() | paramiko.CouldNotCanonicalize():
            return UsageError(f"{host}: ssh_config cannot be used: {text}")
        case paramiko.ssh_exception.IncompatiblePeer():
            return HostUnfit(
                f"{where} has no algorithm in common with orch: {text}", host=host, lacking="connection"
            )
        case paramiko.ssh_exception.MessageOrderError():
            return HostUnfit(
                f"{where} broke the order of the key exchange: {text}", host=host, lacking="connection"
            )
        case paramiko.ChannelException() if error.code in NO_SUCH_CHANNEL:
            return HostUnfit(
                f"{where} does not allow this channel: {text}; see AllowTcpForwarding and MaxSessions in its "
                "sshd_config",
                host=host,
                lacking="connection",
            )
        case _:
            return Unreachable(f"{where}: {text}{next_step and '. Next: '}{next_step}", host=host)


def _text(error: Exception) -> str:
    """Returns the error as one line that is safe to print; hosts have a say in some of these texts."""
    match error:
        case paramiko.ChannelException():
            return printable(str(error.text))
        case EOFError():
            return "the connection was closed by the other side"
        case OSError(strerror=str(reason)):
            return printable(reason)
        case _:
            return printable(str(error)) or type(error).__name__
