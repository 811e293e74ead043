"""Cards by name and as they are said, and what to say instead of what is none."""

import pytest
from dflash.cards import CARDS, GIB, parse_card


@pytest.mark.parametrize("key", CARDS)
def test_what_a_known_card_reports_can_be_said_of_it(key: str) -> None:
    card = CARDS[key]
    assert parse_card(f" {key.upper()} ") == card
    major, minor = card.capability
    said = parse_card(f"{card.total_bytes / GIB}GiB:sm_{major}{minor}")
    assert (said.total_bytes, said.capability) == (card.total_bytes, card.capability)


def test_spaces_in_a_name_are_dashes() -> None:
    assert parse_card("RTX  PRO 6000").key == "rtx-pro-6000"


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("rtx-6000-pro", "rtx-pro-6000"),
        ("6000 ada", "rtx-6000-ada"),
        ("4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 5090", "rtx-5090"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000"),
        ("rtx_pro_600", "rtx-pro-6000"),
        ("h2000", "h200"),
    ],
)
def test_the_card_that_is_meant_has_the_same_words_in_whatever_order(text: str, meant: str) -> None:
    with pytest.raises(ValueError, match=f"did you mean '{meant}'\\?"):
        parse_card(text)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("no such thing", "known: a100-40gb, "),
        ("6000", "did you mean 'rtx-6000-ada' or 'rtx-pro-6000'"),
        ("", "unknown card ''; known"),
        ("99999999999999999999GiB:sm_90", "more than 4096 GiB"),
        (f"{'9' * 400}GiB:sm_90", "more than 4096 GiB"),
        ("0GiB:sm_90", "no memory"),
        ("0.0000000001GiB:sm_90", "no memory"),
        ("96GiB:sm_999", "sm_999 is no architecture"),
        ("96GiB:sm_00", "sm_00 is no architecture"),
        ("96GB", "rtx-pro-6000 has 94.97 GiB"),
        ("96GB:sm_120", "rtx-pro-6000 has 94.97 GiB"),
        ("80 GiB", "a100-80gb has 79.25 GiB, h100 has 79.10 GiB"),
        ("96", "as 96GiB:sm_120"),
        (f"{'9' * 400}GB", "as 96GiB:sm_120"),
        ("h2000", "h200"),
    ],
)
def test_what_no_card_is_is_refused_with_what_to_say(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told) as caught:
        parse_card(text)
    assert len(str(caught.value)) < 400
