"""A small project for tests of the command line: inventory, payload, experiments, and the real `orch`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.forked import run_forked

ORCH = Path(sys.executable).with_name("orch")
TIMEOUT_S = 60.0
AT_START = ("PYTHON", "LANG", "LC_")  # variables that an interpreter reads when it starts

_started: set[str] = set()


@dataclass(frozen=True, kw_only=True)
class Done:
    """A command that has ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Project:
    """``folder`` holds inventory.yaml, payloads/probe/, experiments/, and what its hosts keep."""

    def __init__(self, folder: Path, hosts: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        self.folder = folder
        self.host_root = folder / "host root"
        (folder / "payloads" / "probe").mkdir(parents=True)
        (folder / "experiments").mkdir()
        (folder / "payloads" / "probe" / "__init__.py").touch()
        self.write_inventory(hosts or {"here": {"transport": "local"}})

    def write_inventory(self, hosts: Mapping[str, Mapping[str, Any]]) -> None:
        entries = {name: {"root": str(self.host_root), **host} for name, host in hosts.items()}
        (self.folder / "inventory.yaml").write_text(yaml.safe_dump({"hosts": entries}))

    def experiment(self, code: str, name: str = "trial", **keys: Any) -> Path:
        """Writes a payload module ``probe.NAME`` and the experiment that runs it."""
        (self.folder / "payloads" / "probe" / f"{name}.py").write_text(textwrap.dedent(code))
        path = self.folder / "experiments" / f"{name}.yaml"
        path.write_text(yaml.safe_dump({"payload": "probe", "run": f"probe.{name}", **keys}))
        return path

    def start(self, *arguments: str | Path, **options: Any) -> subprocess.Popen[bytes]:
        """Starts ``orch``, or another ``program`` in its place, with its streams as pipes."""
        settings = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            **options,
        }
        env = {**os.environ, **settings.pop("env", {})}
        program = settings.pop("program", [ORCH])
        return subprocess.Popen([*program, *arguments], cwd=self.folder, env=env, **settings)

    def orch(self, *arguments: str | Path, **options: Any) -> Done:
        """Runs ``orch`` to its end: the first of each command as a person starts it, all others forked."""
        words, env = [*map(str, arguments)], options.get("env", {})
        is_plain = options.keys() <= {"env"} and not any(name.startswith(AT_START) for name in env)
        if is_plain and words and words[0] in _started:
            whole = {**os.environ, **env}
            code, out, err = run_forked(
                [str(ORCH), *words], folder=self.folder, env=whole, timeout_s=TIMEOUT_S
            )
            return Done(code=code, out=out.decode(), err=err.decode())
        _started.update(words[:1])
        return self._orch_from_its_start(*words, **options)

    def _orch_from_its_start(self, *arguments: str, **options: Any) -> Done:
        with self.start(*arguments, **options) as process:
            try:
                out, err = process.communicate(timeout=TIMEOUT_S)
            except BaseException:
                process.kill()
                raise
        return Done(code=process.returncode, out=out.decode(), err=err.decode())

    def execute(self, command: Sequence[str | Path], **options: Any) -> subprocess.CompletedProcess[bytes]:
        """Runs any program to its end, in the project's folder."""
        return subprocess.run(
            command,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=TIMEOUT_S,
            check=False,
            **options,
        )

    def end_all(self) -> None:
        """Leaves nothing behind: what lives under the host's root is told to stop at once."""
        for state in self.host_root.glob("runs/*/state.json"):
            if json.loads(state.read_text())["state"] != "ended":
                self.orch("cancel", state.parent.name, "--grace", "0")

    def runs(self) -> list[dict[str, Any]]:
        """Returns the ledger's rows as `orch ps` shows them, newest first."""
        rows: list[dict[str, Any]] = self.orch("ps", "--json", "-n", "100000").json
        return rows

    def mirrored(self, run_id: str) -> bytes:
        """Returns all bytes of a run's mirror."""
        return _segments(self.folder / ".orch" / "runs" / run_id / "records")

    def written(self, run_id: str) -> bytes:
        """Returns all bytes that the run's host has."""
        return _segments(self.host_root / "runs" / run_id / "records")

    def records(self, run_id: str) -> list[dict[str, Any]]:
        """Returns the mirrored records."""
        return [json.loads(line) for line in self.mirrored(run_id).splitlines()]

    def observations(self, run_id: str, kind: str) -> list[dict[str, Any]]:
        """Returns the controller's own notes of one kind."""
        text = (self.folder / ".orch" / "runs" / run_id / "observations.jsonl").read_text()
        return [entry for entry in map(json.loads, text.splitlines()) if entry["kind"] == kind]

    def output(self, run_id: str, stream: str = "stdout") -> str:
        """Returns what a run wrote to one stream."""
        records = self.records(run_id)
        return "".join(
            record["text"] for record in records if record["kind"] == "out" and record["stream"] == stream
        )


def wait_until(is_so: Callable[[], Any], what: str) -> None:
    """Returns when ``is_so()``; fails after half a minute."""
    end = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < end, f"waited too long for {what}"
        time.sleep(0.02)


def _segments(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.glob("*.jsonl")))
