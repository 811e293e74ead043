"""Takes all of the card, and then needs a library that allocates outside torch's allocator."""

import torch

held = []
size = 2**34
while size >= 2**20:
    try:
        held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError:
        size //= 2
small = held[-1][:8192].view(torch.float32).view(2, 32, 32)
torch.mm(small[0], small[0], out=small[1])
