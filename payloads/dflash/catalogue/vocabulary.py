"""What meets the vocabulary: valid slots, a chunk's logits, and what a loss without chunks would hold.

The last are marked as not made by this code: a log of another program, or of an older one, may hold them.
"""

from collections.abc import Iterator
from functools import partial

from dflash.catalogue.rows import Row
from dflash.catalogue.terms import Shape

HEAD = "dflash.loss._Head"
SCORES = "dflash.loss_rows.PlainRows.score"
NOWHERE = "no code of dflash"
NAIVE = "a loss holds all logits at once, as logits.float() does; dflash never does"


def shapes(row: Row) -> Iterator[Shape]:
    """Yield what of a row meets the vocabulary."""
    yield from _valid_slots(row)
    yield from _chunk(row)
    yield from _naive(row)


def _valid_slots(row: Row) -> Iterator[Shape]:
    parameters = row.parameters
    dims = (("valid slots", row.R), ("hidden", row.H))
    yield Shape(
        name="states of the valid slots, or their gradient",
        category="activation",
        dtype=parameters.dtype,
        dims=dims,
        applies=True,
        when="always",
        born="dflash.gathering._Selected.forward",
        count=3,
    )
    yield Shape(
        name=f"states of the valid slots in {parameters.exact}",
        category="activation",
        dtype=parameters.exact,
        dims=dims,
        applies=parameters.is_narrow and not parameters.is_compiled,
        when="nothing is compiled and the type is bfloat16 or float16",
        born="dflash.pointwise.scale_rows",
        remedy={"compile": True},
    )


def _chunk(row: Row) -> Iterator[Shape]:
    parameters = row.parameters
    vocabulary, rows = ("vocabulary", row.V), ("rows of a chunk", row.C)
    is_plain = not parameters.is_compiled or parameters.exact == "float64"
    smaller = {"loss_chunk_rows": parameters.loss_chunk_rows // 2} if row.C.value > 256 else None
    logits = partial(Shape, category="logits", applies=True, when="always", remedy=smaller)
    copies = ("without compile every step of the loss is a copy of its own",) if is_plain else ()
    yield logits(
        name="logits of a chunk, or their gradient",
        dtype=parameters.exact,
        dims=(rows, vocabulary),
        born=f"{HEAD}.buffer",
        count=3 if is_plain else 1,
        notes=copies,
    )
    yield logits(
        name="teacher's logits of a chunk",
        dtype=parameters.exact,
        dims=(("teacher tokens", row.P), vocabulary),
        born=f"{HEAD}.buffer",
        count=3 if is_plain else 1,
        notes=copies,
    )
    is_mixed = parameters.is_narrow and parameters.is_cuda
    yield logits(
        name="logits' gradient of a chunk in the head's type",
        dtype=parameters.dtype,
        dims=(("rows of a chunk", row.any_C), vocabulary),
        applies=is_plain and is_mixed,
        when="a GPU computes the loss without compile, in bfloat16 or float16",
        born=SCORES,
    )
    yield Shape(
        name=f"lm_head.weight in {parameters.exact}",
        category="temporary",
        dtype=parameters.exact,
        dims=(vocabulary, ("hidden", row.H)),
        applies=parameters.is_narrow and not parameters.is_cuda,
        when="the CPU computes the loss with a bfloat16 or float16 head",
        born=f"{HEAD}.__init__",
    )


def _naive(row: Row) -> Iterator[Shape]:
    vocabulary, exact = ("vocabulary", row.V), row.parameters.exact
    naive = partial(Shape, category="logits", applies=False, when=NAIVE, born=NOWHERE)
    for name, dim in (
        ("logits of all slots", ("slots", row.T)),
        ("logits of all valid slots", ("valid slots", row.R)),
        ("teacher's logits of the whole row", ("context", row.S)),
    ):
        yield naive(name=f"{name} in {exact}", dtype=exact, dims=(dim, vocabulary))
        if row.parameters.is_narrow:
            yield naive(
                name=f"{name} in {row.parameters.dtype}", dtype=row.parameters.dtype, dims=(dim, vocabulary)
            )
