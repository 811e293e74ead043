"""Tables, summaries and their JSON forms, as they come out of rich."""

from __future__ import annotations

import json
import math
import unicodedata
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, RenderableType

from orchestrator.inventory import Host
from orchestrator.ledger import RunRow
from orchestrator.lifecycle import State
from orchestrator.outcome import CardUse, Device, MemoryLimit, Outcome, Peak
from orchestrator.verdict import Verdict
from orchestrator.views import host_json, hosts_table, run_json, runs_table, summary, summary_json

GIB = 1024**3
HOSTILE = "\x1b[31m[bold]evil[/bold]\x9b2J\u202e:smile:\ud800"
SHOWN = "\\x1b[31m[bold]evil[/bold]\\x9b2J\\u202e:smile:\\ud800"
JOB = {
    "module": "dflash.probes.oom",
    "params": {"anchors": 1024},
    "env": {"HF_TOKEN": "hf_very_secret"},
    "alloc_conf": "expandable_segments:True",
    "devices": ["5"],
    "timeout_s": 60.0,
    "provenance": {"branch": "main", "untracked": 2, "remote": "git@example.org:lab/probe"},
    "expect": {"verdicts": ["oom"], "metrics": {}},
}
ROW = RunRow(
    run_id="k3m9x2qa7bcd",
    group_id="k3m9x2qa7bcd",
    experiment="oom_probe",
    profile="wide",
    host="pve-200",
    bundle="b" * 64,
    commit_id="0123456789abcdef" + "0" * 24,
    dirty=True,
    state=State.FAILED,
    verdict="oom",
    exit_code=1,
    created_t=1764435123.0,
    started_t=1764435130.0,
    ended_t=1764435195.0,
    pid=4242,
    job=JOB,
)
OUTCOME = Outcome(
    end="exited",
    exit_code=1,
    pid=4242,
    python="3.11.2",
    torch="2.9.1",
    allocator="native",
    allocator_settings={"expandable_segments": True, "max_split_size": -1},
    devices=(Device(index=0, name="NVIDIA RTX PRO 6000", uuid="GPU-77", total_bytes=95 * GIB),),
    peak_memory=(Peak(index=0, allocated_bytes=73 * GIB, reserved_bytes=74 * GIB),),
    peak_rss_bytes=2 * GIB,
    metrics={"warmup.loss": 12.25, "warmup.grad": math.nan},
)
VERDICT = Verdict(name="oom", is_good=True, reasons=("exit code 1", "Tried to allocate 22.30 GiB"))
HOST = Host(
    name="pve-200",
    transport="ssh",
    address="192.0.2.10",
    port=10638,
    user="root",
    identity=Path("/keys/id"),
    host_key="ssh-ed25519 AAAA",
    env={"HF_TOKEN": "hf_very_secret"},
)


def text_of(renderable: RenderableType, *, width: int = 200, colour: bool = False) -> str:
    """Prints with rich's defaults, markup and emoji on: what a view leaves open shows."""
    console = Console(width=width, force_terminal=colour, color_system="standard" if colour else None)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def row_of(text: str, label: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(label))


def test_what_cards_did_stands_below_what_was_asked() -> None:
    use = CardUse(
        uuid="GPU-77",
        name="card 5 (NVIDIA RTX PRO 6000)",
        samples=6,
        most_used_bytes=74 * GIB,
        utilisation_percent=97.4,
        most_temperature_c=61,
    )
    row = replace(ROW, job=JOB | {"devices": {"count": 1, "free_bytes": 90 * GIB}, "shares_cards": True})
    text = text_of(summary(row, replace(OUTCOME, card_use=(use,)), VERDICT))
    assert "asked: any 1 with 90 GiB free, shared with whoever has them" in row_of(text, "devices")
    used = "card 5 (NVIDIA RTX PRO 6000): at most 74.00 GiB in use, 97 % busy on average"
    assert f"{used}, at most 61 °C, in 6 samples" in text


def test_what_never_started_took_no_time() -> None:
    refused = replace(ROW, started_t=None, ended_t=ROW.created_t + 5, state=State.REFUSED)
    times = row_of(text_of(summary(refused, Outcome(), None)), "times")
    assert "ended 2025-11-29 16:52:08Z" in times
    assert "after" not in times


def test_a_run_that_goes_on_has_started_though_the_ledger_hears_of_it_later() -> None:
    going = replace(ROW, state=State.RUNNING, verdict=None, started_t=None, ended_t=None)
    times = row_of(text_of(summary(going, Outcome(started_t=1764435130.0), None)), "times")
    assert "started 2025-11-29 16:52:10Z" in times


def test_summary_answers_which_code_ran_where_with_what_and_how_it_ended() -> None:
    text = text_of(summary(ROW, OUTCOME, VERDICT))
    for label, shown in {
        "run": "k3m9x2qa7bcd",
        "experiment": "oom_probe, profile wide",
        "bundle": "b" * 64,
        "commit": "0123456789abcdef",
        "host": "pve-200, pid 4242",
        "devices": "asked: 5",
        "allocator": "asked: expandable_segments:True",
        "software": "python 3.11.2, torch 2.9.1",
        "times": "created 2025-11-29 16:52:03Z",
        "peak memory": "cuda:0 73.00 GiB allocated, 74.00 GiB reserved",
        "state": "failed, exit code 1",
        "verdict": "oom (good)",
    }.items():
        assert shown in row_of(text, label)
    assert "on main of git@example.org:lab/probe, payload with uncommitted changes, 2 untracked files" in text
    assert "cuda:0 is NVIDIA RTX PRO 6000 (GPU-77, 95.00 GiB)" in text
    assert "effective: expandable_segments=True, backend=native" in text
    assert "Tried to allocate 22.30 GiB" in text
    assert "host 2.00 GiB resident" in text
    assert "warmup: loss 12.25, grad nan" in text
    assert "after 1m05s" in text


def test_summary_of_ranks_says_whose_each_number_is() -> None:
    row = replace(ROW, job={**JOB, "processes": 2, "memory_limit_bytes": 96 * GIB})
    peaks = tuple(
        Peak(proc=f"rank{rank}", index=rank, allocated_bytes=GIB, reserved_bytes=2 * GIB) for rank in (0, 1)
    )
    limit = MemoryLimit(proc="rank1", index=1, limit_bytes=96 * GIB, allocator_bytes=95 * GIB)
    outcome = replace(
        OUTCOME,
        peak_memory=peaks,
        memory_limits=(limit,),
        metrics={"timed.loss": 1.0, "rank1/timed.loss": 2.0},
    )
    text = text_of(summary(row, outcome, VERDICT))
    assert row_of(text, "processes").split(maxsplit=1)[1].rstrip() == "2, rank0 to rank1"
    assert "rank0 cuda:0 1.00 GiB allocated, 2.00 GiB reserved" in row_of(text, "peak memory")
    assert "rank1 cuda:1 1.00 GiB allocated" in text
    assert "host 2.00 GiB in the largest process" in text
    assert "rank1/timed: loss 2" in text
    assert "96.00 GiB, simulated; out-of-memory messages show the real capacity" in row_of(
        text, "memory limit"
    )
    assert "the allocator of rank1 cuda:1 may take 95.00 GiB" in text
    json.dumps(summary_json(row, outcome, VERDICT))
    silent = text_of(summary(row, replace(outcome, memory_limits=()), VERDICT))
    assert "asked: 96.00 GiB" in row_of(silent, "memory limit")
    assert "effective: not reported" in silent


def test_summary_says_what_nobody_reported() -> None:
    row = replace(
        ROW, commit_id=None, state=State.RUNNING, job={}, started_t=None, ended_t=None, exit_code=None
    )
    text = text_of(summary(row, Outcome(), None))
    assert "effective: not reported" in text
    assert "not in a git repository" in row_of(text, "commit")
    assert "running" in row_of(text, "state")
    assert "verdict" not in text


def test_summary_names_what_could_not_be_ended() -> None:
    outcome = replace(OUTCOME, survivors=("7 sleep 100",), notes=("kept the output open: 8 tee",))
    text = text_of(summary(ROW, outcome, VERDICT))
    assert "7 sleep 100" in row_of(text, "still running")
    assert "8 tee" in row_of(text, "notes")


def test_summary_gives_the_reason_of_a_run_that_never_started() -> None:
    row = replace(ROW, state=State.REFUSED, verdict=None, reason="device 9 is not there")
    assert "device 9 is not there" in row_of(text_of(summary(row, Outcome(), None)), "reason")


def test_runs_table_shows_state_verdict_age_and_duration() -> None:
    running = replace(ROW, run_id="run1", group_id="run1", state=State.RUNNING, verdict=None, ended_t=None)
    running = replace(running, profile=None)
    lost = replace(ROW, run_id="lost1", group_id="lost1", state=State.LOST, verdict="lost", ended_t=None)
    lines = text_of(runs_table([ROW, running, lost], now_t=ROW.created_t + 7267)).splitlines()
    assert lines[0].split() == ["RUN", "EXPERIMENT", "HOST", "STATE", "VERDICT", "AGE", "TOOK", "COMMIT"]
    assert lines[1].split() == [
        *("k3m9x2qa7bcd", "oom_probe:wide", "pve-200", "failed", "oom", "2h01m", "1m05s", "0123456789ab*")
    ]
    assert lines[2].split()[3:7] == ["running", "-", "2h01m", "2h01m"]
    assert lines[3].split()[6] == "?"


def test_runs_of_a_group_show_it_and_their_case() -> None:
    member = replace(ROW, run_id="member1", group_id="g-azybfkw51ckv", job={**JOB, "case": "anchors=128"})
    lines = text_of(runs_table([ROW, member], now_t=ROW.created_t)).splitlines()
    assert lines[0].split()[:3] == ["RUN", "GROUP", "EXPERIMENT"]
    assert lines[1].split()[:3] == ["k3m9x2qa7bcd", "-", "oom_probe:wide"]
    assert lines[2].split()[:4] == ["member1", "g-azybfkw51ckv", "oom_probe:wide", "(anchors=128)"]


def test_a_verdict_is_green_where_it_was_expected() -> None:
    good = text_of(runs_table([ROW], now_t=0.0), colour=True)
    bad = text_of(runs_table([replace(ROW, verdict="ok")], now_t=0.0), colour=True)
    assert "\x1b[32moom" in good
    assert "\x1b[1;31mok" in bad


def test_hosts_table_shows_how_each_host_is_reached() -> None:
    local = Host(name="local", transport="local", address="local", python="/usr/bin/python3")
    unpinned = replace(HOST, name="rented", host_key=None, port=None, user=None)
    lines = text_of(hosts_table([HOST, local, unpinned])).splitlines()
    assert lines[1].split() == ["pve-200", "ssh", "root@192.0.2.10:10638", "pinned", "python3", "~/.orch"]
    assert lines[2].split() == ["local", "local", "-", "-", "/usr/bin/python3", "~/.orch"]
    assert lines[3].split()[2:5] == ["192.0.2.10", "by", "known_hosts"]


@pytest.mark.parametrize("width", [40, 200])
def test_nothing_from_a_host_or_file_acts_on_the_terminal_or_as_markup(width: int) -> None:
    row = replace(ROW, run_id=HOSTILE, experiment=HOSTILE, host=HOSTILE, verdict=HOSTILE, reason=HOSTILE)
    row = replace(
        row, job=JOB | {"devices": [HOSTILE], "alloc_conf": HOSTILE, "provenance": {"branch": HOSTILE}}
    )
    outcome = Outcome(
        python=HOSTILE,
        torch=HOSTILE,
        allocator_settings={HOSTILE: HOSTILE},
        devices=(Device(index=0, name=HOSTILE, uuid=HOSTILE, total_bytes=None),),
        metrics={HOSTILE: 1.0},
        survivors=(HOSTILE,),
        notes=(HOSTILE,),
    )
    host = replace(HOST, address=HOSTILE, user=HOSTILE, python=HOSTILE, root=HOSTILE)
    verdict = Verdict(name=HOSTILE, is_good=False, reasons=(HOSTILE,))
    tables = [runs_table([row], now_t=0.0), hosts_table([host]), summary(row, outcome, verdict)]
    text = "".join(text_of(table, width=width) for table in tables)
    assert not {unicodedata.category(character) for character in text.replace("\n", "")} & {"Cc", "Cf", "Cs"}
    if width == 200:
        assert text_of(summary(row, outcome, verdict)).count(SHOWN) >= 10


def test_json_forms_are_ascii_strict_and_hold_what_was_recorded() -> None:
    row = replace(ROW, reason=HOSTILE)
    text = json.dumps(summary_json(row, OUTCOME, VERDICT), allow_nan=False)
    assert text.isascii()
    form = json.loads(text)
    assert form["run"]["reason"] == HOSTILE
    assert form["run"]["state"] == "failed"
    assert form["outcome"]["metrics"] == {"warmup.loss": 12.25, "warmup.grad": None}
    assert form["outcome"]["devices"][0]["uuid"] == "GPU-77"
    assert form["verdict"] == {"name": "oom", "is_good": True, "reasons": list(VERDICT.reasons)}
    assert summary_json(row, Outcome(), None)["verdict"] is None


def test_no_form_shows_the_value_of_a_variable() -> None:
    forms: list[Any] = [run_json(ROW), summary_json(ROW, OUTCOME, VERDICT), host_json(HOST)]
    shown = json.dumps(forms) + text_of(summary(ROW, OUTCOME, VERDICT)) + text_of(hosts_table([HOST]))
    assert "hf_very_secret" not in shown
    assert host_json(HOST)["env_names"] == ["HF_TOKEN"]
    assert run_json(ROW)["job"]["params"] == {"anchors": 1024}


@given(st.floats(), st.none() | st.floats(), st.none() | st.floats())
def test_no_clock_of_a_host_breaks_a_view(
    created_t: float, started_t: float | None, ended_t: float | None
) -> None:
    row = replace(ROW, created_t=created_t, started_t=started_t, ended_t=ended_t)
    assert text_of(runs_table([row], now_t=1764435123.0))
    assert text_of(summary(row, Outcome(), None))
