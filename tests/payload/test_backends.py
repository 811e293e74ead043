"""Attention backends and recomputation change how the work is done, and no number."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.payload.cases import FULL, SLIDING, Case, build, gradients_of, relative_error

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


def outcome(case: Case) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Return loss, parameter gradients and the gradient of the features."""
    bench = build(case)
    features = bench.arguments["all_hidden_states"].requires_grad_()
    loss, _ = bench.run()
    torch.autograd.backward(loss)
    return loss.detach(), gradients_of(bench.drafter), features.grad


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["float64", "float32"])
@pytest.mark.parametrize("case", ROWS.values(), ids=ROWS.keys())
def test_chunked_attention_equals_eager_forward_and_backward(case: Case, dtype: torch.dtype) -> None:
    eager_loss, eager, eager_features = outcome(replace(case, dtype=dtype, attention="eager"))
    chunked_loss, chunked, chunked_features = outcome(replace(case, dtype=dtype, attention="sdpa_chunked"))
    assert relative_error(chunked_loss, eager_loss) < TOLERANCE[dtype]
    assert relative_error(chunked_features, eager_features) < TOLERANCE[dtype]
    for name, gradient in eager.items():
        assert relative_error(chunked[name], gradient) < TOLERANCE[dtype], name


@pytest.mark.parametrize("attention", ["eager", "sdpa_chunked"])
def test_recomputing_layers_changes_no_gradient(attention: str) -> None:
    case = Case(
        lengths=(30, 23),
        anchors=(0, 3, 29, 31, 44),
        attention=attention,
        layer_types=(SLIDING, SLIDING, FULL),
    )
    kept_loss, kept, kept_features = outcome(case)
    again_loss, again, again_features = outcome(replace(case, recompute="layer"))
    assert torch.equal(kept_loss, again_loss)
    assert torch.equal(kept_features, again_features)
    for name, gradient in kept.items():
        assert torch.equal(again[name], gradient), name


def test_recomputing_layers_saves_activations() -> None:
    # What autograd holds between forward and backward is what recomputation is for.
    case = Case(lengths=(60,), anchors=tuple(range(50)), layer_types=(FULL,) * 4)
    assert saved_bytes(replace(case, recompute="layer")) < 0.6 * saved_bytes(case)


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
