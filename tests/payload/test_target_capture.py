"""States captured from packed rows are those of documents alone, for each family of targets."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from dflash.target import recurrence
from dflash.target.capture import Target
from dflash.target.rows import lay_out_row

from tests.payload.targets import FAMILIES, SIZES, alone, config_of, model_of, relative, tokens_of

LENGTHS = (5, 1, 1, 9, 2, 70, 3)  # one-token documents, and one longer than a chunk of the delta rule
PADDING = 13
LAYERS = (2, 0, 1)
WITH_A_MEMORY = ("qwen3_5", "qwen3_next")

Targets = Callable[[str], Target]


@pytest.fixture(scope="module")
def target() -> Targets:
    made: dict[str, Target] = {}

    def make(family: str) -> Target:
        if family not in made:
            made[family] = Target(model_of(config_of(family)), LAYERS)
        return made[family]

    return make


def hooks_on(model: Any) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_have_the_states_and_logits_of_documents_alone(target: Targets, family: str) -> None:
    one = target(family)
    ids = tokens_of(sum(LENGTHS) + PADDING)
    captured = one.capture(ids, LENGTHS)
    features, last, logits = alone(one.model, ids, LENGTHS, LAYERS)
    text = sum(LENGTHS)
    assert captured.features_1SF.shape == (1, text + PADDING, len(LAYERS) * one.hidden_size)
    assert captured.last_hidden_1SH.shape == (1, text + PADDING, one.hidden_size)
    for part, wanted in zip(captured.features_1SF[0, :text].chunk(3, -1), features.chunk(3, -1), strict=True):
        assert relative(part, wanted) < 1e-4
    assert relative(captured.last_hidden_1SH[0, :text], last) < 1e-4
    assert relative(captured.last_hidden_1SH[0, :text] @ one.lm_head_VH.T, logits) < 1e-4


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_padding_is_zero_and_its_tokens_do_not_matter(target: Targets, family: str) -> None:
    one = target(family)
    ids = tokens_of(sum(LENGTHS) + PADDING)
    other = torch.cat([ids[:, : sum(LENGTHS)], torch.zeros(1, PADDING, dtype=torch.long)], 1)
    first, second = one.capture(ids, LENGTHS), one.capture(other, LENGTHS)
    assert torch.equal(first.features_1SF, second.features_1SF)
    assert torch.equal(first.last_hidden_1SH, second.last_hidden_1SH)
    assert not first.features_1SF[:, sum(LENGTHS) :].any()
    assert not first.last_hidden_1SH[:, sum(LENGTHS) :].any()


def test_a_default_device_elsewhere_changes_nothing(target: Targets) -> None:
    one, ids = target("qwen3_5"), tokens_of(20)
    with torch.device("meta"):
        captured = one.capture(ids, (9, 5))
    assert torch.equal(captured.features_1SF, one.capture(ids, (9, 5)).features_1SF)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_a_document_is_the_same_wherever_it_stands(target: Targets, family: str) -> None:
    one, document = target(family), tokens_of(20)
    behind = one.capture(torch.cat([tokens_of(50, seed=1), document], 1), (30, 20, 20))
    ahead = one.capture(torch.cat([document, tokens_of(50, seed=2)], 1), (20,))
    assert relative(behind.features_1SF[0, 50:], ahead.features_1SF[0, :20]) < 1e-4


def test_narrow_states_are_close_to_those_of_documents_alone() -> None:
    model = model_of(config_of("qwen3_5"), dtype=torch.bfloat16)
    ids = tokens_of(sum(LENGTHS))
    captured = Target(model, LAYERS).capture(ids, LENGTHS)
    features, last, _ = alone(model, ids, LENGTHS, LAYERS)
    assert captured.features_1SF.dtype == torch.bfloat16
    assert relative(captured.features_1SF[0], features) < 0.05
    assert relative(captured.last_hidden_1SH[0], last) < 0.05


def test_zero_centred_norms_make_the_teacher_the_target_itself(target: Targets) -> None:
    one = target("qwen3_5")
    norm = one.model.get_decoder().norm
    ids = tokens_of(12)
    captured = one.capture(ids, (12,))
    before_norm = one.model.get_decoder()(input_ids=ids, output_hidden_states=True, use_cache=False)
    logits = one.model(input_ids=ids, use_cache=False).logits
    assert relative(captured.last_hidden_1SH[0] @ one.lm_head_VH.T, logits[0]) < 1e-5
    # A plain norm with the same weights, as the teacher was once made, is far off.
    plain = torch.nn.functional.rms_norm(before_norm.hidden_states[-2], (32,), norm.weight, 1e-6)
    assert relative(plain[0] @ one.lm_head_VH.T, logits[0]) > 0.1


def test_a_tied_targets_head_is_its_embedding(target: Targets) -> None:
    tied, untied = target("smollm2"), target("llama")
    assert tied.lm_head_VH is tied.embed_tokens_VH
    assert not torch.equal(untied.lm_head_VH, untied.embed_tokens_VH)
    assert (tied.vocab_size, tied.hidden_size, tied.num_layers) == (97, 32, 4)


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_a_capture_computes_no_head_and_leaves_nothing_behind(target: Targets, family: str) -> None:
    one = target(family)
    before = hooks_on(one.model)
    heads: list[int] = []
    handle = one.model.lm_head.register_forward_hook(lambda *_: heads.append(1))
    captured = one.capture(tokens_of(8), (8,))
    handle.remove()
    assert not heads
    assert captured.features_1SF.any()
    assert hooks_on(one.model) == before


def test_a_capture_of_a_model_that_could_be_trained_keeps_no_graph() -> None:
    model = model_of(config_of("qwen3_5")).requires_grad_(True)
    captured = Target(model, LAYERS).capture(tokens_of(8), (5, 3))
    assert not captured.features_1SF.requires_grad
    assert not captured.last_hidden_1SH.requires_grad


def test_hooks_go_when_a_capture_fails(target: Targets) -> None:
    one = target("qwen3_5")
    before = hooks_on(one.model)
    with pytest.raises(IndexError):
        one.capture(torch.full((1, 4), 1000), (4,))
    assert hooks_on(one.model) == before


@pytest.mark.parametrize("layers", [(0, 3), (4,), (), (1, 1), (-1,)])
def test_layers_that_cannot_be_captured_are_refused(layers: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"target.layer.id"):
        Target(model_of(config_of("llama")), layers)


@pytest.mark.parametrize("family", WITH_A_MEMORY)
@pytest.mark.parametrize("forgotten", ["_silence", "_forget"])
def test_a_memory_that_is_not_emptied_is_found_before_training(
    family: str, forgotten: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recurrence, forgotten, lambda *_: lambda *_: None)
    with pytest.raises(ValueError, match="lets a document of a row change"):
        Target(model_of(config_of(family)), LAYERS)


def test_a_target_that_does_not_know_packed_rows_is_refused() -> None:
    config = transformers.OPTConfig(
        vocab_size=97,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        ffn_dim=48,
        word_embed_proj_dim=32,
    )
    with pytest.raises(ValueError, match="OPTForCausalLM lets a document of a row change"):
        Target(model_of(config), LAYERS)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (lambda: transformers.Gemma2Config(**SIZES), "final_logit_softcapping 30"),
        (lambda: transformers.GraniteConfig(**_without_head_dim(), logits_scaling=8.0), "logits_scaling 8"),
        (lambda: transformers.CohereConfig(**_without_head_dim()), "logit_scale 0.0625"),
        (lambda: transformers.PhiConfig(**_without_head_dim()), "adds a bias to its logits"),
        (
            lambda: transformers.MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=4),
            "takes no position_ids",
        ),
    ],
)
def test_a_target_whose_teacher_would_be_wrong_is_refused(config: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Target(model_of(config()), LAYERS)


def _without_head_dim() -> dict[str, Any]:
    return {name: value for name, value in SIZES.items() if name != "head_dim"}


def test_logits_that_are_more_than_a_product_are_found_whatever_they_are_called() -> None:
    model = model_of(config_of("llama"))
    model.lm_head.register_forward_hook(lambda _module, _args, logits: logits * 0.5)
    with pytest.raises(ValueError, match=r"logits differ by 100\.0%"):
        Target(model, LAYERS)


def test_states_that_depend_on_the_rows_length_are_found() -> None:
    model = model_of(config_of("llama"))
    longer = model.model.layers[0].mlp
    longer.register_forward_hook(lambda _module, _args, states: states * states.shape[1])
    with pytest.raises(ValueError, match="states in a packed row differ"):
        Target(model, LAYERS)


def test_a_row_has_gaps_between_documents_and_positions_from_zero() -> None:
    row = lay_out_row(torch.arange(1, 9)[None], (2, 3), gap=2)
    assert row.input_ids_1T[0, :9].tolist() == [1, 2, 0, 0, 3, 4, 5, 0, 0]
    assert row.position_ids_1T[0, :9].tolist() == [0, 1, 0, 0, 0, 1, 2, 0, 0]
    assert row.kept_D.tolist() == [0, 1, 4, 5, 6]
    assert row.firsts_N.tolist() == [0, 4]
    assert row.is_text_T.nonzero().flatten().tolist() == row.kept_D.tolist()
    assert row.input_ids_1T.shape == (1, 64)
    assert not row.is_contiguous
    assert lay_out_row(torch.arange(1, 9)[None], (2, 3), gap=0).is_contiguous


@pytest.mark.parametrize(
    ("shape", "lengths", "message"),
    [((1, 8), (), "holds no document"), ((1, 8), (5, 4), "lengths sum to 9"), ((2, 8), (8,), "expected")],
)
def test_a_row_that_does_not_fit_is_refused(
    shape: tuple[int, ...], lengths: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        lay_out_row(torch.zeros(shape, dtype=torch.long), lengths, gap=0)
