"""Turns what a process writes into a pipe into output records whose bytes can be put together again exactly.

A chunk is what one read returned, at most `CHUNK_BYTES`. A UTF-8 sequence that a read cut in two waits for
its rest; bytes that are not UTF-8 go as base64, and only those. ``off`` and ``line`` count the bytes and line
feeds of the stream before the chunk, as they are after masking.
"""

import base64
import errno
import fcntl
import os
import select
import time
from typing import Callable, Iterator, Optional, Tuple

from .masks import StreamMask

CHUNK_BYTES = 1024 * 1024
PIPE_BYTES = 1024 * 1024
MAX_PIECES = 8
SMALL_BYTES = 16 * 1024
GATHER_S = 0.002
_F_SETPIPE_SZ = 1031

Emit = Callable[[int, int, str, str], None]


def pieces(data: bytes) -> Iterator[Tuple[str, bytes, str]]:
    """Yields ``(key, raw bytes, value)`` with key ``text`` or ``b64``; the raw bytes joined are ``data``.

    After `MAX_PIECES` pieces the rest goes as one, so that a binary flood makes few records.
    """
    count = 0
    while data:
        count += 1
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            if count < MAX_PIECES and error.start:
                yield "text", data[: error.start], data[: error.start].decode("utf-8")
            bad = data[error.start : error.end] if count < MAX_PIECES else data
            yield "b64", bad, base64.b64encode(bad).decode("ascii")
            data = data[error.end :] if count < MAX_PIECES else b""
        else:
            yield "text", data, text
            return


def unfinished_tail(data: bytes) -> int:
    """Returns how many bytes at the end of ``data`` begin a UTF-8 sequence that is not complete (0 to 3)."""
    for back in range(1, min(3, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 == 0xC0:
            need = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return back if back < need and byte < 0xF5 else 0
        if byte & 0xC0 != 0x80:
            return 0
    return 0


class Pump:
    """Reads one pipe's end without blocking and hands its chunks to ``emit(off, line, key, value)``."""

    def __init__(self, fd: int, emit: Emit, mask: Optional[StreamMask] = None) -> None:
        self.fd = fd
        self.is_open = True
        self._emit = emit
        self._mask = mask
        self._off = 0
        self._line = 0
        self._tail = b""
        self._gather_until = 0.0
        os.set_blocking(fd, False)
        try:
            fcntl.fcntl(fd, _F_SETPIPE_SZ, PIPE_BYTES)
        except OSError:
            pass  # the user's limit of pipe memory is reached: a smaller pipe only costs wake-ups

    def read(self) -> bool:
        """Reads once; tells whether there may be more. At the end of the stream the descriptor is closed.

        A process that writes line by line without a pause gets a moment to write more of them: a record for
        each costs it more of the processor than it uses itself.
        """
        rest_s = self._gather_until - time.monotonic()
        if rest_s > 0:
            select.select([], [], [], rest_s)  # relative, whatever libfaketime makes of the clocks
        try:
            data = os.read(self.fd, CHUNK_BYTES)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EINTR):
                return False
            raise
        if not data:
            self.close()
            return False
        self._gather_until = time.monotonic() + GATHER_S if len(data) < SMALL_BYTES else 0.0
        data = self._tail + (data if self._mask is None else self._mask.feed(data))
        keep = unfinished_tail(data)
        self._tail = data[len(data) - keep :] if keep else b""
        self._send(data[: len(data) - keep] if keep else data)
        return True

    def close(self) -> None:
        """Emits what waited and closes the descriptor."""
        if self.is_open:
            self.is_open = False
            os.close(self.fd)
            tail, self._tail = self._tail, b""
            self._send(tail if self._mask is None else tail + self._mask.flush())

    def _send(self, data: bytes) -> None:
        for key, raw, value in pieces(data):
            self._emit(self._off, self._line, key, value)
            self._off += len(raw)
            self._line += raw.count(b"\n")
