"""Uniform noise on the captured features, so that a drafter does not lean on their last digit.

In training only, and never on the last hidden state, which is the teacher.

Shape letters: S tokens of the row, F features (target layers × H).
"""

import torch
from torch import Tensor

from dflash.training.seeds import seed_for


def with_noise(features_1SF: Tensor, amplitude: float, *, seed: int, epoch: int, number: int) -> Tensor:
    """Return the features plus uniform noise within ±amplitude, as the micro-batch decides it.

    Another kind of device draws other noise.

    Raises:
        ValueError: the amplitude is negative.
    """
    if not amplitude >= 0:
        raise ValueError(f"noise is {amplitude}; it must be at least 0")
    if amplitude == 0:
        return features_1SF
    generator = torch.Generator(device=features_1SF.device)
    generator.manual_seed(seed_for("noise", seed, epoch, number))
    noise_1SF = torch.empty_like(features_1SF).uniform_(-amplitude, amplitude, generator=generator)
    return noise_1SF.add_(features_1SF)
