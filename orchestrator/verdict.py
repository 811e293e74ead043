"""What a run's outcome means for its experiment (pure).

A state is what the process did, a verdict what that is worth: a run out of memory that was to be so is FAILED
and good.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from orchestrator.experiment import Bounds, Expectation
from orchestrator.lifecycle import State
from orchestrator.outcome import Outcome, is_oom_type
from orchestrator.text import did_you_mean

CUT_REASON = "part of the records was cut by the run's log limit before it came here, and may have said more"


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What an outcome means for its experiment.

    ``name`` is ok, unverified, oom, failed, killed, timeout, cancelled, refused, lost, mismatch,
    out_of_bounds or altered; ``is_good`` says that it is one of the expected ones.
    """

    name: str
    is_good: bool
    reasons: tuple[str, ...]


def judge(outcome: Outcome, expectation: Expectation) -> Verdict:
    """Names what happened and compares it with what was expected.

    A run whose environment was not the one asked for is a ``mismatch`` however it ended: its result belongs
    to another experiment. Bounds are judged only when the name is an expected one; a metric outside of them,
    missing or not finite turns it into ``out_of_bounds``. A run that ended well but never proved that the
    asked allocator settings and devices took effect is ``unverified``.
    """
    name, reasons = _name(outcome)
    if name in expectation.verdicts:
        broken = tuple(_broken_bounds(outcome.metrics, expectation.metrics))
        broken = (*broken, CUT_REASON) if broken and outcome.is_cut else broken
        name, reasons = ("out_of_bounds", broken) if broken else (name, reasons)
    is_good = name in expectation.verdicts
    if not is_good:
        reasons = (*reasons, f"expected {' or '.join(expectation.verdicts)}")
    return Verdict(name=name, is_good=is_good, reasons=reasons)


def _name(outcome: Outcome) -> tuple[str, tuple[str, ...]]:
    ended = _how_it_ended(outcome)
    if outcome.state in (State.LOST, State.REFUSED):
        return str(outcome.state), ended
    if outcome.mismatches:
        return "mismatch", (*outcome.mismatches, *ended)
    if outcome.end == "exited" and outcome.exit_code == 0:
        doubt = (CUT_REASON,) if outcome.is_cut else ()
        return ("unverified", (*outcome.unproven, *doubt)) if outcome.unproven else ("ok", ())
    if _is_oom(outcome):
        return "oom", ended
    return str(outcome.state), ended


def _is_oom(outcome: Outcome) -> bool:
    """A rank out of memory leaves its peers waiting, and what watches over them may end one by a signal."""
    is_of_another = outcome.exception_proc not in (None, outcome.first_proc)
    has_ended = outcome.end == "exited" or (outcome.end == "signalled" and is_of_another)
    return has_ended and is_oom_type(outcome.exception_type or "")


def _how_it_ended(outcome: Outcome) -> tuple[str, ...]:
    parts = []
    if outcome.state is State.LOST:
        parts.append(_why_lost(outcome))
    elif outcome.state is State.FAILED:
        parts.append(f"exit code {outcome.exit_code}")
    elif outcome.signal is not None:
        parts.append(f"signal {outcome.signal}")
    if outcome.state is State.KILLED and outcome.oom_kill is not None:
        parts.append(f"the kernel killed for memory meanwhile, in this {outcome.oom_kill}")
    if outcome.reason is not None:
        parts.append(outcome.reason)
    if outcome.missing_module is not None:
        parts.append(
            f"Python module {outcome.missing_module!r} is missing there: install it (setup: does), set "
            "'python:' in inventory.yaml, or ship it: a script travels alone, a payload as a package"
        )
    elif outcome.exception_type is not None and outcome.exit_code != 0:
        whose = "" if outcome.exception_proc is None else f"{outcome.exception_proc}: "
        parts.append(f"{whose}{outcome.exception_type}: {outcome.exception_message or ''}".rstrip(": "))
    return tuple(parts)


def _why_lost(outcome: Outcome) -> str:
    if outcome.end is None:
        return "the records hold no end"
    return f"unknown end {outcome.end!r}" if outcome.is_end_sealed else "the end of the records is not sealed"


def _broken_bounds(metrics: Mapping[str, float], bounds: Mapping[str, Bounds]) -> Iterable[str]:
    for name, bound in bounds.items():
        value = metrics.get(name)
        if value is None:
            yield f"metric {name!r} was never reported{did_you_mean(name, metrics)}"
        elif not math.isfinite(value):
            yield f"metric {name!r} is {value}"
        elif bound.min is not None and value < bound.min:
            yield f"metric {name!r} is {value:.6g}, below its minimum {bound.min:.6g}"
        elif bound.max is not None and value > bound.max:
            yield f"metric {name!r} is {value:.6g}, above its maximum {bound.max:.6g}"
