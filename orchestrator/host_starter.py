"""Starts runs on one host over one connection, which is made again when it breaks.

The start protocol may be repeated, so a request whose connection broke is sent again as it was. Touches
neither ledger nor run folder, so it may work in a thread of its own; what a start means is its callers'.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from orchestrator import remote
from orchestrator.bundle import Bundle, ObjectStore
from orchestrator.conversation import Conversation, Cursor
from orchestrator.errors import OrchError, ProtocolError, Unreachable
from orchestrator.following import backoff
from orchestrator.inventory import Host
from orchestrator.transports import Transport, connect

START_PATIENCE_S = 60.0

_Begun = tuple[remote.Started, Conversation]


class NeverStarted(Exception):
    """The host did not take the run; ``cause`` says why."""

    def __init__(self, cause: OrchError) -> None:
        super().__init__(str(cause))
        self.cause = cause


class HostStarter:
    """The way to ``host``; a context manager that closes it. ``transport`` is None until the first start."""

    def __init__(self, host: Host, store: ObjectStore) -> None:
        self.host = host
        self.transport: Transport | None = None
        self._store = store

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Gives the connection up; may be called more than once, and from another thread."""
        transport, self.transport = self.transport, None
        if transport is not None:
            transport.close()

    def start(
        self,
        job: Mapping[str, Any],
        bundle: Bundle,
        cursor: Cursor | None,
        secret_env: Mapping[str, str],
        unreachable: Callable[[Unreachable, float], None],
        preparers: Sequence[str] | None = None,
    ) -> _Begun:
        """No connection at all fails at once; one that broke during the start is made again for a while.

        ``unreachable`` is told of each break and of the pause before the next try. A failure closes the
        connection.

        Raises:
            NotPrepared: what it needs is not there, and no ``preparers`` see to it; the connection stays.
            NeverStarted: the host cannot have the run.
            Unreachable, ProtocolError: it may have it.
        """
        entries = [(entry.path, entry.mode, entry.size_bytes, entry.sha256) for entry in bundle.entries]

        def ask(transport: Transport) -> _Begun:
            return remote.start(transport, job, entries, self._store, cursor, secret_env, preparers)

        try:
            return self._ask_until_answered(ask, unreachable)
        except remote.NotPrepared:
            raise
        except BaseException as error:
            self.close()
            if isinstance(error, OrchError) and not isinstance(error, Unreachable | ProtocolError):
                raise NeverStarted(error) from error
            raise

    def prepared(self, specs: Sequence[Mapping[str, Any]]) -> list[remote.Prepared]:
        """Asks what is there of what a job's ``setup`` lists.

        Raises:
            HostError: the host cannot be asked.
        """
        if self.transport is None:
            self.transport = connect(self.host)
        return remote.prepared(self.transport, specs)

    def _ask_until_answered(
        self, ask: Callable[[Transport], _Begun], unreachable: Callable[[Unreachable, float], None]
    ) -> _Begun:
        pauses = backoff()
        give_up_at = None
        while True:
            tried_at = time.monotonic()
            try:
                if self.transport is None:
                    self.transport = connect(self.host)
                return ask(self.transport)
            except Unreachable as error:
                now, was_there = time.monotonic(), self.transport is not None
                self.close()
                if not was_there and give_up_at is None:
                    raise NeverStarted(error) from error
                was_long = now - tried_at > START_PATIENCE_S  # a long upload earns new patience
                if give_up_at is None or was_long:
                    give_up_at = now + START_PATIENCE_S
                pause_s = next(pauses)
                if now + pause_s > give_up_at:
                    raise
                unreachable(error, pause_s)
                time.sleep(pause_s)
