"""What a block may depend on, found by changing one input at a time, for every attention backend.

The reference states the same rules; these tests do not use it, so that one misreading cannot hide in both.
With `kl_weight=1` labels weigh nothing: what then still reacts to a token has read it as an input.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
import torch
from dflash.attention import sdpa
from torch import Tensor

from tests.payload.cases import FULL, SLIDING, Bench, Case, build
from tests.payload.reference import Objective

TEACHER_ONLY = Objective(kl_weight=1.0)
LABELS_ONLY = Objective(kl_weight=0.0)
# Two documents of 9 and 12 tokens, 3 of padding; the block of the anchor at 16 covers 16 … 20.
PACKED = Case(
    lengths=(9, 12), padding=3, anchors=(16,), block_size=5, sliding_window=6, objective=TEACHER_ONLY
)


TRAINED = ("eager", "sdpa_chunked", "sdpa_chunked, each block its own chunk", "sdpa_math")


@pytest.fixture(params=TRAINED)
def trained_backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A backend with a backward here."""
    return named(request, monkeypatch)


UNCOMPILED = pytest.mark.filterwarnings("ignore:attention. flex attention runs uncompiled")


@pytest.fixture(params=[*TRAINED, pytest.param("flex", marks=UNCOMPILED)])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    return named(request, monkeypatch)


def named(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name, *alone = str(request.param).split(", ")
    if alone:
        monkeypatch.setattr(sdpa, "CHUNK_SLOTS", 1)
    return name


def loss_of(bench: Bench, **changed: Tensor) -> float:
    with torch.no_grad():
        return float(bench.run(**changed)[0])


def reacting(
    bench: Bench, argument: str, change: Callable[[Tensor], Tensor], *, expected: Iterable[int]
) -> set[int]:
    """Return the row indices whose value in one argument, changed alone, changes the loss.

    Those that are not expected are changed all together first: only if that moves a bit is each one tried.
    """
    before, value = loss_of(bench), bench.arguments[argument]
    every = set(range(bench.case.row_length))

    def moves(indices: set[int]) -> bool:
        changed = scrambled(value, keep=every - indices, change=change)
        return loss_of(bench, **{argument: changed}) != before

    others = every - set(expected)
    return {index for index in (every if moves(others) else every - others) if moves({index})}


def other_token(token: Tensor) -> Tensor:
    return (token + 1) % 28


def other_state(state: Tensor) -> Tensor:
    return state.flip(-1) + 1.0


def scrambled(value: Tensor, *, keep: Iterable[int], change: Callable[[Tensor], Tensor]) -> Tensor:
    """Return a tensor `[1, S, …]` with every index changed but those to keep."""
    changed = change(value)
    kept = list(keep)
    changed[:, kept] = value[:, kept]
    return changed


@pytest.mark.parametrize(
    ("layer_types", "anchor", "seen"),
    [
        ((FULL,), 16, range(9, 16)),
        ((FULL, FULL), 16, range(9, 16)),
        ((SLIDING,), 16, range(12, 16)),  # slot 1 is at 17 and sees back to 17 − 5; slot 0 carries no loss
        ((SLIDING, SLIDING), 16, range(11, 16)),  # and now slot 0, seeing back to 16 − 5, feeds the others
        ((SLIDING, SLIDING), 11, range(9, 11)),
        ((FULL, SLIDING), 9, ()),
        ((FULL, SLIDING), 10, (9,)),
        ((FULL,), 4, range(4)),
    ],
)
def test_block_reads_exactly_its_documents_states_before_the_anchor(
    backend: str, layer_types: tuple[str, ...], anchor: int, seen: Iterable[int]
) -> None:
    bench = build(replace(PACKED, attention=backend, layer_types=layer_types, anchors=(anchor,)))
    assert reacting(bench, "all_hidden_states", other_state, expected=seen) == set(seen)


def test_gradient_reaches_exactly_the_states_that_are_read(trained_backend: str) -> None:
    bench = build(replace(PACKED, attention=trained_backend, layer_types=(SLIDING, SLIDING)))
    features = bench.arguments["all_hidden_states"].clone().requires_grad_()
    torch.autograd.backward(bench.run(all_hidden_states=features)[0])
    assert features.grad is not None
    assert features.grad[0].abs().sum(-1).nonzero().flatten().tolist() == [11, 12, 13, 14, 15]


def test_only_the_anchors_own_token_is_an_input(backend: str) -> None:
    bench = build(replace(PACKED, attention=backend))
    assert reacting(bench, "input_ids", other_token, expected={16}) == {16}


def test_labels_are_the_tokens_one_to_block_size_minus_one_after_the_anchor(backend: str) -> None:
    bench = build(replace(PACKED, attention=backend, objective=LABELS_ONLY, holes=(18,)))
    assert reacting(bench, "input_ids", other_token, expected={16, 17, 19, 20}) == {16, 17, 19, 20}


def test_teacher_of_a_slot_is_the_targets_state_one_position_earlier() -> None:
    bench = build(replace(PACKED, holes=(18,)))
    assert reacting(bench, "verifier_last_hidden", other_state, expected={16, 18, 19}) == {16, 18, 19}


def test_hard_labels_ignore_the_teacher() -> None:
    bench = build(replace(PACKED, objective=Objective(use_soft_labels=False, kl_weight=0.5)))
    assert reacting(bench, "verifier_last_hidden", other_state, expected=set()) == set()


def test_close_blocks_do_not_read_what_lies_between_or_after_their_anchors(backend: str) -> None:
    bench = build(replace(PACKED, attention=backend, anchors=(12, 14, 15)))
    assert reacting(bench, "input_ids", other_token, expected={12, 14, 15}) == {12, 14, 15}
    # Block 12 reads 9 … 11, block 14 up to 13, block 15 up to 14; nobody reads 15 or later.
    assert reacting(bench, "all_hidden_states", other_state, expected=set(range(9, 15))) == set(range(9, 15))


@pytest.mark.parametrize("layer_types", [(FULL, FULL), (SLIDING, SLIDING), (SLIDING, FULL)])
def test_blocks_never_see_each_other(backend: str, layer_types: tuple[str, ...]) -> None:
    # Every slot of these blocks is valid, so the loss of all is the mean of the losses of each.
    anchors = (1, 3, 4, 10, 12, 15, 16)
    bench = build(replace(PACKED, attention=backend, layer_types=layer_types, anchors=anchors))
    alone = [loss_of(bench, anchors=torch.tensor([anchor])) for anchor in anchors]
    assert loss_of(bench) == pytest.approx(sum(alone) / len(alone), rel=1e-12)


def test_nothing_of_another_document_or_of_padding_is_read(backend: str) -> None:
    bench = build(replace(PACKED, attention=backend, anchors=(11, 16, 19), objective=Objective()))
    document = range(9, 21)
    changed = {
        name: scrambled(bench.arguments[name], keep=document, change=change)
        for name, change in (
            ("all_hidden_states", other_state),
            ("verifier_last_hidden", other_state),
            ("input_ids", other_token),
        )
    }
    flipped = ~bench.arguments["loss_mask"]
    flipped[:, 9:21] = bench.arguments["loss_mask"][:, 9:21]
    assert loss_of(bench, **changed, loss_mask=flipped) == loss_of(bench)


def test_all_ones_mask_takes_no_label_from_the_next_document(backend: str) -> None:
    bench = build(replace(PACKED, attention=backend, anchors=(6, 7, 19), objective=LABELS_ONLY))
    assert reacting(bench, "input_ids", other_token, expected={6, 7, 8, 19, 20}) == {6, 7, 8, 19, 20}


def test_document_alone_gives_the_same_loss_as_packed(backend: str) -> None:
    packed = build(replace(PACKED, attention=backend, objective=Objective()))
    alone = {
        name: packed.arguments[name][:, 9:21]
        for name in ("all_hidden_states", "verifier_last_hidden", "input_ids", "loss_mask")
    }
    with torch.no_grad():
        shifted = packed.run(**alone, lengths=torch.tensor([12]), anchors=torch.tensor([7]))[0]
    assert float(shifted) == pytest.approx(loss_of(packed), rel=1e-12)


@pytest.mark.parametrize(("layer_types", "reacts"), [((FULL, FULL), True), ((SLIDING, SLIDING), False)])
def test_slot_one_depends_on_the_last_slot_in_full_layers_only(
    backend: str, layer_types: tuple[str, ...], reacts: bool
) -> None:
    # Only slot 1 carries loss; taking the last slot away must show in full layers and nowhere else.
    case = replace(PACKED, attention=backend, layer_types=layer_types, holes=(18, 19, 20))
    with_last = loss_of(build(case))
    without = loss_of(build(replace(case, block_size=4)))
    assert (abs(with_last - without) > 1e-6) is reacts
    if not reacts:
        assert with_last == pytest.approx(without, rel=1e-12)


def test_masked_slots_read_the_mask_tokens_embedding_and_no_other() -> None:
    bench = build(replace(PACKED, anchors=(16, 11)))
    before = loss_of(bench)
    read = {28, *bench.arguments["input_ids"][0, [16, 11]].tolist()}
    embedding = bench.drafter.embed_tokens.weight
    with torch.no_grad():
        embedding[[token for token in range(29) if token not in read]] += 5.0
        assert loss_of(bench) == before
        embedding[28] += other_state(embedding[28])
    assert loss_of(bench) != before


def test_order_of_anchors_does_not_matter(backend: str) -> None:
    bench = build(replace(PACKED, attention=backend, anchors=(16, 1, 11, 4)))
    ordered = loss_of(bench, anchors=torch.tensor([1, 4, 11, 16]))
    assert loss_of(bench) == pytest.approx(ordered, rel=1e-12)


def test_logits_come_from_the_real_head_and_not_from_the_embedding() -> None:
    bench = build(PACKED)
    head = bench.drafter.lm_head.weight
    tied = build(PACKED)
    with torch.no_grad():
        tied.drafter.lm_head.weight.copy_(tied.drafter.embed_tokens.weight)
        # Rows 0 … 4 of the embedding are read by no block here; rows of the head always count.
        unread = [token for token in range(5) if token != bench.row.tokens[16]]
        before = loss_of(bench)
        bench.drafter.embed_tokens.weight[unread] += 1.0
        assert loss_of(bench) == before
        head[unread] += 1.0
    assert loss_of(bench) != before
    assert loss_of(tied) == pytest.approx(float(tied.reference().loss.detach()), rel=1e-9)


def test_tied_target_gives_one_tensor_for_both_without_a_copy() -> None:
    drafter = build(PACKED).drafter
    shared = torch.randn(29, 12, dtype=torch.float64)
    drafter.use_target_weights(embed_tokens_VH=shared, lm_head_VH=shared)
    assert drafter.embed_tokens.weight.data_ptr() == drafter.lm_head.weight.data_ptr() == shared.data_ptr()
    assert not drafter.embed_tokens.weight.requires_grad
    assert not drafter.lm_head.weight.requires_grad


def test_untied_target_gives_each_its_own() -> None:
    drafter = build(PACKED).drafter
    embedding, head = torch.randn(2, 29, 12, dtype=torch.float64)
    drafter.use_target_weights(embed_tokens_VH=embedding, lm_head_VH=head)
    assert torch.equal(drafter.embed_tokens.weight, embedding)
    assert torch.equal(drafter.lm_head.weight, head)


@pytest.mark.parametrize("shape", [(28, 12), (29, 13)])
def test_target_weights_of_another_shape_are_refused_with_both(shape: tuple[int, int]) -> None:
    drafter = build(PACKED).drafter
    right, wrong = torch.zeros(29, 12), torch.zeros(shape)
    for embedding, head in ((wrong, right), (right, wrong)):
        with pytest.raises(ValueError, match=rf"{shape[0]}, {shape[1]}.*29, 12"):
            drafter.use_target_weights(embed_tokens_VH=embedding, lm_head_VH=head)
