"""A model of torch's CUDA caching allocator: what it reserves for what a program asks for, and when it fails.

Follows `c10/cuda/CUDACachingAllocator.cpp` and `c10/core/AllocatorConfig.h` of torch 2.11 for one process
and one card, without CUDA graphs, pools of a caller's own, and blocks that several streams use; the
functions that a rule comes from are named in brackets. Addresses are made up and only order blocks. A card
has so many bytes and no others take any; what it cannot give is an `OutOfMemory` with the numbers of torch's
message. Loads without torch.
"""

from bisect import bisect_left
from dataclasses import dataclass

from dflash.memory.allocator_pools import Block, Pool, merge_neighbours, split, split_behind
from dflash.memory.allocator_settings import INTERVALS, MIB, AllocatorSettings

LEAST_BLOCK = 512  # kMinBlockSize: every size is a multiple of it
LARGEST_SMALL = MIB  # kSmallSize: up to here a block comes from the small pool
SMALL_SEGMENT = 2 * MIB  # kSmallBuffer
LEAST_OWN_SEGMENT = 10 * MIB  # kMinLargeAlloc: from here on a request gets a segment of its own size
ROUND_SEGMENT = 2 * MIB  # kRoundLarge
APART = 2**56  # between the addresses of two segments; more than any card has


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """The allocator at one moment, in bytes; `largest_free_bytes` is its largest block that nobody uses."""

    allocated_bytes: int
    reserved_bytes: int
    largest_free_bytes: int
    retries: int


class OutOfMemory(Exception):
    """The card or the process's share of it is used up: what torch would say, as numbers.

    `requested_bytes` is the rounded request, `segment_bytes` what the card was asked for, which torch's
    message calls "Tried to allocate"; `free_bytes` is what the card would still give, None where only a
    limit counts.
    """

    def __init__(
        self, *, requested_bytes: int, segment_bytes: int, free_bytes: int | None, usage: Usage
    ) -> None:
        super().__init__(f"asked {segment_bytes} bytes with {usage.reserved_bytes} reserved")
        self.requested_bytes = requested_bytes
        self.segment_bytes = segment_bytes
        self.free_bytes = free_bytes
        self.usage = usage


class CachingAllocator:
    """Blocks by name, in pools by stream; a name is the caller's and is free again once its block is.

    `card_bytes` is what the card can give to this allocator, `limit_bytes` the process's share of it
    (`setMemoryFraction`); None is without end. While `has_met_bounds` is false a larger card, and a larger
    share, would have made no difference.
    """

    def __init__(
        self,
        settings: AllocatorSettings,
        *,
        card_bytes: int | None = None,
        limit_bytes: int | None = None,
    ) -> None:
        self._settings = settings
        self._card_bytes = card_bytes
        self._limit_bytes = limit_bytes
        self._pools: dict[tuple[bool, int], Pool] = {}
        self._blocks: dict[int, Block] = {}
        self._next_address = 0
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        self.peak_allocated_bytes = 0
        self.peak_reserved_bytes = 0
        self.retries = 0
        self.has_met_bounds = False

    def allocate(self, name: int, size_bytes: int, *, stream: int = 0) -> int:
        """Give `name` a block of at least so many bytes and return its size [malloc, alloc_found_block].

        Raises:
            OutOfMemory: also after all that nobody uses was given back to the card.
        """
        assert name not in self._blocks
        if not size_bytes:
            return 0
        size = self.rounded(size_bytes)
        pool = self._pool(size, stream)
        block = self._reused(pool, size) or self._fetched(pool, size)
        if self._is_split(block, size):
            block = split(pool, block, size)
        block.is_used = True
        self._blocks[name] = block
        self.allocated_bytes += block.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block.size

    def free(self, name: int) -> None:
        """Give `name`'s block back to its pool, merged with its free neighbours [free, free_block]."""
        block = self._blocks.pop(name, None)
        if block is None:  # of no bytes
            return
        self.allocated_bytes -= block.size
        block.is_used = False
        merge_neighbours(block)
        block.pool.insert(block)

    def empty_cache(self) -> None:
        """Give back to the card what nobody uses [emptyCache, release_cached_blocks]."""
        for pool in sorted(self._pools.values(), key=lambda pool: pool.is_small):
            for block in [block for _, _, block in pool.free]:
                if block.segment is not None:
                    self._unmap(block)
                elif block.is_whole:
                    self._release(block)

    def forget_peaks(self) -> None:
        """Let peaks count from here [resetPeakStats]."""
        self.peak_allocated_bytes = self.allocated_bytes
        self.peak_reserved_bytes = self.reserved_bytes

    @property
    def usage(self) -> Usage:
        """The allocator now."""
        return Usage(
            allocated_bytes=self.allocated_bytes,
            reserved_bytes=self.reserved_bytes,
            largest_free_bytes=max((pool.largest_free for pool in self._pools.values()), default=0),
            retries=self.retries,
        )

    def rounded(self, size: int) -> int:
        """Return the size that a request is raised to [round_size, roundup_power2_next_division]."""
        if size <= LEAST_BLOCK:
            return LEAST_BLOCK
        interval = min(max(size.bit_length() - MIB.bit_length(), 0), INTERVALS - 1)
        divisions = self._settings.roundup_power2_divisions[interval]
        if divisions <= 1 or size <= LEAST_BLOCK * divisions:
            return _rounded_up(size, LEAST_BLOCK)
        floor = 1 << (size.bit_length() - 1)
        return size if size == floor else _rounded_up(size, floor // divisions)

    def segment_size(self, size: int) -> int:
        """Return what the card is asked for, for a block of a rounded size [get_allocation_size]."""
        if size <= LARGEST_SMALL:
            return SMALL_SEGMENT
        if size < LEAST_OWN_SEGMENT:
            return self._settings.large_segment_bytes
        return _rounded_up(size, ROUND_SEGMENT)

    def _pool(self, size: int, stream: int) -> Pool:
        key = (size <= LARGEST_SMALL, stream)
        pool = self._pools.get(key)
        if pool is None:
            page = SMALL_SEGMENT if key[0] else self._settings.large_segment_bytes
            pool = self._pools[key] = Pool(is_small=key[0], page=page)
        return pool

    def _reused(self, pool: Pool, size: int) -> Block | None:
        """Take the smallest free block that is large enough, if it may be used [get_free_block]."""
        free, settings = pool.free, self._settings
        pool.requests += 1
        index = bisect_left(free, (size,))
        if index == len(free):
            return None
        if settings.expandable_segments:
            # The best fit is by what a block could grow to.
            while index + 1 < len(free) and free[index + 1][2].growable < free[index][2].growable:
                index += 1
        block = free[index][2]
        largest = settings.max_split_bytes
        if largest is not None:
            if size < largest <= block.size:
                return None
            if size >= largest and block.size >= size + settings.max_non_split_rounding_bytes:
                return None
        del free[index]
        return block

    def _fetched(self, pool: Pool, size: int) -> Block:
        """Take a block from the card, giving it back what nobody uses when it has none [malloc]."""
        if self._settings.garbage_collection_threshold and self._limit_bytes is not None:
            self._collect_garbage(self._limit_bytes)
        segment_bytes = self.segment_size(size)
        block = self._new_block(pool, size, segment_bytes)
        if block is None and self._release_oversize(pool, size):
            block = self._new_block(pool, size, segment_bytes)
        if block is None:
            self.empty_cache()
            self.retries += 1
            block = self._new_block(pool, size, segment_bytes)
        if block is None:
            free_bytes = None if self._card_bytes is None else self._card_bytes - self.reserved_bytes
            raise OutOfMemory(
                requested_bytes=size, segment_bytes=segment_bytes, free_bytes=free_bytes, usage=self.usage
            )
        return block

    def _new_block(self, pool: Pool, size: int, segment_bytes: int) -> Block | None:
        """Return a block of the card's, at least `size` large, or None [alloc_block]."""
        if self._limit_bytes is not None and self.reserved_bytes + segment_bytes > self._limit_bytes:
            self.has_met_bounds = True
            return None
        if self._settings.expandable_segments:
            return self._grown(pool, size)
        if not self._has_room(segment_bytes):
            return None
        self._reserve(segment_bytes)
        return Block(pool, self._new_address(), segment_bytes)

    def _has_room(self, size: int) -> bool:
        has_room = self._card_bytes is None or self.reserved_bytes + size <= self._card_bytes
        self.has_met_bounds |= not has_room
        return has_room

    def _reserve(self, size: int) -> None:
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def _new_address(self) -> int:
        self._next_address += APART
        return self._next_address

    def _grown(self, pool: Pool, size: int) -> Block | None:
        """Return a free block that pages were mapped behind, or None [try_allocate_expandable_block]."""
        block = self._place_to_grow(pool, size)
        if not block.is_mapped and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            behind = block.after
            assert behind is not None
            if not self._map(behind, min(size - block.size, behind.size)):
                return None
            block = behind
        pool.remove(block)
        return block

    def _place_to_grow(self, pool: Pool, size: int) -> Block:
        """Return the lowest place with so much address space, free or unmapped [find_expandable_block]."""
        for _, candidate in pool.unmapped:
            before = candidate.before
            first = before if before is not None and not before.is_used else candidate
            block: Block | None = first
            found = 0
            while block is not None and found < size and not block.is_used:
                found += block.size
                block = block.after
            if found >= size:
                return first
        # Every segment has room for nine eighths of the card, so that pages can move to its end.
        self.has_met_bounds |= bool(pool.unmapped)
        space = APART // 2 if self._card_bytes is None else self._card_bytes * 9 // 8
        address = self._new_address()
        block = Block(pool, address, _rounded_up(max(space, size), pool.page))
        block.segment, block.is_mapped = address, False
        pool.insert(block)
        return block

    def _map(self, block: Block, size: int) -> bool:
        """Map whole pages at the beginning of an unmapped block; all of them or none [map_block]."""
        pool = block.pool
        mapped = min(_rounded_up(size, pool.page), block.size)
        if not self._has_room(mapped):
            return False
        pool.remove(block)
        if mapped < block.size:
            split_behind(block, mapped)
            assert block.after is not None
            pool.insert(block.after)
        block.is_mapped = True
        merge_neighbours(block)
        pool.insert(block)
        self._reserve(mapped)
        return True

    def _unmap(self, block: Block) -> None:
        """Give back the whole pages of a free block [unmap_block, release_expandable_segment]."""
        pool, start = block.pool, block.segment
        assert start is not None
        first = start + _rounded_up(block.address - start, pool.page)
        size = (block.address + block.size - start) // pool.page * pool.page + start - first
        if size <= 0:
            return
        pool.remove(block)
        if first > block.address:
            split_behind(block, first - block.address)
            pool.insert(block)
            assert block.after is not None
            block = block.after
        if size < block.size:
            split_behind(block, size)
            assert block.after is not None
            pool.insert(block.after)
        block.is_mapped = False
        merge_neighbours(block)
        self.reserved_bytes -= size
        if not block.is_whole:
            pool.insert(block)

    def _release(self, block: Block) -> None:
        """Give a whole segment back to the card [release_block]."""
        block.pool.remove(block)
        self.reserved_bytes -= block.size

    def _release_oversize(self, pool: Pool, size: int) -> bool:
        """Give back blocks that are never split, as many as it takes [release_available_cached_blocks]."""
        largest = self._settings.max_split_bytes
        if largest is None:
            return False
        wanted = max(size, largest)
        index = bisect_left(pool.free, (wanted,))
        if index < len(pool.free):
            self._release(pool.free[index][2])
            return True
        released = 0
        while released < wanted and pool.free and pool.free[-1][0] >= largest:
            released += pool.free[-1][0]
            self._release(pool.free[-1][2])
        return released >= wanted

    def _collect_garbage(self, limit_bytes: int) -> None:
        """Give back whole free blocks, the longest unused first [garbage_collect_cached_blocks]."""
        surplus = self.reserved_bytes - int(self._settings.garbage_collection_threshold * limit_bytes)
        if surplus <= 0:
            return
        self.has_met_bounds = True
        pools = [pool for pool in self._pools.values() if not pool.is_small]
        whole = [block for pool in pools for _, _, block in pool.free if block.is_whole]
        reclaimed = 0
        while whole and reclaimed < surplus:
            mean_age = sum(block.age for block in whole) / len(whole)
            old = [block for block in whole if block.age >= mean_age]
            for block in old:
                reclaimed += block.size
                self._release(block)
            whole = [block for block in whole if block.age < mean_age]

    def _is_split(self, block: Block, size: int) -> bool:
        """Return whether what a block has over stays free [should_split]."""
        rest, settings = block.size - size, self._settings
        if block.pool.is_small or settings.expandable_segments:
            return rest >= LEAST_BLOCK
        return rest > LARGEST_SMALL and (settings.max_split_bytes is None or size < settings.max_split_bytes)


def _rounded_up(size: int, step: int) -> int:
    return (size + step - 1) // step * step
