"""Parameters, their gradients, and what an optimizer keeps of each."""

from collections.abc import Iterator
from dataclasses import replace

from dflash.catalogue.rows import Row
from dflash.catalogue.terms import Shape, Term

DRAFTER, ATTENTION, SWIGLU = (
    "dflash.drafter.DFlashDrafter.__init__",
    "dflash.layers.BlockAttention.__init__",
    "dflash.layers.SwiGLU.__init__",
)


def shapes(row: Row) -> Iterator[Shape]:
    """Yield the weights and what is kept of each; they depend on no row."""
    head = (("vocabulary", row.V), ("hidden", row.H))
    yield Shape(
        name="embed_tokens.weight or lm_head.weight",
        category="parameter",
        dtype=row.parameters.dtype,
        dims=head,
        applies=True,
        when="always; both are frozen",
        born=DRAFTER,
        count=2,
    )
    for weight, gradient_born in _trained(row):
        yield weight
        yield replace(
            weight,
            name=f"gradient of {weight.name}",
            category="gradient",
            when="a step goes backward",
            born=gradient_born,
        )
        yield from _kept_by_the_optimizer(row, weight)


def _trained(row: Row) -> Iterator[tuple[Shape, str]]:
    """Yield each trained matrix, and where its gradient is made."""
    queries, keys = row.A * row.D, row.G * row.D
    layers = row.parameters.num_draft_layers
    project, feed_forward = (
        "dflash.projections._Projection.backward",
        "dflash.feed_forward._Gradients.__init__",
    )

    def matrix(name: str, rows: tuple[str, Term], columns: tuple[str, Term], born: str, count: int) -> Shape:
        return Shape(
            name=name,
            category="parameter",
            dtype=row.parameters.dtype,
            dims=(rows, columns),
            applies=True,
            when="always",
            born=born,
            count=count,
        )

    hidden, intermediate = ("hidden", row.H), ("intermediate", row.I)
    features, queries_of, keys_of = ("features", row.F), ("query width", queries), ("key width", keys)
    yield (
        matrix("fc.weight", hidden, features, DRAFTER, 1),
        "dflash.drafter.DFlashDrafter.forward",
    )
    yield matrix("q_proj.weight", queries_of, hidden, ATTENTION, layers), project
    yield matrix("k_proj.weight or v_proj.weight", keys_of, hidden, ATTENTION, 2 * layers), project
    yield (
        matrix("o_proj.weight", hidden, queries_of, ATTENTION, layers),
        "dflash.layers.BlockAttention.forward",
    )
    yield (
        matrix("gate_proj.weight or up_proj.weight", intermediate, hidden, SWIGLU, 2 * layers),
        feed_forward,
    )
    yield matrix("down_proj.weight", hidden, intermediate, SWIGLU, layers), feed_forward


def _kept_by_the_optimizer(row: Row, weight: Shape) -> Iterator[Shape]:
    is_stepped, is_narrow = row.parameters.optimizer == "adamw", row.parameters.is_narrow
    kept = replace(
        weight,
        category="optimizer_state",
        dtype=row.parameters.exact,
        born="dflash.optimizer._initial_state",
    )
    when = "the optimizer is adamw"
    yield replace(
        kept, name=f"AdamW moment of {weight.name}", applies=is_stepped, when=when, count=2 * weight.count
    )
    narrow = f"{when} and weights are bfloat16 or float16"
    master = is_stepped and is_narrow
    yield replace(kept, name=f"{row.parameters.exact} master of {weight.name}", applies=master, when=narrow)
    yield replace(
        kept,
        name=f"{row.parameters.exact} copy of the gradient of {weight.name}",
        category="temporary",
        applies=master,
        when=narrow,
        born="dflash.optimizer._step_one",
        count=1,
    )
