"""States, the folding of records, and verdicts."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.errors import OrchError
from orchestrator.experiment import EXPECTABLE, Bounds, Expectation
from orchestrator.lifecycle import TRANSITIONS, State, check_transition, is_terminal
from orchestrator.outcome import MOST_NOTES, CardUse, Outcome, outcome_of
from orchestrator.verdict import judge

ENDS = ("exited", "signalled", "timeout", "cancelled", "refused", "abandoned", "from the future", None)
NAMES = (*EXPECTABLE, "lost", "out_of_bounds")
OOM = "torch.OutOfMemoryError"

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
outcomes = st.builds(
    Outcome,
    end=st.sampled_from(ENDS),
    exit_code=st.none() | st.integers(0, 255),
    signal=st.none() | st.integers(1, 64),
    oom_kill=st.sampled_from([None, "cgroup", "host"]),
    exception_type=st.sampled_from([None, OOM, "builtins.ValueError"]),
    missing_module=st.sampled_from([None, "triton"]),
    metrics=st.dictionaries(st.sampled_from(["loss", "peak_gib"]), st.floats()),
    mismatches=st.sampled_from([(), ("devices: asked for ['a'], the process sees ['b']",)]),
)
expectations = st.builds(
    Expectation,
    verdicts=st.lists(st.sampled_from(EXPECTABLE), min_size=1, unique=True).map(tuple),
    metrics=st.dictionaries(
        st.sampled_from(["loss", "accuracy"]), st.builds(Bounds, min=st.floats(-9, 0), max=st.none())
    ),
)


SEAL = {"kind": "seal"}


def end(outcome: str = "exited", **fields: Any) -> dict[str, Any]:
    return {
        "kind": "end",
        "t": 9.0,
        "outcome": outcome,
        "code": None,
        "signal": None,
        "reason": None,
        **fields,
    }


def metric(name: str, value: object) -> dict[str, Any]:
    return {"kind": "event", "event": {"kind": "metric", "name": name, "value": value}}


@given(st.lists(st.sampled_from(State)))
def test_no_sequence_of_transitions_leaves_a_terminal_state_but_lost(steps: list[State]) -> None:
    state, ended = State.CREATED, None
    for step in steps:
        try:
            check_transition(state, step)
        except OrchError:
            continue
        state = step
        if ended is None and is_terminal(state) and state is not State.LOST:
            ended = state
    assert ended is None or state is ended


def test_lost_is_terminal_until_evidence_corrects_it() -> None:
    assert is_terminal(State.LOST)
    for found in (State.RUNNING, State.SUCCEEDED, State.FAILED, State.KILLED):
        check_transition(State.LOST, found)


def test_no_run_goes_back_to_where_it_was() -> None:
    order = [State.CREATED, State.STARTING, State.RUNNING]
    for position, state in enumerate(order):
        assert not TRANSITIONS[state] & set(order[:position])
        assert not TRANSITIONS[State.LOST] & {State.CREATED, State.STARTING}


def test_every_state_can_be_reached_and_every_open_one_can_end() -> None:
    reached = {State.CREATED}
    for _ in State:
        reached |= {new for old in reached for new in TRANSITIONS[old]}
    assert reached == set(State)
    for state in State:
        assert is_terminal(state) or State.FAILED in TRANSITIONS[state]


def test_refused_transition_names_both_states() -> None:
    with pytest.raises(OrchError, match=r"succeeded cannot become running"):
        check_transition(State.SUCCEEDED, State.RUNNING)


@given(outcomes, expectations)
def test_a_run_that_did_not_exit_zero_is_good_only_where_another_end_is_expected(
    outcome: Outcome, expectation: Expectation
) -> None:
    verdict = judge(outcome, expectation)
    if (outcome.end, outcome.exit_code) != ("exited", 0):
        assert verdict.name != "ok"
        assert not verdict.is_good or set(expectation.verdicts) - {"ok"}
    assert verdict.is_good == (verdict.name in expectation.verdicts)
    assert verdict.name in NAMES
    assert verdict.reasons or verdict.is_good


@given(outcomes)
def test_a_mismatch_is_never_good_unless_it_was_the_question(outcome: Outcome) -> None:
    others = Expectation(verdicts=tuple(name for name in EXPECTABLE if name not in ("mismatch", "refused")))
    if outcome.mismatches:
        assert not judge(outcome, others).is_good


@pytest.mark.parametrize(
    ("outcome", "name", "reason"),
    [
        (Outcome(end="exited", exit_code=1), "failed", "exit code 1"),
        (
            Outcome(end="exited", exit_code=1, exception_type=OOM, exception_message="15.09 GiB"),
            "oom",
            "15.09 GiB",
        ),
        (Outcome(end="exited", exit_code=0, exception_type=OOM), "ok", None),
        (Outcome(end="exited", exit_code=1, missing_module="triton"), "failed", "'triton' is missing"),
        (Outcome(end="exited", exit_code=None), "failed", "exit code None"),
        (Outcome(end="signalled", signal=9), "killed", "signal 9"),
        (Outcome(end="signalled", signal=9, oom_kill="cgroup"), "killed", "memory meanwhile, in this cgroup"),
        (Outcome(end="abandoned", reason="the host's disk stayed full"), "killed", "disk stayed full"),
        (Outcome(end="timeout", signal=15, reason="longer than its 5 s"), "timeout", "longer than its 5 s"),
        (Outcome(end="cancelled", exit_code=0), "cancelled", None),
        (Outcome(end="refused", reason="device 9 is not there"), "refused", "device 9 is not there"),
        (Outcome(), "lost", "hold no end"),
        (
            Outcome(end="exited", exit_code=0, mismatches=("allocator: asked",)),
            "mismatch",
            "allocator: asked",
        ),
    ],
)
def test_verdict_says_what_happened(outcome: Outcome, name: str, reason: str | None) -> None:
    verdict = judge(outcome, Expectation(verdicts=(name,)))
    assert (verdict.name, verdict.is_good) == (name, True)
    assert reason is None or reason in "; ".join(verdict.reasons)


def test_a_verdict_that_was_not_expected_says_what_was() -> None:
    verdict = judge(Outcome(end="exited", exit_code=0), Expectation(verdicts=("oom", "killed")))
    assert (verdict.name, verdict.is_good, verdict.reasons) == ("ok", False, ("expected oom or killed",))


@pytest.mark.parametrize(
    ("metrics", "reason"),
    [
        ({}, "never reported"),
        ({"loss": math.nan}, "is nan"),
        ({"loss": math.inf}, "is inf"),
        ({"loss": 0.5}, "below its minimum 1"),
        ({"loss": 2.5}, "above its maximum 2"),
    ],
)
def test_a_metric_outside_its_bounds_spoils_an_expected_verdict(
    metrics: dict[str, float], reason: str
) -> None:
    expectation = Expectation(metrics={"loss": Bounds(min=1.0, max=2.0)})
    verdict = judge(Outcome(end="exited", exit_code=0, metrics=metrics), expectation)
    assert (verdict.name, verdict.is_good) == ("out_of_bounds", False)
    assert reason in verdict.reasons[0]


def test_bounds_include_their_ends_and_are_not_judged_for_a_run_that_failed_anyway() -> None:
    expectation = Expectation(metrics={"loss": Bounds(min=1.0, max=2.0)})
    for value in (1.0, 2.0):
        assert judge(Outcome(end="exited", exit_code=0, metrics={"loss": value}), expectation).is_good
    assert judge(Outcome(end="exited", exit_code=3), expectation).name == "failed"


def test_outcome_gathers_what_the_process_reported_piece_by_piece() -> None:
    card = {"index": 0, "name": "NVIDIA H200", "uuid": "GPU-1", "total_bytes": 150 * 1024**3}
    outcome = outcome_of(
        [
            {"kind": "spawn", "t": 3.0, "pid": 42},
            {"kind": "facts", "python": "3.11.2", "mismatches": []},
            {"kind": "facts", "torch": "2.13.0", "mismatches": []},
            {
                "kind": "facts",
                "devices": [card],
                "allocator": "native",
                "allocator_settings": {"max_split_size": -1},
            },
            metric("loss", 3.5),
            metric("loss", 2.5),
            metric("grad", "inf"),
            metric("note", {"a": 1}),
            {"kind": "facts", "peak_memory": [{"index": 0, "allocated_bytes": 5, "reserved_bytes": 7}]},
            {"kind": "exit", "pid": 42, "code": 0, "signal": None, "oom_kill": 0, "oom_scope": "cgroup"},
            end(code=0),
            SEAL,
        ]
    )
    assert (outcome.pid, outcome.started_t, outcome.ended_t) == (42, 3.0, 9.0)
    assert (outcome.python, outcome.torch, outcome.allocator) == ("3.11.2", "2.13.0", "native")
    assert outcome.allocator_settings == {"max_split_size": -1}
    assert (outcome.devices[0].uuid, outcome.devices[0].total_bytes) == ("GPU-1", 150 * 1024**3)
    assert outcome.peak_memory[0].reserved_bytes == 7
    assert (outcome.metrics["loss"], outcome.metrics["grad"]) == (2.5, math.inf)
    assert math.isnan(outcome.metrics["note"])
    assert (outcome.state, outcome.oom_kill) == (State.SUCCEEDED, None)


def test_samples_of_a_card_are_summed_up_whatever_is_missing_in_them() -> None:
    def sample(used_mib: object, percent: object, degrees: object) -> dict[str, Any]:
        told = {"used_mib": used_mib, "utilisation_percent": percent, "temperature_c": degrees}
        return {"kind": "gpus", "cards": [{"uuid": "GPU-1", **told}, "no card"]}

    had = {"kind": "cards", "cards": [{"index": 4, "uuid": "GPU-1", "name": "NVIDIA H200"}]}
    outcome = outcome_of([had, sample(1024, 10, 40), sample(2048, None, 61), sample("?", 90, None)])
    assert outcome.card_use == (
        CardUse(
            uuid="GPU-1",
            name="card 4 (NVIDIA H200)",
            samples=3,
            most_used_bytes=2 * 1024**3,
            utilisation_percent=50.0,
            most_temperature_c=61,
        ),
    )


def test_strangers_and_cards_that_stop_answering_are_noted() -> None:
    records: list[dict[str, Any]] = [
        {"kind": "stranger", "uuid": "GPU-1", "pid": 7, "argv": ["python", "x.py"], "used_mib": 2048},
        {"kind": "gpus", "fault": "GPU is lost"},
    ]
    assert outcome_of(records).notes == (
        "another process used GPU-1 meanwhile: 7 python x.py, 2.0 GiB",
        "a card stopped answering while the run went on: GPU is lost",
    )


def test_a_number_of_cards_that_nobody_used_is_unproven() -> None:
    job = {"alloc_conf": None, "devices": {"count": 2, "free_bytes": None}}
    assert outcome_of([{"kind": "segment", "job": job}]).unproven == (
        "devices any 2 were asked for, and no process used CUDA",
    )


def test_outcome_keeps_every_mismatch_whichever_record_told_it() -> None:
    records = [
        {"kind": "facts", "mismatches": ["PYTHONPATH: …"]},
        {"kind": "facts", "mismatches": ["devices: …"]},
    ]
    assert outcome_of(records).mismatches == ("PYTHONPATH: …", "devices: …")


def test_a_flood_of_mismatches_makes_no_flood_of_reasons() -> None:
    told = [["the same"], ["the same"], *([f"variable {number}"] for number in range(1000))]
    outcome = outcome_of({"kind": "facts", "mismatches": mismatches} for mismatches in told)
    assert outcome.mismatches[:2] == ("the same", "variable 0")
    assert len(outcome.mismatches) == MOST_NOTES


def test_the_out_of_memory_error_counts_among_the_errors_of_several_ranks() -> None:
    first = {"kind": "exception", "type": "torch.distributed.DistBackendError", "message": "peer gone"}
    oom = {"kind": "exception", "type": OOM, "message": "Tried to allocate 15.09 GiB"}
    later = {"kind": "exception", "type": "builtins.KeyError", "message": "x"}
    assert outcome_of([first, oom, later, end(code=1)]).exception_message == "Tried to allocate 15.09 GiB"
    assert outcome_of([first, later, end(code=1)]).exception_message == "peer gone"


PEER_GONE = "torch.distributed.DistBackendError"


def raised(rank: int, kind: str, message: str = "") -> dict[str, Any]:
    return {"kind": "exception", "proc": f"rank{rank}", "type": kind, "message": message}


def test_of_several_ranks_the_exception_of_the_first_to_fail_is_told_and_whose_it_is() -> None:
    records = [raised(0, PEER_GONE, "peer gone"), raised(2, "builtins.KeyError", "x")]
    reason = "rank 2 exited with code 3 first; the other ranks were ended"
    outcome = outcome_of([*records, end(code=3, proc="rank2", reason=reason), SEAL])
    assert (outcome.first_proc, outcome.exception_proc, outcome.exception_message) == ("rank2", "rank2", "x")
    verdict = judge(outcome, Expectation())
    assert verdict.reasons[:3] == ("exit code 3", reason, "rank2: builtins.KeyError: x")


def test_a_rank_out_of_memory_makes_the_verdict_though_another_was_the_first_to_end() -> None:
    records = [raised(0, PEER_GONE), raised(1, OOM, "15.09 GiB"), raised(1, "builtins.KeyError")]
    for last in (end(code=1, proc="rank0"), end("signalled", signal=6, proc="rank0")):
        verdict = judge(outcome_of([*records, last, SEAL]), Expectation())
        assert (verdict.name, verdict.reasons[-2]) == ("oom", f"rank1: {OOM}: 15.09 GiB")
    own = outcome_of([raised(1, OOM), end("signalled", signal=11, proc="rank1"), SEAL])
    alone = outcome_of(
        [{"kind": "exception", "proc": "main", "type": OOM}, end("signalled", signal=11), SEAL]
    )
    assert [judge(outcome, Expectation()).name for outcome in (own, alone)] == ["killed", "killed"]


def test_what_ranks_report_is_kept_apart() -> None:
    def peak(rank: int, size: int) -> dict[str, Any]:
        card = {"index": 0, "allocated_bytes": size, "reserved_bytes": size}
        return {"kind": "facts", "proc": f"rank{rank}", "peak_memory": [card]}

    def limit(rank: int, allowed: int | None) -> dict[str, Any]:
        card = {"index": 0, "limit_bytes": 9, "allocator_bytes": allowed, "problem": None}
        return {"kind": "facts", "proc": f"rank{rank}", "memory_limit": [card]}

    outcome = outcome_of(
        [
            {"kind": "spawn", "proc": "rank0", "pid": 40, "t": 1.0},
            {"kind": "spawn", "proc": "rank1", "pid": 41, "t": 2.0},
            {**metric("loss", 5.0), "proc": "rank1"},
            {**metric("loss", 3.0), "proc": "rank0"},
            {"kind": "facts", "proc": "rank1", "mismatches": ["devices: …"]},
            *(peak(rank, 100 + rank) for rank in (10, 1, 0)),
            *(limit(rank, 7) for rank in (1, 0)),
            limit(2, None),
            {"kind": "pipe_held", "proc": "rank1", "holders": [{"pid": 7, "argv": ["sleep"]}]},
        ]
    )
    assert (outcome.pid, outcome.started_t) == (40, 1.0)
    assert list(outcome.metrics.items()) == [("loss", 3.0), ("rank1/loss", 5.0)]
    assert outcome.mismatches == ("rank1: devices: …",)
    assert [peak.card for peak in outcome.peak_memory] == ["rank0 cuda:0", "rank1 cuda:0", "rank10 cuda:0"]
    assert [peak.reserved_bytes for peak in outcome.peak_memory] == [100, 101, 110]
    assert [limit.card for limit in outcome.memory_limits] == ["rank0 cuda:0", "rank1 cuda:0"]
    assert outcome.notes == ("kept rank1's output open after it had ended: 7 sleep",)


def test_processes_that_stay_behind_are_named() -> None:
    sleeper = {"pid": 7, "argv": ["sleep", "100"]}
    outcome = outcome_of(
        [
            {"kind": "pipe_held", "holders": [sleeper]},
            {"kind": "leftover", "processes": [sleeper]},
            {"kind": "exit", "code": None, "signal": 9, "oom_kill": 2, "oom_scope": "host"},
            end("signalled", signal=9, survivors=[sleeper]),
            SEAL,
        ]
    )
    assert outcome.survivors == ("7 sleep 100",)
    assert [note.rpartition(": ")[2] for note in outcome.notes] == ["7 sleep 100"] * 2
    assert (outcome.oom_kill, outcome.state) == ("host", State.KILLED)


def test_an_end_that_no_seal_covers_proves_nothing() -> None:
    outcome = outcome_of([SEAL, end(code=0)])
    assert outcome.state is State.LOST
    assert "not sealed" in judge(outcome, Expectation()).reasons[0]
    assert judge(outcome_of([end(code=0), SEAL]), Expectation()).name == "ok"


@pytest.mark.parametrize(
    ("asked", "facts", "name"),
    [
        ({"alloc_conf": "a:1", "devices": []}, {}, "unverified"),
        ({"alloc_conf": "a:1", "devices": []}, {"allocator": "native"}, "ok"),
        ({"alloc_conf": None, "devices": ["0"]}, {}, "unverified"),
        ({"alloc_conf": None, "devices": ["0"]}, {"devices": [{"index": 0}]}, "ok"),
        ({"alloc_conf": None, "devices": []}, {}, "ok"),
        ({"memory_limit_bytes": 5}, {}, "unverified"),
        ({"memory_limit_bytes": 5}, {"memory_limit": [{"allocator_bytes": 4}]}, "ok"),
    ],
)
def test_what_was_asked_for_and_never_reported_from_inside_is_not_ok(
    asked: dict[str, Any], facts: dict[str, Any], name: str
) -> None:
    records = [{"kind": "segment", "job": asked}, {"kind": "facts", **facts}, end(code=0), SEAL]
    assert judge(outcome_of(records), Expectation()).name == name


def test_every_rank_has_to_say_what_it_got() -> None:
    job = {"processes": 3, "devices": ["0", "1"], "alloc_conf": "a:1", "memory_limit_bytes": 2**30}
    seen: dict[str, Any] = {"kind": "facts", "devices": [{"index": 0}], "allocator": "native"}
    records = [{"kind": "segment", "job": job}, {**seen, "proc": "rank0"}, {**seen, "proc": "rank2"}]
    outcome = outcome_of([*records, end(code=0), SEAL])
    assert outcome.unproven == (
        "allocator settings a:1 were asked for, and rank1 never said what took effect",
        "devices 0, 1 were asked for, and rank1 never used CUDA",
        "a memory limit of 1.00 GiB was asked for, and no process reported one",
    )


def test_a_payload_that_changed_its_own_code_is_noted() -> None:
    outcome = outcome_of([{"kind": "code_changed", "files": ["a.py"], "count": 1}, end(code=0), SEAL])
    assert "a.py" in outcome.notes[0]


def test_a_misspelt_metric_is_told_what_was_reported() -> None:
    metric = {"kind": "event", "event": {"kind": "metric", "name": "timed.loss", "value": 1.0}}
    expectation = Expectation(metrics={"timed.los": Bounds(max=2.0)})
    (reason, _) = judge(outcome_of([metric, end(code=0), SEAL]), expectation).reasons
    assert "did you mean 'timed.loss'" in reason


def test_what_a_payload_warns_of_is_noted_and_changes_no_verdict() -> None:
    event = {"kind": "warning", "about": "attention", "message": "flex cannot run here: no Triton"}
    outcome = outcome_of([{"kind": "event", "event": event}] * 2)
    assert outcome.notes == ("the payload warns: attention: flex cannot run here: no Triton",)
    assert outcome_of([{"kind": "event", "event": {"kind": "warning"}}]).metrics == {}


def test_notes_are_bounded() -> None:
    refused = [{"kind": "event_refused", "reason": f"reason {number}"} for number in range(1000)]
    assert len(outcome_of(refused).notes) == MOST_NOTES


KINDS = [
    "spawn",
    "facts",
    "event",
    "event_refused",
    "exception",
    "exit",
    "pipe_held",
    "leftover",
    "code_changed",
    "segment",
    "seal",
    "end",
    [],
]
FIELDS = [
    "pid",
    "t",
    "python",
    "allocator_settings",
    "devices",
    "peak_memory",
    "memory_limit",
    "proc",
    "job",
    "mismatches",
    "event",
    "reason",
]
FIELDS += [
    "type",
    "message",
    "missing_module",
    "oom_kill",
    "oom_scope",
    "holders",
    "processes",
    "outcome",
    "code",
]

records_of_a_liar = st.builds(
    lambda kind, fields: {**fields, "kind": kind},
    st.sampled_from(KINDS),
    st.dictionaries(st.sampled_from(FIELDS), json_values),
)


@given(st.lists(records_of_a_liar, max_size=6))
def test_no_record_of_a_host_breaks_the_outcome(records: list[dict[str, Any]]) -> None:
    outcome = outcome_of(records)
    assert judge(outcome, Expectation()).name in NAMES
    for number in (outcome.pid, outcome.exit_code, outcome.signal):
        assert number is None or abs(number) < 2**63


def test_a_run_that_asked_for_no_card_and_misses_one_is_told_so() -> None:
    missing = {"kind": "exception", "type": "builtins.RuntimeError", "message": "No CUDA GPUs are available"}
    for devices, notes in (([], ("the run asked for no card, so it sees none; see devices:",)), (["0"], ())):
        job = {"alloc_conf": None, "devices": devices}
        assert outcome_of([{"kind": "segment", "job": job}, missing]).notes == notes
