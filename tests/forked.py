"""Real `orch` processes that need not wait for their imports: forked from a process that has them all.

It knows how to start that process, how to hand it words, folder, environment and streams, and how a child
ended. A child is what `orch` is once its modules are imported, and ends as any interpreter does. What happens
before `main` does not show here: `tests.project` starts the first one of every command the long way.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import pkgutil
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

MOST_BYTES = 1 << 20  # argv and environment of one child

_lock = threading.Lock()
_to_parent: socket.socket | None = None


def run_forked(
    argv: Sequence[str], *, folder: Path, env: Mapping[str, str], timeout_s: float
) -> tuple[int, bytes, bytes]:
    """Runs `orch` to its end; returns its exit code as `subprocess` tells it, and what it wrote."""
    with ExitStack() as near, ExitStack() as far:
        out, out_of_child = _pipe(near, far)
        err, err_of_child = _pipe(near, far)
        answers, answering = (near.enter_context(end) for end in socket.socketpair())
        lines = near.enter_context(answers.makefile("rb"))
        nothing = far.enter_context(Path(os.devnull).open("rb"))
        request = json.dumps([[*argv], str(folder), {**env}]).encode()
        ends = [file.fileno() for file in (nothing, out_of_child, err_of_child, answering)]
        socket.send_fds(_parent(), [request], ends)
        far.close()
        answering.close()
        pid = int(lines.readline())
        try:
            said_out, said_err = _read_to_end(out, err, end=time.monotonic() + timeout_s)
        except BaseException:
            os.kill(pid, signal.SIGKILL)
            raise
        return int(lines.readline()), said_out, said_err


def _pipe(near: ExitStack, far: ExitStack) -> tuple[BinaryIO, BinaryIO]:
    reading, writing = os.pipe()
    return near.enter_context(open(reading, "rb")), far.enter_context(open(writing, "wb"))  # noqa: PTH123


def _read_to_end(*files: BinaryIO, end: float) -> list[bytes]:
    """Reads until nobody has the other ends any more, as `subprocess` does."""
    found = {file.fileno(): b"" for file in files}
    with selectors.DefaultSelector() as selector:
        for file in files:
            selector.register(file, selectors.EVENT_READ)
        while selector.get_map():
            ready = selector.select(max(0.0, end - time.monotonic()))
            assert ready, f"orch still runs or its output is held open; so far: {found}"
            for key, _ in ready:
                piece = os.read(key.fd, 1 << 16)
                found[key.fd] += piece
                if not piece:
                    selector.unregister(key.fileobj)
    return [*found.values()]


def _parent() -> socket.socket:
    """Returns the way to the process that all are forked from; it ends with this one."""
    global _to_parent
    with _lock:
        if _to_parent is None:
            _to_parent, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
            with theirs:
                # Its streams are pipes, as its children's are: Python asks once, at the start, what they are.
                process = subprocess.Popen(
                    [sys.executable, "-P", __file__, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    pass_fds=[theirs.fileno()],
                )
            atexit.register(_end, process, _to_parent)
        return _to_parent


def _end(process: subprocess.Popen[bytes], to_it: socket.socket) -> None:
    to_it.close()
    process.communicate()


def serve(requests: socket.socket) -> list[str] | None:
    """Forks a child for each request; returns its argv there, and None here when nobody can ask any more."""
    answers: dict[int, tuple[int, socket.socket]] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(requests, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is not requests:
                    selector.unregister(key.fileobj)
                    _tell_end(key.fd, *answers.pop(key.fd))
                    continue
                request, fds, _, _ = socket.recv_fds(requests, MOST_BYTES, 4)
                if not request:
                    return None
                pid = os.fork()
                if not pid:
                    argv, folder, env = json.loads(request)
                    return _become(argv, folder, env, fds)
                watch = os.pidfd_open(pid)
                answers[watch] = pid, _told(pid, fds)
                selector.register(watch, selectors.EVENT_READ)


def _told(pid: int, fds: list[int]) -> socket.socket:
    """Says who the child is, and closes here what is its alone."""
    *streams, answering = fds
    for fd in streams:
        os.close(fd)
    answer = socket.socket(fileno=answering)
    answer.sendall(b"%d\n" % pid)
    return answer


def _tell_end(watch: int, pid: int, answer: socket.socket) -> None:
    _, status = os.waitpid(pid, 0)
    os.close(watch)
    with answer:
        answer.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))


def _become(argv: list[str], folder: str, env: dict[str, str], fds: list[int]) -> list[str]:
    """Makes this process one that was started with this argv, there, with these streams."""
    for number, fd in enumerate(fds[:3]):
        os.dup2(fd, number)
    os.closerange(3, 1 << 16)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    time.tzset()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return argv


def import_all() -> None:
    """Imports every module of `orch`; what is here now is no child's garbage to look for."""
    import orchestrator  # noqa: PLC0415

    for module in pkgutil.walk_packages(orchestrator.__path__, "orchestrator."):
        if not module.name.startswith("orchestrator.supervisor."):
            importlib.import_module(module.name)
    gc.freeze()


def main() -> Any:
    """Is the parent until it is told to be a child."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import_all()
    argv = serve(socket.socket(fileno=int(sys.argv[1])))
    if argv is None:
        return 0
    from orchestrator.cli.main import main as orch  # noqa: PLC0415

    sys.argv = argv
    return orch()


if __name__ == "__main__":
    sys.exit(main())
