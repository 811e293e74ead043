"""What a run's records, its code and the ledger say together of memory that was out."""

from __future__ import annotations

import base64
import json
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator import explaining
from orchestrator.bundle import Bundle, build_bundle
from orchestrator.errors import RecordsAltered, UsageError
from orchestrator.explain_view import explanation_json, explanation_lines, remedy_lines, short_lines
from orchestrator.forensics.explain import Explanation
from orchestrator.ledger import RunRow
from orchestrator.lifecycle import State
from orchestrator.memory_evidence import MOST_STREAMS, Evidence
from orchestrator.supervisor.records import RecordWriter
from orchestrator.workspace import Workspace
from tests.estimates import ESTIMATE
from tests.unit.housekeeping import a_bundle, a_job, a_workspace

GIB, MIB = 2**30, 2**20
DRAFTER = Path(__file__).parents[2] / "payloads" / "dflash"
PARAMS = {"max_anchors": 512, "block_size": 16, "seq_len": 7260, "attention": "flex", "compile": False}
MESSAGE = (
    "CUDA out of memory. Tried to allocate {asked}. GPU 0 has a total capacity of 94.97 GiB of which {free} "
    "is free. Including non-PyTorch memory, this process has 84.77 GiB memory in use. Of the allocated "
    "memory 83.10 GiB is allocated by PyTorch, and 1.05 GiB is reserved by PyTorch but unallocated. If"
)
MYSTERY = MESSAGE.format(asked="15.09 GiB", free="10.20 GiB")
PLAIN = MESSAGE.format(asked="22.00 GiB", free="10.20 GiB")

Records = Sequence[tuple[str, Mapping[str, Any]]]


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[Workspace]:
    opened = a_workspace(tmp_path)
    yield opened
    opened.close()


@pytest.fixture
def drafter(workspace: Workspace) -> Bundle:
    folder = workspace.project / "payloads" / "dflash"
    shutil.copytree(DRAFTER, folder, ignore=shutil.ignore_patterns("__pycache__"))
    return build_bundle(folder, workspace.store)


def a_failed_run(
    workspace: Workspace,
    run_id: str,
    records: Records = (),
    *,
    bundle: Bundle | None = None,
    age_s: float = 0.0,
    end: Mapping[str, Any] | None = None,
    **job: Any,
) -> RunRow:
    """Mirrors a run with these records; it ended with exit code 1, unless ``end`` says otherwise."""
    made = a_job(run_id, bundle or a_bundle(workspace), **job)
    row = RunRow(
        run_id=run_id,
        group_id=run_id,
        experiment="trial",
        host="here",
        bundle=made["bundle"],
        state=State.FAILED,
        created_t=time.time() - age_s,
        job=made,
    )
    workspace.ledger.insert(row)
    folder = workspace.folder(run_id)
    folder.make()
    writer = RecordWriter(str(folder.records), run_id, {"job": made, "bundle": {"id": made["bundle"]}})
    writer.write("spawn", proc="main", pid=42)
    for kind, fields in records:
        writer.write(kind, **fields)
    ended = {"outcome": "exited", "code": 1, "signal": None, "reason": None, "survivors": []}
    writer.write("end", **{**ended, **(end or {})})
    writer.close()
    return row


def out(text: str, proc: str = "main", off: int = 0, **fields: Any) -> tuple[str, dict[str, Any]]:
    where = {"proc": proc, "pid": 42, "stream": "stderr", "off": off, "line": 0}
    return "out", {**where, **(fields or {"text": text})}


def raised(text: str, proc: str = "main", kind: str = "torch.OutOfMemoryError") -> tuple[str, dict[str, Any]]:
    return "exception", {"proc": proc, "pid": 42, "type": kind, "message": text, "missing_module": None}


def explained(workspace: Workspace, run_id: str) -> Explanation:
    found = explaining.explain_run(workspace, run_id).explanation
    assert found is not None
    return found


class TestTheLogOfAnotherConfiguration:
    @pytest.fixture
    def runs(self, workspace: Workspace, drafter: Bundle) -> Workspace:
        for anchors in (512, 256, 128):
            params = {**PARAMS, "max_anchors": anchors}
            job: dict[str, Any] = {"bundle": drafter, "module": "dflash.probes.oom", "params": params}
            a_failed_run(workspace, f"run{anchors}", [raised(MYSTERY)], **job)
        return workspace

    def test_the_run_that_made_the_tensor_is_told_its_shape_and_expression(self, runs: Workspace) -> None:
        found = explained(runs, "run512")
        assert found.answer.startswith(
            "out of memory: attention scores, [32, 8192, 15452] float32, 15.09 GiB"
        )
        assert any("8192 = max_anchors · block_size = 512 · 16" in line for line in found.tensor)

    def test_the_other_runs_are_told_first_that_it_may_not_be_theirs(self, runs: Workspace) -> None:
        says = "this log may not be this configuration's: 15.09 GiB is attention scores of run run512"
        for run_id in ("run256", "run128"):
            found = explained(runs, run_id)
            assert found.answer.startswith(says)

    def test_parameters_that_the_payload_does_not_know_are_told(
        self, workspace: Workspace, drafter: Bundle
    ) -> None:
        params = {**PARAMS, "learning_rate": 9}
        job: dict[str, Any] = {"bundle": drafter, "module": "dflash.probes.oom", "params": params}
        a_failed_run(workspace, "r", [raised(MYSTERY)], **job)
        says = "params     ignored, as no probe has them: learning_rate"
        assert [*explanation_lines(explained(workspace, "r"))][1] == says

    @pytest.mark.parametrize(
        ("changed", "says"),
        [
            ({"max_anchor": 9}, "--params: unknown parameter 'max_anchor'; did you mean 'max_anchors'?"),
            ({"max_anchors": "512"}, "max_anchors is '512'; it must be an integer"),
        ],
    )
    def test_parameters_of_a_pasted_message_that_are_nearly_right_are_refused(
        self, workspace: Workspace, drafter: Bundle, changed: Mapping[str, Any], says: str
    ) -> None:
        given = {**PARAMS, **changed}
        job: dict[str, Any] = {"bundle": drafter, "module": "dflash.probes.oom", "params": given}
        a_failed_run(workspace, "r", [raised(MYSTERY)], **job)
        assert explained(workspace, "r").answer
        with pytest.raises(UsageError, match=re.escape(says)):
            explaining.explain_text(workspace, [MYSTERY], params=given, experiment=None)

    def test_a_run_that_makes_no_scores_at_all_is_told_the_same(
        self, runs: Workspace, drafter: Bundle
    ) -> None:
        params = {**PARAMS, "compile": True}
        job: dict[str, Any] = {"bundle": drafter, "module": "dflash.probes.oom", "params": params}
        a_failed_run(runs, "compiled", [raised(MYSTERY)], **job)
        assert "may not be this configuration's" in explained(runs, "compiled").answer

    def test_runs_of_other_programs_or_from_long_ago_are_not_compared(
        self, workspace: Workspace, drafter: Bundle
    ) -> None:
        job: dict[str, Any] = {"bundle": drafter, "module": "dflash.probes.oom"}
        a_failed_run(workspace, "old", **job, params=PARAMS, age_s=31 * 86400)
        a_failed_run(workspace, "bench", bundle=drafter, module="dflash.probes.bench", params=PARAMS)
        a_failed_run(workspace, "own", [raised(MYSTERY)], **job, params={**PARAMS, "max_anchors": 128})
        found = explained(workspace, "own")
        assert found.naming is not None
        assert found.naming.candidates == ()

    def test_a_run_whose_parameters_are_refused_keeps_the_own_from_nothing(
        self, workspace: Workspace, drafter: Bundle
    ) -> None:
        job: dict[str, Any] = {"bundle": drafter, "module": "dflash.probes.oom"}
        a_failed_run(workspace, "wrong", **job, params={"max_anchors": -1})
        a_failed_run(workspace, "own", [raised(MYSTERY)], **job, params=PARAMS)
        assert "attention scores, [32, 8192, 15452]" in explained(workspace, "own").answer


class TestWhatRecordsTell:
    def test_a_message_in_the_output_has_its_line_and_stream(self, workspace: Workspace) -> None:
        text = f"step 1\nstep 2\ntorch.OutOfMemoryError: {PLAIN}\n"
        a_failed_run(workspace, "r", [out(text[:90]), out(text[90:], off=90), raised(PLAIN)])
        found = explaining.explain_run(workspace, "r")
        assert found.explanation is not None
        assert found.where == "main.stderr"
        assert found.explanation.message is not None
        assert found.explanation.message.line == 3

    def test_bytes_that_are_no_text_do_not_hide_it(self, workspace: Workspace) -> None:
        raw = base64.b64encode(b"\xff\xfe " + PLAIN.encode()).decode()
        a_failed_run(workspace, "r", [out("", b64=raw)])
        assert "22.00 GiB asked" in explained(workspace, "r").answer

    def test_the_rank_that_failed_is_the_one_that_is_explained(self, workspace: Workspace) -> None:
        small = MESSAGE.format(asked="3.00 GiB", free="1.00 GiB")
        records = [
            out(f"{small}\n", "rank0"),
            raised(small, "rank0"),
            ("event", {"proc": "rank0", "event": {"kind": "oom", "asked_bytes": 3 * GIB, "module": "a"}}),
            ("event", {"proc": "rank1", "event": {"kind": "oom", "asked_bytes": 22 * GIB, "module": "b"}}),
            out(f"{PLAIN}\n", "rank1"),
            raised(PLAIN, "rank1"),
        ]
        a_failed_run(workspace, "r", records, end={"proc": "rank0"}, processes=2)
        found = explained(workspace, "r")
        assert found.asked[0] == "3.00 GiB on GPU 0, by rank0"
        assert found.capture is not None
        assert found.capture.module == "a"

    @pytest.mark.parametrize("is_own_record", [True, False])
    def test_what_the_process_captured_is_taken(self, workspace: Workspace, is_own_record: bool) -> None:
        event = {
            "kind": "oom",
            "device": 0,
            "asked_bytes": 22 * GIB,
            "free_bytes": 10 * GIB,
            "stack": ["loss.py:201 logits"],
            "module": "lm_head",
            "owners": [{"category": "logits", "bytes": 40 * GIB, "blocks": 3}],
            "snapshot": "orch-memory/main-1.pickle",
        }
        fields = {name: value for name, value in event.items() if name != "kind"}
        record = ("oom", {"proc": "main", **fields}) if is_own_record else ("event", {"event": event})
        a_failed_run(workspace, "r", [record, raised(PLAIN)])
        found = explained(workspace, "r")
        assert "22.00 GiB asked in lm_head at loss.py:201 logits" in found.answer
        assert "  logits: 40.00 GiB in 3 blocks" in found.held
        assert any(
            line.endswith("orch fetch r orch-memory/main-1.pickle")
            for line in explanation_lines(found, run_id="r")
        )

    def test_what_stays_after_each_backward_pass_is_a_leak_when_it_rises(self, workspace: Workspace) -> None:
        # As an H200 told it of a list that keeps each step's graph, below a limit of 8 GiB.
        event = {
            "asked_bytes": 142606336,
            "requested_bytes": 142606336,
            "limit_bytes": 8037531648,
            "free_bytes": 141305184256,
            "allocated_bytes": 7878294528,
            "reserved_bytes": 8017412096,
            "autograd_node": "AddmmBackward0",
            "phase": "backward",
            "after_backwards": {"stride": 2, "bytes": [2**28 * step for step in range(2, 29, 2)]},
        }
        limited = MESSAGE.format(asked="136.00 MiB", free="131.60 GiB")
        a_failed_run(workspace, "r", [("oom", {"proc": "main", **event}), raised(limited)])
        found = explained(workspace, "r")
        assert found.cause.name == "leak across iterations"
        assert "by 0.25 GiB each time" in found.answer

    def test_a_leak_of_one_rank_is_found_whichever_told_last(self, workspace: Workspace) -> None:
        rising = {"stride": 1, "bytes": [GIB * step for step in range(3, 25)]}
        flat = {"stride": 1, "bytes": [24 * GIB] * 22}
        event = {"asked_bytes": 22 * GIB, "allocated_bytes": 24 * GIB, "reserved_bytes": 25 * GIB}
        records = [
            ("event", {"proc": proc, "event": {"kind": "oom", **event, "after_backwards": samples}})
            for proc, samples in (("rank0", rising), ("rank1", flat))
        ]
        end = {"proc": "rank0"}
        a_failed_run(workspace, "r", [*records, raised(PLAIN, "rank0")], end=end, processes=2)
        found = explained(workspace, "r")
        told = [*found.cause.evidence, *found.notes]
        assert (
            "rank0: what torch holds after a backward pass went from 3.00 GiB to 24.00 GiB in 21 steps"
            in told
        )

    @pytest.mark.parametrize(
        ("failed", "is_leak"),
        [
            ({}, True),
            ({"proc": "rank1"}, False),
            ({"device": 1}, False),
            ({"phase": "optimizer", "owners": [{"category": "gradient", "bytes": GIB}]}, False),
            ({"phase": "optimizer", "owners": [{"category": "optimizer_state", "bytes": GIB}]}, True),
            (
                {"after_backwards": {"stride": 2**62, "bytes": [2**62 + step * 2**58 for step in range(8)]}},
                False,
            ),
            ({"after_backwards": {"stride": 1, "bytes": list(range(8))}, "allocated_bytes": None}, False),
        ],
        ids=["own", "another rank", "another card", "first states", "later", "no card's", "bytes"],
    )
    def test_a_leak_is_one_of_the_card_and_process_that_failed(
        self, workspace: Workspace, failed: dict[str, Any], is_leak: bool
    ) -> None:
        small = MESSAGE.format(asked="2.00 GiB", free="1.00 GiB")
        event = {
            "kind": "oom",
            "device": 0,
            "asked_bytes": 2 * GIB,
            "free_bytes": GIB,
            "allocated_bytes": 83 * GIB,
            "reserved_bytes": 84 * GIB,
            "after_backwards": {"stride": 1, "bytes": [GIB * step for step in range(20, 84, 4)]},
            **failed,
        }
        proc = event.pop("proc", "rank0")
        flat = {"device": 0, "asked_bytes": 2 * GIB, "free_bytes": GIB, "allocated_bytes": 83 * GIB}
        records: list[tuple[str, dict[str, Any]]] = [("event", {"proc": proc, "event": event})]
        if event["device"] != 0:
            records.insert(0, ("oom", {"proc": "rank0", **flat}))
        end = {"proc": "rank0"}
        a_failed_run(workspace, "r", [*records, raised(small, "rank0")], end=end, processes=2)
        found = explained(workspace, "r")
        assert (found.cause.name == "leak across iterations") == is_leak
        assert is_leak or not any("after a backward pass" in note for note in found.notes)

    def test_samples_that_rise_to_the_end_are_a_leak(self, workspace: Workspace) -> None:
        cards = ("cards", {"cards": [{"uuid": "GPU-1", "index": 0, "name": "H200"}]})
        samples = [
            ("gpus", {"cards": [{"uuid": "GPU-1", "used_mib": 10_000 + 8_000 * step}]}) for step in range(10)
        ]
        small = MESSAGE.format(asked="2.00 GiB", free="1.00 GiB")
        a_failed_run(workspace, "r", [cards, *samples, raised(small)])
        found = explained(workspace, "r")
        assert found.cause.name == "leak across iterations"
        assert (
            "memory in use on card 0 (H200) went from 9.77 GiB to 80.08 GiB in 9 steps"
            in found.cause.evidence
        )

    def test_metrics_of_memory_that_rise_are_one_too(self, workspace: Workspace) -> None:
        steps = [
            ("event", {"event": {"kind": "metric", "name": "train.allocated_gib", "value": 4.0 * step}})
            for step in range(1, 21)
        ]
        small = MESSAGE.format(asked="2.00 GiB", free="1.00 GiB")
        a_failed_run(workspace, "r", [*steps, raised(small)])
        found = explained(workspace, "r")
        assert found.cause.name == "leak across iterations"
        assert "by 4.00 GiB each time" in found.answer
        peaks = [
            ("event", {"event": {"kind": "metric", "name": "train.peak_allocated_gib", "value": 4.0 * step}})
            for step in range(1, 21)
        ]
        a_failed_run(workspace, "peaks", [*peaks, raised(small)])
        assert explained(workspace, "peaks").cause.name != found.cause.name, "a peak only ever rises"

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("allocated_gib", 1e305),
            ("allocated_gib", 10**400),
            ("allocated_bytes", 2**63),
            ("reserved_mib", -1),
            ("allocated_gib", True),
        ],
        ids=["float", "integer", "column", "negative", "bool"],
    )
    def test_metrics_that_no_card_could_hold_are_left_out(
        self, workspace: Workspace, name: str, value: float
    ) -> None:
        steps = [("event", {"event": {"kind": "metric", "name": name, "value": value}})] * 20
        a_failed_run(workspace, "r", [*steps, raised(PLAIN)])
        assert explained(workspace, "r").cause.name == "too large"

    @pytest.mark.parametrize("used", [10**400, -1, True, "many"], ids=["integer", "negative", "bool", "text"])
    def test_sizes_that_no_card_could_hold_are_left_out(self, workspace: Workspace, used: Any) -> None:
        records = [
            ("cards", {"cards": [{"uuid": "GPU-1", "index": 0, "name": "H200"}]}),
            *[("gpus", {"cards": [{"uuid": "GPU-1", "used_mib": used}]})] * 20,
            ("facts", {"memory_limit": [{"index": 0, "allocator_bytes": used}, {"index": used}]}),
            ("stranger", {"uuid": "GPU-1", "pid": 7, "argv": ["serve"], "used_mib": used}),
            raised(PLAIN),
        ]
        a_failed_run(workspace, "r", records)
        found = explained(workspace, "r")
        assert found.balance.limit_bytes is None
        assert "a stranger came onto the card meanwhile: process 7 serve" in found.notes

    def test_names_of_processes_without_end_take_no_memory_without_end(self) -> None:
        evidence = Evidence()
        for number in range(3000):
            proc = f"p{number}"
            evidence.read({"kind": "out", "proc": proc, "stream": "stderr", "text": "step\n"})
            evidence.read({"kind": "exception", "proc": proc, "type": "E", "message": "x"})
        evidence.read({"kind": "out", "proc": "p0", "stream": "stderr", "text": f"{PLAIN}\n"})
        told = evidence.told()
        assert len(told.found) == len(told.exceptions) == MOST_STREAMS
        assert told.output_of(None)[0] == "p0.stderr", "those that are known are read to their end"

    def test_the_run_s_own_memory_limit_is_named(self, workspace: Workspace) -> None:
        limit = {"index": 0, "limit_bytes": 96 * GIB, "allocator_bytes": 90 * GIB, "problem": None}
        text = MESSAGE.format(asked="22.00 GiB", free="60.00 GiB")
        a_failed_run(
            workspace, "r", [("facts", {"memory_limit": [limit]}), raised(text)], memory_limit_bytes=96 * GIB
        )
        found = explained(workspace, "r")
        assert found.cause.name == "memory limit"
        assert "torch may take 90.00 GiB of this card, and it holds 84.15 GiB" in found.cause.evidence

    def test_a_library_that_got_nothing_is_told_what_torch_kept(self, workspace: Workspace) -> None:
        card = {"index": 0, "name": "H200", "uuid": "GPU-1", "total_bytes": 140 * GIB}
        peak = {"index": 0, "allocated_bytes": 90 * GIB, "reserved_bytes": 138 * GIB}
        text = "NCCL error: unhandled cuda error\nncclUnhandledCudaError: Cuda failure 2 'out of memory'"
        records = [
            ("facts", {"devices": [card]}),
            raised(text, kind="torch.distributed.DistBackendError"),
            ("facts", {"peak_memory": [peak]}),
        ]
        a_failed_run(workspace, "r", records)
        found = explained(workspace, "r")
        assert found.answer == "out of memory: NCCL got no memory on the card beside torch's allocator"
        says = "torch kept up to 138.00 GiB of the card's 140.00 GiB, which others cannot use"
        assert found.cause.evidence == (says,)

    def test_a_stranger_that_came_is_told(self, workspace: Workspace) -> None:
        stranger = {"uuid": "GPU-1", "pid": 7, "argv": ["python", "serve\x1b.py"], "used_mib": 2048}
        a_failed_run(workspace, "r", [("stranger", stranger), raised(PLAIN)])
        says = "a stranger came onto the card meanwhile with 2.00 GiB: process 7 python serve\\x1b.py"
        assert says in explained(workspace, "r").notes

    @pytest.mark.parametrize(("scope", "name"), [("cgroup", "container limit"), ("host", "host memory")])
    def test_the_kernel_s_word_is_enough(self, workspace: Workspace, scope: str, name: str) -> None:
        killed = ("exit", {"oom_kill": 1, "oom_scope": scope, "rusage": {"peak_rss_bytes": 30 * GIB}})
        end = {"outcome": "signalled", "code": None, "signal": 9}
        row = a_failed_run(workspace, "r", [out("Killed\n"), killed], end=end)
        found = explaining.explain_run(workspace, "r")
        assert found.explanation is not None
        assert found.explanation.cause.name == name
        assert found.outcome is not None
        assert explaining.may_have_died_of_memory(row, found.outcome)

    def test_a_run_that_failed_for_another_reason_is_not_explained_by_itself(
        self, workspace: Workspace
    ) -> None:
        row = a_failed_run(workspace, "r", [out(f"caught: {PLAIN}\n"), raised("x is 3", kind="ValueError")])
        found = explaining.explain_run(workspace, "r")
        assert found.explanation is not None, "who asks is told what the log holds"
        assert found.outcome is not None
        assert not explaining.may_have_died_of_memory(row, found.outcome)

    @pytest.mark.parametrize(
        ("records", "end", "says"),
        [
            ([raised("x is 3", kind="ValueError")], {}, "ended with ValueError"),
            ([], {"code": 0}, "succeeded"),
        ],
    )
    def test_a_message_after_which_the_run_went_on_says_so(
        self, workspace: Workspace, records: list[Any], end: dict[str, Any], says: str
    ) -> None:
        a_failed_run(workspace, "r", [out(f"caught: {PLAIN}\n"), *records], end=end)
        assert explained(workspace, "r").answer.endswith(f"; but the run went on after it, and {says}")

    @pytest.mark.parametrize(
        ("end", "is_killed"),
        [
            ({"code": 3}, False),
            ({"code": 137}, True),
            ({"outcome": "signalled", "code": None, "signal": 9}, True),
        ],
    )
    def test_who_prints_that_it_was_killed_is_believed_when_it_was(
        self, workspace: Workspace, end: dict[str, Any], is_killed: bool
    ) -> None:
        a_failed_run(workspace, "r", [out("./go.sh: line 3:  1234 Killed   python train.py\n")], end=end)
        assert (explaining.explain_run(workspace, "r").explanation is not None) == is_killed

    def test_what_grows_and_is_not_what_torch_held_is_no_leak(self, workspace: Workspace) -> None:
        steps = [
            ("event", {"event": {"kind": "metric", "name": "dataset_reserved_bytes", "value": MIB * step}})
            for step in range(1, 21)
        ]
        small = MESSAGE.format(asked="2.00 MiB", free="1.00 GiB")
        a_failed_run(workspace, "r", [*steps, raised(small)])
        assert explained(workspace, "r").cause.name != "leak across iterations"

    def test_output_is_searched_for_a_bounded_time(self, workspace: Workspace) -> None:
        a_failed_run(workspace, "r", [out(f"{PLAIN}\n"), raised(PLAIN)])
        found = explaining.explain_run(workspace, "r", patience_s=0.0)
        assert found.facts.found.count == 0
        assert found.explanation is not None, "the exception is told all the same"

    def test_a_run_that_ended_well_has_nothing_to_explain(self, workspace: Workspace) -> None:
        row = a_failed_run(workspace, "r", [out("step 1 of 2, 3.00 GiB in use\n")], end={"code": 0})
        found = explaining.explain_run(workspace, "r")
        assert found.explanation is None
        assert found.outcome is not None
        assert not explaining.may_have_died_of_memory(row, found.outcome)

    def test_records_that_were_altered_are_no_evidence(self, workspace: Workspace) -> None:
        a_failed_run(workspace, "r", [out(f"{PLAIN}\n")])
        path = workspace.folder("r").segment(0)
        path.write_bytes(path.read_bytes().replace(b"22.00", b"15.09"))
        with pytest.raises(RecordsAltered):
            explaining.explain_run(workspace, "r")

    def test_code_that_is_gone_is_named_and_the_rest_is_explained(self, workspace: Workspace) -> None:
        row = a_failed_run(workspace, "r", [raised(PLAIN)])
        (workspace.home / "bundles" / f"{row.bundle}.json").unlink(missing_ok=True)
        shutil.rmtree(workspace.home / "bundles")
        found = explained(workspace, "r")
        assert "its code is not here, which would say which tensors it makes" in found.tensor[0]


class TestWhatWouldFit:
    @pytest.fixture
    def bundle(self, workspace: Workspace) -> Bundle:
        folder = workspace.project / "payloads" / "probe"
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
        (folder / "estimate.py").write_text(ESTIMATE)
        return build_bundle(folder, workspace.store)

    def test_alternatives_stand_with_their_peaks_and_verdicts(
        self, workspace: Workspace, bundle: Bundle
    ) -> None:
        card = {"index": 0, "name": "RTX", "uuid": "GPU-1", "total_bytes": 95 * GIB, "capability": [12, 0]}
        records = [("facts", {"devices": [card]}), raised(PLAIN)]
        a_failed_run(
            workspace, "r", records, bundle=bundle, params={"size_gib": 120}, memory_limit_bytes=None
        )
        found = explaining.with_outlook(workspace, explaining.explain_run(workspace, "r")).explanation
        assert found is not None
        assert found.outlook is not None
        assert found.outlook.verdict == "does not fit"
        assert found.outlook.capacity_bytes == 94 * GIB, "the card that the run had"
        verdicts = [remedy.verdict for remedy in found.remedies]
        assert "fits" in verdicts
        assert verdicts == sorted(verdicts, key=lambda verdict: verdict != "fits")
        assert any(line.endswith(": fits") for line in remedy_lines(found))
        titles = [line[:9].strip() for line in remedy_lines(found)]
        assert [title for title in titles if title] == ["predicted", "next"]
        left_out = "not estimated, which would take longer: max_anchors=16; max_anchors=8"
        assert [*remedy_lines(found)][-1].strip() == left_out

    def test_an_estimate_that_fails_is_told_and_the_rest_is_explained(
        self, workspace: Workspace, bundle: Bundle
    ) -> None:
        params = {"size_gib": 120, "fault": "refused"}
        a_failed_run(workspace, "r", [raised(PLAIN)], bundle=bundle, params=params, memory_limit_bytes=None)
        found = explaining.with_outlook(workspace, explaining.explain_run(workspace, "r")).explanation
        assert found is not None
        (line,) = found.foreseen
        assert line.startswith("nothing is predicted: ")
        assert "seq_len is -1" in line
        assert any(line in shown for shown in remedy_lines(found))


class TestHowItIsShown:
    def test_no_line_can_act_on_a_terminal(self, workspace: Workspace) -> None:
        text = f"\x1b[2J{PLAIN}".replace("Including", "Incl\u202e\x07uding")
        argv = ["serve", "\x1b]0;x\x07"]
        records = [("stranger", {"pid": 7, "argv": argv}), raised(text, "rank0\x1b[31m")]
        a_failed_run(workspace, "r", records, end={"proc": "rank0\x1b[31m"})
        found = explained(workspace, "r")
        for line in (*explanation_lines(found), *remedy_lines(found), *short_lines(found, "r")):
            assert line.isprintable(), line

    def test_the_short_form_has_twelve_lines_at_most_and_says_where_to_read_on(
        self, workspace: Workspace
    ) -> None:
        owners = [{"category": name, "bytes": GIB, "blocks": 1} for name in ("parameter", "scores", "logits")]
        event = {"kind": "oom", "asked_bytes": 22 * GIB, "owners": owners, "stack": ["a"] * 16}
        a_failed_run(workspace, "r", [("event", {"event": event}), raised(PLAIN)])
        lines = short_lines(explained(workspace, "r"), "r")
        assert 8 <= len(lines) <= 12
        assert lines[-1] == "  more: orch explain r"
        assert short_lines(explained(workspace, "r"), "r", 2) == [lines[0], lines[-1]]

    def test_json_holds_all_of_it(self, workspace: Workspace, drafter: Bundle) -> None:
        size = 32 * 8192 * 15452 * 4
        event = {
            "kind": "oom",
            "requested_bytes": size,
            "stack": ["flex.py:7 _attend", "layers.py:9 forward"],
        }
        records = [("event", {"event": event}), raised(MYSTERY)]
        a_failed_run(workspace, "r", records, bundle=drafter, module="dflash.probes.oom", params=PARAMS)
        found = explained(workspace, "r")
        values = json.loads(json.dumps(explanation_json(found, run_id="r", where=None)))
        assert values["answer"] == found.answer
        best = values["tensor"]["candidates"][0]
        assert best["expression"] == [
            "num_attention_heads",
            "max_anchors · block_size",
            "seq_len + max_anchors · block_size",
        ]
        assert best["bytes"] == size
        assert "the function that makes it is in the stack: flex.py:7 _attend" in best["evidence"]
        assert values["would_fit"][0]["changes"] == {"compile": True}
        assert explanation_json(None, run_id="r", where=None)["answer"] is None

    def test_a_run_s_row_is_not_needed_to_say_that_it_prepared_something(self, workspace: Workspace) -> None:
        row = a_failed_run(workspace, "r", [out("Killed\n")])
        outcome = explaining.explain_run(workspace, "r").outcome
        assert outcome is not None
        prepared = replace(row, job={**row.job, "prepares": {"kind": "venv", "path": "requirements.txt"}})
        assert explaining.may_have_died_of_memory(row, outcome)
        assert not explaining.may_have_died_of_memory(prepared, outcome)
