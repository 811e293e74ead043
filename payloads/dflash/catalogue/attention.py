"""What each attention backend makes beside its arguments: scores, masks, copies of keys and values.

Entries of backends that do not run are listed too: a log may be another configuration's.
"""

from collections.abc import Iterator
from functools import partial

from dflash.catalogue.rows import Row
from dflash.catalogue.terms import Shape, Term

EAGER = "dflash.attention.eager.EagerAttention.__call__"
FLEX = "dflash.attention.flex._attend"
MATH = "dflash.attention.sdpa.MathAttention"
CHUNKED = "dflash.attention.sdpa"
FUSED = {"attention": "flex", "compile": True}


def shapes(row: Row) -> Iterator[Shape]:
    """Yield what attention makes of a row."""
    yield from _dense(row)
    yield _log_sums(row)
    for blocks in (row.math_blocks, row.last_math_blocks):
        if blocks is not None:
            yield from _math(row, blocks)
    yield from _gathered(row)
    yield from _chunked(row)


def _dense(row: Row) -> Iterator[Shape]:
    """Yield what eager attention holds, and flex attention when it is not compiled."""
    parameters = row.parameters
    is_eager = parameters.backend == "eager"
    is_flex = parameters.backend == "flex" and not parameters.is_compiled
    either, flex_only = "attention is eager, or flex without compile", "attention is flex without compile"
    heads, queries, keys = ("heads", row.A), ("queries", row.T), ("keys", row.K)
    scores, expanded = (heads, queries, keys), (heads, keys, ("head_dim", row.D))
    in_scores = partial(Shape, category="scores", remedy=FUSED)
    yield in_scores(
        name="attention scores",
        dtype=parameters.exact,
        dims=scores,
        applies=is_eager or is_flex,
        when=either,
        born=EAGER if is_eager else FLEX,
        count=3,
        notes=("every query is compared with every key, whatever the mask leaves of it",),
    )
    yield in_scores(
        name="attention shares in the states' type",
        dtype=parameters.dtype,
        dims=scores,
        applies=is_flex and parameters.is_narrow,
        when=f"{flex_only}, in bfloat16 or float16",
        born=FLEX,
    )
    yield in_scores(
        name="which attention scores are masked",
        dtype="bool",
        dims=scores,
        applies=is_flex,
        when=flex_only,
        born=FLEX,
    )
    yield in_scores(
        name=f"expanded keys or values in {parameters.exact}",
        dtype=parameters.exact,
        dims=expanded,
        applies=is_eager or is_flex,
        when=either,
        born=EAGER if is_eager else FLEX,
        count=2,
        notes=(_expanded(row),),
    )
    yield in_scores(
        name="expanded keys or values in the states' type",
        dtype=parameters.dtype,
        dims=expanded,
        applies=is_flex and parameters.is_narrow,
        when=f"{flex_only}, in bfloat16 or float16",
        born=FLEX,
        count=2,
        notes=(_expanded(row),),
    )
    yield in_scores(
        name="dense mask",
        dtype="bool",
        dims=(queries, keys),
        applies=is_eager or is_flex,
        when=either,
        born="dflash.visibility.Visibility.mask_LK" if is_eager else FLEX,
        count=2,
    )


def _log_sums(row: Row) -> Shape:
    """Return what compiled flex attention keeps of each query beside its output."""
    return Shape(
        name="log-sum-exp of each query's scores",
        category="activation",
        dtype="float32",
        dims=(("heads", row.A), ("queries", row.query_rows)),
        applies=row.is_tiled,
        when="attention is flex, compiled",
        born=FLEX,
        count=row.parameters.num_draft_layers if row.parameters.recompute != "layer" else 1,
    )


def _math(row: Row, of_chunk: Term) -> Iterator[Shape]:
    """Yield what PyTorch's math path makes of some blocks, each with a copy of its keys."""
    parameters = row.parameters
    is_math = parameters.backend == "sdpa_math"
    when, narrow = "attention is sdpa_math", "attention is sdpa_math, in bfloat16 or float16"
    blocks, keys, width = ("blocks of a chunk", of_chunk), ("keys", row.block_keys), ("head_dim", row.D)
    heads, slots = ("heads", row.A), ("slots of a block", row.number("block_size"))
    upcast = (f"{parameters.dtype} is upcast to {parameters.exact} there",) if parameters.is_narrow else ()
    in_math = partial(Shape, category="scores", remedy=FUSED, born=f"{MATH}._attend")
    yield in_math(
        name="expanded keys or values of the math path",
        dtype=parameters.exact,
        dims=(blocks, heads, keys, width),
        applies=is_math,
        when=when,
        count=3,
        notes=(
            _expanded(row),
            *upcast,
            "keys, values, and a scaled transposed copy of the keys are of this size",
            (
                "sdpa_math allows the math path alone; torch takes it by itself where no fused kernel serves "
                "a boolean mask with grouped heads"
            ),
        ),
    )
    grouped = (blocks, ("key-value heads", row.G), keys, width)
    yield in_math(
        name=f"keys or values of the math path in {parameters.exact}, not yet expanded",
        dtype=parameters.exact,
        dims=grouped,
        applies=is_math and parameters.is_narrow,
        when=narrow,
        count=2,
        notes=upcast,
    )
    yield in_math(
        name="copies of keys or values, one for each block",
        dtype=parameters.dtype,
        dims=grouped,
        applies=is_math,
        when=when,
        born=f"{MATH}._copies",
        count=2,
    )
    scores = (blocks, heads, slots, keys)
    yield in_math(
        name="attention scores of the math path",
        dtype=parameters.exact,
        dims=scores,
        applies=is_math,
        when=when,
        count=3,
    )
    yield in_math(
        name="attention shares of the math path in the states' type",
        dtype=parameters.dtype,
        dims=scores,
        applies=is_math and parameters.is_narrow,
        when=narrow,
    )
    yield in_math(
        name="which attention scores of the math path are masked",
        dtype="bool",
        dims=scores,
        applies=is_math and parameters.is_cuda,
        when=f"{when} on a GPU",
    )
    yield in_math(
        name="mask of the math path",
        dtype="bool",
        dims=(blocks, slots, keys),
        applies=is_math,
        when=when,
        born="dflash.visibility.Visibility.masks_nBK",
    )
    for dtype, applies in ((parameters.exact, is_math), (parameters.dtype, is_math and parameters.is_narrow)):
        yield in_math(
            name="queries or mixed values of the math path",
            category="activation",
            dtype=dtype,
            dims=(blocks, heads, slots, width),
            applies=applies,
            when=when if dtype == parameters.exact else narrow,
            count=2,
        )


def _gathered(row: Row) -> Iterator[Shape]:
    """Yield the gradients of context and slots, which scaled_dot_product_attention is given apart."""
    parameters = row.parameters
    is_math = parameters.backend == "sdpa_math"
    for rows, applies, when in (
        (("context", row.S), is_math, "attention is sdpa_math"),
        (
            ("slots", row.T),
            is_math or parameters.backend == "sdpa_chunked",
            "attention is sdpa_math or sdpa_chunked",
        ),
    ):
        yield Shape(
            name=f"gradient of the {rows[0]}'s keys or values",
            category="temporary",
            dtype=parameters.dtype,
            dims=(rows, ("key-value heads", row.G), ("head_dim", row.D)),
            applies=applies,
            when=f"{when}, and a step goes backward",
            born=f"{MATH}._copies" if is_math else f"{CHUNKED}.ChunkedAttention.__call__",
            count=2,
            remedy=FUSED,
        )


def _chunked(row: Row) -> Iterator[Shape]:
    """Yield what the fused kernel is given; how much of the context a chunk sees is up to the anchors."""
    parameters = row.parameters
    is_chunked, when = parameters.backend == "sdpa_chunked", "attention is sdpa_chunked"
    width, groups = ("head_dim", row.D), ("key-value heads", row.G)
    yield Shape(
        name=f"context's keys or values in {parameters.exact}, or their gradient",
        category="activation",
        dtype=parameters.exact,
        dims=(("context", row.S), groups, width),
        applies=is_chunked,
        when=when,
        born=f"{CHUNKED}.ChunkedAttention.__call__",
        count=2,
        remedy=FUSED,
    )
    keys = ("keys of a chunk", row.chunk_keys)
    yield Shape(
        name="keys or values of a chunk",
        category="activation",
        dtype=parameters.dtype,
        dims=(keys, groups, width),
        applies=is_chunked,
        when=when,
        born=f"{CHUNKED}.ChunkedAttention.__call__",
        count=2,
        remedy=FUSED,
    )
    seen = (("context of a chunk", row.chunk_context), groups, width)
    for name, dtype, applies in (
        ("context's keys or values of a chunk", parameters.dtype, is_chunked and parameters.is_narrow),
        (f"gradient of a chunk's context in {parameters.exact}", parameters.exact, is_chunked),
    ):
        yield Shape(
            name=name,
            category="activation" if dtype == parameters.dtype else "temporary",
            dtype=dtype,
            dims=seen,
            applies=applies,
            when=when,
            born=f"{CHUNKED}.ChunkedAttention.__call__",
            remedy=FUSED,
        )
    queries = ("queries of a chunk", row.group * row.chunk_slots)
    for name, dtype in (("mask of a chunk", "bool"), ("mask of a chunk as a bias", parameters.dtype)):
        yield Shape(
            name=name,
            category="activation",
            dtype=dtype,
            dims=(queries, keys),
            applies=is_chunked,
            when=when,
            born=f"{CHUNKED}._attend_chunk",
            remedy=FUSED,
        )


def _expanded(row: Row) -> str:
    return f"{row.G.value} key-value heads are expanded to {row.A.value} query heads"
