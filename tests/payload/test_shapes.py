"""The catalogue of large tensors against what a step really allocates, and the program that prints it.

Sizes share few factors, so that two tensors of one type and size have one shape, up to how heads are grouped.
"""

import importlib
import itertools
import json
import math
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash import execution, layers, shapes
from dflash.attention import sdpa
from dflash.attention.interface import TILE_ROWS, dense_layout, padded_layout
from dflash.catalogue import vocabulary
from dflash.catalogue.parameters import Parameters, read_parameters
from dflash.catalogue.rows import Row, rows_of
from dflash.catalogue.terms import ITEM_BYTES, Free, Shape
from dflash.config import ATTENTION_BACKENDS, DTYPES, RECOMPUTE_POLICIES, create_drafter_config
from dflash.loss import Teacher, _plan_chunks
from dflash.probes.oom import OomProbeParams
from dflash.probes.size import REFERENCE
from dflash.probes.work.machine import open_machine
from dflash.probes.work.workload import blocks_of, build_drafter, forward_backward, random_row
from dflash.values import build
from torch.nn.attention import flex_attention

from tests.payload.births import Birth, Births

SMALL: dict[str, Any] = {
    "device": "cpu",
    "compile": False,
    "chunk_blocks": 3,
    "loss_chunk_rows": 13,
    "num_draft_layers": 2,
    "hidden_size": 46,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 34,
    "intermediate_size": 58,
    "vocab_size": 211,
    "sliding_window": 9,
    "num_target_layers": 8,
    "target_layer_ids": [1, 3, 5],
    "block_size": 5,
    "mask_token_id": 100,
    "seq_len": 71,
    "max_anchors": 6,
    "packed_lengths": [17, 22],
}
# What the drawn anchors or the loss mask decide; a row's tokens are open for naming only.
DRAWN = {"valid slots", "rows of a chunk", "teacher tokens of a chunk", "context tokens that a chunk sees"}
NAMED_FROM = 0.05  # of the largest


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut work into parts at these sizes too, in the code and in the catalogue."""
    for module in (layers, importlib.import_module("dflash.catalogue.rows")):
        monkeypatch.setattr(module, "PART_COLUMNS", 19)
    monkeypatch.setattr(importlib.import_module("dflash.catalogue.states"), "PART_COLUMNS", 19)
    for module in (sdpa, importlib.import_module("dflash.catalogue.rows")):
        monkeypatch.setattr(module, "CHUNK_SLOTS", 15)


@pytest.fixture(autouse=True)
def _default_dtype() -> Iterator[None]:
    kept = torch.get_default_dtype()
    yield
    torch.set_default_dtype(kept)


def parameters(**changed: Any) -> Parameters:
    return read_parameters({**SMALL, **changed})[0]


def births(**changed: Any) -> list[Birth]:
    """Return what a step on each of the probe's rows allocates, the drafter and the rows included."""
    params = build(OomProbeParams, {**SMALL, **changed}, what="parameter")
    machine = open_machine("cpu")
    torch.set_default_dtype(getattr(torch, params.dtype))
    noted = Births()
    with noted, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        drafter = build_drafter(params, machine, max_anchors=params.max_anchors)
        for lengths in ((params.seq_len,), params.packed_lengths):
            drafter.zero_grad()
            forward_backward(drafter, random_row(params, lengths, machine.device), seed=params.seed)
    return noted.all


def is_like(shape: Shape, birth: Birth) -> bool:
    """Whether a birth has the declared type and size; what was drawn may be anything within its bounds."""
    if birth.dtype != shape.dtype:
        return False
    elements = birth.size_bytes // ITEM_BYTES[birth.dtype]
    if elements == math.prod(shape.values):
        return True
    return any(
        free is not None and free.name in DRAWN and _is_within(free, elements, rest)
        for free, rest in _open_dimensions(shape)
    )


def _open_dimensions(shape: Shape) -> Iterator[tuple[Free | None, int]]:
    for at, (_, size) in enumerate(shape.dims):
        others = (other.value for index, (_, other) in enumerate(shape.dims) if index != at)
        yield size.free, math.prod(others)


def _is_within(free: Free, elements: int, rest: int) -> bool:
    quantity, left = divmod(elements // rest - free.offset, free.factor)
    return elements % rest == 0 and left == 0 and free.least <= quantity <= free.most


def unborn(listed: list[Shape], noted: list[Birth]) -> list[str]:
    """Return the entries that apply and that no birth is like, at the place that they name."""
    return [
        f"{shape.name} {list(shape.values)} {shape.dtype} in {shape.born}"
        for shape in listed
        if shape.applies
        and not any(is_like(shape, birth) and is_where_it_says(shape, birth) for birth in noted)
    ]


def is_where_it_says(shape: Shape, birth: Birth) -> bool:
    # Autograd's own backward has no function of ours on the stack.
    of_autograd = all(name.startswith("dflash.probes.") for name in birth.stack)
    return shape.born in birth.stack or (of_autograd and shape.category in {"gradient", "temporary"})


def unnamed(listed: list[Shape], noted: list[Birth]) -> list[str]:
    """Return the large births that no entry names."""
    floating = [birth for birth in noted if birth.dtype in ITEM_BYTES]
    least = NAMED_FROM * max(birth.size_bytes for birth in floating)
    made = [shape for shape in listed if shape.applies]
    return sorted(
        {
            f"{list(birth.shape)} {birth.dtype} by {birth.operator} in {birth.stack[:2]}"
            for birth in floating
            if birth.size_bytes >= least and not any(is_like(shape, birth) for shape in made)
        }
    )


@pytest.mark.parametrize("recompute", RECOMPUTE_POLICIES)
@pytest.mark.parametrize("attention", ["eager", "sdpa_math", "sdpa_chunked"])
def test_what_applies_is_born_as_it_says_and_nothing_large_is_left_unnamed(
    attention: str, recompute: str
) -> None:
    changed = {"attention": attention, "recompute": recompute, "dtype": "bfloat16"}
    listed, noted = shapes.shapes_of(parameters(**changed)), births(**changed)
    assert unborn(listed, noted) == []
    assert unnamed(listed, noted) == []


def test_uncompiled_flex_is_born_as_a_card_would_make_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch refuses its backward on the CPU, though the same operators make it up; and traces the call.
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(execution, "_why_not_flex", lambda *_, **__: None)
    changed = {"attention": "flex", "recompute": "none", "dtype": "bfloat16"}
    on_card = shapes.shapes_of(parameters(**changed, device="cuda"))
    elsewhere = shapes.shapes_of(parameters(**changed))
    noted = births(**changed)
    of_attention = [shape for shape in on_card if shape.born.startswith("dflash.attention.")]
    assert len([shape for shape in of_attention if shape.applies]) == 12  # 6 kinds, two rows
    assert unborn(of_attention, noted) == []
    assert unnamed(on_card + elsewhere, noted) == []


@pytest.mark.parametrize(("attention", "compiles"), [("flex", True), ("flex", False), ("sdpa_chunked", True)])
def test_on_a_simulated_card_the_same_holds(attention: str, compiles: bool) -> None:
    memory = pytest.importorskip("dflash.memory.trace")
    card = importlib.import_module("dflash.cards").parse_card("h200")
    changed = {"attention": attention, "compile": compiles, "head_dim": 40, "dtype": "bfloat16"}
    params = build(OomProbeParams, {**SMALL, **changed, "device": "cuda"}, what="parameter")

    def work() -> None:
        machine = open_machine("cuda")
        torch.set_default_dtype(torch.bfloat16)
        drafter = build_drafter(params, machine, max_anchors=params.max_anchors)
        for lengths in ((params.seq_len,), params.packed_lengths):
            drafter.zero_grad()
            forward_backward(drafter, random_row(params, lengths, machine.device), seed=params.seed)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        log = memory.trace(work, card=card)
    listed = shapes.shapes_of(parameters(**changed, device="cuda"))
    noted = [
        Birth(
            shape=tuple(block.shape),
            dtype=block.dtype,
            size_bytes=block.bytes,
            operator=str(block.where),
            stack=(),
        )
        for block in log.blocks
        if block.category not in {"cublas", "workspace"}
    ]
    made = [shape for shape in listed if shape.applies]
    assert [shape.name for shape in made if not any(is_like(shape, birth) for birth in noted)] == []
    assert unnamed(listed, noted) == []


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_wide_types_need_no_copies(dtype: str) -> None:
    changed = {"attention": "sdpa_math", "recompute": "mlp", "dtype": dtype}
    listed, noted = shapes.shapes_of(parameters(**changed)), births(**changed)
    assert unborn(listed, noted) == []
    assert unnamed(listed, noted) == []
    assert {shape.dtype for shape in listed if shape.applies} == {dtype, "bool"}


ORIGINAL = {"max_anchors": 512, "block_size": 16, "seq_len": 7260, "attention": "flex", "compile": False}


def named(listed: list[Shape], name: str, *, applies: bool = True) -> list[Shape]:
    return [shape for shape in listed if shape.name == name and shape.applies is applies]


def test_the_score_matrix_of_uncompiled_flex_is_the_one_that_was_never_found() -> None:
    scores = named(shapes.shapes_of(read_parameters(ORIGINAL)[0]), "attention scores")[0]
    assert (scores.values, scores.dtype) == ((32, 8192, 15452), "float32")
    assert scores.size_bytes / 2**30 == pytest.approx(15.09, abs=0.005)
    (_, queries), (_, keys) = scores.dims[1:]
    assert (queries.expression, queries.numbers) == ("max_anchors · block_size", "512 · 16")
    assert (keys.expression, keys.numbers) == ("seq_len + max_anchors · block_size", "7260 + 512 · 16")
    assert keys.free == Free(name="context tokens", value=7260, least=2, most=8192, offset=8192)


@pytest.mark.parametrize("changed", [{"compile": True}, {"attention": "sdpa_chunked"}])
def test_compiled_or_fused_there_is_no_score_matrix_but_it_is_still_listed(changed: dict[str, Any]) -> None:
    listed = shapes.shapes_of(read_parameters({**ORIGINAL, **changed})[0])
    assert named(listed, "attention scores") == []
    assert named(listed, "attention scores", applies=False)[0].values == (32, 8192, 15452)


def test_the_math_path_expands_heads_and_widens_the_type() -> None:
    given = {"max_anchors": 1024, "block_size": 32, "attention": "sdpa_math", "chunk_blocks": 182}
    listed = shapes.shapes_of(read_parameters(given)[0])
    expanded = named(listed, "expanded keys or values of the math path")[0]
    assert (expanded.values, expanded.dtype) == ((182, 32, 8032, 128), "float32")
    assert expanded.size_bytes / 2**30 == pytest.approx(22.31, abs=0.005)
    assert "8 key-value heads are expanded to 32 query heads" in expanded.notes


def test_the_reference_drafter_has_as_many_parameters_as_are_listed() -> None:
    listed = [shape for shape in shapes.shapes_of(Parameters()) if shape.category == "parameter"]
    matrices = sum(
        shape.count * math.prod(shape.values) for shape in listed if "embed_tokens" not in shape.name
    )
    norms = 2 * 5120 + 5 * (2 * 5120 + 2 * 128)
    assert matrices + norms == 1_730_213_120


def test_adamw_keeps_twelve_bytes_for_each_narrow_weight_and_eight_for_a_wide_one() -> None:
    for dtype, item_bytes in (("bfloat16", 12), ("float32", 8)):
        listed = shapes.shapes_of(Parameters(optimizer="adamw", dtype=dtype))
        kept = sum(
            shape.count * shape.size_bytes
            for shape in listed
            if shape.applies and shape.category == "optimizer_state"
        )
        gradients = [shape for shape in listed if shape.category == "gradient"]
        assert kept == item_bytes * sum(shape.count * math.prod(shape.values) for shape in gradients)


def test_every_place_that_an_entry_names_is_there() -> None:
    places = {shape.born for shape in _all_configurations()} - {vocabulary.NOWHERE}
    for place in places:
        assert callable(_resolved(place)), place


def _all_configurations() -> Iterator[Shape]:
    backends = [name for name in ATTENTION_BACKENDS if name != "auto"]
    for dtype, compiles, device in itertools.product(("bfloat16", "float64"), (True, False), ("cpu", "cuda")):
        yield from shapes.shapes_of(
            Parameters(
                dtype=dtype,
                optimizer="adamw",
                compile=compiles,
                device=device,
                backends=tuple(backends),
                policies=RECOMPUTE_POLICIES,
            )
        )


def _resolved(place: str) -> Callable[..., Any]:
    parts = place.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for name in parts[cut:]:
            found = getattr(found, name)
        return found  # type: ignore[no-any-return]
    raise AssertionError(place)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_attention_that_runs_is_the_one_that_execution_chooses(
    device: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    monkeypatch.setattr(execution, "has_triton", lambda: True)
    for attention, head_dim, compiles in itertools.product(ATTENTION_BACKENDS, (12, 16, 128), (True, False)):
        given: dict[str, Any] = {"attention": attention, "head_dim": head_dim, "compile": compiles}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = execution.choose_execution(
                create_drafter_config(**given),
                device=torch.device(device),
                dtype=getattr(torch, dtype),
                needs_gradients=True,
            )
        ours = Parameters(device=device, dtype=dtype, **given)
        assert (ours.backend, ours.is_compiled) == (found.attention, found.is_compiled), given


def test_a_probe_of_several_backends_or_anchors_makes_what_any_of_them_makes() -> None:
    several = shapes.shapes_of(
        Parameters(backends=("sdpa_math", "eager"), anchor_counts=(128, 256), seq_len=4000)
    )
    assert named(several, "expanded keys or values of the math path")
    assert {shape.values[1] for shape in named(several, "attention scores")} == {128 * 32, 256 * 32}


@pytest.mark.parametrize("lengths", [(1,), (127,), (128,), (129,), (200, 57)])
@pytest.mark.parametrize("anchors", [1, 4, 33])
def test_rows_of_keys_and_queries_are_laid_out_as_attention_wants_them(
    lengths: tuple[int, ...], anchors: int
) -> None:
    for compiles, tile_rows in ((True, TILE_ROWS), (False, 1)):
        given = Parameters(compile=compiles, attention="flex", max_anchors=anchors, block_size=4)
        row = Row(parameters=given, lengths=lengths, expression="seq_len")
        rows = (sum(lengths), row.T.value)
        layout = padded_layout(*rows, tile_rows=tile_rows) if compiles else dense_layout(*rows)
        assert (row.key_rows.value, row.query_rows.value) == (layout.key_rows, layout.query_rows)
        free = row.key_rows.free
        assert free is not None
        assert free.offset + free.factor * free.value == row.key_rows.value


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("chunk", [1, 5, 40, 2000])
@pytest.mark.parametrize("anchors", [6, 500])
def test_what_the_drawn_anchors_decide_lies_within_its_bounds(seed: int, chunk: int, anchors: int) -> None:
    changed = {"loss_chunk_rows": chunk, "max_anchors": anchors}
    given = build(OomProbeParams, {**SMALL, **changed, "seed": seed}, what="parameter")
    for row in rows_of(parameters(**changed)):
        blocks = blocks_of(given, row.lengths, max_anchors=given.max_anchors)
        teacher = Teacher(states_SH=torch.empty(0), tokens_R=blocks.teachers_R, kl_weight=0.5)
        chunks = _plan_chunks(len(blocks.slots_R), chunk, teacher, torch.device("cpu"))
        drawn = (
            (row.N, blocks.count),
            (row.R, len(blocks.slots_R)),
            (row.C, max(part.size for part in chunks)),
            (row.P, max(len(part.tokens_P) for part in chunks if part.tokens_P is not None)),
        )
        for expected, found in drawn:
            free = expected.free
            assert expected.value == found if free is None else free.least <= found <= free.most


def test_adamws_state_is_born_where_it_says() -> None:
    made = pytest.importorskip("dflash.optimizer")
    listed = [
        shape
        for shape in shapes.shapes_of(parameters(optimizer="adamw", dtype="bfloat16"))
        if shape.born.startswith("dflash.optimizer.")
    ]
    params = build(OomProbeParams, {**SMALL, "dtype": "bfloat16"}, what="parameter")
    machine, noted = open_machine("cpu"), Births()
    torch.set_default_dtype(torch.bfloat16)
    with noted:
        drafter = build_drafter(params, machine, max_anchors=params.max_anchors)
        optimizer = made.MasterAdamW(drafter.parameters(), lr=1e-3)
        forward_backward(drafter, random_row(params, (params.seq_len,), machine.device), seed=0)
        optimizer.step(1.0)
    assert all(shape.applies for shape in listed)
    assert unborn(listed, noted.all) == []


def test_the_program_answers_for_each_file_in_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "a b.json", tmp_path / "c.json"
    first.write_text(json.dumps({**ORIGINAL, "profile": True}))
    second.write_text(json.dumps({**SMALL, "bogus": 1, "attention": "sdpa_math"}))
    assert shapes.main(["--params", str(first), "--params", str(second)]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["format"] == 1
    assert [part["notes"] for part in answer["sets"]] == [[], ["ignored, as no probe has them: bogus"]]
    listed = shapes.shapes_of(read_parameters(ORIGINAL)[0])
    assert [part["name"] for part in answer["sets"][0]["tensors"]] == [shape.name for shape in listed]
    scores = next(part for part in answer["sets"][0]["tensors"] if part["name"] == "attention scores")
    assert scores["bytes"] == 32 * 8192 * 15452 * 4
    assert scores["remedy"] == {"compile": True}, "attention is flex already"
    assert scores["dims"][2]["free"] == {
        "name": "context tokens",
        "value": 7260,
        "least": 2,
        "most": 8192,
        "factor": 1,
        "offset": 8192,
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"seq_len": "x"}', "seq_len is 'x'; it must be an integer"),
        ('{"seq_len": 0}', "seq_len is 0; it must be greater than 0"),
        ('{"attention": "flax"}', "unknown attention backend 'flax'; did you mean 'flex'?"),
        ('{"backends": ["flax"]}', "unknown attention backend 'flax'; did you mean 'flex'?"),
        ('{"num_key_value_heads": 5}', "num_attention_heads 32 is not a multiple of num_key_value_heads 5"),
        ("[]", "expected a JSON object of parameters, found list"),
    ],
)
def test_the_program_refuses_in_one_line(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "params.json"
    path.write_text(text)
    with pytest.raises(SystemExit) as ended:
        shapes.main(["--params", str(path)])
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"dflash.shapes: {path}: {message}\n"


def test_the_program_loads_without_torch() -> None:
    script = "import sys, dflash.shapes; sys.exit('torch' in sys.modules)"
    payloads = Path(shapes.__file__).parents[1]
    assert subprocess.run([sys.executable, "-c", script], cwd=payloads, check=False).returncode == 0


def test_defaults_are_those_of_the_reference() -> None:
    assert Parameters().head_dim == REFERENCE.head_dim
    assert rows_of(Parameters())[0].S.value == 8000
