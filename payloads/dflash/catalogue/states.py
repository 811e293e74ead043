"""What goes into a step, and the states of context and slots on their way through the layers."""

from collections.abc import Iterator, Mapping
from typing import Any

from dflash.catalogue.rows import Row
from dflash.catalogue.terms import Shape, Term
from dflash.tiling import PART_COLUMNS

FORWARD = "dflash.drafter.DFlashDrafter.forward"
PROJECT = "dflash.projections._Projection"
FEED_FORWARD = "dflash.feed_forward._FeedForward.forward"
EAGER = "dflash.attention.eager.EagerAttention.__call__"
UNCOMPILED = "nothing is compiled and the type is bfloat16 or float16"


def shapes(row: Row) -> Iterator[Shape]:
    """Yield the states of a row."""
    yield from _inputs(row)
    yield from _context(row)
    yield from _slots(row)
    yield from _projections(row)
    yield from _feed_forward(row)


def _inputs(row: Row) -> Iterator[Shape]:
    for name, width in (
        ("target states of the row", ("features", row.F)),
        ("teacher's states of the row", ("hidden", row.H)),
    ):
        yield Shape(
            name=name,
            category="input",
            dtype=row.parameters.dtype,
            dims=(("context", row.S), width),
            applies=True,
            when="always",
            born="dflash.probes.work.workload.random_row",
        )


def _context(row: Row) -> Iterator[Shape]:
    dims = (("context", row.S), ("hidden", row.H))
    parameters = row.parameters
    yield Shape(
        name="context states, or their gradient",
        category="activation",
        dtype=parameters.dtype,
        dims=dims,
        applies=True,
        when="always",
        born=FORWARD,
        count=2,
    )
    yield Shape(
        name=f"context states in {parameters.exact}",
        category="activation",
        dtype=parameters.exact,
        dims=dims,
        applies=parameters.is_narrow and not parameters.is_cuda,
        when="it runs on the CPU in bfloat16 or float16; on a GPU the norm is one kernel",
        born=FORWARD,
    )


def _slots(row: Row) -> Iterator[Shape]:
    dims, layers = (("slots", row.T), ("hidden", row.H)), row.parameters.num_draft_layers
    yield Shape(
        name="states of the slots, or their gradient",
        category="activation",
        dtype=row.parameters.dtype,
        dims=dims,
        applies=True,
        when="always",
        born=FEED_FORWARD,
        count=2 * layers + 1,
    )
    yield _exact_copy(row, "states of the slots", dims, "dflash.pointwise.normalize")


def _projections(row: Row) -> Iterator[Shape]:
    kept = row.parameters.num_draft_layers if row.parameters.recompute != "layer" else 1
    remedy = None if row.parameters.recompute == "layer" else {"recompute": "layer"}
    for name, dims, tensors in (
        ("queries", (("queries", row.query_rows), ("heads", row.A), ("head_dim", row.D)), 2),
        ("keys or values", (("keys", row.key_rows), ("key-value heads", row.G), ("head_dim", row.D)), 3),
    ):
        yield Shape(
            name=f"{name}, raw or rotated, or their gradient",
            category="activation",
            dtype=row.parameters.dtype,
            dims=dims,
            applies=True,
            when="always",
            born=f"{PROJECT}.forward",
            count=tensors * kept,
            remedy=remedy,
        )
        yield _exact_copy(
            row, name, dims, "dflash.pointwise.norm_rotate", is_eager=row.parameters.backend == "eager"
        )
        yield Shape(
            name=f"half of {name} in {row.parameters.exact}",
            category="activation",
            dtype=row.parameters.exact,
            dims=(*dims[:2], ("half of a head", row.half_D)),
            applies=not row.parameters.is_compiled,
            when="nothing is compiled",
            born="dflash.rope.rotate",
            remedy={"compile": True},
        )
    yield Shape(
        name="gradient of attention's output without padding",
        category="temporary",
        dtype=row.parameters.dtype,
        dims=(("slots", row.T), ("heads", row.A), ("head_dim", row.D)),
        applies=row.query_rows.value != row.T.value,
        when="attention is flex, compiled, and the slots fill no whole tiles",
        born="dflash.layers.BlockAttention.forward",
    )
    yield Shape(
        name="cosines or sines of the positions",
        category="activation",
        dtype=row.parameters.exact,
        dims=(("keys", row.key_rows), ("frequencies", row.half_D)),
        applies=True,
        when="always",
        born="dflash.rope.rope_table",
        count=2,
    )


def _feed_forward(row: Row) -> Iterator[Shape]:
    parameters = row.parameters
    whole = (("slots", row.T), ("intermediate", row.I))
    part = (("slots", row.T), ("columns of a part", row.part_columns))
    remedies: Mapping[str, Mapping[str, Any] | None] = {
        "none": {"recompute": "mlp"},
        "mlp": {"recompute": "layer"},
        "layer": None,
    }
    yield Shape(
        name="gate or up, their product, or their gradients",
        category="activation",
        dtype=parameters.dtype,
        dims=whole,
        applies=True,
        when="always",
        born=FEED_FORWARD,
        count=2 * parameters.num_draft_layers if parameters.recompute == "none" else 2,
        remedy=remedies[parameters.recompute],
    )
    in_place = "_" if parameters.recompute != "none" else ""
    yield _exact_copy(row, "gate or up", whole, f"dflash.pointwise.swiglu{in_place}")
    in_parts = parameters.recompute == "layer" and parameters.intermediate_size > PART_COLUMNS
    takes = f"recompute is layer and intermediate_size is larger than {PART_COLUMNS}"
    yield Shape(
        name="a part of gate or up, computed again",
        category="temporary",
        dtype=parameters.dtype,
        dims=part,
        applies=in_parts,
        when=takes,
        born="dflash.feed_forward._Gradients.add",
        count=3,
    )
    is_copied = parameters.is_narrow and not parameters.is_compiled
    yield Shape(
        name=f"a part of gate or up, computed again, in {parameters.exact}",
        category="temporary",
        dtype=parameters.exact,
        dims=part,
        applies=in_parts and is_copied,
        when=f"{takes}, and {UNCOMPILED}",
        born="dflash.pointwise.swiglu_backward_in_place_",
        remedy={"compile": True},
    )


def _exact_copy(
    row: Row, name: str, dims: tuple[tuple[str, Term], ...], born: str, *, is_eager: bool = False
) -> Shape:
    """Return what arithmetic in float32 makes of narrow tensors where no kernel does it in one pass."""
    parameters = row.parameters
    is_compiled = parameters.is_compiled and not is_eager
    return Shape(
        name=f"{name} in {parameters.exact}",
        category="activation",
        dtype=parameters.exact,
        dims=dims,
        applies=parameters.is_narrow and not is_compiled,
        when=UNCOMPILED,
        born=EAGER if is_eager and parameters.is_compiled else born,
        remedy={"compile": True},
    )
