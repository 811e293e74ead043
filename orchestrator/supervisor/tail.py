"""Sends a run's bytes to the controller: what is there, then what comes, until the run has ended.

In place of segments that a limit has removed it says so and sends their stub. Waits on inotify where the
kernel has it (a poll with a falling rate elsewhere), and on standard input, whose end means that the
controller has gone: a reader never outlives its channel.
"""

import os
import select
import struct
import time
from typing import Callable, Optional, Tuple

from .cuts import segment_name, stub_for
from .wire import PIECE_BYTES

IDLE_S = 10.0
POLL_MIN_S = 0.005
POLL_MAX_S = 1.0
_INPUT_FD = 0
_IN_MODIFY, _IN_CLOSE_WRITE, _IN_CREATE = 0x2, 0x8, 0x100
_EVENT = struct.Struct("iIII")


class Watch:
    """Wakes when a run writes, when it ends, or when standard input says that the controller has gone."""

    def __init__(self, records: str, lock: str) -> None:
        self._notify_fd, self._lock_watch = _inotify(records, lock)
        self._poll_s = POLL_MIN_S
        self._is_closing = False
        self.input_ended = False

    def wait(self, timeout_s: float) -> None:
        """Returns when something may have changed, or after ``timeout_s`` seconds."""
        fds = [fd for fd in (_INPUT_FD, self._notify_fd) if fd is not None]
        polls = self._notify_fd is None or self._is_closing
        ready, _, _ = select.select(fds, [], [], min(timeout_s, self._poll_s) if polls else timeout_s)
        self._poll_s = min(POLL_MAX_S, self._poll_s * 1.5)
        if _INPUT_FD in ready and not os.read(_INPUT_FD, 4096):
            self.input_ended = True
        if self._notify_fd in ready:
            self._read_events()

    def saw_something(self) -> None:
        """Makes the poll quick again."""
        self._poll_s = POLL_MIN_S

    def _read_events(self) -> None:
        """The lock file is closed an instant before its lock is free: from then on a quick poll has to do."""
        assert self._notify_fd is not None
        data = os.read(self._notify_fd, 64 * 1024)
        while data:
            watch, _, _, length = _EVENT.unpack_from(data)
            data = data[_EVENT.size + length :]
            if watch == self._lock_watch and not self._is_closing:
                self._is_closing = True
                self.saw_something()


class Tail:
    """Reads segments from a position on; ``send(segment, offset, data)`` takes each piece.

    ``cut(segment, offset, through, stub)``: what comes from there to the end of segment ``through`` is gone.
    """

    def __init__(
        self,
        folder: str,
        segment: int,
        offset: int,
        send: Callable[[int, int, bytes], None],
        cut: Callable[[int, int, int, bytes], None],
    ) -> None:
        self._folder = folder
        self._segment = segment
        self._offset = offset
        self._send = send
        self._cut = cut

    def pump(self) -> bool:
        """Sends all that is there now; tells whether it sent anything."""
        sent = False
        while True:
            is_complete = self._is_followed()  # asked first: then nothing is added to it
            data = self._piece()
            if data:
                self._send(self._segment, self._offset, data)
                self._offset += len(data)
                sent = True
            elif data is None:
                stub = stub_for(self._folder, self._segment)
                if stub is None:
                    return sent
                self._cut(self._segment, self._offset, *stub)
                self._segment, self._offset = stub[0] + 1, 0
                sent = True
            elif is_complete:
                self._segment, self._offset = self._segment + 1, 0
            else:
                return sent

    def _is_followed(self) -> bool:
        following = self._segment + 1
        return os.path.exists(self._path(following)) or stub_for(self._folder, following) is not None

    def _piece(self) -> Optional[bytes]:
        """Returns what comes next in the segment, or None when it is not there.

        Opened anew each time: while a slow controller is waited for, no removed segment keeps its room.
        """
        try:
            fd = os.open(self._path(self._segment), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            return os.pread(fd, PIECE_BYTES, self._offset)
        finally:
            os.close(fd)

    def follow(self, is_alive: Callable[[], bool], idle: Callable[[], None], watch: Watch) -> None:
        """Sends until the run has ended and everything is sent, or the controller has gone."""
        idle_at = time.monotonic() + IDLE_S
        while not watch.input_ended:
            alive = is_alive()  # asked first: what a run wrote before it ended is then seen by this pass
            if self.pump():
                watch.saw_something()
                idle_at = time.monotonic() + IDLE_S
            if not alive:
                return
            now = time.monotonic()
            if now >= idle_at:
                idle()
                idle_at = now + IDLE_S
            watch.wait(min(1.0, idle_at - now))

    def host_end(self) -> Tuple[int, int]:
        """Returns the last segment's index and its size in bytes, as they are on this disk now."""
        last = max(int(name[:6]) for name in os.listdir(self._folder) if name.endswith(".jsonl"))
        return last, os.stat(self._path(last)).st_size

    def _path(self, segment: int) -> str:
        return os.path.join(self._folder, segment_name(segment))


def _inotify(records: str, lock: str) -> Tuple[Optional[int], int]:
    """Returns a descriptor that watches both and the number of the lock's watch, or (None, 0)."""
    try:
        import ctypes  # noqa: PLC0415  (a stripped Python may lack it)

        libc = ctypes.CDLL(None, use_errno=True)
        fd = int(libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
        on_records = libc.inotify_add_watch(fd, os.fsencode(records), _IN_MODIFY | _IN_CREATE)
        on_lock = int(libc.inotify_add_watch(fd, os.fsencode(lock), _IN_CLOSE_WRITE))
        return (None, 0) if min(fd, on_records, on_lock) < 0 else (fd, on_lock)
    except (ImportError, OSError, AttributeError):
        return None, 0
