"""Which tensor it was: the two that nobody found at the time, others, and what must not be named."""

import json
import random
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import pytest
from dflash.shapes import set_of
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.forensics.asked import asked_exactly, asked_from_text, size_as_torch
from orchestrator.forensics.fits import Way, solve
from orchestrator.forensics.naming import Candidate, Naming, name_tensor
from orchestrator.forensics.shapes import Dimension, FreeQuantity, ShapeSet, TensorShape, read_shape_set

UNCOMPILED = {"max_anchors": 512, "block_size": 16, "seq_len": 7260, "attention": "flex", "compile": False}
MATH = {
    "max_anchors": 1024,
    "block_size": 32,
    "seq_len": 8000,
    "attention": "sdpa_math",
    "chunk_blocks": 182,
}


def shapes(params: Mapping[str, Any], label: str = "this-run") -> ShapeSet:
    return _shapes(json.dumps(params), label)


@lru_cache
def _shapes(params: str, label: str) -> ShapeSet:
    values = json.loads(params)
    return read_shape_set(set_of(values), label=label, params=values)


def recent(*changes: Mapping[str, Any]) -> list[ShapeSet]:
    return [
        shapes({**UNCOMPILED, **changed}, label=f"run-{number}") for number, changed in enumerate(changes)
    ]


def named(text: str, params: Mapping[str, Any], others: list[ShapeSet] | None = None) -> Naming:
    return name_tensor(asked_from_text(text), own=shapes(params), others=others or [])


def first(naming: Naming) -> Candidate:
    assert naming.candidates, naming.ruled_out
    return naming.candidates[0]


def test_15_09_gib_is_the_score_matrix_of_512_anchors() -> None:
    naming = named("15.09 GiB", UNCOMPILED)
    best = first(naming)
    assert (best.tensor.name, best.fit.shape, best.fit.dtype) == (
        "attention scores",
        (32, 8192, 15452),
        "float32",
    )
    assert (best.is_this_run, naming.not_this_run, best.fit.way) == (True, False, Way.DECLARED)
    assert best.confidence > 0.99
    assert best.why_fits == "[32, 8192, 15452] float32 is 15.09 GiB: heads × queries × keys"
    assert "queries 8192 = max_anchors · block_size = 512 · 16" in best.evidence
    assert "keys 15452 = seq_len + max_anchors · block_size = 7260 + 512 · 16" in best.evidence
    assert (
        "15.09 GiB alone leaves keys 15447…15457, context tokens 7,255…7,265 of at most 8,192"
        in best.evidence
    )


@pytest.mark.parametrize("anchors", [256, 128])
def test_the_same_size_of_a_run_with_fewer_anchors_is_another_runs(anchors: int) -> None:
    others = recent({}, {"max_anchors": 256}, {"max_anchors": 128})
    naming = named("15.09 GiB", {**UNCOMPILED, "max_anchors": anchors}, others)
    best = first(naming)
    assert naming.not_this_run
    assert (best.label, best.is_this_run, best.fit.shape) == ("run-0", False, (32, 8192, 15452))
    assert best.differences == {"max_anchors": (anchors, 512)}
    assert f"of run-0, where max_anchors is 512 (here {anchors})" in best.evidence
    assert naming.summary == (
        "15.09 GiB is attention scores of run-0, [32, 8192, 15452] float32; "
        "nothing of this run's parameters has that size"
    )
    # No batch within its budget gives such a matrix with 256 or 128 anchors.
    assert {line.split(":")[0] for line in naming.ruled_out} == {
        *({"not this run, run-1", "not run-2"} if anchors == 256 else {"not this run, run-2", "not run-1"})
    }
    needs = "with queries {} · 16 needs context tokens {} of at most 8,192"
    told = " ".join(naming.ruled_out)
    assert needs.format(256, "26,797…26,818") in told
    assert needs.format(128, "59,737…59,781") in told


@pytest.mark.parametrize(
    "changed",
    [
        {"compile": True},
        {"attention": "auto", "compile": True},
        {"attention": "sdpa_chunked"},
        {"attention": "sdpa_math"},
    ],
)
def test_a_run_that_makes_no_score_matrix_did_not_ask_for_one(changed: dict[str, Any]) -> None:
    others = recent(
        {}, {"max_anchors": 256}, {"max_anchors": 128}, *[{"seq_len": 5000 + n} for n in range(17)]
    )
    naming = named("15.09 GiB", {**UNCOMPILED, **changed}, others)
    assert naming.not_this_run
    assert (first(naming).label, first(naming).tensor.applies) == ("run-0", True)
    assert naming.ruled_out[0] == (
        "not this run: it makes no attention scores; "
        "they are made when attention is eager, or flex without compile"
    )


def test_what_another_length_of_this_runs_batches_would_give_is_not_called_another_runs() -> None:
    naming = named("15.09 GiB", {**UNCOMPILED, "seq_len": 8192}, recent({}))
    assert not naming.not_this_run
    assert [candidate.label for candidate in naming.candidates] == ["run-0", "this-run"]
    assert naming.candidates[1].fit.shape_text == "[32, 8192, 15447…15457]"
    assert naming.ruled_out == ()


def test_alone_such_a_run_gets_no_name_but_what_the_size_would_need() -> None:
    naming = named("15.09 GiB", {**UNCOMPILED, "max_anchors": 256, "packed_lengths": [4000]})
    assert (naming.candidates, naming.not_this_run) == ((), False)
    assert naming.summary == "15.09 GiB is the size of no tensor that the payload declares"
    assert naming.ruled_out == (
        "the next smaller one: attention scores, [32, 4096, 11356] float32, 5.54 GiB",
        (
            "attention scores are 5.54 GiB; 15.09 GiB with queries 256 · 16 needs context tokens "
            "26,797…26,818 of at most 8,192"
        ),
    )


def test_a_run_whose_slots_alone_are_more_than_that_says_so() -> None:
    naming = named("15.09 GiB", {**UNCOMPILED, "max_anchors": 1024, "block_size": 32}, recent({}))
    assert naming.not_this_run
    assert naming.ruled_out == (
        (
            "not this run: attention scores are 156.36 GiB; 15.09 GiB with queries 1024 · 32 "
            "needs fewer context tokens than the 2 that there are at least"
        ),
    )


def test_runs_of_the_same_parameters_are_one_answer() -> None:
    naming = named("15.09 GiB", {**UNCOMPILED, "max_anchors": 256}, recent({}, {}, {"max_anchors": 128}))
    assert (first(naming).label, first(naming).also) == ("run-0", ("run-1",))
    ours = named("15.09 GiB", UNCOMPILED, recent({}, {"max_anchors": 256}))
    assert (first(ours).is_this_run, first(ours).also, ours.not_this_run) == (True, ("run-0",), False)


@pytest.mark.parametrize("text", ["22.31 GiB", "22.3 GiB"])
def test_22_3_gib_are_keys_expanded_to_all_heads_in_float32(text: str) -> None:
    best = first(named(text, MATH))
    assert best.tensor.name == "expanded keys or values of the math path"
    assert (best.fit.shape, best.fit.dtype) == ((182, 32, 8032, 128), "float32")
    assert best.confidence > 0.95
    for reason in (
        "blocks of a chunk 182 = chunk_blocks, heads 32 = num_attention_heads",
        "8 key-value heads are expanded to 32 query heads",
        "bfloat16 is upcast to float32 there",
        "in bfloat16 it would be 11.15 GiB",
        "keys, values, and a scaled transposed copy of the keys are of this size",
        (
            "sdpa_math allows the math path alone; torch takes it by itself where no fused kernel serves a "
            "boolean mask with grouped heads"
        ),
    ):
        assert reason in best.evidence


ADAMW = {"optimizer": "adamw"}
SIXTEEN = {"max_anchors": 512, "block_size": 16}
KNOWN: list[tuple[str, dict[str, Any], str, tuple[int, ...], str]] = [
    ("1.89 GiB", {}, "logits of a chunk, or their gradient", (2048, 248320), "float32"),
    (
        "7.58 GiB",
        {"loss_chunk_rows": 8192},
        "logits of a chunk, or their gradient",
        (8192, 248320),
        "float32",
    ),
    ("7.58 GiB", SIXTEEN, "logits of all slots in float32", (8192, 248320), "float32"),
    ("340.00 MiB", ADAMW, "AdamW moment of gate_proj.weight or up_proj.weight", (17408, 5120), "float32"),
    ("500.00 MiB", ADAMW, "AdamW moment of fc.weight", (5120, 25600), "float32"),
    ("2.37 GiB", {}, "embed_tokens.weight or lm_head.weight", (248320, 5120), "bfloat16"),
    ("392.00 MiB", {}, "target states of the row", (8000, 25600), "bfloat16"),
    ("586.00 MiB", {}, "target states of the row", (12000, 25600), "bfloat16"),
    (
        "1.06 GiB",
        {"recompute": "none"},
        "gate or up, their product, or their gradients",
        (32768, 17408),
        "bfloat16",
    ),
    (
        "2.12 GiB",
        {"attention": "sdpa_chunked", "compile": False},
        "gate or up in float32",
        (32768, 17408),
        "float32",
    ),
    ("272.00 MiB", {}, "a part of gate or up, computed again", (32768, 4352), "bfloat16"),
    ("320.00 MiB", {}, "states of the slots, or their gradient", (32768, 5120), "bfloat16"),
    ("256.00 MiB", {}, "queries, raw or rotated, or their gradient", (32768, 32, 128), "bfloat16"),
    (
        "3.95 GiB",
        {"attention": "eager", "max_anchors": 256, "block_size": 16, "seq_len": 4000},
        "attention scores",
        (32, 4096, 8096),
        "float32",
    ),
    ("1.24 GiB", {"attention": "eager"}, "dense mask", (32768, 40768), "bool"),
    ("7.54 GiB", UNCOMPILED, "attention shares in the states' type", (32, 8192, 15452), "bfloat16"),
    ("11.15 GiB", MATH, "expanded keys or values of the math path", (182, 32, 8032, 128), "bfloat16"),
]


@pytest.mark.parametrize(("text", "params", "name", "shape", "dtype"), KNOWN)
def test_sizes_that_such_runs_ask_for_are_named(
    text: str, params: dict[str, Any], name: str, shape: tuple[int, ...], dtype: str
) -> None:
    best = first(named(text, params))
    assert (best.tensor.name, best.fit.shape, best.fit.dtype) == (name, shape, dtype)
    assert len(best.why_fits) <= 110


def test_what_this_code_never_makes_is_said_to_be_so() -> None:
    best = first(named("7.58 GiB", SIXTEEN))
    assert not best.tensor.applies
    assert best.evidence[1] == (
        "these parameters should not make it; it is made when "
        "a loss holds all logits at once, as logits.float() does; dflash never does"
    )


@pytest.mark.parametrize(
    ("text", "params"),
    [
        ("28.00 GiB", MATH),
        ("9.99 GiB", MATH),
        ("1.23 GiB", MATH),
        ("40.00 GiB", MATH),
        ("2.00 MiB", MATH),
        ("20.00 MiB", MATH),
        ("13.37 GiB", {}),
        ("64.00 GiB", UNCOMPILED),
    ],
)
def test_a_size_that_nothing_gives_is_not_named(text: str, params: dict[str, Any]) -> None:
    naming = named(text, params)
    assert (naming.candidates, naming.not_this_run) == ((), False)
    assert naming.unknown > 0.5
    assert naming.ruled_out


def test_random_sizes_are_seldom_called_another_runs() -> None:
    own, others = shapes(UNCOMPILED), recent(*[{"max_anchors": 100 + 7 * number} for number in range(5)])
    chosen = random.Random(0)
    texts = [f"{chosen.uniform(2, 60):.2f} GiB" for _ in range(30)]
    called = [
        text for text in texts if name_tensor(asked_from_text(text), own=own, others=others).not_this_run
    ]
    assert len(called) <= 2, called


def dimension(name: str, value: int, free: FreeQuantity | None = None) -> Dimension:
    return Dimension(name=name, expression=name, value=value, free=free)


def tensor(name: str, *dimensions: Dimension, dtype: str = "float32", applies: bool = True) -> TensorShape:
    return TensorShape(
        name=name,
        category="activation",
        dtype=dtype,
        dimensions=dimensions,
        applies=applies,
        when="so",
        count=1,
        born="a.b",
    )


def of(*tensors: TensorShape, label: str = "run") -> ShapeSet:
    return ShapeSet(label=label, tensors=tensors)


def test_two_tensors_of_one_size_are_both_named_with_half_the_confidence_each() -> None:
    rows, columns = dimension("rows", 5000), dimension("columns", 7001)
    own = of(tensor("one", rows, columns), tensor("other", columns, rows), tensor("third", rows))
    found = name_tensor(asked_exactly(5000 * 7001 * 4), own=own).candidates
    assert [candidate.tensor.name for candidate in found] == ["one", "other"]
    assert found[0].confidence == found[1].confidence == pytest.approx(0.5, abs=0.01)


def test_a_batch_of_another_length_is_found_and_is_less_certain_than_the_declared_one() -> None:
    free = FreeQuantity(name="tokens", value=8000, least=1, most=8192, offset=100, factor=2)
    scores = tensor("scores", dimension("queries", 40_000), dimension("keys", 16_100, free))
    declared = name_tensor(asked_exactly(40_000 * 16_100 * 4), own=of(scores)).candidates[0]
    assert (declared.fit.way, declared.fit.shape_text) == (Way.DECLARED, "[40000, 16100]")
    shorter = name_tensor(asked_from_text("2.37 GiB"), own=of(scores)).candidates[0]
    assert (shorter.fit.way, shorter.fit.shape_text) == (Way.SOLVED, "[40000, 15860…15938]")
    assert (
        shorter.evidence[1] == "2.37 GiB alone leaves keys 15860…15938, tokens 7,880…7,919 of at most 8,192"
    )
    assert shorter.confidence < declared.confidence
    assert name_tensor(asked_exactly(40_000 * 16_600 * 4), own=of(scores)).candidates == ()


def test_several_at_once_parts_of_heads_and_other_types_are_found() -> None:
    own = of(tensor("keys", dimension("heads", 32), dimension("rows", 3_000_017)))
    whole = 32 * 3_000_017 * 4
    for size, way in ((3 * whole, Way.SEVERAL), (whole // 4, Way.PART), (whole // 2, Way.DTYPE)):
        found = name_tensor(asked_exactly(size), own=own).candidates
        assert way in {candidate.fit.way for candidate in found}
        assert all(candidate.fit.size_bytes == size for candidate in found)


def test_without_this_runs_parameters_others_are_named_and_nothing_is_said_about_this_run() -> None:
    naming = name_tensor(asked_from_text("15.09 GiB"), own=None, others=recent({}, {"max_anchors": 256}))
    assert (first(naming).label, naming.not_this_run) == ("run-0", False)
    assert name_tensor(asked_from_text("15.09 GiB"), own=None).candidates == ()


@settings(max_examples=60)
@given(
    queries=st.integers(1, 60_000),
    tokens=st.integers(1, 8192),
    factor=st.integers(1, 128),
    offset=st.integers(0, 40_000),
    unit=st.sampled_from([1, 2]),
)
def test_solving_finds_the_length_that_was_asked_for(
    queries: int, tokens: int, factor: int, offset: int, unit: int
) -> None:
    free = FreeQuantity(name="tokens", value=4000, least=1, most=8192, factor=factor, offset=offset)
    scores = tensor("scores", dimension("queries", queries), dimension("keys", offset + factor * 4000, free))
    size = queries * (offset + factor * tokens) * 4
    asked = asked_exactly(size) if unit == 1 else asked_from_text(size_as_torch(size))
    solved = solve(asked, scores)
    assert solved is not None
    assert solved.is_allowed
    if size > 20 * 2**20:  # smaller ones print as several sizes, of which the widest is told
        assert solved.quantities[0] <= tokens <= solved.quantities[1]


def test_a_round_size_fits_more_often_by_chance() -> None:
    params = {"max_anchors": 1024, "block_size": 32, "seq_len": 8000, "attention": "flex"}
    naming = named("256.00 MiB", params)
    best = first(naming)
    assert best.fit.shape == (32768, 32, 128)
    assert 0.5 < best.confidence < 0.9
    assert best.doubt == "probably "
    assert named("8.00 GiB", {"max_anchors": 512, "attention": "sdpa_math"}).candidates, (
        "and is named all the same"
    )


def test_confidences_and_the_unknown_are_one_in_all() -> None:
    for text, params, *_ in KNOWN:
        naming = named(text, params)
        assert sum(candidate.confidence for candidate in naming.candidates) + naming.unknown <= 1 + 1e-9
        assert all(0 < candidate.confidence <= 1 for candidate in naming.candidates)


def test_every_line_is_safe_and_short_enough_for_a_terminal() -> None:
    hostile = {**UNCOMPILED, "x\x1b[31m": "\x1b]0;evil\x07" * 20}
    others = [shapes({**UNCOMPILED}, label="run-0"), shapes(hostile, label="run-1")]
    for naming in (
        named("15.09 GiB", {**UNCOMPILED, "max_anchors": 256}, others[1:]),
        *(named(text, params, others) for text, params, *_ in KNOWN),
    ):
        lines = [naming.summary, *naming.ruled_out, *(line for c in naming.candidates for line in c.evidence)]
        assert all(line.isprintable() for line in lines)
        assert max(map(len, lines)) <= 170
