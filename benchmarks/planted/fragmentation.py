"""Holes: every second block of 64 MiB is given back, and then 512 MiB are asked for in one piece."""

import torch

BLOCK = 64 * 2**20
large = torch.empty(20 * BLOCK, dtype=torch.uint8, device="cuda")
del large  # one segment, from which the blocks below are cut
blocks = [torch.empty(BLOCK, dtype=torch.uint8, device="cuda") for _ in range(20)]
del blocks[::2]
torch.empty(8 * BLOCK, dtype=torch.uint8, device="cuda")
