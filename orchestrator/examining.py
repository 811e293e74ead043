"""Examines hosts, all side by side, bounded time for each: what one is like, or what kept it from telling.

An error of a host becomes its last finding and holds up no other host. Touches no ledger and no run.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from orchestrator import diagnosis, remote, transports
from orchestrator.allocator import HARMLESS
from orchestrator.errors import OrchError, Unreachable
from orchestrator.finding import Finding
from orchestrator.inventory import Host
from orchestrator.runs import MOST_HOSTS_AT_ONCE
from orchestrator.transports import Transport

__all__ = ["Examined", "examine"]

CONNECT_TIMEOUT_S = 10.0
HOST_PATIENCE_S = 200.0  # torch may come from a slow disk


@dataclass(frozen=True, kw_only=True, slots=True)
class Examined:
    """A host and all that was found about it."""

    host: str
    findings: Sequence[Finding]


def examine(hosts: Sequence[Host], *, patience_s: float = HOST_PATIENCE_S) -> Generator[Examined]:
    """Yields each host in the given order once it is done; the others are examined meanwhile.

    Who leaves early waits for none of them.
    """
    visits = [_Visit(host, patience_s) for host in hosts]
    with ThreadPoolExecutor(MOST_HOSTS_AT_ONCE) as pool:
        try:
            answers = [pool.submit(visit.findings) for visit in visits]
            for visit, answer in zip(visits, answers, strict=True):
                yield Examined(host=visit.host.name, findings=answer.result())
        except BaseException:
            for visit in visits:
                visit.end("it was left")
            raise


class _Visit:
    """One host, asked in a thread of its own; `end` may come from another one."""

    def __init__(self, host: Host, patience_s: float) -> None:
        self.host = host
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._transport: Transport | None = None
        self._why_ended = ""

    def findings(self) -> list[Finding]:
        """Asks the host; an error is one of the findings."""
        way: tuple[str, ...] = ()
        try:
            way = transports.route(self.host)
            with (
                self._limited(),
                transports.connect(self.host, connect_timeout_s=CONNECT_TIMEOUT_S) as transport,
            ):
                self._note(transport)
                told = remote.facts(transport, _asked(self.host))
                return diagnosis.diagnosed(self.host, way, told.python, told.noise, told.clock, told.facts)
        except OrchError as error:
            why = Unreachable(self._why_ended, host=self.host.name) if self._why_ended else error
            return diagnosis.failed(self.host, way, why)

    def end(self, why: str) -> None:
        """Closes the connection: whatever waits for it ends with an error."""
        with self._lock:
            self._why_ended = why
            if self._transport is not None:
                self._transport.close()

    def _note(self, transport: Transport) -> None:
        with self._lock:
            if self._why_ended:
                raise Unreachable(self._why_ended, host=self.host.name)
            self._transport = transport

    @contextmanager
    def _limited(self) -> Iterator[None]:
        timer = threading.Timer(
            self._patience_s, self.end, [f"it did not answer within {self._patience_s:g} s"]
        )
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


def _asked(host: Host) -> dict[str, object]:
    """Returns what a host needs to know to look as a run would; values of secrets stay here."""
    return {
        "env": {name: value for name, value in host.env.items() if isinstance(value, str)},
        "venv": host.venv,
        "workdir": host.workdir,
        "import_container_env": host.import_container_env,
        "allocator": dict(HARMLESS),
    }
