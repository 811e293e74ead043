"""`setup:` from its key to the jobs that prepare: what is refused, which files travel, who waits for whom."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator import host_starter, remote, submitting
from orchestrator.errors import ConfigError, PayloadRefused
from orchestrator.experiment import load_experiment
from orchestrator.following import Watcher
from orchestrator.inventory import Host, load_inventory
from orchestrator.lifecycle import State
from orchestrator.remote import Prepared
from orchestrator.setup_files import find_setup_files
from orchestrator.setup_form import Setup
from orchestrator.setups import specs_of
from orchestrator.starting import Plan, launch, plan_preparation, plan_setup, prepare, row_of
from orchestrator.workspace import Workspace

INVENTORY = """\
hosts:
  bare: {transport: local}
  box: {transport: local, setup: {script: base.sh}, env: {A: host}}
"""
TRIAL = """\
payload: probe
run: probe.go
env: {B: mine, T: {secret: true, from_env: TOKEN}}
devices: [0]
timeout: 5s
setup: {requirements: needs/all.txt}
profiles:
  bare: {setup: null}
  alone: {setup: {requirements: needs/all.txt, system_packages: false}}
matrix: {params: {a: [1, 2]}}
params: {a: 0}
"""


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[Workspace]:
    (tmp_path / "inventory.yaml").write_text(INVENTORY)
    (tmp_path / "base.sh").write_text("#!/bin/sh\n")
    payload = tmp_path / "payloads" / "probe"
    for folder in ("needs/wheels", "needs/src", "other"):
        (payload / folder).mkdir(parents=True)
    (payload / "go.py").touch()
    (payload / "needs" / "all.txt").write_text(
        "# torch comes from the image\n"
        "numpy >= 1 ; python_version > '3'\n"
        "-r ../other/more.txt\n"
        "--constraint=fixed.txt\n"
        "-f wheels\n"
        "./src[extra]  # a folder\n"
        "wheels/a-1-py3-none-any.whl \\\n"
        "  --hash=sha256:00\n"
        "--extra-index-url https://example.invalid/simple\n"
        "b @ https://example.invalid/b.whl\n"
        "/on/the/host/c.whl\n"
        "git+https://example.invalid/d\n"
        "${WHEELS}/e.whl\n"
    )
    (payload / "needs" / "fixed.txt").write_text("numpy < 3\n-c fixed.txt\n")
    (payload / "other" / "more.txt").write_text("-rlast.txt\n./src\n")
    (payload / "other" / "last.txt").write_text("")
    for name in ("wheels/a-1-py3-none-any.whl", "wheels/z.whl", "src/setup.py", "unnamed.txt"):
        (payload / "needs" / name).write_text(name)
    opened = Workspace.open(tmp_path / "inventory.yaml")
    yield opened
    opened.close()


def _experiment(workspace: Workspace, **options: Any) -> Any:
    path = workspace.project / "trial.yaml"
    path.write_text(TRIAL)
    return load_experiment(path, **options)


def _host(workspace: Workspace, name: str = "box") -> Host:
    return workspace.inventory.host(name)


def _setup(path: str = "r.txt", kind: str = "requirements") -> Setup:
    return Setup(kind=kind, path=path, system_packages=True, where="x.yaml:3")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{}", "setup: must have one of requirements and script"),
        ("{requirements: a.txt, script: b.sh}", "setup: must have one of requirements and script"),
        ("{requirements: ../a.txt}", "setup.requirements: '../a.txt' must be relative"),
        ("{script: /etc/x}", "setup.script: '/etc/x' must be relative"),
        ("{script: ~/x}", "setup.script: '~/x' must be relative"),
        ("{script: a.sh, system_packages: true}", "setup.system_packages: has no meaning for a script"),
        ("{requirement: a.txt}", "did you mean 'requirements'"),
        ("a.txt", "setup: must be"),
    ],
)
def test_a_setup_that_cannot_be_meant_is_refused_at_its_line_in_both_files(
    tmp_path: Path, value: str, message: str
) -> None:
    inventory, trial = tmp_path / "inventory.yaml", tmp_path / "trial.yaml"
    inventory.write_text(f"hosts:\n  h:\n    transport: local\n    setup: {value}\n")
    trial.write_text(f"payload: p\nrun: p.go\n\nsetup: {value}\n")
    for load, path in ((load_inventory, inventory), (load_experiment, trial)):
        with pytest.raises(ConfigError) as caught:
            load(path)
        assert message in str(caught.value)
        assert caught.value.line == 4


def test_all_that_requirements_name_here_is_shipped_and_nothing_else(workspace: Workspace) -> None:
    payload = workspace.project / "payloads" / "probe"
    found = find_setup_files(payload, "probe", _setup("needs/all.txt"))
    assert found[0].path == "probe/needs/all.txt"
    assert sorted(file.path for file in found) == [
        "probe/needs/all.txt",
        "probe/needs/fixed.txt",
        "probe/needs/src/setup.py",
        "probe/needs/wheels/a-1-py3-none-any.whl",
        "probe/needs/wheels/z.whl",
        "probe/other/last.txt",
        "probe/other/more.txt",
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("-r gone.txt", "r.txt:2: there is no "),
        ("./gone.whl", "r.txt:2: there is no "),
        ("-c ../inventory.yaml", "r.txt:2: "),
        ("-e .", "r.txt:2: an editable folder would be that run's: no -e"),
        ("-r .env", "never shipped"),
        ("./link.txt", "is not in "),
    ],
)
def test_requirements_that_cannot_be_shipped_are_refused_by_file_and_line(
    tmp_path: Path, line: str, message: str
) -> None:
    root = tmp_path / "payload"
    root.mkdir()
    (tmp_path / "inventory.yaml").touch()
    (root / ".env").touch()
    (root / "link.txt").symlink_to(tmp_path / "inventory.yaml")
    (root / "r.txt").write_text(f"numpy\n{line}\n")
    with pytest.raises(PayloadRefused) as caught:
        find_setup_files(root, "payload", _setup())
    assert message in str(caught.value)


@pytest.mark.parametrize("kind", ["requirements", "script"])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("folder", "is a folder: name a file"),
        ("pipe", "is neither a file nor a folder"),
        ("broken", "is a symlink that leads nowhere"),
        ("loop", "loop|is a symlink to itself|Too many levels"),
        ("secret", "cannot be read: Permission denied"),
        ("gone", "there is no "),
        ("x" * 300, "cannot be read: File name too long"),
    ],
)
def test_what_is_no_file_that_can_be_read_is_refused_where_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, name: str, message: str
) -> None:
    monkeypatch.setattr(os, "access", lambda path, _: Path(path).name != "secret")  # root may read anything
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "broken").symlink_to("gone")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "secret").touch()
    (tmp_path / "all.txt").write_text(f"numpy\n-r {name}\n")
    with pytest.raises(PayloadRefused, match=rf"^x\.yaml:3: .*({message})"):
        find_setup_files(tmp_path, "p", _setup(name, kind))
    with pytest.raises(PayloadRefused, match=rf"^[^:]*/all\.txt:2: .*({message})"):
        find_setup_files(tmp_path, "p", _setup("all.txt"))


def test_requirements_that_are_no_text_are_refused_where_they_are_named(tmp_path: Path) -> None:
    (tmp_path / "r.txt").write_bytes(b"\xff")
    with pytest.raises(PayloadRefused, match=r"^x\.yaml:3: .*r\.txt cannot be read as requirements"):
        find_setup_files(tmp_path, "p", _setup())


def test_a_script_must_be_there_and_be_a_program(tmp_path: Path) -> None:
    with pytest.raises(PayloadRefused, match=r"x\.yaml:3: there is no .*s\.sh"):
        find_setup_files(tmp_path, "", _setup("s.sh", "script"))
    (tmp_path / "s.sh").write_text("echo hello\n")
    with pytest.raises(PayloadRefused, match="begin it with #! and its interpreter"):
        find_setup_files(tmp_path, "", _setup("s.sh", "script"))


def test_what_the_host_needs_comes_before_what_the_experiment_needs(workspace: Workspace) -> None:
    specs = specs_of(workspace.project, workspace.store, _host(workspace), _experiment(workspace))
    assert [(spec["kind"], spec["path"], spec["system_packages"]) for spec in specs] == [
        ("script", "base.sh", True),
        ("requirements", "probe/needs/all.txt", True),
    ]
    script = workspace.store.load_manifest(specs[0]["bundle"])
    assert [(entry.path, entry.mode) for entry in script.entries] == [("base.sh", 0o755)]
    bare = _experiment(workspace, profile="bare")
    assert specs_of(workspace.project, workspace.store, _host(workspace, "bare"), bare) == []
    alone = _experiment(workspace, profile="alone")
    assert not specs_of(workspace.project, workspace.store, _host(workspace), alone)[1]["system_packages"]


def test_changed_content_makes_another_bundle_and_an_unnamed_file_does_not(workspace: Workspace) -> None:
    def bundles() -> list[str]:
        specs = specs_of(workspace.project, workspace.store, _host(workspace), _experiment(workspace))
        return [spec["bundle"] for spec in specs]

    before, needs = bundles(), workspace.project / "payloads" / "probe" / "needs"
    (needs / "unnamed.txt").write_text("changed")
    assert bundles() == before
    (needs / "fixed.txt").write_text("numpy < 2\n")
    script, requirements = bundles()
    assert (script, requirements != before[1]) == (before[0], True)


def test_a_preparation_has_the_variables_of_the_run_that_needs_it_and_nothing_else_of_it(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "long enough")
    plan = prepare(workspace, _experiment(workspace).cases()[0], _host(workspace))
    preparation = plan_preparation(workspace, plan, 1, ("earlier",))
    job, spec = preparation.job, plan.job["setup"][1]
    assert job["env"] == {"A": "host", "B": "mine"}
    assert (job["secrets"], preparation.secrets) == ({"T": "TOKEN"}, plan.secrets)
    assert (job["prepares"], job["setup"], job["bundle"]) == (spec, plan.job["setup"][:1], spec["bundle"])
    assert (job["group_id"], job["experiment"]) == (plan.job["run_id"], "setup")
    assert (job["devices"], job["timeout_s"], job["workdir"], job["params"]) == ([], None, None, {})
    assert preparation.preparers == ("earlier",)


def test_what_is_prepared_for_nobody_is_a_group_of_its_own(workspace: Workspace) -> None:
    plan = plan_setup(workspace, _host(workspace), None, force=True)
    assert plan is not None
    job = plan_preparation(workspace, plan, 0, ()).job
    assert (job["group_id"], job["prepares"]["force"]) == (job["run_id"], True)
    assert plan_setup(workspace, _host(workspace, "bare"), None, force=False) is None


def test_a_group_s_preparations_come_first_and_its_runs_wait_for_those_of_their_host(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepared(starter: host_starter.HostStarter, specs: list[Any]) -> list[Prepared]:
        is_there = starter.host.name == "bare"
        made_by = "earlier" if is_there else None
        return [Prepared(digest="d", made_by=made_by, made_t=None, preparer=None) for _ in specs]

    monkeypatch.setattr(host_starter.HostStarter, "prepared", prepared)
    hosts = [_host(workspace), _host(workspace, "bare")]
    plans = submitting.prepare_group(workspace, _experiment(workspace), hosts)
    every = submitting.with_preparations(workspace, plans)
    names = [(plan.host.name, plan.job["case"]) for plan in every]
    assert names == [
        ("box", "script base.sh"),
        ("box", "requirements probe/needs/all.txt"),
        ("box", "a=1"),
        ("box", "a=2"),
        ("bare", "a=1"),
        ("bare", "a=2"),
    ]
    ids = [plan.job["run_id"] for plan in every]
    assert [plan.preparers for plan in every] == [(), (ids[0],), (ids[0], ids[1]), (ids[0], ids[1]), (), ()]
    assert {plan.job["group_id"] for plan in every} == {plans[0].job["group_id"]}
    assert every[0].job["turn"] is None


def test_a_group_that_needs_nothing_asks_no_host(workspace: Workspace) -> None:
    plans: tuple[Plan, ...] = submitting.prepare_group(
        workspace, _experiment(workspace, profile="bare"), [_host(workspace, "bare")]
    )
    assert submitting.with_preparations(workspace, plans) is plans


def test_the_last_run_is_the_one_that_was_asked_for(workspace: Workspace) -> None:
    plan = prepare(workspace, _experiment(workspace).cases()[0], _host(workspace))
    workspace.ledger.insert(row_of(plan), row_of(plan_preparation(workspace, plan, 0, ())))
    last = workspace.ledger.last()
    assert last is not None
    assert last.run_id == plan.job["run_id"]
    alone = plan_setup(workspace, _host(workspace), None, force=False)
    assert alone is not None
    preparation = plan_preparation(workspace, alone, 0, ())
    workspace.ledger.insert(row_of(preparation))
    last = workspace.ledger.last()
    assert last is not None
    assert last.run_id == preparation.job["run_id"]


def test_what_may_have_to_wait_is_queued_until_its_host_says_more(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "long enough")
    talk = SimpleNamespace(hello={}, clock=None, close=lambda: None)
    started = remote.Started(is_new=True, sent_files=0, sent_bytes=0)

    def start(starter: Any, job: Any, *others: Any) -> Any:
        if not job.get("prepares") and others[-1] is None:
            raise remote.NotPrepared([0])
        starter.transport = SimpleNamespace(close=lambda: None)
        return started, talk

    monkeypatch.setattr(host_starter.HostStarter, "start", start)
    plan = prepare(workspace, _experiment(workspace, profile="bare").cases()[0], _host(workspace))
    launch(workspace, plan, Watcher(), is_followed=False)
    alone = plan_setup(workspace, _host(workspace), None, force=True)
    assert alone is not None
    launch(workspace, plan_preparation(workspace, alone, 0, ()), Watcher(), is_followed=False)
    assert [row.state for row in workspace.ledger.recent(9)] == [State.QUEUED] * 3
