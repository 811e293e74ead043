"""What `orch gc` lets go: chosen by age, number and what is known; here it is also carried out."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator import home_cleaning
from orchestrator.cleaning import Item, Policy, Surveyed, choose
from orchestrator.cleaning_view import cleaning_sum, cleaning_table
from orchestrator.errors import StorageError
from orchestrator.lifecycle import State
from orchestrator.runs import report
from orchestrator.text import size_text
from orchestrator.workspace import Workspace
from tests.unit.housekeeping import DAY_S, a_bundle, a_run, a_workspace, make_old
from tests.unit.test_views import text_of

ALL = Policy(older_than_s=30 * DAY_S)
surveyed = st.builds(
    Surveyed,
    run_id=st.uuids().map(str),
    standing=st.sampled_from(["alive", "waiting", "ended", "never started"]),
    age_s=st.floats(-1e9, 1e9),
    size_bytes=st.just(1),
    end=st.none(),
)


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[Workspace]:
    with_runs = a_workspace(tmp_path)
    yield with_runs
    with_runs.close()


def clean(workspace: Workspace, policy: Policy = ALL, *, is_real: bool = True) -> dict[str, Item]:
    items = home_cleaning.clean_home(workspace, policy, is_real=is_real)
    of_runs = ("mirror", "artifacts")
    return {f"{item.what} {item.name}" if item.what in of_runs else item.what: item for item in items}


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


class TestChoice:
    @given(st.lists(surveyed, unique_by=lambda run: run.run_id), st.floats(0.1, 1e8), st.integers(0, 5))
    def test_nothing_goes_that_lives_is_young_or_among_the_newest(
        self, runs: list[Surveyed], older_than_s: float, keep: int
    ) -> None:
        policy = Policy(older_than_s=older_than_s, keep=keep)
        kept = choose(runs, policy, lambda _: "")
        gone = [run for run in runs if run.run_id not in kept]
        over = sorted(run.age_s for run in runs if run.standing in ("ended", "never started"))
        for run in gone:
            assert run.standing in ("ended", "never started")
            assert run.age_s >= older_than_s
            assert run.age_s >= over[min(keep, len(over) - 1)]
        assert len(over) - len(gone) >= min(keep, len(over))
        assert choose(runs, policy, lambda _: "no").keys() == {run.run_id for run in runs}


class TestHome:
    def test_a_mirror_goes_and_the_verdict_stays(self, workspace: Workspace) -> None:
        a_run(workspace, "good")
        a_run(workspace, "bad", code=3)
        make_old(workspace.home)
        assert clean(workspace)["mirror good"].goes
        assert not any(
            path.exists() for path in (workspace.folder("good").records, workspace.folder("bad").records)
        )
        for run_id, state, name, is_good in (
            ("good", State.SUCCEEDED, "ok", True),
            ("bad", State.FAILED, "failed", False),
        ):
            found = report(workspace, run_id)
            assert found.verdict is not None
            assert (found.row.state, found.verdict.name, found.verdict.is_good) == (state, name, is_good)
            assert "orch gc" in found.verdict.reasons[0]
        assert list((workspace.home / "removing").iterdir()) == []

    def test_a_look_changes_nothing(self, workspace: Workspace) -> None:
        a_run(workspace, "r1")
        make_old(workspace.home)
        before = files(workspace.home)
        assert clean(workspace, is_real=False)["mirror r1"].goes
        assert files(workspace.home) - {"gc.lock"} == before

    def test_open_unknown_and_young_runs_stay(self, workspace: Workspace) -> None:
        a_run(workspace, "open", code=None)
        a_run(workspace, "lost", code=None)
        workspace.ledger.update("lost", state=State.LOST)
        make_old(workspace.home)
        a_run(workspace, "young")
        unknown = workspace.folder("unknown")
        unknown.make()
        unknown.segment(0).write_text("{}\n")
        make_old(unknown.path)
        said = clean(workspace)
        assert {name: item.why for name, item in said.items() if name.startswith("mirror")} == {
            "mirror open": "its end is not known here",
            "mirror lost": "its end is not known here",
            "mirror young": "not old enough",
            "mirror unknown": "not in the ledger: `orch ledger rebuild` enters it",
        }
        assert said["objects"].why == "a run is not in the ledger"

    def test_fetched_files_stay_and_are_told(self, workspace: Workspace) -> None:
        for name in ("old", "young"):
            a_run(workspace, name)
            workspace.folder(name).artifacts.mkdir()
            (workspace.folder(name).artifacts / "result").write_text("precious")
        make_old(workspace.folder("old").path)
        said = clean(workspace)
        folder = workspace.folder("old").artifacts
        assert said["mirror old"].goes
        assert said["artifacts old"].why == f"fetched files are for you to remove: {folder}"
        assert "artifacts young" not in said
        assert (folder / "result").read_text() == "precious"
        assert "artifacts old" in clean(workspace)

    def test_code_that_a_run_that_stays_needs_stays(self, workspace: Workspace) -> None:
        old, kept = a_bundle(workspace, "old\n"), a_bundle(workspace, "kept\n")
        a_run(workspace, "old", bundle=old)
        a_run(workspace, "kept", bundle=kept, code=None)
        make_old(workspace.home)
        said = clean(workspace)
        assert (said["bundles"].name, said["objects"].name) == ("1", "1")
        assert workspace.store.load_manifest(kept.id)
        assert workspace.store.path(kept.entries[0].sha256).read_text() == "kept\n"
        assert not workspace.store.path(old.entries[0].sha256).exists()

    def test_code_that_was_just_bundled_stays_though_no_run_has_it_yet(self, workspace: Workspace) -> None:
        bundle = a_bundle(workspace)
        workspace.store.put(b"old")
        make_old(workspace.home)
        a_bundle(workspace)  # once more: a start is about to use it
        change = workspace.store.put(b"uncommitted change")  # which no manifest names
        assert clean(workspace)["objects"].name == "1"
        assert workspace.store.path(change).exists()
        assert workspace.store.path(bundle.entries[0].sha256).read_text() == "pass\n"

    def test_a_mirror_that_is_being_written_stays(self, workspace: Workspace) -> None:
        a_run(workspace, "r1")
        make_old(workspace.home)
        fd = os.open(workspace.folder("r1").path / "pull.lock", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        assert clean(workspace)["mirror r1"].why == "another command is mirroring it"
        os.close(fd)
        assert clean(workspace)["mirror r1"].goes

    def test_no_link_is_followed(self, workspace: Workspace, tmp_path: Path) -> None:
        precious = tmp_path / "precious"
        precious.mkdir()
        (precious / "file").write_text("kept")
        a_run(workspace, "r1")
        (workspace.folder("r1").records / "link").symlink_to(precious)
        (workspace.home / "runs" / "r2").symlink_to(precious)
        (workspace.home / "objects" / "zz").symlink_to(precious)
        make_old(workspace.home)
        assert clean(workspace)["mirror r1"].goes
        assert files(precious) == {"file"}

    def test_one_at_a_time(self, workspace: Workspace) -> None:
        fd = os.open(workspace.home / "gc.lock", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        with pytest.raises(StorageError, match="another `orch gc`"):
            clean(workspace)
        os.close(fd)

    def test_what_a_killed_removal_left_is_deleted_by_the_next(self, workspace: Workspace) -> None:
        (workspace.home / "removing" / "r1.0").mkdir(parents=True)
        (workspace.home / "removing" / "r1.0" / "000000.jsonl").write_text("{}\n")
        clean(workspace)
        assert files(workspace.home / "removing") == set()

    def test_a_removal_killed_between_its_steps_leaves_a_run_that_can_be_read(
        self, workspace: Workspace
    ) -> None:
        a_run(workspace, "r1")
        workspace.folder("r1").forget_seals()  # the step before the records go
        found = report(workspace, "r1")
        assert found.verdict is not None
        assert found.verdict.is_good
        make_old(workspace.home)
        assert clean(workspace)["mirror r1"].goes


def test_the_table_escapes_names_and_says_what_goes() -> None:
    items = [
        Item(place="h", what="run", name="r1", size_bytes=2 * 1024**3, age_s=90000.0),
        Item(place="h", what="run", name="r2", size_bytes=10, why="\x1b[2Jalive"),
    ]
    shown = text_of(cleaning_table(items, is_real=False))
    assert "\x1b[2J" not in shown
    assert "2.0 GiB  would go" in shown
    assert "stays: \\x1b[2Jalive" in shown
    assert "nothing was removed" in cleaning_sum(items, is_real=False)
    assert cleaning_sum(items, is_real=True) == "removed 2.0 GiB, 1 runs among it"


def test_sizes_are_told_in_their_own_unit() -> None:
    assert [size_text(size) for size in (0, 1023, 1024, 3 * 1024**2, 5 * 1024**5)] == [
        *("0 B", "1023 B", "1.0 KiB", "3.0 MiB", "5120.0 TiB")
    ]
