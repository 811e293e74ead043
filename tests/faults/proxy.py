"""A TCP proxy in front of a test's own server on loopback, which breaks connections where it is told."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Literal, Self

Direction = Literal["up", "down"]  # to the server, from it
READ_BYTES = 4096


class Proxy:
    """Forwards connections to ``127.0.0.1:port`` until one has carried as many bytes as `cut_at` says.

    The cut ends that connection in both directions, as a router that forgets it does; those that come
    later are forwarded in peace.
    """

    def __init__(self, port: int) -> None:
        self._server_port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.carried: dict[Direction, int] = {"up": 0, "down": 0}
        self.cuts = 0
        self._cut: tuple[Direction, int] | None = None
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]

    def cut_at(self, direction: Direction, size: int) -> None:
        """Breaks the next connection once ``size`` bytes went in ``direction``; 0 is at once."""
        self.carried = {"up": 0, "down": 0}
        self._cut = (direction, size)

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for one in self._sockets:
            _end(one)
        for thread in self._threads:
            thread.join(5.0)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._server_port))
            except OSError:
                return
            self._sockets += [near, far]
            for direction, source, sink in (("up", near, far), ("down", far, near)):
                thread = threading.Thread(target=self._forward, args=(direction, source, sink), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _forward(self, direction: Direction, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(READ_BYTES):
                room = len(data)
                if self._cut is not None and self._cut[0] == direction:
                    room = self._cut[1] - self.carried[direction]
                sink.sendall(data[: max(0, room)])
                self.carried[direction] += len(data)
                if room < len(data):
                    self._cut = None
                    self.cuts += 1
                    break
        except OSError:
            pass
        _end(source)
        _end(sink)


def _end(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()
