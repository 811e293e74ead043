"""The job: plain JSON values, put together from experiment, bundle and host."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.bundle import Bundle
from orchestrator.experiment import Expectation, Experiment
from orchestrator.fields import Secret
from orchestrator.inventory import Host
from orchestrator.job import Program, Turn, job_for, program_of, secrets_of, secrets_of_job
from orchestrator.provenance import Provenance

BUNDLE = Bundle(id="0" * 64, entries=(), provenance=Provenance(commit="a" * 40))
HOST = Host(name="box", transport="local", address="box", env={"A": "host", "B": "host"})


def _job(**changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "name": "oom_probe",
        "path": Path("experiments/oom_probe.yaml"),
        "payload": "dflash",
        "module": "dflash.probe",
        "params": {"anchors": [1, 2], "nested": {"lr": 1e-5}},
        "env": {"B": "experiment"},
        "alloc_conf": "expandable_segments:True",
        "devices": ("5",),
        "timeout_s": 600.0,
        "expect": Expectation(verdicts=("oom",)),
        "profile": "small",
    }
    return job_for("k3m9x2qa7bcd", Experiment(**{**values, **changes}), BUNDLE, HOST)


def test_a_job_says_all_that_a_host_and_a_verdict_need() -> None:
    assert _job() == {
        "version": 1,
        "run_id": "k3m9x2qa7bcd",
        "group_id": "k3m9x2qa7bcd",
        "experiment": "oom_probe",
        "profile": "small",
        "bundle": "0" * 64,
        "case": None,
        "module": "dflash.probe",
        "params": {"anchors": [1, 2], "nested": {"lr": 1e-5}},
        "env": {"A": "host", "B": "experiment"},
        "import_container_env": False,
        "venv": None,
        "workdir": None,
        "secrets": {},
        "alloc_conf": "expandable_segments:True",
        "devices": ["5"],
        "waits_for_cards": True,
        "shares_cards": False,
        "processes": 1,
        "memory_limit_bytes": None,
        "timeout_s": 600.0,
        "grace_s": 10.0,
        "on_disk_full": "wait",
        "log_limit_bytes": None,
        "setup": [],
        "collect": [],
        "collect_limit_bytes": 1024**3,
        "turn": None,
        "provenance": BUNDLE.provenance.as_json(),
        "expect": {"verdicts": ["oom"], "metrics": {}},
    }


def test_a_job_survives_the_wire_unchanged() -> None:
    job = _job()
    assert json.loads(json.dumps(job)) == job


def test_changing_a_part_later_does_not_change_the_job() -> None:
    params = {"anchors": [1]}
    job = _job(params=params)
    params["anchors"].append(2)
    assert job["params"] == {"anchors": [1]}


def test_numbers_that_json_lacks_are_refused() -> None:
    with pytest.raises(ValueError, match="JSON"):
        _job(params={"lr": float("nan")})


def test_a_job_names_its_secrets_and_the_experiment_s_wish_for_a_variable_wins() -> None:
    token, other = (Secret(name=name, from_env=f"MY_{name}", where="x.yaml:1") for name in ("A", "B"))
    assert [_job(env={"A": token})[key] for key in ("env", "secrets")] == [{"B": "host"}, {"A": "MY_A"}]
    host = replace(HOST, env={"A": token, "B": other})
    experiment = Experiment(name="x", path=Path("x.yaml"), payload="p", module="p.m", env={"B": "plain"})
    job = job_for("k3m9x2qa7bcd", experiment, BUNDLE, host)
    assert (job["env"], job["secrets"]) == ({"B": "plain"}, {"A": "MY_A"})
    assert secrets_of(experiment, host) == (token,)
    assert secrets_of_job(job) == (replace(token, where="run k3m9x2qa7bcd"),)


def test_a_job_names_one_program_and_what_a_person_reads_of_it() -> None:
    script = Experiment(name="x", path=Path("x.py"), script="my x.py", args=("--lr", "a b"))
    command = Experiment(name="x", path=Path("x"), command=("sh", "-c", "echo $0"))
    jobs = [_job(), *(job_for("k3m9x2qa7bcd", experiment, BUNDLE, HOST) for experiment in (script, command))]
    keys = {"module", "script", "args", "command"}
    assert [keys & job.keys() for job in jobs] == [{"module"}, {"script", "args"}, {"command"}]
    assert list(map(program_of, jobs)) == [
        Program("module", "dflash.probe"),
        Program("script", "'my x.py' --lr 'a b'"),
        Program("command", "sh -c 'echo $0'"),
    ]
    assert program_of({"module": None, "script": None, "command": None}) == Program("module", "?")


def test_a_turn_puts_a_run_into_its_group() -> None:
    experiment = Experiment(name="x", path=Path("x.yaml"), payload="p", module="p.m", case="a=1")
    job = job_for("k3m9x2qa7bcd", experiment, BUNDLE, HOST, Turn("g-1", 3, 2))
    assert (job["group_id"], job["case"]) == ("g-1", "a=1")
    assert job["turn"] == {"queue": "g-1", "place": 3, "at_once": 2}
