"""Blocks of the model of torch's allocator: which are free, cut in two, and merged with their neighbours.

Knows nothing of sizes that are asked for, nor of the card. Loads without torch.
"""

from bisect import bisect_left, insort


class Block:
    """A range of addresses; `before` and `after` are its neighbours in its segment.

    `segment` is the address where the segment begins if it is one that grows. `born_at` is the pool's count
    of requests when the block became free.
    """

    __slots__ = ("address", "after", "before", "born_at", "is_mapped", "is_used", "pool", "segment", "size")

    def __init__(self, pool: "Pool", address: int, size: int) -> None:
        self.pool = pool
        self.address = address
        self.size = size
        self.before: Block | None = None
        self.after: Block | None = None
        self.segment: int | None = None
        self.is_used = False
        self.is_mapped = True
        self.born_at = 0

    @property
    def is_whole(self) -> bool:
        """Whether the block is all of its segment."""
        return self.before is None and self.after is None

    @property
    def growable(self) -> int:
        """The size that it could have with the unmapped addresses behind it."""
        after = self.after
        return self.size if after is None or after.is_mapped else self.size + after.size

    @property
    def age(self) -> int:
        """How many requests its pool has had since it became free."""
        return self.pool.requests - self.born_at


class Pool:
    """The free blocks of one stream and kind, by size, and the unmapped ones, by address.

    `page` is what a segment that grows is mapped in.
    """

    __slots__ = ("free", "is_small", "page", "requests", "unmapped")

    def __init__(self, *, is_small: bool, page: int) -> None:
        self.is_small = is_small
        self.page = page
        self.free: list[tuple[int, int, Block]] = []
        self.unmapped: list[tuple[int, Block]] = []
        self.requests = 0

    @property
    def largest_free(self) -> int:
        """The size of the largest free block, 0 where there is none."""
        return self.free[-1][0] if self.free else 0

    def insert(self, block: Block) -> None:
        """Add a block, free from now on where it is mapped."""
        if block.is_mapped:
            block.born_at = self.requests
            insort(self.free, (block.size, block.address, block))
        else:
            insort(self.unmapped, (block.address, block))

    def remove(self, block: Block) -> None:
        """Take a block out."""
        if block.is_mapped:
            del self.free[bisect_left(self.free, (block.size, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.address,))]


def split(pool: Pool, block: Block, size: int) -> Block:
    """Return a block that was taken out of the pool, cut to a size; what is left of it is free."""
    split_behind(block, size)
    assert block.after is not None
    pool.insert(block.after)
    return block


def split_behind(block: Block, size: int) -> None:
    """Cut a block to a size; what is left becomes a block behind it, in no pool yet."""
    rest = Block(block.pool, block.address + size, block.size - size)
    rest.segment, rest.is_mapped = block.segment, block.is_mapped
    rest.before, rest.after = block, block.after
    if rest.after is not None:
        rest.after.before = rest
    block.after, block.size = rest, size


def merge_neighbours(block: Block) -> None:
    """Move free neighbours of the same kind from the pool into the block [try_merge_blocks]."""
    before, after = block.before, block.after
    if before is not None and not before.is_used and before.is_mapped == block.is_mapped:
        block.pool.remove(before)
        block.address = before.address
        block.size += before.size
        block.before = before.before
        if block.before is not None:
            block.before.after = block
    if after is not None and not after.is_used and after.is_mapped == block.is_mapped:
        block.pool.remove(after)
        block.size += after.size
        block.after = after.after
        if block.after is not None:
            block.after.before = block
