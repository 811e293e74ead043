"""Predicted against measured: the same steps on a simulated card and on the one that is here."""

import contextlib
import gc
import io
from typing import Any

import pytest
import torch
from dflash.cards import Card
from dflash.probes.backends import BACKENDS
from dflash.probes.oom import OomProbeParams
from dflash.probes.work import workload
from dflash.values import build

from tests.payload.simulated import peaks_by_phase_gib, steps, take_steps

pytestmark = pytest.mark.gpu

# The reference drafter's widths, so that what is measured is gigabytes, with scores that fit a card of 80 GB.
SIZE: dict[str, Any] = {"num_draft_layers": 2, "seq_len": 4000, "max_anchors": 96}
UNCOMPILED_ERROR, COMPILED_ERROR = 0.01, 0.05


@pytest.fixture
def this_card(card: torch.device) -> Card:
    """The card that is here, as a simulation knows it; nothing of an earlier test is left on it."""
    torch._C._cuda_clearCublasWorkspaces()
    properties = torch.cuda.get_device_properties(card)
    return Card(
        name=properties.name,
        key="here",
        capability=(properties.major, properties.minor),
        total_bytes=properties.total_memory,
    )


def measured_gib(lengths: tuple[int, ...], step: workload.Step, **params: Any) -> float:
    size = build(OomProbeParams, {**params, "device": "cuda:0"}, what="parameter")
    with contextlib.redirect_stdout(io.StringIO()):
        peaks_gib = take_steps(size, lengths, step, count=2)
    gc.collect()
    return peaks_gib["peak_allocated_gib"]


def check(
    card: Card, lengths: tuple[int, ...], step: workload.Step = workload.forward_backward, **params: Any
) -> None:
    predicted_gib = peaks_by_phase_gib(steps(lengths, step, card=card, count=2, **params))["steps"]
    found_gib = measured_gib(lengths, step, **params)
    error = predicted_gib / found_gib - 1
    print(f"{params}, {lengths}: predicted {predicted_gib:.3f}, measured {found_gib:.3f} GiB, {error:+.2%}")
    assert abs(error) <= (COMPILED_ERROR if params.get("compile", True) else UNCOMPILED_ERROR)


@pytest.mark.filterwarnings("ignore:attention. flex attention runs uncompiled")
@pytest.mark.parametrize("recompute", ["none", "layer"])
@pytest.mark.parametrize("is_compiled", [True, False], ids=["compiled", "uncompiled"])
@pytest.mark.parametrize("attention", BACKENDS)
def test_peaks_are_predicted(this_card: Card, attention: str, is_compiled: bool, recompute: str) -> None:
    check(this_card, (4000,), **SIZE, attention=attention, compile=is_compiled, recompute=recompute)


@pytest.mark.parametrize("recompute", ["none", "mlp", "layer"])
def test_peaks_of_packed_rows_are_predicted(this_card: Card, recompute: str) -> None:
    check(this_card, (1000, 1500, 2500), **SIZE, recompute=recompute)


def test_a_forward_s_peak_is_predicted(this_card: Card) -> None:
    check(this_card, (4000,), workload.forward_only, **SIZE)
