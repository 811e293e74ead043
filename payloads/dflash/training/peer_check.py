"""Tries direct copies between two cards, both ways, and compares every bit with the host's.

    python -m dflash.training.peer_check 0 1

Ends with 0 when all were exact and with 1 when not; it may hang, so whoever starts it gives it a time.
"""

import sys

import torch
from torch import Tensor

from dflash.training.transfer import PeerCarrier

WORDS = 8 * 2**20  # 64 MiB: more than one packet, window or page of anything between the cards
ROUNDS = 4


def main(arguments: list[str]) -> int:
    """Return the status for two card numbers."""
    first, second = (torch.device("cuda", int(number)) for number in arguments)
    is_exact = all(
        arrives_exact(pattern(number), PeerCarrier(*pair), *pair)
        for number in range(ROUNDS)
        for pair in ((first, second), (second, first))
    )
    return 0 if is_exact else 1


def pattern(number: int) -> Tensor:
    """Return random bits on the host, others for each number."""
    generator = torch.Generator().manual_seed(number)
    return torch.randint(-(2**62), 2**62, (WORDS,), generator=generator)


def arrives_exact(expected: Tensor, carrier: PeerCarrier, source: torch.device, target: torch.device) -> bool:
    """Return whether bits that the source is given reach the host by way of the target."""
    arrived = carrier.send(expected.to(source)).receive()
    assert arrived.device == target
    return torch.equal(arrived.cpu(), expected)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
