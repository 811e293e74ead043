"""Into what parts work is cut, and how small a part a kernel takes; knows nothing of torch."""

TILE_ROWS = 128  # flex attention's own default, and what its kernels are tuned for
# Every slot of a chunk meets all its slots, so a large chunk wastes keys (512 beside 2,000 to 8,000 of the
# context at the reference shape), and a small one leaves the card idle.
CHUNK_SLOTS = 512
PART_COLUMNS = 4352  # a quarter of the reference's; narrower ones leave the card's matrix units idle
ALIGNED_BYTES = 16  # what the memory-efficient kernel reads at a time
LEAST_FLEX_HEAD_DIM = 16  # below, a tile is too narrow for the matrix units
