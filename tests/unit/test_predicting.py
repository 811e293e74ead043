"""Predictions are made beside the start of runs, said before their logs, and kept with them."""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from orchestrator import payload_programs, starting
from orchestrator.bundle import Bundle
from orchestrator.cli import predicting as view
from orchestrator.cli.estimates import estimating
from orchestrator.cli.predicting import Predictor
from orchestrator.cli.run import NEEDS_NONE, name_cardless_profiles
from orchestrator.cli.terminal import Screen
from orchestrator.experiment import load_experiment
from orchestrator.host_cards import HostCard, last_card
from orchestrator.lifecycle import State
from orchestrator.predicting import Forecast, forecasts, is_predictable, kept, question_of
from orchestrator.starting import Plan, row_of
from orchestrator.submitting import prepare_group
from orchestrator.workspace import Workspace
from tests.estimates import GIB, open_with_programs
from tests.project import Project

H200 = HostCard(name="NVIDIA H200", total_bytes=150_110_011_392, capability=(9, 0))


@pytest.fixture
def workspace(project: Project) -> Iterator[Workspace]:
    with open_with_programs(project) as opened:
        yield opened


def _plan(project: Project, workspace: Workspace, **changes: Any) -> Plan:
    keys = {"params": {"size_gib": 15, "fault": None, "log": None}, "devices": [0], **changes}
    experiment = load_experiment(project.experiment("", **keys))
    return starting.prepare(workspace, experiment, workspace.inventory.host("here"))


def _group(project: Project, workspace: Workspace, sizes: list[float], **params: Any) -> tuple[Plan, ...]:
    values = {"size_gib": 1, "fault": None, **params}
    matrix = {"params": {"size_gib": sizes}}
    experiment = load_experiment(project.experiment("", params=values, devices=[0], matrix=matrix))
    return prepare_group(workspace, experiment, [workspace.inventory.host("here")])


def _told(
    workspace: Workspace, plans: tuple[Plan, ...], capsys: pytest.CaptureFixture[str], card: bool = True
) -> list[str]:
    if card:
        _run_that_told(workspace, H200)
    with Predictor(workspace, plans, Screen()) as predictor:
        predictor.tell()
    return [line.removeprefix("orch: estimate: ") for line in capsys.readouterr().err.splitlines()]


def _run_that_told(workspace: Workspace, *cards: HostCard, run_id: str = "earlier00000") -> None:
    """Leaves the beginning of a run's mirror, as one with these cards would."""
    job = {"run_id": run_id, "devices": ["0"], "env": {}, "experiment": "earlier", "expect": {"verdicts": []}}
    plan = Plan(
        job={**job, "group_id": run_id, "profile": None},
        bundle=Bundle(id="0" * 64, entries=()),
        host=workspace.inventory.host("here"),
        secrets=(),
    )
    workspace.ledger.insert(row_of(plan, State.CREATED))
    folder = workspace.folder(run_id)
    folder.make()
    devices = [{"index": index, **card.as_json()} for index, card in enumerate(cards)]
    facts = {"seq": 1, "t": 1.0, "kind": "facts", "devices": devices}
    folder.segment(0).write_text(
        f"{json.dumps({'seq': 0, 't': 1.0, 'kind': 'segment'})}\n{json.dumps(facts)}\n"
    )


class TestWhatIsSaid:
    def test_one_run_gets_one_line_with_the_card_that_its_host_told(
        self, project: Project, workspace: Workspace, capsys: pytest.CaptureFixture[str]
    ) -> None:
        plan = _plan(project, workspace)
        assert _told(workspace, (plan,), capsys) == [
            "15.00 GiB allocated, 16.00 GiB reserved of 139.80 GiB (NVIDIA H200), within 5 %: fits"
        ]
        prediction = kept(workspace.folder(plan.job["run_id"]))
        assert prediction is not None
        assert (prediction.card, prediction.estimate.peak_allocated_bytes) == (H200, 15 * GIB)
        mode = (workspace.folder(plan.job["run_id"]).path / "prediction.json").stat().st_mode
        assert stat.S_IMODE(mode) == 0o600

    def test_one_that_will_not_fit_is_warned_of_with_the_tensor_that_fails(
        self, project: Project, workspace: Workspace, capsys: pytest.CaptureFixture[str]
    ) -> None:
        plan = _plan(project, workspace, params={"size_gib": 100}, memory_limit="90GiB")
        line, warning = _told(workspace, (plan,), capsys)
        assert line.endswith("of 90.00 GiB (NVIDIA H200, a memory limit), within 5 %: does not fit")
        assert warning.startswith(
            "WARNING, it will not fit: scores (bmm) [32, 8192, 204800] float32 of 50.00 GiB at "
            "eager.py:12 attend in layers.0, in phase timed, with 50.00 GiB allocated of 50.00 GiB reserved, "
            "the largest free piece 1.00 GiB; started all the same."
        )
        assert warning.endswith("Next: `orch estimate --host here --alternatives` of its experiment, trial")

    def test_a_group_gets_a_line_for_each_case_and_no_more_than_a_screen(
        self, project: Project, workspace: Workspace, capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:  # fmt: skip
        monkeypatch.setattr(view, "MOST_LINES", 2)
        first, second, more, warning = _told(workspace, _group(project, workspace, [1, 200, 2]), capsys)
        assert first.startswith("size_gib=1 on here: 1.00 GiB allocated")
        assert second.endswith("does not fit")
        assert more == "1 more case: orch estimate shows them"
        assert warning.startswith("WARNING, 1 of 3 cases will not fit: scores (bmm)")

    def test_without_a_known_card_there_is_no_verdict(
        self, project: Project, workspace: Workspace, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (line,) = _told(workspace, (_plan(project, workspace),), capsys, card=False)
        assert line.endswith("no verdict, since no card is known")


class TestWhatIsNotMade:
    def test_runs_without_cards_or_program_and_those_that_want_none_are_not_estimated(
        self, project: Project, workspace: Workspace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        log = tmp_path / "log"
        params = {"size_gib": 1, "log": str(log)}
        without = _plan(project, workspace, params=params, devices="none")
        wanted = _plan(project, workspace, params=params)
        assert [is_predictable(plan.job, plan.bundle) for plan in (without, wanted)] == [False, True]
        for plan, is_wanted in ((without, True), (wanted, False)):
            with estimating(workspace, [plan], Screen(), is_wanted=is_wanted) as tell:
                tell(lambda: False)
        (project.folder / "payloads" / "probe" / "estimate.py").unlink()
        with estimating(
            workspace, [_plan(project, workspace, params=params)], Screen(), is_wanted=True
        ) as tell:
            tell(lambda: False)
        assert not log.exists()
        assert capsys.readouterr().err == ""
        assert not workspace.folder(wanted.job["run_id"]).has_prediction

    @pytest.mark.parametrize(
        ("fault", "said"),
        [
            ("crash", "not made: probe.estimate: RuntimeError: a \\x1b[31mred"),
            ("crash", "in payloads/; the run goes on, and --no-estimate asks nothing"),
            ("refused", "not made: probe.estimate: seq_len is -1"),
            ("old torch", "orch estimate --on-host NAME; the run goes on"),
        ],
    )
    def test_why_an_estimate_is_not_made_is_one_line_for_all_cases(
        self,
        fault: str,
        said: str,
        project: Project,
        workspace: Workspace,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        (line,) = _told(workspace, _group(project, workspace, [1, 2], fault=fault), capsys, card=False)
        assert said in line

    def test_one_that_takes_too_long_is_given_up(
        self,
        project: Project,
        workspace: Workspace,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(view, "MOST_S", 0.3)
        plan = _plan(project, workspace, params={"size_gib": 1, "fault": "slow"})
        before = time.monotonic()
        (line,) = _told(workspace, (plan,), capsys, card=False)
        says = "not ready after 0.3 s, the run goes on; to have it next time: `orch estimate --host here`"
        assert line == f"{says} of its experiment, trial"
        assert time.monotonic() - before < 20
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
        assert children == ""

    def test_nobody_waits_for_one_of_a_run_that_has_ended(
        self, project: Project, workspace: Workspace, capsys: pytest.CaptureFixture[str]
    ) -> None:
        plan = _plan(project, workspace, params={"size_gib": 1, "fault": "slow"})
        file, before = project.folder / "experiments" / "a trial.yaml", time.monotonic()
        with estimating(workspace, [plan], Screen(), is_wanted=True, file=file) as tell:
            tell(lambda: True)
        command = f"orch estimate '{file}' --host here"
        says = f"orch: estimate: not ready when the run ended; to have it next time: {command}\n"
        assert capsys.readouterr().err == says
        assert time.monotonic() - before < view.MOST_S

    def test_what_a_host_has_estimated_counts_where_torch_is_lacking_here(
        self, project: Project, workspace: Workspace, capsys: pytest.CaptureFixture[str]
    ) -> None:
        plan = _plan(project, workspace, params={"size_gib": 4})
        made = payload_programs.estimate(workspace, plan.bundle, question_of(plan.job, None))
        assert made.peak_allocated_bytes == 4 * GIB
        lacking = _plan(project, workspace, params={"size_gib": 4, "fault": "no torch"})
        (answer,) = (workspace.home / "estimates" / plan.bundle.id / "answers").iterdir()
        question = question_of(lacking.job, None)
        payload_programs.keep_on(workspace, lacking.bundle, question, lacking.host, answer.read_bytes())
        (line,) = _told(workspace, (lacking,), capsys, card=False)
        assert line.startswith("4.00 GiB allocated")

    @pytest.mark.parametrize("place", ["forecasts", "estimate_line"])
    def test_what_nobody_thought_of_is_one_line_as_well(
        self,
        place: str,
        project: Project,
        workspace: Workspace,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        def fail(*_: object) -> None:
            raise OverflowError("int too large\nto convert")

        monkeypatch.setattr(view, place, fail)
        (line,) = _told(workspace, (_plan(project, workspace),), capsys, card=False)
        assert line == "not made: OverflowError: int too large\\nto convert; the run goes on"

    def test_one_that_cannot_be_kept_is_said_all_the_same(
        self, project: Project, workspace: Workspace, capsys: pytest.CaptureFixture[str]
    ) -> None:
        plan = _plan(project, workspace)
        (workspace.folder(plan.job["run_id"]).path / "prediction.json.new").mkdir(parents=True)
        lost, line = _told(workspace, (plan,), capsys, card=False)
        assert "not kept: " in lost
        assert line.startswith("15.00 GiB allocated")


@pytest.mark.parametrize(
    ("state", "reason", "is_told"),
    [
        (State.REFUSED, f"nvidia-smi is not there: no NVIDIA driver; {NEEDS_NONE}; expected ok", True),
        (State.REFUSED, "card 7 is not there", False),
        (State.FAILED, NEEDS_NONE, False),
    ],
)
def test_a_host_without_a_card_is_told_the_profiles_that_need_none(
    project: Project,
    workspace: Workspace,
    capsys: pytest.CaptureFixture[str],
    state: State,
    reason: str,
    is_told: bool,
) -> None:
    profiles = {"cpu": {"devices": "none"}, "large": {"timeout": "3h"}}
    experiment = load_experiment(project.experiment("", devices=[0], profiles=profiles))
    plan = starting.prepare(workspace, experiment, workspace.inventory.host("here"))
    row = replace(row_of(plan), state=state, reason=reason)
    name_cardless_profiles(experiment, row, Screen())
    says = "orch: of trial these need no card: --profile cpu\n"
    assert capsys.readouterr().err == (says if is_told else "")


def test_equal_questions_are_asked_once_and_each_is_told(
    project: Project, workspace: Workspace, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    plans = [_plan(project, workspace, params={"size_gib": size, "log": str(log)}) for size in (1, 2, 1)]
    found: dict[int, Forecast] = {}
    questions = [question_of(plan.job, None) for plan in plans]
    forecasts(workspace, plans[0].bundle, questions, found.__setitem__, Event())
    estimates = [found[place].estimate for place in range(3)]
    assert [each and each.peak_allocated_bytes for each in estimates] == [GIB, 2 * GIB, GIB]
    assert len(log.read_text().splitlines()) == 2


class TestTheCardOfAHost:
    def test_is_the_smallest_that_its_newest_run_with_cards_told(self, workspace: Workspace) -> None:
        assert last_card(workspace, "here") is None
        small = HostCard(name="small", total_bytes=24 * GIB, capability=(8, 9))
        _run_that_told(workspace, small, run_id="older0000000")
        _run_that_told(workspace, H200, HostCard(name="b", total_bytes=2**40, capability=(10, 0)))
        assert last_card(workspace, "here") == H200
        assert last_card(workspace, "elsewhere") is None

    def test_is_spelt_to_the_byte(self) -> None:
        size, _, architecture = H200.text.partition("GiB:")
        assert (int(float(size) * 2**30), architecture) == (H200.total_bytes, "sm_90")

    @pytest.mark.parametrize(
        "told",
        [
            {"name": "x", "total_bytes": 1},
            {"name": "x", "total_bytes": 1, "capability": [9]},
            {"name": "x", "total_bytes": 1, "capability": [None, None]},
            {"name": 3, "total_bytes": 1, "capability": [9, 0]},
            {"name": "x", "total_bytes": -1, "capability": [9, 0]},
            "card",
        ],
    )
    def test_one_that_is_told_in_part_is_not_known(self, told: Any) -> None:
        assert HostCard.of(told) is None
