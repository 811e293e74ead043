"""Connections that are begun before anybody asks for them, so that a host's part of a log-in takes no time.

Half of a log-in is waiting for the host; a command has the rest of orch to import meanwhile. `begin` starts
in a thread, `taken` hands the connection (or why there is none) to the first who asks for that very host, and
`drop` closes what nobody asked for. Nothing is sent but what any connection begins with.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

from orchestrator.inventory import Host
from orchestrator.transports.base import Transport

__all__ = ["begin", "drop", "taken"]

JOIN_TIMEOUT_S = 0.2

_begun: dict[str, _Early] = {}


class _Early(threading.Thread):
    """One connection on its way."""

    def __init__(self, host: Host, connect: Callable[[], Transport]) -> None:
        super().__init__(name=f"orch-connect-{host.name}", daemon=True)
        self.host = host
        self._connect = connect
        self._outcome: Transport | BaseException | None = None

    def run(self) -> None:
        """Runs in the thread."""
        try:
            self._outcome = self._connect()
        except BaseException as error:  # noqa: BLE001  (raised again where somebody waits for it)
            self._outcome = error

    def result(self) -> Transport:
        """Waits for the end of the attempt, which bounds its own time."""
        self.join()
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        assert self._outcome is not None
        return self._outcome


def begin(host: Host, connect: Callable[[], Transport]) -> None:
    """Has ``connect`` called in the background; once for each host."""
    if host.name not in _begun:
        early = _begun[host.name] = _Early(host, connect)
        early.start()


def taken(host: Host) -> Transport | None:
    """Returns the connection to ``host`` that was begun, waiting for it; None where there is none (left).

    Raises:
        OrchError: as connecting does.
    """
    early = _begun.get(host.name)
    if early is None or early.host != host or _begun.pop(host.name, None) is None:
        return None
    return early.result()


def drop() -> None:
    """Closes the connections that nobody took; one that still hangs ends with the process."""
    while _begun:
        _, early = _begun.popitem()
        early.join(JOIN_TIMEOUT_S)
        if not early.is_alive():
            with suppress(Exception):  # whoever needs the host is told when they ask for it
                early.result().close()
