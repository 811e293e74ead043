"""Files of a run brought here from a real host on this machine: chosen, resumed, bounded, never elsewhere."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator import fetching, remote_artifacts
from orchestrator.artifact_folder import Part, fetched_here, part_name
from orchestrator.checks import check_artifacts
from orchestrator.errors import HostError, OrchError, StorageError, Unreachable
from orchestrator.fetching import Choice, Fetch, Finding, Progress, choose
from orchestrator.inventory import Host
from orchestrator.remote_artifacts import Artifact
from orchestrator.transports import Transport, connect
from orchestrator.workspace import Workspace
from tests.unit.housekeeping import a_run, a_workspace

MIB = 1024**2
DATA = os.urandom(3 * MIB + 17)


class Said(Progress):
    """Keeps what is said."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


class Here:
    """A run that has ended, its artifacts on the host and the folder for them here."""

    def __init__(self, workspace: Workspace, home: Path) -> None:
        self.workspace = workspace
        self.there = home / ".orch" / "runs" / "run1" / "artifacts"
        self.there.mkdir(parents=True, mode=0o700)
        self.said = Said()

    @property
    def folder(self) -> Path:
        return self.workspace.folder("run1").artifacts

    @property
    def is_uncollected(self) -> bool:
        return fetching.is_uncollected(self.workspace.ledger.get("run1"), self.workspace.folder("run1"))

    def put(self, path: str, data: bytes = b"x") -> Path:
        full = self.there / path
        full.parent.mkdir(parents=True, exist_ok=True)
        full.write_bytes(data)
        return full

    def fetch(self, *patterns: str, **options: Any) -> Fetch:
        return fetching.fetch(self.workspace, "run1", patterns, progress=self.said, **options)

    def files(self) -> dict[str, bytes]:
        found = (path for path in self.folder.rglob("*") if path.is_file())
        return {str(path.relative_to(self.folder)): path.read_bytes() for path in found}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the supervisor is installed for all tests, not anew in the home of each."""
    return tmp_path_factory.mktemp("supervisor")


@pytest.fixture
def here(tmp_path: Path, home: Path, installed: Path) -> Iterator[Here]:
    (home / ".orch").mkdir(mode=0o700)
    (home / ".orch" / "supervisor").symlink_to(installed)
    workspace = a_workspace(tmp_path)
    a_run(workspace, "run1", collect=["*.json", "logs/"], collect_limit_bytes=8 * MIB)
    yield Here(workspace, home)
    workspace.close()


def an_artifact(path: str, kind: str = "file", size_bytes: int = 1) -> Artifact:
    return Artifact(path=path, kind=kind, size_bytes=size_bytes, mtime_ns=1)


def test_hostile_names_are_refused_one_by_one_and_the_others_go_on() -> None:
    hostile = ["/etc/passwd", "../x", "a/../../x", "", ".", "a//b", "a\0b", "\udcff", "x" * 300, ".part/x"]
    found = choose([an_artifact(path) for path in ("a", *hostile, "z", "a")], (), 100)
    assert [(file.path, names) for file, names in found.files.items()] == [("a", ("a",)), ("z", ("z",))]
    assert [finding.path for finding in found.findings] == [*hostile, "a"]
    assert found.findings[-1].why == "the host names it twice"


def test_what_does_not_fit_the_limit_is_named_and_what_does_goes_on() -> None:
    found = choose(
        [an_artifact("a", size_bytes=60), an_artifact("b", size_bytes=50), an_artifact("c")], (), 100
    )
    assert [file.path for file in found.files] == ["a", "c"]
    assert found.findings == (
        Finding(path="b", why="its 50 bytes are more than is left of 100; see --limit"),
    )


def test_what_is_no_file_is_left_and_does_not_meet_a_pattern() -> None:
    found = choose([an_artifact("latest", "link"), an_artifact("deep", "deep")], ["latest", "*.csv"], 100)
    left = (Finding(path="latest", why="it is a symbolic link"),)
    assert found == Choice(files={}, findings=(), left=left, unmet=("latest", "*.csv"))


def test_what_is_kept_of_memory_comes_only_by_name() -> None:
    snapshot, result = an_artifact("orch-memory/main-1.pickle"), an_artifact("a.json")
    found = choose([snapshot, result], (), 100)
    assert list(found.files) == [result]
    why = "it comes when it is asked for by name"
    assert found.left == (Finding(path=snapshot.path, why=why),)
    assert choose([snapshot], ["**"], 100) == Choice(files={}, findings=(), left=(), unmet=("**",))
    assert list(choose([snapshot, result], ["orch-memory/*"], 100).files) == [snapshot]


def test_what_an_experiment_collects_comes_whole_and_private(here: Here) -> None:
    here.put("a.json", DATA)
    here.put("logs/deep/x y.txt", b"")
    here.put("other")
    done = here.fetch()
    assert here.files() == {"a.json": DATA, "logs/deep/x y.txt": b""}
    assert (done.exit_code, done.moved_bytes, done.findings, done.unmet) == (0, len(DATA), (), ())
    for path in (here.folder, *here.folder.rglob("*")):
        assert stat.S_IMODE(path.lstat().st_mode) == (0o700 if path.is_dir() else 0o600)
    assert not here.is_uncollected


def test_an_unchanged_file_moves_no_data_and_a_changed_one_takes_its_place(here: Here) -> None:
    a = here.put("a.json", DATA)
    here.put("b.json")
    here.fetch()
    assert here.fetch().moved_bytes == 0
    a.write_bytes(b"new")
    done = here.fetch()
    assert (done.moved, done.moved_bytes, here.files()["a.json"]) == (("a.json",), 3, b"new")
    (file,) = (file for file in fetched_here(here.workspace.folder("run1"))[done.to] if file.path == "a.json")
    assert file.size_bytes == 3


def test_a_fetch_that_broke_off_goes_on_where_it_was(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    here.put("a.json", DATA)
    write = Part.write

    def leave(part: Part, data: bytes) -> None:
        if part.have_bytes >= MIB:
            raise KeyboardInterrupt
        write(part, data)

    monkeypatch.setattr(Part, "write", leave)
    with pytest.raises(KeyboardInterrupt):
        here.fetch()
    monkeypatch.setattr(Part, "write", write)
    (part,) = (here.folder / ".part").iterdir()
    assert (part.stat().st_size, stat.S_IMODE(part.stat().st_mode)) == (MIB, 0o600)
    assert here.fetch().moved_bytes == len(DATA) - MIB
    assert here.files() == {"a.json": DATA}
    assert not part.parent.exists()


def test_a_beginning_that_is_another_is_dropped(here: Here) -> None:
    here.put("a.json", DATA)
    part = here.folder / ".part" / part_name("run1", "a.json")
    part.parent.mkdir(mode=0o700, parents=True)
    part.write_bytes(b"not the beginning")
    assert here.fetch().moved_bytes == len(DATA)
    assert here.files() == {"a.json": DATA}


def test_a_file_that_changes_meanwhile_is_taken_again_and_then_reported(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = here.put("a.json", DATA)
    here.put("b.json", b"still")
    write = Part.write
    writes: list[int] = []

    def grow(part: Part, data: bytes) -> None:
        write(part, data)
        if part.artifact.path == "a.json" and not writes[most:]:
            writes.append(len(data))
            full.write_bytes(full.read_bytes() + b"more")

    monkeypatch.setattr(Part, "write", grow)
    most = 0  # changes once
    done = here.fetch()
    assert (done.findings, here.files()) == ((), {"a.json": DATA + b"more", "b.json": b"still"})
    full.write_bytes(DATA)
    most = 100  # for ever
    done = here.fetch()
    assert done.findings == (Finding(path="a.json", why="it changed while it was fetched"),)
    assert here.files() == {"a.json": DATA + b"more", "b.json": b"still"}
    assert done.exit_code == 1


def test_nothing_is_written_through_a_link_or_over_what_is_not_ours(here: Here, tmp_path: Path) -> None:
    for path in ("a.json", "b.json", "c.json", "d.json", "logs/x", "logs/deep/y"):
        here.put(path, b"theirs")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_bytes(b"mine")
    here.folder.mkdir(mode=0o700)
    (here.folder / "logs").symlink_to(outside)
    (here.folder / "a.json").symlink_to(outside / "file")
    (here.folder / "b.json").write_bytes(b"mine")
    (here.folder / "c.json").mkdir()
    done = here.fetch()
    assert {finding.path for finding in done.findings} == {
        *("a.json", "b.json", "c.json", "logs/x", "logs/deep/y"),
    }
    assert [file.path for file in done.files] == ["d.json"]
    assert {path.name: path.read_bytes() for path in outside.iterdir()} == {"file": b"mine"}
    assert (here.folder / "b.json").read_bytes() == b"mine"


def test_a_link_in_the_place_of_what_arrived_or_arrives_is_not_followed(here: Here, tmp_path: Path) -> None:
    here.put("a.json", b"1")
    here.fetch()
    (here.folder / "a.json").rename(tmp_path / "elsewhere")
    (here.folder / "a.json").symlink_to(tmp_path / "elsewhere")
    assert "something else of its name stands here" in here.fetch().findings[0].why
    (here.folder / "a.json").unlink()
    part = here.folder / ".part" / part_name("run1", "a.json")
    part.parent.mkdir(mode=0o700)
    part.symlink_to(tmp_path / "precious")
    with pytest.raises(OrchError, match="is none of orch's files; remove it"):
        here.fetch()
    assert not (tmp_path / "precious").exists()


def test_a_host_that_is_away_for_a_while_in_the_middle_is_asked_again_and_not_for_ever(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    here.put("a.json", DATA)
    write = Part.write
    slept: list[float] = []
    tries_s = [1.0, 2.0, 4.0]

    def cut(part: Part, data: bytes) -> None:
        if part.have_bytes and not slept:
            raise Unreachable("broke", host="here")
        write(part, data)

    def away(host: Host) -> Transport:
        if 0 < len(slept) < len(tries_s):
            raise Unreachable("is away", host="here")
        return connect(host)

    monkeypatch.setattr(Part, "write", cut)
    monkeypatch.setattr(fetching, "connect", away)
    monkeypatch.setattr(fetching, "time", SimpleNamespace(sleep=slept.append))
    assert (here.fetch("a.json").moved_bytes, slept) == (len(DATA), tries_s)
    assert here.said.notes[1] == "here: is away; going on from where it broke in 2 s"
    here.put("b.json", DATA)
    slept.clear()
    tries_s = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]
    with pytest.raises(Unreachable):
        here.fetch("b.json")
    assert slept == tries_s[:-1]


def test_more_files_than_one_request_names_all_come(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_artifacts, "MOST_ASKED", 2)
    for name in "abcde":
        here.put(f"{name}.json", name.encode())
    here.fetch()
    assert here.files() == {f"{name}.json": name.encode() for name in "abcde"}


def test_a_file_that_was_changed_here_is_not_overwritten(here: Here) -> None:
    there = here.put("a.json", b"1")
    here.fetch()
    (here.folder / "a.json").write_bytes(b"edited")
    there.write_bytes(b"2")
    done = here.fetch()
    assert "was changed here" in done.findings[0].why
    assert here.files() == {"a.json": b"edited"}


def test_two_runs_in_one_folder_do_not_overwrite_each_other(here: Here, home: Path, tmp_path: Path) -> None:
    here.put("a.json", b"1")
    a_run(here.workspace, "run2")
    other = home / ".orch" / "runs" / "run2" / "artifacts"
    other.mkdir(parents=True)
    (other / "a.json").write_bytes(b"2")
    target = tmp_path / "all here"
    assert here.fetch(to=target).moved == ("a.json",)
    done = fetching.fetch(here.workspace, "run2", (), to=target, progress=here.said)
    assert "not fetched from this run" in done.findings[0].why
    assert (target / "a.json").read_bytes() == b"1"
    assert target.stat().st_mode & 0o777 == 0o700


def test_a_run_collects_once_and_its_limit_holds(here: Here) -> None:
    here.put("a.json", DATA)
    here.put("b.json", DATA)
    here.put("c.json", DATA)
    done = fetching.collect(here.workspace, "run1", here.said)
    assert done is not None
    assert [finding.path for finding in done.findings] == ["c.json"]
    assert here.is_uncollected
    done = here.fetch(limit_bytes=16 * MIB)
    assert (done.exit_code, done.unmet, done.moved) == (1, ("logs/",), ("c.json",))
    assert fetching.collect(here.workspace, "run1", here.said) is None


def test_a_run_without_artifacts_or_without_a_folder_is_told_apart(here: Here) -> None:
    assert here.fetch("*").unmet == ("*",)
    here.there.rmdir()
    here.there.parent.rmdir()
    with pytest.raises(HostError, match="has no run run1"):
        here.fetch()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is missing")
def test_a_disk_that_is_full_is_said_in_one_line(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    here.put("a.json", DATA)

    def to_full_disk(_: Part, data: bytes) -> None:
        with Path("/dev/full").open("wb", buffering=0) as full:
            full.write(data)

    monkeypatch.setattr(Part, "write", to_full_disk)
    with pytest.raises(StorageError, match=r"artifacts: cannot be written: No space left"):
        here.fetch()


def test_a_fetched_file_that_was_changed_here_is_found(here: Here) -> None:
    here.put("a.json", DATA)
    folder = here.workspace.folder("run1")
    assert check_artifacts(folder) == []
    here.fetch()
    (found,) = check_artifacts(folder)
    assert (found.status, found.says) == ("ok", "1 fetched file here, each as it arrived")
    (here.folder / "a.json").write_bytes(DATA[:-1])
    (found,) = check_artifacts(folder)
    assert (found.status, found.says) == ("not ok", f"not as fetched: {here.folder}/a.json")
    (here.folder / "a.json").unlink()  # which is the user's affair
    assert check_artifacts(folder) == []


def test_what_arrives_otherwise_than_the_host_hashed_it_gets_no_place(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    here.put("a.json", DATA)
    write = Part.write
    monkeypatch.setattr(Part, "write", lambda part, data: write(part, data[:-1] + b"x"))
    done = here.fetch("a.json")
    assert done.findings == (Finding(path="a.json", why="it did not arrive as the host hashed it"),)
    assert (done.moved_bytes, here.files()) == (2 * len(DATA), {})  # once more, and then no more
