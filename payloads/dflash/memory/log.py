"""What a simulated run yields: every storage's birth and death in order, and who each of them was.

Sizes are as requested; rounding and segments are an allocator's business. Loads without torch.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from dflash.cards import Card

Category = Literal[
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
]
Phase = Literal["setup", "forward", "backward", "optimizer"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """One storage on the card, as the tensor that it was made for.

    `name` is a parameter's, buffer's or input's own, that of the parameter for a gradient, that of state and
    parameter for an optimizer's state ("exp_avg of fc.weight"), and the operator's for everything else.
    `where` is the innermost line of the payload, "feed_forward.py:52 forward".
    """

    id: int
    bytes: int
    shape: tuple[int, ...]
    dtype: str
    category: Category
    name: str | None
    module: str | None
    where: str | None
    phase: Phase


class Born(NamedTuple):
    """A block is allocated; the number is its place in `Trace.blocks`."""

    block: int


class Died(NamedTuple):
    """A block is freed."""

    block: int


class Mark(NamedTuple):
    """Something that is no allocation.

    "phase": the part of the run with that name begins, until the next such mark. "empty_cache": what is
    cached and free goes back to the card.
    """

    kind: Literal["phase", "empty_cache"]
    name: str = ""


Event = Born | Died | Mark


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """One run on one simulated card. Blocks that never die lived when the work returned.

    `execution` is how the drafter computed ("flex, compiled kernels"), None where none ran; `notes` is what
    the payload warned of. What sdpa's rules or a compiler decide differs from torch to torch: `torch` is the
    one that ran.
    """

    card: Card
    torch: str
    blocks: tuple[Block, ...]
    events: tuple[Event, ...]
    execution: str | None
    notes: tuple[str, ...]
