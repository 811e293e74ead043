"""An estimate that a host makes, where this machine has no torch: a run of the payload's program there."""

from __future__ import annotations

from orchestrator import payload_programs, runs, starting
from orchestrator.errors import NeedsTorch, ProgramFailed, UsageError
from orchestrator.experiment import Experiment
from orchestrator.following import Watcher
from orchestrator.inventory import Host
from orchestrator.log_raw import RawOutput
from orchestrator.mirror_reader import checked_records
from orchestrator.payload_answers import Estimate
from orchestrator.payload_programs import ESTIMATE, Question
from orchestrator.program_folder import MOST_ANSWER_BYTES
from orchestrator.runs import Report
from orchestrator.workspace import Workspace

__all__ = ["estimate_on"]

NAME = "estimate"


def estimate_on(
    workspace: Workspace, experiment: Experiment, question: Question, host: Host, watcher: Watcher
) -> tuple[Estimate, str | None]:
    """Returns an estimate of ``experiment``, and the id of the run on ``host`` that made it; None where it
    was kept from an earlier one.

    Raises:
        UsageError: a parameter is refused.
        NeedsTorch, ProgramFailed: it could not be made there.
        HostError: the run could not be started.
    """
    program = f"{question.entry.partition('.')[0]}.{ESTIMATE}"
    asked = Experiment(
        name=NAME,
        path=experiment.path,
        payload=experiment.payload,
        module=program,
        args=tuple(question.words()),
        params=question.params,
        setup=experiment.setup,
        timeout_s=payload_programs.ESTIMATE_LIMIT_S,
    )
    plan = starting.prepare(workspace, asked, host)
    kept = payload_programs.kept_on(workspace, plan.bundle, question, host)
    if kept is not None:
        return kept, None
    run_id = plan.job["run_id"]
    following = starting.launch(workspace, plan, watcher)
    assert following is not None
    with following:
        for _ in following.records(watcher):
            pass
    report = runs.conclude(workspace, run_id)
    if report.verdict is None or not report.verdict.is_good:
        raise _failure(workspace, report, program)
    answer = _output(workspace, report, "stdout")
    return payload_programs.keep_on(workspace, plan.bundle, question, host, answer), run_id


def _output(workspace: Workspace, report: Report, stream: str) -> bytes:
    """Returns what the run wrote to a stream, the beginning of it where it is too much for an answer."""
    row = report.row
    raw, data = RawOutput(host=row.host, run_id=row.run_id, proc=None, stream=stream), bytearray()
    for record in checked_records(workspace.folder(row.run_id)):
        if len(data) <= MOST_ANSWER_BYTES:
            data += raw.bytes_of(record)
    return bytes(data)


def _failure(workspace: Workspace, report: Report, program: str) -> UsageError | ProgramFailed:
    said = payload_programs.last_line(_output(workspace, report, "stderr"), program)
    where, code = f"{report.row.host}: {program}", report.outcome.exit_code
    if code == payload_programs.REFUSED:
        return UsageError(f"{where}: {said}")
    if report.outcome.missing_module == "torch":
        return NeedsTorch(f"{where}: its Python has no torch; set 'venv:' or 'python:' in inventory.yaml")
    if code == payload_programs.CANNOT:
        return NeedsTorch(f"{where}: {said}")
    reasons = "" if report.verdict is None else "; ".join((report.verdict.name, *report.verdict.reasons))
    return ProgramFailed(f"{where}: {reasons}; see: orch logs {report.row.run_id}")
