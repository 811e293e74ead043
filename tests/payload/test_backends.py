"""Attention backends and recomputation change how the work is done, and no number."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from dflash import layers
from dflash.attention import Attend, prepare_attention, sdpa
from dflash.execution import Execution
from dflash.visibility import Visibility
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.payload.cases import (
    FULL,
    SLIDING,
    Case,
    blocks_of,
    build,
    gradients_of,
    leaves,
    relative_error,
)

MIXED = (SLIDING, FULL)
ROWS = {
    "row shorter than 128": Case(lengths=(30, 23), padding=4, anchors=(0, 1, 3, 29, 30, 31, 44)),
    "row not a multiple of 128": Case(lengths=(90, 131, 80), padding=10, anchors=tuple(range(2, 300, 7))),
    "one document": Case(lengths=(197,), padding=0, anchors=tuple(range(0, 195, 3))),
    "many documents": Case(lengths=tuple(range(2, 24)), padding=5, anchors=tuple(range(0, 273, 4))),
    "every token an anchor": Case(lengths=(40, 25), padding=0, anchors=tuple(range(65))),
    "one anchor": Case(lengths=(140,), padding=0, anchors=(131,)),
    "one anchor with no context": Case(lengths=(140,), padding=0, anchors=(0,)),
    "anchors at starts only": Case(lengths=(20, 20, 20), padding=1, anchors=(0, 20, 40)),
    "window smaller than documents": Case(
        sliding_window=16, lengths=(150, 77), padding=2, anchors=tuple(range(1, 226, 9))
    ),
    "window of one block": Case(sliding_window=5, lengths=(60,), padding=2, anchors=tuple(range(1, 58, 2))),
    "block of sixteen": Case(
        block_size=16, sliding_window=32, lengths=(100, 50), anchors=tuple(range(5, 149, 12))
    ),
    "more blocks than fit one chunk": Case(
        block_size=32,
        sliding_window=40,
        num_attention_heads=2,
        num_key_value_heads=1,
        lengths=(70, 45),
        anchors=tuple(range(0, 105, 3)),
    ),
    "holes in the loss mask": Case(
        lengths=(60, 70), holes=tuple(range(10, 130, 6)), anchors=(4, 8, 19, 61, 80)
    ),
}
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}


BACKWARD = ("sdpa_chunked", "sdpa_math")
POLICIES = ("none", "mlp", "layer")


def outcome(case: Case) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Return loss, parameter gradients and the gradient of the features."""
    bench = build(case)
    features = bench.arguments["all_hidden_states"].requires_grad_()
    loss, _ = bench.run()
    torch.autograd.backward(loss)
    return loss.detach(), gradients_of(bench.drafter), features.grad


@pytest.mark.parametrize("attention", BACKWARD)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=["float64", "float32"])
@pytest.mark.parametrize("case", ROWS.values(), ids=ROWS.keys())
def test_backends_equal_eager_forward_and_backward(case: Case, dtype: torch.dtype, attention: str) -> None:
    eager_loss, eager, eager_features = outcome(replace(case, dtype=dtype, attention="eager"))
    loss, gradients, features = outcome(replace(case, dtype=dtype, attention=attention, chunk_blocks=3))
    assert relative_error(loss, eager_loss) < TOLERANCE[dtype]
    assert relative_error(features, eager_features) < TOLERANCE[dtype]
    for name, gradient in eager.items():
        assert relative_error(gradients[name], gradient) < TOLERANCE[dtype], name


NARROW = replace(ROWS["row not a multiple of 128"], dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def widened() -> tuple[Tensor, dict[str, Tensor]]:
    """The reference's loss and its weights: those of the drafter, rounded and then widened."""
    bench = build(NARROW)
    weights = leaves(bench.drafter)
    exact = bench.reference(weights).loss
    torch.autograd.backward(exact)
    return exact.detach(), weights


@pytest.mark.parametrize("attention", ["eager", *BACKWARD])
def test_bfloat16_backends_are_as_close_to_float64_as_bfloat16_is(
    attention: str, widened: tuple[Tensor, dict[str, Tensor]]
) -> None:
    exact, weights = widened
    narrow = outcome(replace(NARROW, attention=attention))
    assert relative_error(narrow[0], exact) < 5e-3
    for name, gradient in narrow[1].items():
        expected = weights[name].grad
        assert expected is not None
        assert relative_error(gradient, expected) < 6e-2, name


def test_math_backend_is_the_math_path_whatever_else_could_run() -> None:
    case = ROWS["one document"]
    with Names() as names:
        attended(case, torch.float32, None, "sdpa_math")
    assert not {name for name in names.seen if name.startswith("_scaled_dot_product_f")}
    with Names() as names:
        attended(case, torch.float32, None, "sdpa_chunked")
    assert "_scaled_dot_product_flash_attention_for_cpu" in names.seen


class Names(TorchDispatchMode):
    """Notes which operators run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def test_context_gradients_of_many_chunks_are_summed_before_they_are_rounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sdpa, "CHUNK_SLOTS", 1)
    case = Case(lengths=(300,), padding=0, anchors=tuple(range(40, 295)), head_dim=8)
    chunked, eager = (context_gradient(case, attention) for attention in ("sdpa_chunked", "eager"))
    # One rounding of bfloat16 is 0.2 %; hundreds of rounded sums would be several percent off.
    assert relative_error(chunked, eager) < 4e-3


def context_gradient(case: Case, attention: str) -> Tensor:
    """Return the gradient of the context's values, of which every chunk has a part, from bfloat16."""
    attend = prepared(case, None, attention)
    generator = torch.Generator().manual_seed(3)
    rows = (attend.layout.query_rows, attend.layout.key_rows)
    heads = (case.num_attention_heads, case.num_key_value_heads)
    queries, keys, values = (
        torch.randn(rows[part], heads[part], case.head_dim, generator=generator).bfloat16()
        for part in (0, 1, 1)
    )
    values.requires_grad_()
    torch.autograd.backward(attend(queries, keys, values).float().sum())
    assert values.grad is not None
    return values.grad[: case.row_length]


def test_masks_of_blocks_are_those_of_each_block_alone() -> None:
    case = Case(lengths=(100, 200), padding=7, sliding_window=30, anchors=tuple(range(120, 290, 8)))
    context = slice(0, case.row_length)
    for window in (case.sliding_window, None):
        seen = Visibility(
            blocks=blocks_of(case), context_length=case.row_length, window=window, device=torch.device("cpu")
        )
        alone = [seen.mask_LK(slice(block, block + 1), context) for block in range(3, 9)]
        assert torch.equal(seen.masks_nBK(slice(3, 9), context), torch.stack(alone))


def test_chunk_reads_no_more_of_the_context_than_its_blocks_see() -> None:
    case = Case(lengths=(100, 200), padding=0, sliding_window=30, anchors=tuple(range(120, 290, 8)))
    for window in (case.sliding_window, None):
        seen = Visibility(
            blocks=blocks_of(case),
            context_length=case.row_length,
            window=window,
            device=torch.device("cpu"),
        )
        for first in range(0, seen.blocks.count, 4):
            blocks = slice(first, min(first + 4, seen.blocks.count))
            bounds = seen.context_bounds(blocks)
            reached = seen.mask_LK(blocks, slice(0, case.row_length))[:, : case.row_length].any(0).nonzero()
            assert (bounds.start, bounds.stop) == (int(reached.min()), int(reached.max()) + 1)


@pytest.mark.filterwarnings("ignore:attention. flex attention runs uncompiled")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=["float64", "float32"])
@pytest.mark.parametrize("case", ROWS.values(), ids=ROWS.keys())
def test_flex_equals_eager_forward(case: Case, dtype: torch.dtype) -> None:
    for window in (case.sliding_window, None):
        eager, flex = (attended(case, dtype, window, attention) for attention in ("eager", "flex"))
        assert relative_error(flex, eager) < TOLERANCE[dtype]


def attended(case: Case, dtype: torch.dtype, window: int | None, attention: str) -> Tensor:
    """Return what one backend makes of random queries, keys and values, `[T, A·D]`."""
    attend = prepared(case, window, attention)
    heads, groups, width = case.num_attention_heads, case.num_key_value_heads, case.head_dim
    generator = torch.Generator().manual_seed(3)
    queries, keys, values = (
        torch.randn(rows, parts, width, generator=generator, dtype=torch.float64).to(dtype)
        for rows, parts in (
            (attend.layout.query_rows, heads),
            (attend.layout.key_rows, groups),
            (attend.layout.key_rows, groups),
        )
    )
    with torch.no_grad():
        return attend(queries, keys, values)


def prepared(case: Case, window: int | None, attention: str) -> Attend:
    """Return one backend, prepared for the case's row and a window."""
    execution = Execution(attention=attention, is_compiled=False, chunk_blocks=3)
    seen = Visibility(
        blocks=blocks_of(case), context_length=case.row_length, window=window, device=torch.device("cpu")
    )
    return prepare_attention(execution, {"layer": seen})["layer"]


@pytest.mark.parametrize("recompute", ["mlp", "layer"])
@pytest.mark.parametrize("attention", ["eager", *BACKWARD])
def test_recomputing_changes_no_gradient(attention: str, recompute: str) -> None:
    case = Case(
        lengths=(30, 23),
        anchors=(0, 3, 29, 31, 44),
        attention=attention,
        layer_types=(SLIDING, SLIDING, FULL),
    )
    kept_loss, kept, kept_features = outcome(case)
    again_loss, again, again_features = outcome(replace(case, recompute=recompute))
    assert torch.equal(kept_loss, again_loss)
    assert torch.equal(kept_features, again_features)
    for name, gradient in kept.items():
        assert torch.equal(again[name], gradient), name


@pytest.mark.parametrize("columns", [1, 3, 7, 19, 20, 500])
def test_columns_of_a_part_change_no_gradient(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(lengths=(30, 23), anchors=(0, 3, 29, 31, 44))
    assert case.intermediate_size == 20
    _, kept, _ = outcome(case)
    monkeypatch.setattr(layers, "PART_COLUMNS", columns)
    _, again, _ = outcome(replace(case, recompute="layer"))
    for name, gradient in kept.items():
        assert relative_error(again[name], gradient) < 1e-12, name


def test_each_policy_saves_less_than_the_one_before() -> None:
    # What autograd holds between forward and backward is what recomputation is for.
    case = Case(lengths=(60,), anchors=tuple(range(50)), layer_types=(FULL,) * 4)
    none, mlp, layer = (saved_bytes(replace(case, recompute=policy)) for policy in POLICIES)
    slots = 50 * case.block_size
    gate_and_up = 4 * 2 * slots * case.intermediate_size * 8
    assert none - mlp == gate_and_up
    # Two states a layer remain, beside what is saved once.
    assert layer < mlp - 4 * 2 * slots * case.num_attention_heads * case.head_dim * 8


def saved_bytes(case: Case) -> int:
    """Return the bytes of distinct storages that one forward saves for its backward."""
    bench = build(case)
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = bench.run()[0]
    weights = {parameter.untyped_storage().data_ptr() for parameter in bench.drafter.parameters()}
    assert loss.requires_grad
    return sum(size for pointer, size in saved.items() if pointer not in weights)


def test_layer_keeps_what_its_policy_says_and_no_more() -> None:
    # What a third layer adds is what one layer keeps; numbers of eight bytes.
    case = Case(lengths=(60,), anchors=tuple(range(50)), attention="sdpa_chunked")
    slots = 50 * case.block_size
    states, gate_and_up = 2 * slots * case.hidden_size, 2 * slots * case.intermediate_size
    kept = {policy: added(replace(case, recompute=policy)) for policy in POLICIES}
    assert kept["layer"] == states
    assert kept["none"] - kept["mlp"] == gate_and_up


def added(case: Case) -> int:
    two, three = (saved_bytes(replace(case, layer_types=(FULL,) * layers)) for layers in (2, 3))
    return (three - two) // 8


class Products(TorchDispatchMode):
    """Counts the matrix products that read a given tensor."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0
        self._storage = tensor.untyped_storage().data_ptr()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.overloadpacket.__name__ in ("mm", "addmm", "addmm_"):
            read = [part for part in args if isinstance(part, Tensor)]
            self.count += any(part.untyped_storage().data_ptr() == self._storage for part in read)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("recompute", POLICIES)
@pytest.mark.parametrize(
    ("name", "once_more"), [("mlp.down_proj", ()), ("mlp.gate_proj", ("mlp", "layer")), ("fc", ())]
)
def test_only_gate_and_up_are_multiplied_again(recompute: str, name: str, once_more: tuple[str, ...]) -> None:
    bench = build(Case(recompute=recompute))
    owner = bench.drafter if name == "fc" else bench.drafter.layers[0]
    with Products(owner.get_parameter(f"{name}.weight")) as products:
        torch.autograd.backward(bench.run()[0])
    # Forward and the gradient of the input; nobody asks for the features' gradient.
    assert products.count == (1 if name == "fc" else 2) + (recompute in once_more)
