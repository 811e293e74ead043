"""Who is at work on a run, as its folder tells it."""

from pathlib import Path

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
