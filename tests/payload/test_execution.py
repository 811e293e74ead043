"""What runs where: every fall-back says why, once, and nothing runs uncompiled in silence."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from dflash import execution, notices
from dflash.execution import Execution, choose_execution

from tests.payload.cases import Case, build, config_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _nothing_said_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "_said", set())


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The warning records that are sent."""
    sent: list[tuple[str, str]] = []
    monkeypatch.setattr(notices, "emit_warning", lambda about, message: sent.append((about, message)))
    return sent


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    card(monkeypatch, (9, 0))


def card(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], *, triton: bool = True) -> None:
    """Pretend that there is a card; nothing is run on it."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    monkeypatch.setattr(execution, "has_triton", lambda: triton)


def chosen(
    device: torch.device, *, training: bool = True, dtype: Any = torch.bfloat16, **config: Any
) -> Execution:
    return choose_execution(
        config_of(Case(), **{"head_dim": 128, "attention": "auto", **config}),
        device=device,
        dtype=dtype,
        needs_gradients=training,
    )


def test_default_is_compiled_flex_on_a_card_and_chunks_elsewhere(hopper: None) -> None:
    assert (chosen(CUDA).attention, chosen(CUDA).is_compiled) == ("flex", True)
    assert (chosen(CPU).attention, chosen(CPU).is_compiled) == ("sdpa_chunked", False)


@pytest.mark.parametrize(
    ("reason", "capability", "settings"),
    [
        ("head_dim is 8, .*at least 16", (9, 0), {"head_dim": 8}),
        ("no float64", (9, 0), {"dtype": torch.float64}),
        ("head_dim is 192, .*sm_12x takes at most 128", (12, 0), {"head_dim": 192}),
    ],
)
@pytest.mark.parametrize("asked", ["auto", "flex"])
def test_what_flex_cannot_do_on_a_card_falls_back_and_says_why(
    asked: str,
    reason: str,
    capability: tuple[int, int],
    settings: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    events: list[tuple[str, str]],
) -> None:
    card(monkeypatch, capability)
    with pytest.warns(notices.DFlashWarning, match=f"flex cannot run here: .*{reason}.*sdpa_chunked"):
        found = chosen(CUDA, attention=asked, **settings)
    assert (found.attention, found.is_compiled) == ("sdpa_chunked", True)
    assert [about for about, _ in events] == ["attention"]


def test_heads_that_no_fused_kernel_takes_end_in_the_math_path(
    hopper: None, events: list[tuple[str, str]]
) -> None:
    with pytest.warns(notices.DFlashWarning):
        assert chosen(CUDA, head_dim=12).attention == "sdpa_math"
    assert len(events) == 2
    assert "rows of 24 bytes, and its kernel needs a multiple of 16" in events[1][1]
    assert chosen(CPU, head_dim=12).attention == "sdpa_chunked"
    assert chosen(CUDA, head_dim=12, attention="eager").attention == "eager"


def test_uncompiled_flex_is_said_once_whatever_the_lengths(events: list[tuple[str, str]]) -> None:
    rows = [
        build(Case(attention="flex", anchors=(2, 5), lengths=(length,), padding=0))
        for length in range(20, 30)
    ]
    with torch.no_grad(), pytest.warns(notices.DFlashWarning) as warned:
        losses = [row.run()[0] for row in rows]
    assert len(losses) == 10
    assert len(warned) == len(events) == 1


def test_wide_heads_on_sm120_are_refused_for_training_only(monkeypatch: pytest.MonkeyPatch) -> None:
    card(monkeypatch, (12, 0))
    assert chosen(CUDA, head_dim=192, training=False).attention == "flex"
    assert chosen(CUDA, head_dim=128).attention == "flex"
    for capability in ((9, 0), (10, 0)):
        card(monkeypatch, capability)
        assert chosen(CUDA, head_dim=192).attention == "flex"


def test_without_triton_nothing_is_compiled_and_both_are_said(
    monkeypatch: pytest.MonkeyPatch, events: list[tuple[str, str]]
) -> None:
    card(monkeypatch, (9, 0), triton=False)
    with pytest.warns(notices.DFlashWarning, match="Triton is not installed"):
        found = chosen(CUDA)
    assert (found.attention, found.is_compiled) == ("sdpa_chunked", False)
    assert [about for about, _ in events] == ["attention", "compile"]


def test_compile_false_keeps_flex_and_compiles_nothing(hopper: None) -> None:
    found = chosen(CUDA, compile=False)
    assert (found.attention, found.is_compiled) == ("flex", False)


def test_training_with_flex_on_the_cpu_falls_back_and_says_why(events: list[tuple[str, str]]) -> None:
    with pytest.warns(notices.DFlashWarning, match="no backward on cpu"):
        assert chosen(CPU, attention="flex").attention == "sdpa_chunked"
    assert chosen(CPU, attention="flex", training=False).attention == "flex"
    assert len(events) == 1


def test_same_fall_back_is_said_once(events: list[tuple[str, str]]) -> None:
    case = Case(attention="flex")
    with pytest.warns(notices.DFlashWarning) as warned:
        build(case).run()
    build(case).run()
    assert len(warned) == len(events) == 1


def test_uncompiled_flex_is_reported_with_the_scores_that_it_holds(events: list[tuple[str, str]]) -> None:
    case = Case(attention="flex", anchors=(2, 5), lengths=(13,), padding=0)
    with (
        torch.no_grad(),
        pytest.warns(notices.DFlashWarning, match=r"runs uncompiled and holds scores \[4, 10, 23\]"),
    ):
        build(case).run()
    assert [about for about, _ in events] == ["attention"]


@pytest.mark.parametrize("recompute", ["mlp", "layer"])
def test_fall_back_changes_no_result(recompute: str) -> None:
    case = Case(recompute=recompute)
    expected = float(build(replace(case, attention="eager")).run()[0].detach())
    with pytest.warns(notices.DFlashWarning):
        found = float(build(replace(case, attention="flex")).run()[0].detach())
    assert found == pytest.approx(expected, rel=1e-12)
