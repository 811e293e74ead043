"""The benchmarks work: tiny sizes through the same parts. What they measure is no affair of the suite."""

import json
from pathlib import Path

import pytest

from benchmarks import history, results, shipping
from benchmarks.rig import Rig
from tests.sshd import require_sshd


def test_the_rig_counts_what_a_second_ship_sends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_sshd()
    monkeypatch.setenv("HOME", str(tmp_path))  # the rig sets its own
    with Rig(tmp_path / "rig") as rig:
        ship, files = shipping.second_ship(rig)
    assert (ship.value, ship.is_met) == (2, True)
    assert (files.value, files.beside) == (1, {"bytes": shipping.FILE_BYTES})


def test_a_long_log_is_made_as_a_run_leaves_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_sshd()
    monkeypatch.setenv("HOME", str(tmp_path))
    with Rig(tmp_path / "rig") as rig:
        (figure,) = history.long_log(rig, 5_000_000, 1)
    assert figure.name.startswith("orch logs --tail 100")


def test_figures_are_shown_with_their_bars_and_kept_as_json(tmp_path: Path) -> None:
    figures = [
        results.at_most(2.0, name="slow", value=3.0, unit="s", plain_tool=1.5),
        results.at_least(80, name="quick", value=90.0, unit="MB/s"),
    ]
    slow, quick = results.table(figures).splitlines()[1:]
    assert "MISSED" in slow
    assert "plain tool 1.5" in slow
    assert "ok" in quick
    results.save(figures, tmp_path / "new" / "figures.json", load_before=0.1)
    kept = json.loads((tmp_path / "new" / "figures.json").read_text())
    assert [figure["is_met"] for figure in kept["figures"]] == [False, True]
