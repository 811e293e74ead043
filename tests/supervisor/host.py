"""A host for the supervisor's tests: a temporary root and real conversations with a real interpreter.

Standard library only: these tests also run on a bare Python 3.8 (``python3.8 -m unittest discover -s
tests/supervisor -t .``). The interpreter under test is the one that runs the tests.
"""

import contextlib
import glob
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import unittest
from typing import Any, Dict, Iterator, List, Optional, Tuple

from orchestrator.supervisor import bootstrap, processes, store, wire

LOADER = "import sys;i=sys.stdin.buffer;g={};exec(i.read(int(i.readline())),g);g['main'](i)"
WAIT_S = 30.0


def sources() -> Dict[str, str]:
    """Returns the supervisor's files."""
    found = {}
    for path in glob.glob(os.path.join(os.path.dirname(bootstrap.__file__), "*.py")):
        with open(path, encoding="utf-8") as file:
            found[os.path.basename(path)] = file.read()
    return found


class Talk:
    """One conversation: a process, its frames."""

    def __init__(self, root: str, request: Dict[str, Any], env: Optional[Dict[str, str]] = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", LOADER],
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

    def close(self) -> int:
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        return self.process.wait(WAIT_S)


class HostCase(unittest.TestCase):
    """Gives each test a root of its own, and ends what a test leaves running."""

    def setUp(self) -> None:
        self.base = tempfile.mkdtemp(prefix="orch 'test' ")
        self.root = os.path.join(self.base, "root")
        self.addCleanup(shutil.rmtree, self.base, True)
        self.run_ids: List[str] = []
        self.addCleanup(self.end_all)
        self.count = 0

    def end_all(self) -> None:
        for run_id in self.run_ids:
            left = processes.members(run_id)
            state = self.state(run_id)
            supervisor = processes.look(state["identity"]["pid"]) if state else None
            if supervisor is not None and supervisor.started == state["identity"]["started"]:
                left.append(supervisor)
            processes.send_signal(left, signal.SIGKILL)
            processes.wait_for_end(left, 5.0)

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

    def talk(self, request: Dict[str, Any], env: Optional[Dict[str, str]] = None) -> Talk:
        talk = Talk(self.root, request, env)
        self.addCleanup(talk.close)
        return talk

    def start(
        self, code: str, follow: bool = True, host_env: Optional[Dict[str, str]] = None, **changes: Any
    ) -> Talk:
        """Starts a run and returns its conversation, the answer read."""
        job, entries, objects = self.job(code, **changes)
        return self.start_job(job, entries, objects, follow, host_env)

    def start_job(
        self,
        job: Dict[str, Any],
        entries: List[List[Any]],
        objects: Dict[str, bytes],
        follow: bool = True,
        env: Optional[Dict[str, str]] = None,
    ) -> Talk:
        cursor = {"segment": 0, "offset": 0} if follow else None
        talk = self.talk({"op": "start", "job": job, "entries": entries, "cursor": cursor}, env)
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

    def wait_for(self, what: str, is_so: Any) -> None:
        end = time.monotonic() + WAIT_S
        while not is_so():
            if time.monotonic() > end:
                self.fail("waited too long for " + what)
            time.sleep(0.02)


def of_kind(records: List[Dict[str, Any]], kind: str) -> List[Dict[str, Any]]:
    """Returns the records of one kind."""
    return [record for record in records if record["kind"] == kind]
