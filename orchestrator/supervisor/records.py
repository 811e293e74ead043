"""Writes a run's records: numbered JSON lines in append-only segments, sealed as they go.

One writer per run. A record is one line; ``seq`` counts records, and a segment's first record carries what a
reader needs to know where it is: ``first`` and ``at`` are the records and bytes before it. Knows nothing of
processes; a full disk is waited for, then reported as `DiskFull`; a limit is kept by `cuts`.
"""

import errno
import json
import os
import time
from typing import Any, Callable, Dict, Optional

from .cuts import Cap, Segment, cut_record, longest_segment, segment_name
from .seals import SealMaker

FORMAT_VERSION = 1
SEAL_BYTES = 4 * 1024 * 1024
SEAL_INTERVAL_S = 1.0
RESERVE_BYTES = 8 * 1024 * 1024  # more than the longest record
DISK_FULL_WAIT_S = 600.0


_ESCAPES = ((b"\\", b"\\\\"), (b'"', b'\\"'), (b"\n", b"\\n"), (b"\r", b"\\r"), (b"\t", b"\\t"))
_RARE_CONTROLS = bytes(code for code in range(32) if chr(code) not in "\n\r\t")


class DiskFull(Exception):
    """The disk stayed full for `DISK_FULL_WAIT_S`; the reserve has been released for the last records."""


def dump(value: Any) -> str:
    """Returns compact JSON for a record; NaN and infinity, which JSON lacks, are refused with ValueError."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:  # a lone surrogate is no text in any encoding: as an escape it is valid JSON
        text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text


def dump_text(text: str) -> bytes:
    """Returns the bytes of what `dump` returns for a text, twice as fast where most of it is plain."""
    try:
        data = text.encode("utf-8")
    except UnicodeEncodeError:
        return dump(text).encode("ascii")
    if len(data.translate(None, _RARE_CONTROLS)) < len(data):
        return dump(text).encode("utf-8")
    for plain, escaped in _ESCAPES:
        data = data.replace(plain, escaped)
    return b'"%s"' % data


class RecordWriter:
    """Appends records to ``folder``, which must be new to this run.

    ``may_wait``, asked every second while the disk is full, ends the wait by returning False. ``header`` goes
    into the first record of the run (job and bundle); ``clock`` gives seconds since the epoch. With a limit
    all segments together stay below ``limit_bytes``: older ones go.
    """

    def __init__(
        self,
        folder: str,
        run_id: str,
        header: Dict[str, Any],
        clock: Callable[[], float] = time.time,
        segment_bytes: Optional[int] = None,
        disk_full_wait_s: float = DISK_FULL_WAIT_S,
        limit_bytes: Optional[int] = None,
    ) -> None:
        self._folder = folder
        self._run_id = run_id
        self._clock = clock
        self._segment_bytes = segment_bytes or longest_segment(limit_bytes)
        self._cap = Cap(folder, limit_bytes)
        self._disk_full_wait_s = disk_full_wait_s
        self._seals = SealMaker(run_id)
        self._seq = 0
        self._index = -1
        self._file: Optional[int] = None
        self._first = 0
        self._size = 0
        self._finished_bytes = 0
        self._others = 0
        self._others_cut = 0
        self._cut_through = 0
        self._seal_line = b""
        self._unsealed_since: Optional[float] = None
        self.may_wait: Callable[[], bool] = lambda: True
        self.masked: Callable[[Dict[str, Any]], Dict[str, Any]] = lambda fields: fields
        self._reserve = os.path.join(folder, "reserve")
        with open(self._reserve, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, RESERVE_BYTES)
        self._open_segment(header)

    def write(self, kind: str, **fields: Any) -> None:
        """Appends one record; ``fields``, as `masked` leaves them, follow ``seq``, ``t`` and ``kind``."""
        self.write_text(kind, dump(self.masked(fields))[1:-1])

    def write_output(
        self, proc: str, pid: int, stream: str, off: int, line: int, key: str, value: str
    ) -> None:
        """Appends an ``out`` record: ``key`` is ``text``, or ``b64`` for bytes that are not UTF-8."""
        head = '"proc":%s,"pid":%d,"stream":"%s","off":%d,"line":%d,"%s":' % (
            (dump(proc), pid, stream, off, line, key)
        )
        self._write_body("out", b",%s%s}\n" % (head.encode("utf-8"), dump_text(value)))

    def seal(self) -> None:
        """Appends a seal when anything but the last seal came since."""
        if self._unsealed_since is None:
            return
        head = self._head("seal") + b',"bytes":%d,' % self._seals.pending_bytes
        self._seal_line = b'%s"sha256":"%s"}\n' % (head, self._seals.close(head).encode("ascii"))
        self._append(self._seal_line)
        self._unsealed_since = None

    def seal_due_in(self, now: float) -> Optional[float]:
        """Returns the seconds until the next seal is due by time, or None when nothing is unsealed."""
        if self._unsealed_since is None:
            return None
        return max(0.0, self._unsealed_since + SEAL_INTERVAL_S - now)

    def close(self) -> None:
        """Seals, forces all to the disk, and gives the reserve back."""
        self.release_reserve()
        self.seal()
        if self._file is not None:
            os.fsync(self._file)
            os.close(self._file)
            self._file = None

    def release_reserve(self) -> None:
        """Frees the space kept for a run's last records on a full disk."""
        try:
            os.unlink(self._reserve)
        except FileNotFoundError:
            pass

    def write_text(self, kind: str, fields: str) -> None:
        """Appends one record whose ``fields`` are the inside of a JSON object already."""
        self._write_body(kind, (",%s}\n" % fields if fields else "}\n").encode("utf-8"))

    def _write_body(self, kind: str, body: bytes) -> None:
        if self._size + len(body) > self._segment_bytes and self._seq > self._first + 1:
            self._finish_segment(max(len(body), self._segment_bytes))
            self._open_segment({})
        self._put(kind, body)
        self._others += kind not in ("out", "heartbeat")
        if self._seals.pending_bytes >= SEAL_BYTES:
            self.seal()

    def _put(self, kind: str, body: bytes) -> None:
        self._append(self._head(kind) + body)
        if self._unsealed_since is None:
            self._unsealed_since = time.monotonic()

    def _head(self, kind: str) -> bytes:
        return b'{"seq":%d,"t":%.6f,"kind":"%s"' % (self._seq, self._clock(), kind.encode("ascii"))

    def _append(self, data: bytes) -> None:
        try:
            self._write_all(data)
        finally:
            self._seals.add(data)
            self._seq += 1
            self._size += len(data)

    def _finish_segment(self, next_bytes: int) -> None:
        """Seals it, and makes room for a next one of ``next_bytes``: what goes stands in the last records."""
        assert self._file is not None
        surplus = self._cap.surplus(self._size + next_bytes)
        for segment in surplus:
            if segment.number <= self._cut_through:
                continue  # told before, when the disk did not take its stub
            self._cut_through = segment.number
            self._others_cut += segment.others
            self._put("cut", (",%s}\n" % dump(cut_record(segment, self._others_cut))[1:-1]).encode("ascii"))
        self.seal()
        os.fsync(self._file)
        os.close(self._file)
        self._file = None
        self._cap.remove(surplus)
        last, others = self._seq - 1, self._others
        self._cap.add(Segment(self._index, self._size, self._first, last, others, self._seal_line))
        self._finished_bytes += self._size

    def _open_segment(self, header: Dict[str, Any]) -> None:
        self._index += 1
        path = os.path.join(self._folder, segment_name(self._index))
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._first, self._size, self._others = self._seq, 0, 0
        fields = {
            "version": FORMAT_VERSION,
            "run": self._run_id,
            "first": self._seq,
            "at": self._finished_bytes,
            "prev": self._seals.last,
        }
        fields.update(header)
        self._put("segment", (",%s}\n" % dump(fields)[1:-1]).encode("utf-8"))

    def _write_all(self, data: bytes) -> None:
        """A short write is continued, never repeated; a full disk is tried again until the wait is over.

        Raises:
            DiskFull: the wait is over; the reserve was released and the record is complete.
        """
        assert self._file is not None
        view = memoryview(data)
        give_up_at = None
        gave_up = False
        while view:
            try:
                view = view[os.write(self._file, view) :]
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT) or gave_up:
                    raise
                now = time.monotonic()
                give_up_at = now + self._disk_full_wait_s if give_up_at is None else give_up_at
                if now < give_up_at and self.may_wait():
                    time.sleep(min(1.0, give_up_at - now))
                    continue
                gave_up = True
                self.release_reserve()
        if gave_up:
            raise DiskFull(self._folder)
