"""Which of the tensors that fit a size it was, where the place in the code is known too (pure).

A payload says in which function each tensor is made, and a capture where the process stood: a tensor whose
function is in the stack is as much likelier as it is unlikely that the stack is another one's by chance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from orchestrator.forensics.naming import Candidate, Naming

__all__ = ["placed"]

_BY_CHANCE = 0.05  # that the function of another tensor stands in the stack


def placed(naming: Naming, stack: Sequence[str]) -> Naming:
    """Returns the candidates with their confidence once the stack is known, the likeliest first.

    ``stack`` is innermost first, its frames like ``flex.py:120 attend``: the innermost function that makes
    one of the candidates made it. A stack with none of them says nothing: it may not reach that far.
    """
    made_in = (frame for frame in stack if any(_is_made_in(each, frame) for each in naming.candidates))
    frame = next(made_in, None)
    if frame is None:
        return naming
    there = [_is_made_in(candidate, frame) for candidate in naming.candidates]
    weights = [
        candidate.confidence * (1.0 if is_there else _BY_CHANCE)
        for candidate, is_there in zip(naming.candidates, there, strict=True)
    ]
    unknown = naming.unknown * _BY_CHANCE
    total = sum(weights) + unknown
    says = f"the function that makes it is in the stack: {frame}"
    candidates = [
        replace(
            candidate,
            confidence=weight / total,
            evidence=(*candidate.evidence, says) if is_there else candidate.evidence,
        )
        for candidate, weight, is_there in zip(naming.candidates, weights, there, strict=True)
    ]
    candidates.sort(key=lambda candidate: -candidate.confidence)
    return replace(
        naming,
        candidates=tuple(candidates),
        not_this_run=naming.not_this_run and not candidates[0].is_this_run,
        unknown=unknown / total,
    )


def _is_made_in(candidate: Candidate, frame: str) -> bool:
    """Tells whether a frame is of the function that makes a tensor, ``dflash.attention.flex.attend``."""
    *modules, function = candidate.tensor.born.split(".")
    place, _, name = frame.partition(" ")
    file = place.rpartition("/")[2].partition(".py")[0]
    return file in modules and name.rpartition(".")[2] == function
