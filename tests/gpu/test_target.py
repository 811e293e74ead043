"""A target on one card and on two computes what it computes on the host."""

from pathlib import Path

import pytest
import torch
from dflash.target.capture import Captured, Target
from dflash.target.loading import load_target

from tests.payload.targets import config_of, model_of, relative, tokens_of

pytestmark = pytest.mark.gpu

LENGTHS = (30, 5, 60)


def captured(folder: Path, devices: str | list[str]) -> Captured:
    target = Target(load_target(folder, device=devices, dtype="float32").model, [0, 1, 2])
    return target.capture(tokens_of(128), LENGTHS)


@pytest.mark.parametrize("family", ["llama", "smollm2", "qwen3_5"])
@pytest.mark.parametrize("devices", ["cuda:0", ["cuda:0", "cuda:1"]])
def test_states_are_those_of_the_host(
    tmp_path: Path, card: torch.device, family: str, devices: str | list[str]
) -> None:
    if torch.cuda.device_count() < len(devices) and isinstance(devices, list):
        pytest.skip("there is one card")
    model_of(config_of(family)).save_pretrained(tmp_path)
    there, here = captured(tmp_path, devices), captured(tmp_path, "cpu")
    last = torch.device(devices if isinstance(devices, str) else devices[-1])
    for found, wanted in (
        (there.features_1SF, here.features_1SF),
        (there.last_hidden_1SH, here.last_hidden_1SH),
    ):
        assert found.device == last
        text = sum(LENGTHS)
        assert relative(found[0, :text].cpu(), wanted[0, :text]) < 1e-3
        assert not found[0, text:].any()


def test_random_weights_are_made_on_the_card(tmp_path: Path, card: torch.device) -> None:
    config_of("qwen3_5").save_pretrained(tmp_path)
    model = load_target(tmp_path, device="cuda:0", random_seed=1).model
    assert {parameter.device for parameter in model.parameters()} == {card}
    Target(model, [0, 2])
