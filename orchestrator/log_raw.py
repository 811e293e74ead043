"""The bytes of one stream of one process, exactly as they were written, out of a run's records."""

from __future__ import annotations

from collections.abc import Iterable

from orchestrator.errors import RecordsAltered, UsageError
from orchestrator.log_lines import Key, Source
from orchestrator.outcome import MISSING, Record


class RawOutput:
    """Takes a run's records from the first on; ``proc`` and ``stream`` are None where any will do."""

    def __init__(self, *, host: str, run_id: str, proc: str | None, stream: str | None) -> None:
        self._source = Source(host, run_id)
        self._proc = proc
        self._stream = stream
        self._key: Key | None = None
        self._next_off = 0

    def check(self, records: Iterable[Record]) -> None:
        """Reads all records before a byte of them is written anywhere.

        Raises:
            UsageError: several streams have output, or records are missing.
        """
        keys = {self._key_of(record) for record in records if self._is_asked_for(record)}
        if len(keys) > 1:
            raise self._ambiguous(keys)

    def bytes_of(self, record: Record) -> bytes:
        """Returns what a record adds to the stream; nothing when it is of another kind.

        Raises:
            UsageError: a second stream has output, or records are missing.
            ProtocolError: an output record that does not follow the format.
            RecordsAltered: bytes before it are missing.
        """
        if not self._is_asked_for(record):
            return b""
        data = self._source.data(record)
        key = self._key_of(record)
        if self._key not in (None, key):
            raise self._ambiguous({key, *filter(None, [self._key])})
        if record["off"] != self._next_off:
            raise RecordsAltered(
                f"run {self._source.run_id}: {'.'.join(key)} goes on at byte {record['off']} "
                f"after byte {self._next_off}; see: orch show {self._source.run_id}"
            )
        self._key = key
        self._next_off += len(data)
        return data

    def _is_asked_for(self, record: Record) -> bool:
        if record.get("kind") == MISSING:
            run_id = self._source.run_id
            raise UsageError(
                f"--raw writes a stream as it was, and records {record['seq']} to {record['last']} of run "
                f"{run_id} were cut by its log limit; `orch logs {run_id}` shows what there is"
            )
        return (
            record.get("kind") == "out"
            and self._proc in (None, record.get("proc"))
            and self._stream in (None, record.get("stream"))
        )

    @staticmethod
    def _key_of(record: Record) -> Key:
        return str(record.get("proc")), str(record.get("stream"))

    def _ambiguous(self, keys: Iterable[Key]) -> UsageError:
        names = ", ".join(sorted(".".join(key) for key in keys))
        return UsageError(
            f"--raw writes one stream, and run {self._source.run_id} has output on {names}: "
            "name one with --stream and --proc"
        )
