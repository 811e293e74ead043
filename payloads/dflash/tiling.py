"""Into what parts work is cut where a part's size is a choice of ours; knows nothing of torch."""

TILE_ROWS = 128  # flex attention's own default, and what its kernels are tuned for
# Every slot of a chunk meets all its slots, so a large chunk wastes keys (512 beside 2,000 to 8,000 of the
# context at the reference shape), and a small one leaves the card idle.
CHUNK_SLOTS = 512
PART_COLUMNS = 4352  # a quarter of the reference's; narrower ones leave the card's matrix units idle
