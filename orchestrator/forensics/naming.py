"""Which tensor an allocation was, from its size alone: ranked candidates, each with a confidence and reasons.

A size is compared with every tensor that a payload declares for this run's parameters and for those of other
runs, in each of the ways of `fits`. What fits gets a confidence, never a bare guess.

**Confidence** is the probability of a candidate, by Bayes' rule, among all that fit and the possibility that
the payload declares nothing of the kind. Before anything is compared this run's configuration has nine
tenths, the others share the rest, and within a configuration each tensor weighs the same, an entry as often
as it counts; what fits keeps the share that `fits` says. Against them stands chance: a size of which nothing
is known falls into a printed size as often as that is wide (`AskedSize.chance`), and into a round one more
often (`AskedSize.round_chance`). So two tensors of one size
get half each, `20.00 MiB`, which anything from 1 to 10 MiB prints, gives nobody much, and a size that this
run's parameters name to the megabyte is nearly certain. It is only as good as the payload's list is whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from orchestrator.forensics.asked import AskedSize
from orchestrator.forensics.fits import Fit, Way, find_fits
from orchestrator.forensics.reasons import (
    ADMITTED,
    difference_text,
    differences,
    may_be,
    nearest,
    reasons,
    why_not,
)
from orchestrator.forensics.shapes import ShapeSet, TensorShape

__all__ = ["LIKELY", "Candidate", "Naming", "name_tensor"]

MOST_CANDIDATES, MOST_LABELS, LEAST_CONFIDENCE = 8, 3, 0.02
LEAST_AGAINST_CHANCE = 0.3  # what is hardly likelier than chance is no answer
DECLARED_SHARE = 0.7  # that the payload declares the tensor at all
OWN_SHARE = 0.9  # that a message belongs to the run which it is shown for
# What is not made by these parameters may have been by others from outside, or by code that is not the
# payload's; first of all where nothing that is made fits.
NOT_MADE_SHARE, NOT_MADE_ALONE_SHARE = 0.001, 0.004
CERTAIN, LIKELY = 0.9, 0.5  # confidence, to say so plainly, and to say "probably"
FOREIGN_FROM = 0.6  # confidence in others' tensors, to say that it is not this run's


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A tensor that the size may have been; ``label`` is whose parameters make it, ``also`` who else's do.

    ``differences`` are the parameters in which that run is not like this one: name → (here, there).
    """

    fit: Fit
    label: str
    is_this_run: bool
    confidence: float
    evidence: tuple[str, ...]
    also: tuple[str, ...] = ()
    differences: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)

    @property
    def doubt(self) -> str:
        """The word before its name that its confidence asks for."""
        likely = "probably " if self.confidence >= LIKELY else "perhaps "
        return "" if self.confidence >= CERTAIN else likely

    @property
    def whose(self) -> str | None:
        """In what the run whose tensor it is differs from this one; None where there is nothing to tell."""
        return _whose(self.label, self.differences)

    @property
    def tensor(self) -> TensorShape:
        """The tensor as it is declared."""
        return self.fit.tensor

    @property
    def text(self) -> str:
        """What it is, whose and how large."""
        several = f"{self.fit.pieces} × " if self.fit.pieces > 1 else ""
        owner = "" if self.is_this_run else f" of {self.label}"
        return f"{several}{self.tensor.name}{owner}, {self.fit.shape_text} {self.fit.dtype}"

    @property
    def why_fits(self) -> str:
        """The strongest reason, short enough for a line of a terminal."""
        return self.evidence[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Naming:
    """What a size may have been, the likeliest first; ``unknown`` is the probability that it is none of them.

    ``not_this_run``: it fits another run's parameters and not this one's, so the message may not be this
    run's. ``ruled_out`` says why the likeliest tensor cannot be this run's, or any other's that was compared;
    where nothing fits, what comes nearest.
    """

    asked: AskedSize
    candidates: tuple[Candidate, ...]
    not_this_run: bool
    unknown: float
    ruled_out: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        """One line that answers, or says that nothing does."""
        if not self.candidates and self.asked.asked_for is not None:
            return (
                f"{self.asked.text} is what torch asks for at once for {self.asked.asked_for}: it was "
                "something small, and the size does not tell what"
            )
        if not self.candidates:
            return f"{self.asked.text} is the size of no tensor that the payload declares"
        best = self.candidates[0]
        line = f"{self.asked.text} is {best.doubt}{best.text}"
        return f"{line}; nothing of this run's parameters has that size" if self.not_this_run else line


def name_tensor(asked: AskedSize, *, own: ShapeSet | None, others: Sequence[ShapeSet] = ()) -> Naming:
    """Returns what of these configurations the size may have been; ``own`` is this run's, if it is known."""
    hypotheses = list(_hypotheses(asked, own, others))
    chance = (1 - DECLARED_SHARE) * asked.chance
    against_chance = chance * LEAST_AGAINST_CHANCE / (1 - LEAST_AGAINST_CHANCE)
    answers = _answers(hypotheses, not_made_share=NOT_MADE_SHARE)
    if not any(answer.weight >= against_chance for answer in answers if answer.is_made):
        answers = _answers(hypotheses, not_made_share=NOT_MADE_ALONE_SHARE)
    fitting = sum(answer.weight for answer in answers)
    least = max(LEAST_CONFIDENCE * (chance + fitting), against_chance)  # that a size is round hides nothing
    chance += (1 - DECLARED_SHARE) * asked.round_chance
    total = chance + fitting
    if not total:  # a size that no tensor has, not even by chance
        ruled_out = () if own is None else tuple(nearest(asked, own))
        return Naming(asked=asked, candidates=(), not_this_run=False, unknown=1.0, ruled_out=ruled_out)
    listed = [answer for answer in answers if answer.weight >= least][:MOST_CANDIDATES]
    listed += [answer for answer in answers if answer not in listed and _is_also_own(answer, listed)]
    in_others = sum(answer.weight for answer in listed if answer.is_made and not answer.best.is_own) / total
    is_own = any(answer.is_made and answer.best.is_own for answer in listed)
    return Naming(
        asked=asked,
        candidates=tuple(_candidate(asked, answer, own, total) for answer in listed),
        not_this_run=own is not None and not is_own and in_others >= FOREIGN_FROM,
        unknown=chance / total,
        ruled_out=tuple(_ruled_out(asked, listed, own, others)),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Hypothesis:
    """One tensor of one configuration that fits in one way."""

    of: ShapeSet
    is_own: bool
    fit: Fit
    weight: float

    @property
    def answer(self) -> tuple[object, ...]:
        """What of one configuration is the same answer: a row of another length makes no other tensor."""
        tensor, fit = self.fit.tensor, self.fit
        return tensor.name, tensor.category, tensor.applies, fit.dtype, fit.pieces, fit.way is Way.PART


@dataclass(slots=True)
class _Answer:
    """Hypotheses that are one answer, under the likeliest of them."""

    best: _Hypothesis
    weight: float = 0.0
    also: list[str] = field(default_factory=list)

    @property
    def is_made(self) -> bool:
        """Whether its configuration makes it at all."""
        return self.best.fit.tensor.applies


def _hypotheses(asked: AskedSize, own: ShapeSet | None, others: Sequence[ShapeSet]) -> Iterator[_Hypothesis]:
    for part, share in _shares(own, others):
        declared = {(tensor.shape, tensor.dtype) for tensor in part.tensors}
        for tensor in part.tensors:
            for fit in find_fits(asked, tensor):
                # What is declared itself is no other tensor in another type.
                if fit.way is not Way.DTYPE or (fit.shape, fit.dtype) not in declared:
                    weight = share * tensor.count * fit.share
                    yield _Hypothesis(of=part, is_own=part is own, fit=fit, weight=weight)


def _shares(own: ShapeSet | None, others: Sequence[ShapeSet]) -> Iterator[tuple[ShapeSet, float]]:
    """Yields each configuration with what each of its tensors weighs before anything is compared."""
    rest = 1.0 if own is None else 1.0 - OWN_SHARE
    shares = [] if own is None else [(own, OWN_SHARE if others else 1.0)]
    shares += [(part, rest / len(others)) for part in others]
    for part, share in shares:
        counts = {tensor.name: tensor.count for tensor in part.tensors if tensor.applies}
        yield part, DECLARED_SHARE * share / max(1, sum(counts.values()))


def _answers(hypotheses: Iterable[_Hypothesis], *, not_made_share: float) -> list[_Answer]:
    """Returns the answers, the likeliest first; one that several configurations give is the first one's."""
    by_set: dict[tuple[object, ...], _Answer] = {}
    for hypothesis in hypotheses:
        answer = by_set.setdefault((id(hypothesis.of), *hypothesis.answer), _Answer(hypothesis))
        answer.weight += hypothesis.weight * (1.0 if answer.is_made else not_made_share)
        if hypothesis.weight > answer.best.weight:
            answer.best = hypothesis
    answers: dict[tuple[object, ...], _Answer] = {}
    for answer in by_set.values():
        fit = answer.best.fit
        first = answers.setdefault((*answer.best.answer, fit.way, fit.shape), answer)
        if first is not answer:
            first.weight += answer.weight
            first.also.append(answer.best.of.label)
    return sorted(answers.values(), key=lambda answer: -answer.weight)


def _is_also_own(answer: _Answer, listed: Sequence[_Answer]) -> bool:
    """Returns whether this run's parameters admit the tensor that another run's name, however unlikely."""
    best = listed[0].best if listed else None
    return (
        best is not None
        and not best.is_own
        and answer.best.is_own
        and answer.is_made
        and answer.best.fit.way in ADMITTED
        and answer.best.fit.tensor.name == best.fit.tensor.name
    )


def _candidate(asked: AskedSize, answer: _Answer, own: ShapeSet | None, total: float) -> Candidate:
    best = answer.best
    changed = {} if own is None or best.is_own else differences(own.params, best.of.params)
    return Candidate(
        fit=best.fit,
        label=best.of.label,
        is_this_run=best.is_own,
        confidence=answer.weight / total,
        evidence=(
            *reasons(asked, best.fit),
            *filter(None, [_whose(best.of.label, changed)]),
            *best.fit.tensor.notes,
        ),
        also=tuple(answer.also),
        differences=changed,
    )


def _whose(label: str, changed: Mapping[str, tuple[Any, Any]]) -> str | None:
    return f"of {label}, where {difference_text(changed)}" if changed else None


def _ruled_out(
    asked: AskedSize, listed: Sequence[_Answer], own: ShapeSet | None, others: Sequence[ShapeSet]
) -> Iterator[str]:
    """Yields why a tensor that is another run's is nobody else's; where nothing fits, what comes nearest."""
    if not listed:
        yield from () if own is None else nearest(asked, own)
        return
    best, also = listed[0].best, listed[0].also
    if best.is_own:
        return
    labels_by_reason: dict[str, list[str]] = {}
    for part in ([] if own is None else [own]) + [
        part for part in others if part.label not in (best.of.label, *also)
    ]:
        same = [tensor for tensor in part.tensors if tensor.name == best.fit.tensor.name]
        if same and not any(may_be(asked, tensor) for tensor in same):
            label = "this run" if part is own else part.label
            labels_by_reason.setdefault(why_not(asked, same[0]), []).append(label)
    for reason, labels in labels_by_reason.items():
        yield f"not {', '.join(labels[:MOST_LABELS])}: {reason}"
