"""What a payload's own programs answer, as checked values: an estimate of memory, the shapes of tensors.

A payload is somebody else's code: an answer is believed only as far as its types go. Keys that are not known
here are passed over, since a newer payload may tell more. Sizes are bytes.
"""

from __future__ import annotations

import json
import math
from typing import Annotated, Any, Final, Literal, NoReturn

from orchestrator.strict_model import Range, StrictModel
from orchestrator.text import printable

__all__ = [
    "CATEGORIES",
    "FITS",
    "NO_CARD",
    "UNFIT",
    "UNSURE",
    "Alternative",
    "Card",
    "Estimate",
    "Failure",
    "Malformed",
    "Phase",
    "Tensor",
    "Verdict",
    "as_json",
    "estimate_of",
    "read_estimate",
    "read_shapes",
]

CATEGORIES = (
    "parameter",
    "gradient",
    "optimizer_state",
    "buffer",
    "input",
    "activation",
    "logits",
    "scores",
    "workspace",
    "cublas",
    "temporary",
    "unsplit",
    "unnamed",
)
"""Who holds memory, in the order in which it is shown."""

MOST_S = 86400.0
MOST_CATEGORIES = 64
MOST_CHARACTERS = 80  # of a category's name
_Size = Annotated[int, Range(least=0, most=2**63 - 1)]  # of bytes, or of what is named
_Format = Annotated[int, Range(least=1, most=1)]
Verdict = Literal["fits", "does not fit", "within the error", "no card"]
FITS: Final = "fits"
UNFIT: Final = "does not fit"
UNSURE: Final = "within the error"
NO_CARD: Final = "no card"


class Malformed(Exception):
    """An answer that is not in format 1 of decision 0017; the message says where."""


class _Answer(StrictModel):
    is_open = True


class Card(_Answer):
    """The card that an estimate is for."""

    name: str
    key: str | None = None
    total_bytes: _Size
    capability: list[_Size]


class Tensor(_Answer):
    """One of the largest tensors that live at a peak; ``where`` is the line that made it."""

    bytes: _Size
    shape: list[_Size] | None = None
    dtype: str | None = None
    category: str
    name: str | None = None
    module: str | None = None
    where: str | None = None
    phase: str | None = None


class Failure(_Answer):
    """The allocation that the card would refuse, and what torch held then: ``largest_free_bytes`` is the
    largest piece that it kept free.
    """

    phase: str
    category: str | None = None
    name: str | None = None
    bytes: _Size
    segment_bytes: _Size | None = None
    shape: list[_Size] | None = None
    dtype: str | None = None
    module: str | None = None
    where: str | None = None
    allocated_bytes: _Size
    reserved_bytes: _Size
    largest_free_bytes: _Size | None = None


class Phase(_Answer):
    """A part of the run: its peak, who holds memory then, its largest tensors, and whether it fits."""

    name: str
    peak_allocated_bytes: _Size
    peak_reserved_bytes: _Size
    by_category: dict[str, _Size]
    largest: list[Tensor]
    verdict: Verdict | None = None


class Alternative(_Answer):
    """A change that may help, and what it would come to."""

    label: str
    set: dict[str, Any]
    alloc_conf: str | None = None
    peak_allocated_bytes: _Size
    peak_reserved_bytes: _Size
    verdict: Verdict


class Estimate(_Answer):
    """What a run is predicted to hold; the peaks are the largest over its phases.

    ``capacity_bytes`` is what the allocator may take of the card, ``outside_bytes`` what is held beside it.
    ``error_share``, at least 0 and less than 1, is how far the prediction may be off. ``failure`` is there
    where memory runs out. ``left_out`` are labels of alternatives for which there was no time.
    """

    format: _Format
    entry: str
    torch: str
    seconds: float
    card: Card | None
    capacity_bytes: _Size | None
    outside_bytes: _Size
    error_share: float
    peak_allocated_bytes: _Size
    peak_reserved_bytes: _Size
    verdict: Verdict
    failure: Failure | None
    phases: list[Phase]
    execution: str
    notes: list[str]
    alternatives: list[Alternative] | None = None
    left_out: list[str] | None = None

    @property
    def highest(self) -> Phase | None:
        """The phase with the largest peak."""
        return max(self.phases, key=lambda phase: phase.peak_allocated_bytes, default=None)


def read_estimate(text: bytes) -> Estimate:
    """Returns what ``PKG.estimate --json`` printed.

    Raises:
        Malformed: it is something else.
    """
    return _estimate(_parsed(text))


def estimate_of(value: object) -> Estimate | None:
    """Returns an estimate that was kept as `as_json` returned it; None where it is none."""
    try:
        return _estimate(value)
    except Malformed:
        return None


def as_json(model: StrictModel) -> dict[str, Any]:
    """Returns an answer as JSON values, of what is known here alone."""
    return {name: _json(getattr(model, name)) for name in model.fields()}


def read_shapes(text: bytes, count: int) -> list[Any]:
    """Returns the sets that ``PKG.shapes`` printed for so many of parameters; what a set holds is for
    `forensics.shapes` to check.

    Raises:
        Malformed: it is no JSON, of another format, or for another number of sets.
    """
    value = _parsed(text)
    if not isinstance(value, dict) or value.get("format") != 1 or not isinstance(value.get("sets"), list):
        raise Malformed("it has no 'format' 1 with 'sets'")
    if len(value["sets"]) != count:
        raise Malformed(f"sets: there are {len(value['sets'])} for {count} files of parameters")
    sets: list[Any] = value["sets"]
    return sets


def _estimate(value: object) -> Estimate:
    checked = Estimate.check(value)
    if isinstance(checked, list):
        first = checked[0]
        where = ".".join(map(str, first.keys)) or "the whole"
        raise Malformed(printable(f"{where}: {first.message}"))
    _refuse_outside(checked)
    return checked


def _refuse_outside(estimate: Estimate) -> None:
    """Refuses what a type alone lets through; no comparison holds for a number that is none."""
    if not 0 <= estimate.error_share < 1:
        raise Malformed("error_share: must be at least 0 and less than 1")
    if not 0 <= estimate.seconds <= MOST_S:
        raise Malformed(f"seconds: must be between 0 and {MOST_S:g}")
    if estimate.card is not None and len(estimate.card.capability) != 2:
        raise Malformed("card.capability: must be two numbers")
    if not estimate.phases and (estimate.peak_allocated_bytes or estimate.peak_reserved_bytes):
        raise Malformed("phases: there are none, though a peak is named")
    for name in ("peak_allocated_bytes", "peak_reserved_bytes"):
        most_bytes = max((getattr(phase, name) for phase in estimate.phases), default=0)
        if getattr(estimate, name) != most_bytes:
            raise Malformed(f"{name}: is {getattr(estimate, name)}, but the largest phase has {most_bytes}")
    for index, phase in enumerate(estimate.phases):
        _refuse_owners(f"phases.{index}.by_category", phase)
    _refuse_verdict("verdict", estimate, estimate)
    for index, each in enumerate(estimate.alternatives or ()):
        _refuse_verdict(f"alternatives.{index}.verdict", each, estimate)


def _refuse_owners(key: str, phase: Phase) -> None:
    """Refuses owners that hold more than there is, and more or longer names than a table has room for."""
    if len(phase.by_category) > MOST_CATEGORIES:
        raise Malformed(f"{key}: has {len(phase.by_category)} categories; at most {MOST_CATEGORIES} are read")
    if any(len(name) > MOST_CHARACTERS for name in phase.by_category):
        raise Malformed(f"{key}: has a name of more than {MOST_CHARACTERS} characters")
    held_bytes = sum(phase.by_category.values())
    if held_bytes > phase.peak_allocated_bytes:
        raise Malformed(f"{key}: adds up to {held_bytes}, more than peak_allocated_bytes")


def _refuse_verdict(key: str, judged: Estimate | Alternative, estimate: Estimate) -> None:
    """Refuses a verdict that the numbers beside it deny."""
    capacity = estimate.capacity_bytes
    if capacity is None and judged.verdict != NO_CARD:
        raise Malformed(f"{key}: is '{judged.verdict}', but there is no capacity_bytes")
    if capacity is not None and judged.verdict == FITS and judged.peak_allocated_bytes > capacity:
        raise Malformed(f"{key}: is '{FITS}', but the peak is above capacity_bytes")


def _parsed(text: bytes) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"it is no JSON: {printable(str(error))}") from None


def _json(value: Any) -> Any:
    if isinstance(value, StrictModel):
        return as_json(value)
    return [_json(each) for each in value] if isinstance(value, list) else value


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is no number")
    return value
