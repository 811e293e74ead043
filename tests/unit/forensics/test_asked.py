"""What a printed size admits: its decimals, and the segment that torch prints in a tensor's place."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from orchestrator.errors import UsageError
from orchestrator.forensics.asked import (
    GIB,
    MIB,
    asked_exactly,
    asked_from_message,
    asked_from_text,
    size_as_torch,
)


def segment(size_bytes: int) -> int:
    """Return what torch's allocator asks for, by its own rule."""
    if size_bytes <= MIB:
        return 2 * MIB
    return 20 * MIB if size_bytes < 10 * MIB else -(-size_bytes // (2 * MIB)) * 2 * MIB


@given(st.integers(1, 300 * GIB))
def test_a_tensor_is_among_what_its_printed_segment_admits(size_bytes: int) -> None:
    assert asked_from_text(size_as_torch(segment(size_bytes))).admits(size_bytes)
    assert asked_exactly(segment(size_bytes)).admits(size_bytes)
    assert asked_from_message(segment(size_bytes)).admits(size_bytes)


@given(st.integers(1, 300 * GIB))
def test_a_tensor_is_among_what_its_own_printed_size_admits(size_bytes: int) -> None:
    assert asked_from_text(size_as_torch(size_bytes)).admits(size_bytes)
    assert asked_exactly(size_bytes).admits(size_bytes)


@given(st.integers(32 * MIB, 200 * GIB), st.integers(-16 * MIB, 16 * MIB))
def test_what_neither_prints_the_size_nor_has_such_a_segment_is_not_admitted(asked: int, more: int) -> None:
    text, size_bytes = size_as_torch(asked), asked + more
    assume((asked > GIB) == (size_bytes > GIB))  # else they print the same size in different units
    prints = {size_as_torch(size) for size in (size_bytes, size_bytes + 1024, segment(size_bytes))}
    if asked_from_text(text).admits(size_bytes):
        assert text in prints


def test_two_decimals_of_a_gibibyte_leave_five_megabytes_to_either_side() -> None:
    asked = asked_from_text("15.09 GiB")
    mib = [size for size in range(15000, 16000) if asked.admits(size * MIB)]
    assert (mib[0], mib[-1]) == (15447, 15457)


def test_fewer_decimals_admit_more() -> None:
    assert not asked_from_text("22.30 GiB").admits(int(22.306 * GIB))
    assert asked_from_text("22.3 GiB").admits(int(22.306 * GIB))


@pytest.mark.parametrize(
    ("text", "admitted", "refused"),
    [
        ("2.00 MiB", [1, 512, MIB, 2 * MIB], [MIB + 4096, 3 * MIB]),
        ("20.00 MiB", [MIB + 1, 5 * MIB, 10 * MIB - 1, 19 * MIB, 20 * MIB], [MIB, 11 * MIB, 21 * MIB]),
        ("512 bytes", [1, 512], [513]),
        ("64.50 KiB", [66048], [65000, 67000]),
        ("1.50 TiB", [1536 * GIB], [1400 * GIB]),
    ],
)
def test_small_requests_print_the_pool_they_come_from(
    text: str, admitted: list[int], refused: list[int]
) -> None:
    asked = asked_from_text(text)
    assert [size for size in admitted + refused if asked.admits(size)] == admitted


def test_a_wide_size_is_met_by_chance_more_often_than_a_narrow_one() -> None:
    texts = ("15.09 GiB", "1.09 GiB", "100.00 MiB", "20.00 MiB", "2.00 MiB")
    chances = [asked_from_text(text).chance for text in texts]
    assert chances == sorted(chances)
    assert 0 < chances[0] < 1e-4
    assert chances[-1] > 0.3


@pytest.mark.parametrize(
    "text", ["", "GiB", "15,09 GiB", "15.09 GB", "-1.00 GiB", "1" * 30 + " GiB", "nan GiB"]
)
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is no size as torch prints it"):
        asked_from_text(text)


@pytest.mark.parametrize(
    ("text", "is_round"),
    [
        ("256.00 MiB", True),
        ("640.00 MiB", True),
        ("8.00 GiB", True),
        ("96.00 GiB", True),
        ("22.31 GiB", False),
        ("15.09 GiB", False),
        ("1.56 GiB", False),
        ("300.00 GiB", False),
    ],
)
def test_a_round_size_is_met_more_often_by_chance(text: str, is_round: bool) -> None:
    asked = asked_from_text(text)
    assert (asked.round_chance > asked.chance) == is_round
    assert is_round or asked.round_chance == 0
