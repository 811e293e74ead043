"""Who is at work on a run, as its folder tells it."""

from pathlib import Path

import pytest

from orchestrator.errors import StorageError
from orchestrator.run_folder import RunFolder, starting_together


def test_runs_that_are_started_together_are_all_marked_by_one_lock(tmp_path: Path) -> None:
    folders = [RunFolder(tmp_path, name) for name in ("a", "b", "c")]
    with starting_together(folders):
        assert [folder.is_starting for folder in folders] == [True] * 3
        folders[0].end_starting()
        folders[2].end_starting()
        assert [folder.is_starting for folder in folders] == [False, True, False]
        folders[0].wait_for_start()
    assert [folder.is_starting for folder in folders] == [False] * 3
    folders[1].wait_for_start()


def test_one_run_alone_can_be_started_so_too(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, "a")
    with starting_together([folder]):
        assert folder.is_starting
    assert not folder.is_starting


def test_word_to_cancel_stays_until_it_is_carried_out(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, "a")
    folder.make()
    assert folder.cancel_request is None
    folder.request_cancel(3.0)
    assert folder.cancel_request == folder.cancel_request == {"grace_s": 3.0}
    folder.drop_cancel_request()
    folder.drop_cancel_request()
    assert folder.cancel_request is None


def test_a_mark_that_the_disk_does_not_take_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("in the way")
    with pytest.raises(StorageError, match="cannot mark"), RunFolder(tmp_path, "a").starting():
        pass
