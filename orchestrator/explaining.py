"""Gathers what is known of a run, or of a pasted message, that speaks of memory, and has it explained.

Reads the mirror, the ledger and the run's code as they are here, and asks the payload's own programs: its
`shapes` to name a tensor, of this run's parameters and of recent other runs', and its `estimate` for what
would fit. Nothing is asked of a host. What cannot be had is said in the explanation, which does without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from signal import SIGKILL
from typing import Any

from orchestrator import payload_programs
from orchestrator.bundle import Bundle
from orchestrator.errors import OrchError, ProgramFailed, UsageError
from orchestrator.experiment import Experiment
from orchestrator.forensics.asked import AskedSize
from orchestrator.forensics.captures import Capture
from orchestrator.forensics.causes import Surroundings
from orchestrator.forensics.explain import Explanation, Facts, asked_size, device_of, explain, failure_of
from orchestrator.forensics.growth import Growth, Series, steady_growth
from orchestrator.forensics.message_kinds import KILLED
from orchestrator.forensics.messages import Found, OomMessage, find_in, parse
from orchestrator.forensics.naming import Naming, name_tensor
from orchestrator.forensics.outlook import Outlook, Remedy
from orchestrator.forensics.placing import placed
from orchestrator.forensics.shapes import ShapeSet, read_shape_sets
from orchestrator.host_cards import HostCard
from orchestrator.ledger import RunRow
from orchestrator.lifecycle import State
from orchestrator.memory_evidence import Evidence, Told
from orchestrator.memory_subject import Subject, canonical, label_of, of_run, of_text
from orchestrator.mirror_reader import checked_records
from orchestrator.outcome import Outcome, is_oom_type, outcome_of
from orchestrator.payload_answers import Estimate
from orchestrator.payload_programs import ESTIMATE, SHAPES, Question
from orchestrator.supervisor.ranks import MAIN
from orchestrator.text import printable
from orchestrator.workspace import Workspace

__all__ = [
    "Explained",
    "can_be_predicted",
    "explain_run",
    "explain_text",
    "may_have_died_of_memory",
    "with_outlook",
]


MOST_LEFT_OUT = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Explained:
    """An explanation, None where nothing says that memory was out, and what it was made from.

    ``where`` is the stream that a message was printed to, ``card`` the one that it was about, in the form
    that estimates take, None where that is not known.
    """

    explanation: Explanation | None
    facts: Facts
    subject: Subject
    where: str | None = None
    card: str | None = None
    outcome: Outcome | None = None


def explain_run(workspace: Workspace, run_id: str, *, patience_s: float | None = None) -> Explained:
    """Explains a run by what is mirrored of it here, without predictions.

    ``patience_s`` bounds the time for which its output is searched.

    Raises:
        UnknownName: there is no such run.
        RecordsAltered: its records are not what they were.
    """
    row, evidence = workspace.ledger.get(run_id), Evidence(patience_s=patience_s)
    outcome = outcome_of(evidence.passing(checked_records(workspace.folder(run_id))))
    told, subject = evidence.told(), of_run(workspace, row)
    where, facts = _facts(outcome, told, row)
    device = device_of(*failure_of(facts)) or 0
    named = _named(workspace, subject, replace(facts, allocator_bytes=told.limits.get(device)))
    card = HostCard.of(next(iter(told.cards[device:]), None))
    return Explained(
        explanation=explain(named),
        facts=named,
        subject=subject,
        where=where or None,
        card=None if card is None else card.text,
        outcome=outcome,
    )


def _facts(outcome: Outcome, told: Told, row: RunRow) -> tuple[str, Facts]:
    """Returns where the message that counts was printed, and what the records say of its process."""
    proc = outcome.exception_proc or outcome.first_proc
    where, found = told.output_of(proc)
    found = _believed(found, outcome)
    ended_by = _in_output(parse(told.exceptions.get(proc or MAIN, "")), found)
    facts = Facts(
        proc=None if proc == MAIN else proc,
        ended_by=ended_by,
        went_on=None if ended_by is not None or not found.messages else _other_end(outcome),
        found=found,
        captures=_captures_of(told, proc),
        around=_surroundings(outcome, told, row),
    )
    _, capture = failure_of(facts)
    growths = _growths(told, capture, proc or MAIN)
    return where, replace(facts, around=replace(facts.around, growths=growths))


def _believed(found: Found, outcome: Outcome) -> Found:
    """Leaves out who is said to have been killed where nothing else says so: output is words."""
    is_killed = outcome.signal == SIGKILL or outcome.exit_code == 128 + SIGKILL
    if is_killed or outcome.oom_kill is not None:
        return found
    kept = tuple(
        message
        for message in found.messages
        if message.detail != KILLED or "DataLoader worker" in (message.text or "")
    )
    return found if kept == found.messages else Found(count=found.count if kept else 0, messages=kept)


def _other_end(outcome: Outcome) -> str | None:
    """Returns how a run ended that says itself that it was not for memory; None where it does not say."""
    if outcome.oom_kill is not None:
        return None
    if outcome.state is State.SUCCEEDED:
        return "succeeded"
    kind = outcome.exception_type
    return None if kind is None or is_oom_type(kind) else f"ended with {kind}"


def _surroundings(outcome: Outcome, told: Told, row: RunRow) -> Surroundings:
    return Surroundings(
        killed_in=outcome.oom_kill,
        peak_rss_bytes=outcome.peak_rss_bytes,
        peak_reserved_bytes=max((peak.reserved_bytes for peak in outcome.peak_memory), default=None),
        card_bytes=outcome.devices[0].total_bytes if outcome.devices else None,
        strangers=told.strangers,
        settings=outcome.allocator_settings,
        is_limited=bool(row.job.get("memory_limit_bytes")),
    )


def _growths(told: Told, capture: Capture | None, proc: str) -> tuple[Growth, ...]:
    """Returns what grew: of what is left by backward passes only on the card and in the process that failed.

    Where the optimizer's first states are being made no step has ended, so what grew is no leak.
    """
    if capture is None or capture.proc != proc:
        return told.growths
    if capture.is_in_first_step:
        return ()
    whose = "" if proc == MAIN else f"{proc}: "
    passes = Series(
        name=f"{whose}what torch holds after a backward pass",
        values=capture.after_backwards,
        stride=capture.stride,
    )
    grown = steady_growth(passes)
    return told.growths if grown is None else (*told.growths, grown)


def _in_output(message: OomMessage | None, found: Found) -> OomMessage | None:
    """Returns an exception's message as it was printed, where it was: an exception has no line."""
    if message is None:
        return None
    bare = replace(message, line=None, text=None)
    printed = [each for each in found.messages if replace(each, line=None, text=None) == bare]
    return printed[-1] if printed else replace(message, line=None)


def _captures_of(told: Told, proc: str | None) -> tuple[Capture, ...]:
    """Returns the captures of the process that counts, or all where it told none."""
    own = tuple(capture for capture in told.captures if capture.proc == (proc or MAIN))
    return own or told.captures


def may_have_died_of_memory(row: RunRow, outcome: Outcome) -> bool:
    """Tells whether memory may be why a run ended; one that told another reason did not."""
    if outcome.state not in (State.FAILED, State.KILLED):
        return False
    if outcome.oom_kill is not None or outcome.exception_type is None:
        return row.job.get("prepares") is None
    return parse(f"{outcome.exception_type}: {outcome.exception_message or ''}") is not None


def explain_text(
    workspace: Workspace,
    pieces: Iterable[str],
    *,
    params: Mapping[str, Any] | None,
    experiment: Experiment | None,
) -> Explained:
    """Explains a text that came from somewhere, as if a run with these parameters had printed it.

    ``params`` go over those of ``experiment``.

    Raises:
        UsageError: the experiment's payload cannot be bundled; the payload refuses one of ``params``, or
            knows one that is nearly of that name.
    """
    facts = Facts(found=find_in(pieces, takes_bare=True))
    subject = of_text(workspace, params, experiment)
    named = _named(workspace, subject, facts, is_checked=params is not None)
    return Explained(explanation=explain(named), facts=named, subject=subject)


def can_be_predicted(found: Explained) -> bool:
    """Tells whether the payload can say what would fit, and whether more memory on the card would help."""
    facts, subject = found.facts, found.subject
    is_foreign = facts.naming is not None and facts.naming.not_this_run
    if is_foreign or facts.caution is not None or asked_size(*failure_of(facts)) is None:
        return False
    if subject.bundle is None or subject.module is None or subject.params is None:
        return False
    return payload_programs.has_program(subject.bundle, subject.module, ESTIMATE)


def with_outlook(workspace: Workspace, found: Explained) -> Explained:
    """Adds what the payload's estimate says would fit, which takes seconds for each way that it knows."""
    if not can_be_predicted(found):
        return found
    subject = found.subject
    assert subject.bundle is not None
    assert subject.module is not None
    question = Question(
        entry=subject.module,
        params=subject.params or {},
        card=found.card,
        alloc_conf=subject.alloc_conf,
        memory_limit_bytes=subject.memory_limit_bytes,
        has_alternatives=True,
    )
    try:
        if subject.is_unnamed:
            raise UsageError("name the program with --experiment")
        outlook = _outlook(payload_programs.estimate(workspace, subject.bundle, question))
    except OrchError as error:
        outlook = Outlook(missing=str(error))
    facts = replace(found.facts, outlook=outlook)
    return replace(found, explanation=explain(facts), facts=facts)


# Which tensor


def _named(workspace: Workspace, subject: Subject, facts: Facts, *, is_checked: bool = False) -> Facts:
    """Adds which tensor it is, or why that is not known; ``is_checked``: parameters that the payload refuses
    are an error.
    """
    size = asked_size(*failure_of(facts))
    if size is None:
        return facts
    if subject.bundle is None or subject.module is None:
        return replace(facts, unnamed_why=subject.unknown_why)
    if not payload_programs.has_program(subject.bundle, subject.module, SHAPES):
        package = subject.module.partition(".")[0]
        why = f"the payload ships no {package}/{SHAPES}.py, which would say which tensors it makes"
        return replace(facts, unnamed_why=why)
    try:
        own, others = _shape_sets(workspace, subject.bundle, subject.module, subject)
    except OrchError as error:
        if is_checked and isinstance(error, UsageError):
            raise UsageError(f"--params: {error}") from error
        return replace(facts, unnamed_why=f"the payload cannot say which tensors it makes: {error}")
    if is_checked and own is not None and own.misspelt:
        raise UsageError(f"--params: {'; '.join(own.misspelt)}")
    return _compared(facts, size, own, others)


def _compared(facts: Facts, size: AskedSize, own: ShapeSet | None, others: Sequence[ShapeSet]) -> Facts:
    if own is None and not others:
        return replace(facts, unnamed_why=_NO_PARAMS)
    if own is not None and own.is_foreign:
        return replace(facts, unnamed_why=_FOREIGN_NEXT, caution=_foreign_text(own))
    message, capture = failure_of(facts)
    first = facts.found.first
    naming = placed(name_tensor(size, own=own, others=others), () if capture is None else capture.stack)
    if own is None and not naming.candidates:
        return replace(facts, unnamed_why=f"{_NO_PARAMS}; recent runs here make nothing of that size")
    return replace(
        facts,
        naming=naming,
        shapes_notes=() if own is None else own.notes,
        first_naming=_naming_of(first, own, others) if first is not None and first != message else None,
    )


_NO_PARAMS = "no parameters are known: give --params FILE or --experiment FILE"
_FOREIGN_NEXT = "give the parameters of the program that ran out: --params FILE or --experiment FILE"


def _foreign_text(own: ShapeSet) -> str:
    named = ", ".join(printable(name)[:40] for name in sorted(own.params)[:3])
    return f"none of these parameters is one of the payload's ({named}), so nothing is named"


def _naming_of(message: OomMessage, own: ShapeSet | None, others: Sequence[ShapeSet]) -> Naming | None:
    size = asked_size(message, None)
    return None if size is None else name_tensor(size, own=own, others=others)


def _shape_sets(
    workspace: Workspace, bundle: Bundle, module: str, subject: Subject
) -> tuple[ShapeSet | None, tuple[ShapeSet, ...]]:
    """Returns what this configuration makes, and what the others do; those are left out if one is refused."""
    own = [] if subject.params is None else [(subject.label, subject.params)]
    mine = "" if subject.params is None else canonical(subject.params)
    others = [(label_of(row), row.job["params"]) for row in subject.others]
    others = [(label, params) for label, params in others if canonical(params) != mine]
    try:
        sets = _ask(workspace, bundle, module, [*own, *others])
    except OrchError:
        if not own or not others:
            raise
        sets = _ask(workspace, bundle, module, own)
    return (sets[0], sets[1:]) if own else (None, sets)


def _ask(
    workspace: Workspace, bundle: Bundle, module: str, asked: Sequence[tuple[str, Mapping[str, Any]]]
) -> tuple[ShapeSet, ...]:
    if not asked:
        return ()
    labels, params = [label for label, _ in asked], [given for _, given in asked]
    sets = payload_programs.shapes(workspace, bundle, module, params)
    try:
        return read_shape_sets(sets, labels=labels, params=params)
    except UsageError as error:
        raise ProgramFailed(str(error)) from error


# What would fit


def _outlook(estimate: Estimate) -> Outlook:
    remedies = tuple(
        Remedy(
            label=way.label,
            changes=way.set,
            alloc_conf=way.alloc_conf,
            peak_allocated_bytes=way.peak_allocated_bytes,
            peak_reserved_bytes=way.peak_reserved_bytes,
            verdict=way.verdict,
        )
        for way in estimate.alternatives or ()
    )
    return Outlook(
        peak_allocated_bytes=estimate.peak_allocated_bytes,
        peak_reserved_bytes=estimate.peak_reserved_bytes,
        capacity_bytes=estimate.capacity_bytes,
        error_share=estimate.error_share,
        verdict=estimate.verdict,
        torch=estimate.torch,
        remedies=remedies,
        left_out=tuple(map(printable, estimate.left_out or ()))[:MOST_LEFT_OUT],
    )
