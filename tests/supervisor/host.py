"""A host for the supervisor's tests: a temporary root and real conversations with a real interpreter.

Standard library only: these tests also run on a bare Python 3.8 (``python3.8 -m unittest discover -s
tests/supervisor -t .``). The interpreter under test is the one that runs the tests.
"""

import base64
import contextlib
import glob
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import unittest
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

from orchestrator.supervisor import bootstrap, cgroups, processes, store, wire

LOADER = "import sys;i=sys.stdin.buffer;g={};exec(i.read(int(i.readline())),g);g['main'](i)"
WAIT_S = 30.0
MOST_S = 120  # a test that waits for what never comes fails
NEEDS_ROOT = unittest.skipUnless(os.geteuid() == 0, "a mount namespace needs root")
WITHOUT_CGROUPS = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs none /sys/fs/cgroup && exec "$@"', "sh")


def sources() -> Dict[str, str]:
    """Returns the supervisor's files."""
    found = {}
    for path in glob.glob(os.path.join(os.path.dirname(bootstrap.__file__), "*.py")):
        with open(path, encoding="utf-8") as file:
            found[os.path.basename(path)] = file.read()
    return found


class Talk:
    """One conversation: a process, its frames."""

    def __init__(
        self,
        root: str,
        request: Dict[str, Any],
        env: Optional[Dict[str, str]] = None,
        prefix: Sequence[str] = (),
    ) -> None:
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-I", "-S", "-c", LOADER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=env,
        )
        files = sources()
        code = files["bootstrap.py"].encode()
        digest = bootstrap.digest_of({name: text.encode() for name, text in files.items()})
        hello = json.dumps({"nonce": "n0", "root": root, "digest": digest}).encode()
        self.send_raw(b"%d\n%s%s\n%s" % (len(code), code, hello, wire.pack(request)))
        opening = wire.preamble("n0")
        assert self.exactly(len(opening)) == opening
        self.hello, _ = self.frame()
        self.need: Dict[str, Any] = {}
        self.answer: Dict[str, Any] = {}
        if "error" not in self.hello and not self.hello["supervisor"]:
            text = json.dumps(files).encode()
            self.send_raw(b"%d\n%s" % (len(text), text))

    def send_raw(self, data: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(data)
        self.process.stdin.flush()

    def exactly(self, size: int) -> bytes:
        assert self.process.stdout is not None
        data = self.process.stdout.read(size)
        if len(data) != size:
            raise wire.WireError("ended")
        return data

    def frame(self) -> Tuple[Dict[str, Any], bytes]:
        return wire.read_frame(self.exactly)

    def header(self) -> Dict[str, Any]:
        return self.frame()[0]

    def pieces(self) -> Iterator[Tuple[int, int, bytes]]:
        while True:
            header, body = self.frame()
            if header.get("end"):
                return
            if "segment" in header:
                yield header["segment"], header["offset"], body

    def follow(self) -> "Following":
        return Following(self.pieces())

    def close(self) -> int:
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        return self.process.wait(WAIT_S)


class Following:
    """A run's records, read as far as a test needs them."""

    def __init__(self, pieces: Iterator[Tuple[int, int, bytes]]) -> None:
        self._pieces = pieces
        self._data = b""

    def until_printed(self, *words: bytes) -> None:
        while not all(printed(self._data, word) for word in words):
            self._data += next(self._pieces)[2]

    def so_far(self, kind: str) -> List[Dict[str, Any]]:
        """Returns the records of a kind among those that were read."""
        whole = self._data.rpartition(b"\n")[0].splitlines()
        return of_kind([json.loads(line) for line in whole], kind)

    def until(self, kind: str) -> Dict[str, Any]:
        while True:
            found = self.so_far(kind)
            if found:
                return found[0]
            self._data += next(self._pieces)[2]

    def rest(self) -> List[Dict[str, Any]]:
        """Reads to the end; returns all records."""
        self._data += b"".join(piece for _, _, piece in self._pieces)
        return [json.loads(line) for line in self._data.splitlines()]


class HostCase(unittest.TestCase):
    """Gives each test a root of its own, and ends what a test leaves running."""

    def setUp(self) -> None:
        signal.signal(signal.SIGALRM, _too_long)
        signal.alarm(MOST_S)
        self.addCleanup(signal.alarm, 0)
        self.base = tempfile.mkdtemp(prefix="orch 'test' ")
        self.root = os.path.join(self.base, "root")
        self.addCleanup(shutil.rmtree, self.base, True)
        self.run_ids: List[str] = []
        self.addCleanup(self.end_all)
        self.count = 0

    def end_all(self) -> None:
        for run_id in self.run_ids:
            state = self.state(run_id)
            cgroup = cgroups.checked(state.get("cgroup"), run_id)
            left = processes.members(run_id, in_cgroup=cgroups.pids(cgroup))
            supervisor = processes.look(state["identity"]["pid"]) if state else None
            if supervisor is not None and supervisor.started == state["identity"]["started"]:
                left.append(supervisor)
            processes.send_signal(left, signal.SIGKILL)
            cgroups.kill(cgroup)
            processes.wait_for_end(left, 5.0)
            cgroups.remove(cgroup)

    def state(self, run_id: str) -> Dict[str, Any]:
        path = self.path(run_id, "state.json")
        if not os.path.exists(path):
            return {}
        with open(path, encoding="utf-8") as file:
            state: Dict[str, Any] = json.load(file)
        return state

    def path(self, run_id: str, *parts: str) -> str:
        return os.path.join(self.root, "runs", run_id, *parts)

    def job(self, code: str, **changes: Any) -> Tuple[Dict[str, Any], List[List[Any]], Dict[str, bytes]]:
        """Returns a job whose payload is one module with ``code``, its manifest, its objects."""
        self.count += 1
        data = textwrap.dedent(code).encode()
        sha256 = hashlib.sha256(data).hexdigest()
        entries = [
            ["probe/__init__.py", 0o644, 0, hashlib.sha256(b"").hexdigest()],
            ["probe/go.py", 0o644, len(data), sha256],
        ]
        job = {
            "version": 1,
            "run_id": "run%d%s" % (self.count, os.path.basename(self.base)[-6:].replace(" ", "x")),
            "bundle": store.manifest_id(entries),
            "module": "probe.go",
            "params": {"answer": 42},
            "env": {},
            "alloc_conf": None,
            "devices": [],
            "timeout_s": None,
            "grace_s": 5.0,
        }
        job.update(changes)
        self.run_ids.append(str(job["run_id"]))
        return job, entries, {sha256: data, hashlib.sha256(b"").hexdigest(): b""}

    def talk(
        self,
        request: Dict[str, Any],
        env: Optional[Dict[str, str]] = None,
        prefix: Sequence[str] = (),
    ) -> Talk:
        talk = Talk(self.root, request, env, prefix)
        self.addCleanup(talk.close)
        return talk

    def start(
        self,
        code: str,
        follow: bool = True,
        host_env: Optional[Dict[str, str]] = None,
        prefix: Sequence[str] = (),
        **changes: Any,
    ) -> Talk:
        """Starts a run and returns its conversation, the answer read."""
        job, entries, objects = self.job(code, **changes)
        return self.start_job(job, entries, objects, follow, host_env, prefix)

    def start_job(
        self,
        job: Dict[str, Any],
        entries: List[List[Any]],
        objects: Dict[str, bytes],
        follow: bool = True,
        env: Optional[Dict[str, str]] = None,
        prefix: Sequence[str] = (),
    ) -> Talk:
        cursor = {"segment": 0, "offset": 0} if follow else None
        talk = self.talk({"op": "start", "job": job, "entries": entries, "cursor": cursor}, env, prefix)
        talk.need = talk.header()
        for sha256 in talk.need.get("need", []):
            talk.send_raw(wire.pack({"object": sha256}, objects[sha256]))
        talk.answer = talk.header()
        return talk

    def records(self, talk: Talk) -> List[Dict[str, Any]]:
        """Reads a conversation to its end and returns the records."""
        data = b"".join(piece for _, _, piece in talk.pieces())
        return [json.loads(line) for line in data.splitlines()]

    def run_code(self, code: str, **changes: Any) -> List[Dict[str, Any]]:
        """Runs ``code`` to its end."""
        return self.records(self.start(code, **changes))

    def stop(self, run_id: str, grace_s: Optional[float] = None) -> Dict[str, Any]:
        """Asks for a run's end; returns the answer."""
        return self.talk({"op": "stop", "run": run_id, "grace_s": grace_s}).header()

    def standing(self, run_id: str) -> Dict[str, Any]:
        """Returns what the host says of a run."""
        found: Dict[str, Any] = self.talk({"op": "status", "runs": [run_id]}).header()["runs"][run_id]
        return found

    def supervisor(self, run_id: str) -> int:
        """Returns the pid of a run's supervisor."""
        pid: int = self.state(run_id)["identity"]["pid"]
        assert pid > 1
        return pid

    def wait_for(self, what: str, is_so: Any) -> None:
        end = time.monotonic() + WAIT_S
        while not is_so():
            if time.monotonic() > end:
                self.fail("waited too long for " + what)
            time.sleep(0.02)


def _too_long(*_: Any) -> None:
    raise AssertionError("the test took longer than %d s" % MOST_S)


def of_kind(records: List[Dict[str, Any]], kind: str) -> List[Dict[str, Any]]:
    """Returns the records of one kind."""
    return [record for record in records if record["kind"] == kind]


def stream_bytes(records: List[Dict[str, Any]], stream: str) -> bytes:
    """Puts one stream together again, checking that offsets and line counts say where each chunk belongs."""
    data = b""
    for record in of_kind(records, "out"):
        if record["stream"] == stream:
            assert record["off"] == len(data), (record["off"], len(data))
            assert record["line"] == data.count(b"\n")
            data += record["text"].encode() if "text" in record else base64.b64decode(record["b64"])
    return data


def printed(records: bytes, word: bytes) -> bool:
    """Tells whether the payload's own output, and nothing else in the records, holds ``word``."""
    return re.search(rb'"text":"[^"]*' + word, records) is not None
