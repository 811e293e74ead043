"""The model of torch's caching allocator: sequences computed by hand, and what holds of every sequence."""

import contextlib
from collections.abc import Sequence
from typing import Any

import pytest
from dflash.memory.allocator import CachingAllocator, OutOfMemory
from dflash.memory.allocator_settings import (
    AllocatorSettings,
    parse_alloc_conf,
    with_expandable_segments,
)
from hypothesis import given, settings
from hypothesis import strategies as st

KIB, MIB, GIB = 2**10, 2**20, 2**30


def allocator(conf: str = "", **limits: int) -> CachingAllocator:
    return CachingAllocator(parse_alloc_conf(conf), **limits)


def fill(model: CachingAllocator, sizes: Sequence[int], *, first: int = 0) -> None:
    for name, size in enumerate(sizes, start=first):
        model.allocate(name, size)


@pytest.mark.parametrize(
    ("size", "rounded", "segment"),
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
        (15 * GIB + 1, 15 * GIB + 512, 15 * GIB + 2 * MIB),
    ],
)
def test_sizes_are_rounded_to_512_bytes_and_segments_to_what_the_pool_takes(
    size: int, rounded: int, segment: int
) -> None:
    model = allocator()
    assert (model.allocate(0, size), model.reserved_bytes) == (rounded, segment)


def test_no_bytes_take_none() -> None:
    model = allocator()
    assert model.allocate(0, 0) == 0
    model.free(0)
    assert model.reserved_bytes == 0


def test_small_blocks_share_a_segment_and_the_large_pool_is_another() -> None:
    model = allocator()
    fill(model, [512 * KIB, 512 * KIB, MIB])
    assert (model.allocated_bytes, model.reserved_bytes) == (2 * MIB, 2 * MIB)
    model.allocate(3, MIB + 512)
    assert model.reserved_bytes == 22 * MIB


def test_rest_of_a_large_block_is_split_off_only_above_a_mebibyte() -> None:
    model = allocator()
    model.allocate(0, 11 * MIB)  # of a segment of 12: what is left is a mebibyte and stays with it
    assert model.allocated_bytes == 12 * MIB
    model.free(0)
    assert model.allocate(1, 11 * MIB - 512) == 11 * MIB - 512
    assert model.usage.largest_free_bytes == MIB + 512


def test_best_fit_takes_the_smallest_block_that_is_large_enough() -> None:
    model = allocator()
    fill(model, [40 * MIB, 30 * MIB, 50 * MIB])
    for name in range(3):
        model.free(name)
    assert model.allocate(3, 30 * MIB) == 30 * MIB
    assert model.allocate(4, 31 * MIB) == 31 * MIB  # of the 40
    assert model.usage.largest_free_bytes == 50 * MIB
    assert model.reserved_bytes == 120 * MIB


def test_neighbours_merge_and_a_hole_between_two_that_live_stays_a_hole() -> None:
    model = allocator()
    model.allocate(0, 60 * MIB)
    model.free(0)
    fill(model, [20 * MIB, 20 * MIB, 20 * MIB])
    model.free(1)
    model.allocate(3, 40 * MIB)
    assert model.reserved_bytes == 100 * MIB
    model.free(0)
    assert model.usage.largest_free_bytes == 40 * MIB
    model.free(2)
    assert model.usage.largest_free_bytes == 60 * MIB


def test_emptied_cache_keeps_segments_that_are_partly_used() -> None:
    model = allocator()
    fill(model, [60 * MIB, 30 * MIB])
    model.free(0)
    model.allocate(2, 20 * MIB)
    model.free(1)
    model.empty_cache()
    assert (model.allocated_bytes, model.reserved_bytes) == (20 * MIB, 60 * MIB)
    model.free(2)
    model.empty_cache()
    assert model.reserved_bytes == 0


def test_full_card_is_flushed_and_asked_again() -> None:
    model = allocator(card_bytes=100 * MIB)
    model.allocate(0, 60 * MIB)
    model.free(0)
    model.allocate(1, 70 * MIB)
    assert (model.reserved_bytes, model.retries) == (70 * MIB, 1)
    assert model.peak_reserved_bytes == 70 * MIB


def test_what_does_not_fit_fails_with_the_numbers_of_torchs_message() -> None:
    model = allocator(card_bytes=100 * MIB)
    model.allocate(0, 60 * MIB)
    model.free(0)
    fill(model, [20 * MIB + 512, 30 * MIB], first=1)
    model.free(1)
    with pytest.raises(OutOfMemory) as caught:
        model.allocate(3, 40 * MIB + 1)
    error = caught.value
    assert (error.requested_bytes, error.segment_bytes, error.free_bytes) == (
        40 * MIB + 512,
        42 * MIB,
        40 * MIB,
    )
    # The 30 in the middle keep both holes of the segment of 60.
    assert (error.usage.allocated_bytes, error.usage.reserved_bytes) == (30 * MIB, 60 * MIB)
    assert (error.usage.largest_free_bytes, error.usage.retries) == (20 * MIB + 512, 1)
    model.allocate(4, 20 * MIB)  # and the program may go on


def test_small_requests_ask_for_a_whole_segment() -> None:
    with pytest.raises(OutOfMemory) as caught:
        allocator(card_bytes=19 * MIB).allocate(0, 2 * MIB)
    assert (caught.value.requested_bytes, caught.value.segment_bytes) == (2 * MIB, 20 * MIB)


def test_limit_counts_segments_though_the_card_has_more() -> None:
    model = allocator(card_bytes=GIB, limit_bytes=100 * MIB)
    model.allocate(0, 99 * MIB)
    with pytest.raises(OutOfMemory) as caught:
        model.allocate(1, 512)
    assert caught.value.free_bytes == GIB - 100 * MIB


# Segments that grow


def test_growing_segment_maps_pages_and_splits_to_the_byte() -> None:
    model = allocator("expandable_segments:True")
    model.allocate(0, 30 * MIB)
    assert (model.allocated_bytes, model.reserved_bytes) == (30 * MIB, 40 * MIB)
    model.allocate(1, 25 * MIB)  # 10 are there, 15 more are one page
    assert (model.allocated_bytes, model.reserved_bytes) == (55 * MIB, 60 * MIB)
    fill(model, [512, MIB], first=2)
    assert model.reserved_bytes == 62 * MIB


def test_growing_segment_takes_no_more_for_a_larger_request_than_the_difference() -> None:
    model = allocator("expandable_segments:True")
    model.allocate(0, 60 * MIB)
    model.free(0)
    model.allocate(1, 100 * MIB)
    assert model.reserved_bytes == 100 * MIB
    fixed = allocator()
    fixed.allocate(0, 60 * MIB)
    fixed.free(0)
    fixed.allocate(1, 100 * MIB)
    assert fixed.reserved_bytes == 160 * MIB


def test_flush_unmaps_whole_pages_between_blocks_that_live() -> None:
    model = allocator("expandable_segments:True", card_bytes=160 * MIB)
    fill(model, [30 * MIB, 60 * MIB, 30 * MIB])
    model.free(1)  # 30 … 90; the pages 40 … 60 and 60 … 80 are free
    assert model.reserved_bytes == 120 * MIB
    model.allocate(3, 80 * MIB)
    # In no place are 80 free MiB; so two pages go from the middle to the segment's end.
    assert (model.allocated_bytes, model.reserved_bytes, model.retries) == (140 * MIB, 160 * MIB, 1)
    assert model.usage.largest_free_bytes == 10 * MIB


def test_pages_that_the_card_has_not_are_all_refused() -> None:
    model = allocator("expandable_segments:True", card_bytes=90 * MIB)
    model.allocate(0, 60 * MIB)
    with pytest.raises(OutOfMemory) as caught:
        model.allocate(1, 31 * MIB)
    assert caught.value.segment_bytes == 32 * MIB
    assert model.reserved_bytes == 60 * MIB


def test_emptied_cache_gives_back_a_whole_growing_segment() -> None:
    model = allocator("expandable_segments:True")
    fill(model, [30 * MIB, 512])
    model.free(0)
    model.free(1)
    model.empty_cache()
    assert (model.reserved_bytes, model.usage.largest_free_bytes) == (0, 0)


# Other settings


def test_blocks_that_are_never_split_serve_only_what_nearly_fills_them() -> None:
    model = allocator("max_split_size_mb:100")
    model.allocate(0, 200 * MIB)
    model.free(0)
    model.allocate(1, 30 * MIB)  # not from the 200
    assert model.reserved_bytes == 230 * MIB
    model.allocate(2, 180 * MIB)  # 200 is 20 more: too much
    assert model.reserved_bytes == 410 * MIB
    assert model.allocate(3, 180 * MIB + 512) == 200 * MIB  # unsplit
    assert model.reserved_bytes == 410 * MIB


def test_non_split_rounding_says_how_much_more_may_be_taken() -> None:
    model = allocator("max_split_size_mb:100,max_non_split_rounding_mb:64")
    model.allocate(0, 200 * MIB)
    model.free(0)
    assert model.allocate(1, 150 * MIB) == 200 * MIB


def test_oversize_blocks_go_first_and_only_as_many_as_needed() -> None:
    model = allocator("max_split_size_mb:100", card_bytes=500 * MIB)
    fill(model, [150 * MIB, 120 * MIB, 110 * MIB, 60 * MIB])
    for name in range(4):
        model.free(name)
    model.allocate(4, 250 * MIB)  # no single block is that large: the largest go, 150 + 120
    assert (model.reserved_bytes, model.retries) == (420 * MIB, 0)


@pytest.mark.parametrize(
    ("conf", "size", "rounded"),
    [
        ("roundup_power2_divisions:4", 1200 * KIB, 1280 * KIB),
        ("roundup_power2_divisions:4", 1280 * KIB, 1280 * KIB),
        ("roundup_power2_divisions:4", 2049, 2560),
        ("roundup_power2_divisions:4", 2000, 2048),  # below four blocks: as without
        ("roundup_power2_divisions:1", 1200 * KIB + 1, 1200 * KIB + 512),
        ("roundup_power2_divisions:[64:8,128:2,256:4,512:2,1024:4,>:1]", 33 * MIB, 36 * MIB),
        ("roundup_power2_divisions:[64:8,128:2,256:4,512:2,1024:4,>:1]", 65 * MIB, 72 * MIB),
        ("roundup_power2_divisions:[64:8,128:2,256:4,512:2,1024:4,>:1]", 129 * MIB, 192 * MIB),
        ("roundup_power2_divisions:[64:8,128:2,256:4,512:2,1024:4,>:1]", 300 * MIB, 320 * MIB),
        ("roundup_power2_divisions:[64:8,128:2,256:4,512:2,1024:4,>:1]", 1025 * MIB, 1280 * MIB),
        ("roundup_power2_divisions:[64:8,128:2,256:4,512:2,1024:4,>:1]", 2049 * MIB, 2049 * MIB),
        ("roundup_power2_divisions:[256:1,1024:4]", 700 * MIB + 1, 700 * MIB + 512),
    ],
)
def test_sizes_are_rounded_to_a_division_of_their_power_of_two(conf: str, size: int, rounded: int) -> None:
    assert allocator(conf).rounded(size) == rounded


def test_large_segments_have_the_size_that_was_set() -> None:
    model = allocator("large_segment_size_mb:64")
    model.allocate(0, 2 * MIB)
    assert model.reserved_bytes == 64 * MIB
    growing = allocator("large_segment_size_mb:64,expandable_segments:True")
    growing.allocate(0, 65 * MIB)
    assert growing.reserved_bytes == 128 * MIB


def test_garbage_goes_oldest_first_once_the_share_is_used_up_to_the_threshold() -> None:
    model = allocator("garbage_collection_threshold:0.5", card_bytes=GIB, limit_bytes=400 * MIB)
    fill(model, [50 * MIB, 60 * MIB, 110 * MIB])
    model.free(0)
    fill(model, [20 * MIB, 20 * MIB], first=3)  # both of the 50, which are then no whole segment any more
    model.free(1)
    model.allocate(5, 61 * MIB)  # 220 MiB are reserved, 20 above the threshold, and 60 of them are free
    assert model.reserved_bytes == (50 + 110 + 62) * MIB
    model.free(5)
    model.free(2)
    model.allocate(6, 61 * MIB)
    model.free(6)
    model.allocate(7, 111 * MIB)  # 22 above it; of the free ones the 110 are older than the 62
    assert model.reserved_bytes == (50 + 62 + 112) * MIB
    without_limit = allocator("garbage_collection_threshold:0.5", card_bytes=400 * MIB)
    fill(without_limit, [100 * MIB, 120 * MIB])
    without_limit.free(0)
    without_limit.allocate(2, 101 * MIB)
    assert without_limit.reserved_bytes == 322 * MIB


def test_streams_share_nothing() -> None:
    model = allocator()
    model.allocate(0, 30 * MIB)
    model.free(0)
    model.allocate(1, 30 * MIB, stream=1)
    assert model.reserved_bytes == 60 * MIB


def test_peaks_count_from_where_they_were_forgotten() -> None:
    model = allocator()
    fill(model, [30 * MIB, 40 * MIB])
    model.free(1)
    model.empty_cache()
    model.forget_peaks()
    assert (model.peak_allocated_bytes, model.peak_reserved_bytes) == (30 * MIB, 30 * MIB)


# What holds of every sequence

CONFS = [
    "",
    "expandable_segments:True",
    "max_split_size_mb:40",
    "roundup_power2_divisions:4",
    "large_segment_size_mb:32,expandable_segments:True",
]
SIZES = st.one_of(
    st.integers(1, 4 * KIB), st.integers(1, 3 * MIB), st.integers(1, 80 * MIB), st.just(10 * MIB)
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("allocate"), SIZES),
        st.tuples(st.just("free"), st.integers(0, 10**6)),
        st.tuples(st.just("empty"), st.just(0)),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(conf=st.sampled_from(CONFS), steps=STEPS, card_mib=st.one_of(st.none(), st.integers(40, 400)))
def test_no_blocks_overlap_nothing_is_lost_and_all_of_it_comes_back(
    conf: str, steps: list[tuple[str, int]], card_mib: int | None
) -> None:
    card_bytes = None if card_mib is None else card_mib * MIB
    model = CachingAllocator(parse_alloc_conf(conf), card_bytes=card_bytes)
    live: dict[int, int] = {}
    for name, (step, number) in enumerate(steps):
        if step == "allocate":
            with contextlib.suppress(OutOfMemory):
                live[name] = model.allocate(name, number)
                assert live[name] >= number
        elif step == "free" and live:
            chosen = list(live)[number % len(live)]
            del live[chosen]
            model.free(chosen)
        elif step == "empty":
            model.empty_cache()
        assert model.allocated_bytes == sum(live.values()) <= model.reserved_bytes
        assert card_bytes is None or model.reserved_bytes <= card_bytes
        check_layout(model)
    for chosen in live:
        model.free(chosen)
    check_layout(model)
    assert all(block.is_whole or block.segment for pool in model._pools.values() for *_, block in pool.free)
    model.empty_cache()
    assert (model.allocated_bytes, model.reserved_bytes) == (0, 0)
    assert not any(pool.free or pool.unmapped for pool in model._pools.values())


@settings(max_examples=300, deadline=None)
@given(
    conf=st.sampled_from([*CONFS, "garbage_collection_threshold:0.5"]),
    steps=STEPS,
    card_mib=st.integers(40, 1000),
    is_limit=st.booleans(),
)
def test_larger_card_makes_no_difference_where_no_bounds_were_met(
    conf: str, steps: list[tuple[str, int]], card_mib: int, is_limit: bool
) -> None:
    bound = "limit_bytes" if is_limit else "card_bytes"
    first, *others = (
        allocator(conf, **limits)
        for limits in ({bound: card_mib * MIB}, {bound: card_mib * MIB * 21 // 20}, dict[str, int]())
    )
    expected = history(first, steps)
    for other in others:
        assert first.has_met_bounds or history(other, steps) == expected


def history(model: CachingAllocator, steps: list[tuple[str, int]]) -> list[Any]:
    """Return the model's usage after each step, and None where it failed."""
    found: list[Any] = []
    live: list[int] = []
    for name, (step, number) in enumerate(steps):
        failed = False
        if step == "allocate":
            try:
                model.allocate(name, number)
                live.append(name)
            except OutOfMemory:
                failed = True
        elif step == "free" and live:
            model.free(live.pop(number % len(live)))
        elif step == "empty":
            model.empty_cache()
        found.append(None if failed else (model.usage, model.peak_reserved_bytes))
    return found


def check_layout(model: CachingAllocator) -> None:
    """Walk the segments: neighbours touch, free ones are merged, what is mapped is what is reserved."""
    seen: set[Any] = set(model._blocks.values())
    for pool in model._pools.values():
        assert pool.free == sorted(pool.free, key=lambda entry: entry[:2])
        free = [block for _, _, block in pool.free]
        assert all((size, address) == (block.size, block.address) for size, address, block in pool.free)
        unmapped = [block for _, block in pool.unmapped]
        assert not any(block.is_used for block in free + unmapped)
        assert all(block.is_mapped for block in free)
        assert not any(block.is_mapped for block in unmapped)
        seen.update(free, unmapped)
    for block in seen:
        after = block.after
        if after is None:
            continue
        assert after in seen
        assert after.before is block
        assert block.address + block.size == after.address
        assert block.is_used or after.is_used or block.is_mapped != after.is_mapped
    assert sum(block.size for block in seen if block.is_mapped) == model.reserved_bytes


# The settings' spelling


def test_settings_are_read_as_torch_reads_them() -> None:
    conf = " max_split_size_mb : 64, roundup_power2_divisions:[256:1, >:8],pinned_use_background_threads:True"
    parsed = parse_alloc_conf(conf)
    assert parsed.max_split_bytes == 64 * MIB
    assert parsed.roundup_power2_divisions == (1,) * 9 + (8,) * 7
    assert parsed.max_non_split_rounding_bytes == 20 * MIB
    assert parse_alloc_conf("large_segment_size_mb:32").max_non_split_rounding_bytes == 32 * MIB
    assert parse_alloc_conf("per_process_memory_fraction:0.5").per_process_memory_fraction == 0.5
    assert parse_alloc_conf("") == AllocatorSettings()


@pytest.mark.parametrize(
    ("conf", "told"),
    [
        ("max_split_mb:64", "did you mean 'max_split_size_mb'"),
        ("expandable_segments", "not key:value"),
        ("expandable_segments:true", "True or False"),
        ("max_split_size_mb:10", "at least 20"),
        ("max_split_size_mb:64,max_split_size_mb:64", "twice"),
        ("garbage_collection_threshold:1", "between 0 and 1"),
        ("roundup_power2_divisions:3", "powers of two"),
        ("roundup_power2_divisions:[256:1,128:2]", "ascending"),
        ("roundup_power2_divisions:[>:1,128:2]", "ascending"),
        ("expandable_segments:True,max_split_size_mb:64", "keep one"),
        ("large_segment_size_mb:64,max_split_size_mb:32", "below the 64"),
        ("backend:cudaMallocAsync", "cannot be estimated"),
    ],
)
def test_settings_that_torch_refuses_or_that_break_are_refused(conf: str, told: str) -> None:
    with pytest.raises(ValueError, match=told.replace("(", r"\(")):
        parse_alloc_conf(conf)


def test_growing_segments_replace_what_does_not_go_with_them() -> None:
    conf = "max_split_size_mb:64,expandable_segments:False,roundup_power2_divisions:[256:1,>:8]"
    assert with_expandable_segments(conf) == "roundup_power2_divisions:[256:1,>:8],expandable_segments:True"
    assert with_expandable_segments("") == "expandable_segments:True"
