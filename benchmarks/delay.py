"""A TCP proxy that makes a network slow without making it narrow: each byte arrives ``delay_s`` later.

Runs as a process of its own, ``python -m benchmarks.delay PORT DELAY_S``: it prints its port, passes every
connection on to PORT of this machine, and prints for each connection that has ended the number of its round
trips: how often the client spoke after it had heard something.
"""

from __future__ import annotations

import queue
import socket
import sys
import threading
import time
from contextlib import suppress

READ_BYTES = 1024 * 1024


class Trips:
    """Counts how often the client's word follows the server's."""

    def __init__(self) -> None:
        self.count = 0
        self._heard = True

    def spoken(self, *, by_client: bool) -> None:
        """Takes one piece."""
        self.count += by_client and self._heard
        self._heard = not by_client


def main(target: int, delay_s: float) -> None:
    """Serves until the process is ended."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        print(listener.getsockname()[1], flush=True)
        while True:
            client, _ = listener.accept()
            threading.Thread(target=_serve, args=(client, target, delay_s), daemon=True).start()


def _serve(client: socket.socket, target: int, delay_s: float) -> None:
    time.sleep(2 * delay_s)  # the handshake, which the kernel has done at once
    trips = Trips()
    with client, socket.create_connection(("127.0.0.1", target)) as server:
        for end in (client, server):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        ways = [
            threading.Thread(target=_pass_on, args=(client, server, delay_s, trips, True), daemon=True),
            threading.Thread(target=_pass_on, args=(server, client, delay_s, trips, False), daemon=True),
        ]
        for way in ways:
            way.start()
        for way in ways:
            way.join()
    print(trips.count, flush=True)


def _pass_on(
    source: socket.socket, target: socket.socket, delay_s: float, trips: Trips, by_client: bool
) -> None:
    """What has arrived is read at once, whatever the other side takes: only time is in the way."""
    due: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
    delivering = threading.Thread(target=_deliver, args=(due, target), daemon=True)
    delivering.start()
    data = b"begin"
    while data:
        try:
            data = source.recv(READ_BYTES)
        except OSError:
            data = b""
        if data:
            trips.spoken(by_client=by_client)
        due.put((time.monotonic() + delay_s, data))
    delivering.join()


def _deliver(due: queue.SimpleQueue[tuple[float, bytes]], target: socket.socket) -> None:
    with suppress(OSError):
        while True:
            at, data = due.get()
            time.sleep(max(0.0, at - time.monotonic()))
            if not data:
                target.shutdown(socket.SHUT_WR)
                return
            target.sendall(data)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
