"""Asks for 40 GiB on a card of which another process holds most."""

import torch

torch.empty(40 * 2**30, dtype=torch.uint8, device="cuda")
