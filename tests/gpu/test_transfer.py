"""Copies between cards, directly and through the host: exact, and in order with what both cards do."""

import pytest
import torch
from dflash.training.peer_check import arrives_exact, pattern
from dflash.training.ranks import ThreadRanks
from dflash.training.transfer import Carrier, PeerCarrier, StagedCarrier, carrier_between, why_not_direct

from tests.payload.test_gradients import in_threads

pytestmark = pytest.mark.gpu
WIDTH = 4096


@pytest.fixture
def cards(card: torch.device) -> tuple[torch.device, torch.device]:
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one card")
    return card, torch.device("cuda", 1)


@pytest.fixture(params=[PeerCarrier, StagedCarrier])
def carrier(request: pytest.FixtureRequest, cards: tuple[torch.device, torch.device]) -> Carrier:
    made: Carrier = request.param(*cards)
    return made


def test_a_trial_says_whether_cards_copy_directly(cards: tuple[torch.device, torch.device]) -> None:
    reason = why_not_direct(*cards)
    chosen = carrier_between(*cards)
    assert isinstance(chosen, PeerCarrier if reason is None else StagedCarrier)
    assert arrives_exact(pattern(9), PeerCarrier(*cards), *cards) or reason is not None


def test_a_copy_has_what_the_source_makes_before_it(
    carrier: Carrier, cards: tuple[torch.device, torch.device]
) -> None:
    first, second = cards
    value = torch.full((WIDTH, WIDTH), 0.5, device=first)
    for _ in range(20):  # the card is busy for long after the host has gone on
        value = value @ torch.eye(WIDTH, device=first)
    arrived = carrier.send(value).receive()
    assert arrived.device == second
    assert bool((arrived * 2 == 1).all())


def test_a_source_may_be_overwritten_after_its_release(
    carrier: Carrier, cards: tuple[torch.device, torch.device]
) -> None:
    first, _ = cards
    value = torch.zeros(WIDTH, WIDTH, device=first)
    for number in range(1, 30):
        value.fill_(number)
        moved = carrier.send(value)
        moved.release(first)
        value.fill_(-1)
        assert bool((moved.receive() == number).all())


def test_memory_of_copies_is_reused_only_after_their_receivers(
    carrier: Carrier, cards: tuple[torch.device, torch.device]
) -> None:
    first, second = cards
    total = torch.zeros(WIDTH, WIDTH, device=second)
    for number in range(50):
        total += carrier.send(torch.full((WIDTH, WIDTH), float(number), device=first)).receive()
    assert bool((total == sum(range(50))).all())


def test_threads_on_two_cards_sum_the_same_bits(cards: tuple[torch.device, torch.device]) -> None:
    def work(ranks: ThreadRanks) -> list[torch.Tensor]:
        device = cards[ranks.rank]
        generator = torch.Generator(device=device).manual_seed(ranks.rank)
        tensors = [torch.randn(3000, 3000, generator=generator, device=device) for _ in range(3)]
        for _ in range(5):
            ranks.sum(tensors)
        return [tensor.cpu() for tensor in tensors]

    one, other = in_threads(2, work, devices=cards)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))
